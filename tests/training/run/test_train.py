"""Whole runs: what they leave behind, that they resume exactly, that novel labels never reach them."""

from __future__ import annotations

import io
import json
import resource
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ncd_training.base.run_dir import RunDir
from ncd_training.config.resolve import parse_override, resolve_config
from ncd_training.config.schema import ReportConfig, StageConfig, TrainConfig
from ncd_training.data import prepare as setup
from ncd_training.model.weights import initial_trunk
from ncd_training.objective import stage_loop
from ncd_training.pretext import Stages
from ncd_training.run import train as training
from rich.console import Console
from safetensors.torch import load_file, save_file

from ncd_serve.errors import DataError, UsageError
from ncd_serve.progress import Progress
from tests.runs import SILENT, again, ready, train_new

QUIET = Console(quiet=True)


@pytest.fixture
def config(glyphs: Path, tiny_settings: list[str]) -> TrainConfig:
    return make_config(glyphs, tiny_settings)


def make_config(glyphs: Path, tiny_settings: list[str], **more: Any) -> TrainConfig:
    settings = dict(parse_override(text) for text in tiny_settings[1::2])
    return resolve_config(recipes=["glyphs"], overrides={"data.root": str(glyphs), **settings, **more})


def train(config: TrainConfig, folder: Path, console: Console = QUIET) -> RunDir:
    return train_new(config, folder, progress=Progress(console))


def weights(run: RunDir) -> dict[str, torch.Tensor]:
    return load_file(run.checkpoint)


def test_other_images_are_not_gone_on_with(tiny_run: Path, config: TrainConfig, tmp_path: Path) -> None:
    run = RunDir(shutil.copytree(tiny_run, tmp_path / "run"))
    prepared = ready(config)
    fewer = replace(prepared.manifest, unlabelled=prepared.manifest.unlabelled[1:])
    with pytest.raises(DataError, match="images have changed"):
        training.train(replace(prepared, manifest=fewer), run, progress=SILENT)


def assert_same_weights(first: RunDir, second: RunDir) -> None:
    a, b = weights(first), weights(second)
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def test_a_run_directory_holds_everything(tiny_run: Path) -> None:
    run = RunDir.open(tiny_run)
    assert [row["epoch"] for row in run.read_metrics()] == [1, 2]
    assert set(run.read_summary().scores) == {"unlabelled-train", "novel-test", "known-test"}
    assert set(run.read_summary().baselines) == {"k-means on raw pixels", "k-means on supervised features"}
    assert run.config().data.novel_classes == 5
    plots = ("terms", "quality", "pseudo-labels", "tsne-init", "tsne-epoch-2")
    assert sorted(path.stem for path in run.plots.iterdir() if path.stat().st_size > 1000) == sorted(plots)
    environment = json.loads((tiny_run / "environment.json").read_text())
    assert "torch" in environment["packages"] and environment["device"] and environment["folder"] == str(Path.cwd())


def test_novel_labels_never_reach_training(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = train(config, tmp_path / "seen")
    load = setup.load_manifest
    monkeypatch.setattr(setup, "load_manifest", lambda *a, **k: replace(load(*a, **k), truth=None, novel_test=()))
    hidden = train(config, tmp_path / "hidden")
    assert "unlabelled-train" not in hidden.read_summary().scores
    assert hidden.read_summary().verdict == seen.read_summary().verdict is not None
    told = {
        "acc",
        "nmi",
        "ari",
        *(f"pseudo_{kind}_{name}" for kind in ("global", "local") for name in ("precision", "recall")),
    }
    assert set(seen.read_metrics()[-1]) - set(hidden.read_metrics()[-1]) == told
    assert {path.name for path in hidden.plots.iterdir()} >= {"tsne-init.png", "tsne-epoch-2.png", "quality.png"}
    assert_same_weights(seen, hidden)


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["data.cache_views=0", "data.cache_views=3 optim.onnx_trunk=true"])
def test_two_and_two_epochs_are_four(
    setting: str, glyphs: Path, tiny_settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = [part for one in setting.split() for part in ("--set", one)]
    config = make_config(glyphs, [*tiny_settings, *settings], **{"optim.epochs": 4})
    whole = train(config, tmp_path / "whole")
    train_epoch = training.train_epoch

    def interrupted(state: Any, *rest: Any) -> Any:
        if state.epoch == 2:
            raise KeyboardInterrupt
        return train_epoch(state, *rest)

    monkeypatch.setattr(training, "train_epoch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "parts")
    monkeypatch.setattr(training, "train_epoch", train_epoch)
    parts = RunDir.open(tmp_path / "parts")
    assert "This run was interrupted after 2 of 4 epochs" in parts.report.read_text()
    training.train(again(parts), parts, progress=SILENT)
    assert_same_weights(whole, parts)
    assert parts.read_metrics() == whole.read_metrics()
    log = parts.log.read_text()
    assert log.index("ended by KeyboardInterrupt") < log.index("resuming") < log.index("epoch 4/4")


@pytest.mark.slow
def test_a_run_killed_in_the_middle_of_a_checkpoint_goes_on(
    glyphs: Path, tiny_settings: list[str], tmp_path: Path
) -> None:
    config = make_config(glyphs, tiny_settings, **{"optim.epochs": 6})
    whole, killed = train(config, tmp_path / "whole"), RunDir(tmp_path / "killed")
    command = ["train", "--config", str(whole.path / "config.toml"), "--out", str(killed.path)]
    with subprocess.Popen([sys.executable, "-m", "ncd_serve", *command], stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 120
        while not any(killed.checkpoint.parent.glob(".last*")) or not killed.metrics.exists():
            assert time.monotonic() < deadline, "no checkpoint was seen being written"
            time.sleep(0.001)
        process.kill()
    training.train(again(killed), killed, progress=SILENT)
    assert_same_weights(whole, killed)
    assert killed.read_metrics() == whole.read_metrics()


def test_a_run_stopped_before_its_first_checkpoint_goes_on(
    config: TrainConfig, tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    console = Console(file=io.StringIO(), width=300)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Stages, "supervised", lambda *_: signal.raise_signal(signal.SIGINT))
        train(config, tmp_path / "run", console)
    run = RunDir.open(tmp_path / "run")
    assert f"resume with: ncd-serve train --resume {run.path}" in console.file.getvalue()  # type: ignore[attr-defined]
    (run.checkpoint.parent / ".notebook").mkdir(parents=True)  # not ours
    training.train(again(run), run, progress=SILENT)
    assert_same_weights(RunDir(tiny_run), run)


@pytest.mark.slow
def test_every_stage_before_discovery_goes_on_where_it_was_stopped(
    glyphs: Path, tiny_settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("rotations", "from_labels", "supervised", "similarity")
    settings = {f"{name}.epochs": 2 for name in names}
    config = make_config(
        glyphs, tiny_settings, **settings, **{"method.name": "kcl", "model.branches": "global", "optim.epochs": 1}
    )
    whole, saved = train(config, tmp_path / "whole"), []

    def save_and_stop(state: Any, path: Path) -> None:
        save_checkpoint(state, path)
        saved.append((path.stem, state.epoch))
        if state.epoch == 1:
            raise KeyboardInterrupt

    save_checkpoint = stage_loop.save_checkpoint
    monkeypatch.setattr(stage_loop, "save_checkpoint", save_and_stop)
    parts = RunDir.create(tmp_path / "parts", config)
    for _ in names:
        with pytest.raises(KeyboardInterrupt):
            training.train(ready(config), parts, progress=SILENT)
    training.train(ready(config), parts, progress=SILENT)
    assert len(saved) == len(set(saved)) == 2 * len(names)  # no epoch was trained twice
    assert_same_weights(whole, parts)
    assert not parts.stages.exists()


def test_a_run_that_goes_on_must_have_the_images_that_it_began_with(config: TrainConfig, tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", config)
    prepared = ready(config)
    replace(prepared, manifest=replace(prepared.manifest, labelled=prepared.manifest.labelled[1:])).keep(run)
    with pytest.raises(DataError, match="the images have changed"):
        training.train(prepared, run, progress=SILENT)


def test_a_disk_that_fills_up_is_said(config: TrainConfig, tmp_path: Path) -> None:
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, old[1]))  # no file may grow larger: the checkpoint would
    try:
        with pytest.raises(DataError, match=r"cannot write: .*File too large") as caught:
            train(config.model_copy(update={"report": ReportConfig(tsne_epochs=())}), tmp_path / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert f"ncd-serve train --resume {tmp_path / 'run'}" in str(caught.value.hint)


@pytest.mark.parametrize("recipes", [["joint"], ["open-world"], ["released"]], ids=lambda recipes: recipes[0])
def test_the_variants_train_and_are_evaluated(
    recipes: list[str], glyphs: Path, tiny_settings: list[str], tmp_path: Path
) -> None:
    settings = dict(parse_override(text) for text in tiny_settings[1::2])
    config = resolve_config(recipes=["glyphs", *recipes], overrides={"data.root": str(glyphs), **settings})
    scores = train(config, tmp_path / "run").read_summary().scores
    assert {"unlabelled-train", "novel-test", "known-test"} <= set(scores)
    assert ("all-test, joint head" in scores) == (recipes != ["released"])


@pytest.mark.parametrize("branches", ["global", "local", "global+global", "local+local"])
def test_every_branch_configuration_trains(
    branches: str, glyphs: Path, tiny_settings: list[str], tmp_path: Path
) -> None:
    config = make_config(glyphs, tiny_settings, **{"model.branches": branches, "optim.epochs": 1})
    rows = train(config, tmp_path / "run").read_metrics()
    assert ("distillation" in rows[-1]) == ("+" in branches)


def test_the_trunk_stays_frozen(config: TrainConfig, tmp_path: Path) -> None:
    random = config.model.model_copy(update={"weights": "none"})
    config = config.model_copy(update={"rotations": StageConfig(), "model": random})
    prepared = ready(config)
    parts, _ = initial_trunk(config, weights=None)
    before = training.build_state(prepared, parts).model.trunk.state_dict()
    after = weights(train(config, tmp_path / "run"))
    assert all(torch.equal(tensor, after[f"model.trunk.{name}"]) for name, tensor in before.items())


@pytest.mark.parametrize("stage", ["optim", "supervised"])
def test_a_run_that_diverges_ends_before_its_state_is_kept(
    stage: str, glyphs: Path, tiny_settings: list[str], tmp_path: Path
) -> None:
    config = make_config(glyphs, tiny_settings, **{f"{stage}.learning_rate": 1e12})
    with pytest.raises(UsageError, match=r"diverged in epoch 1: .* is nan") as caught:
        train(config, tmp_path / "run")
    assert caught.value.hint == "start a new run with a lower learning rate"
    kept = weights(RunDir(tmp_path / "run")) if stage == "optim" else {}
    assert all(tensor.isfinite().all() for tensor in kept.values())


def test_a_run_is_never_written_over(tiny_run: Path, config: TrainConfig) -> None:
    with pytest.raises(UsageError, match="already holds a run"):
        train(config, tiny_run)
    with pytest.raises(DataError, match=r"cannot write to .*File exists"):
        train(config, tiny_run / "config.toml")


def test_a_damaged_checkpoint_is_named(tiny_run: Path, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "copy")
    run.checkpoint.parent.mkdir(parents=True)
    (run.path / "config.toml").write_text((tiny_run / "config.toml").read_text())
    with pytest.raises(DataError, match="no checkpoint"):
        training.load_state(again(run), run.checkpoint)
    run.checkpoint.write_bytes(RunDir(tiny_run).checkpoint.read_bytes()[:1000])
    prepared = again(run)
    with pytest.raises(DataError, match="damaged"):
        training.load_state(prepared, run.checkpoint)
    for epoch, reason in (("1", "does not fit the run's configuration: .* Missing key"), ("last", "not a checkpoint")):
        save_file({"model.weight": torch.zeros(1)}, run.checkpoint, metadata={"epoch": epoch})
        with pytest.raises(DataError, match=reason) as caught:
            training.load_state(prepared, run.checkpoint)
        assert len(str(caught.value)) < 600


def test_own_folders_and_bad_files(glyphs: Path, tiny_settings: list[str], tmp_path: Path) -> None:
    labelled, pile = tmp_path / "labelled", tmp_path / "pile"
    for name in "BC":
        (labelled / name).mkdir(parents=True)
        for path in sorted((glyphs / "train" / name).iterdir()):
            (labelled / name / path.name).write_bytes(path.read_bytes())
    (pile / "deep").mkdir(parents=True)
    for name in "AE":
        for path in sorted((glyphs / "train" / name).iterdir()):
            (pile / "deep" / path.name).write_bytes(path.read_bytes())
    (pile / "broken.png").write_bytes(b"not a picture")
    (pile / "empty.jpg").touch()
    (pile / ".hidden.png").write_bytes(b"")
    folders = {"data.dataset": None, "data.labelled": str(labelled), "data.unlabelled": str(pile)}
    config = make_config(glyphs, tiny_settings, **folders, **{"data.novel_classes": 2, "optim.epochs": 1})
    console = Console(file=io.StringIO(), width=300)
    run = train(config, tmp_path / "run", console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "broken.png: not an image of a known format" in text
    assert "empty.jpg: the file is empty" in text
    assert ".hidden" not in text
    summary = run.read_summary().as_json()
    assert summary.pop("verdict")["images"] == 8
    assert summary == {"method": "dual", "baselines": {}, "scores": {}}
