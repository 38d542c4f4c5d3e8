"""TensorBoard reads what a run wrote for it, and a resumed run leaves no epoch twice."""

import subprocess
import sys
from pathlib import Path

import pytest
from ncd_training.summary.live import tensorboard
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def test_scalars_by_group_and_after_going_on(tmp_path: Path) -> None:
    with tensorboard(tmp_path, epochs_done=0) as write:
        for epoch in (1, 2, 3):
            write({"epoch": epoch, "distillation": 0.5 * epoch, "acc": 0.25})
    with tensorboard(tmp_path, epochs_done=2) as write:
        write({"epoch": 3, "distillation": 9.0})
    events = EventAccumulator(str(tmp_path)).Reload()
    assert set(events.Tags()["scalars"]) == {"objective terms/distillation", "unlabelled-train/ACC"}
    points = {event.step: event.value for event in events.Scalars("objective terms/distillation")}
    assert points == pytest.approx({1: 0.5, 2: 1.0, 3: 9.0})


def test_without_the_extra_nothing_is_begun(glyphs: Path, tmp_path: Path) -> None:
    hide = "import sys; sys.modules['tensorboard'] = None; from ncd_serve.cli.app import main; main()"
    command = [sys.executable, "-c", hide, "train", "--dataset", "glyphs", "--data-root", str(glyphs), "--tensorboard"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 6, done.stderr
    assert "this needs tensorboard" in done.stderr and "pip install 'ncd-serve[tensorboard]'" in done.stderr
    assert list(tmp_path.iterdir()) == []
