"""The measured plan: what is timed is real, and the run does not notice."""

from __future__ import annotations

import io
import math
import os
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ncd_training.config.resolve import parse_override, resolve_config
from ncd_training.config.schema import OptimConfig
from ncd_training.data.prepare import Setup
from ncd_training.data.views import BatchPlan
from ncd_training.model.onnx import configured_trunk
from ncd_training.model.weights import initial_trunk
from ncd_training.run import train as training
from ncd_training.run.plan import Expected, StepCost, announce_cost, device_name, expected_cost, measure_step
from rich.console import Console

from ncd_serve.errors import UsageError
from ncd_serve.progress import Progress
from tests.runs import ready

CORES = len(os.sched_getaffinity(0))


@pytest.fixture
def prepared(glyphs: Path, tiny_settings: list[str]) -> Setup:
    settings = dict(parse_override(text) for text in tiny_settings[1::2])
    config = resolve_config(recipes=["glyphs"], overrides={"data.root": str(glyphs), **settings})
    return ready(config)


def with_data(prepared: Setup, **settings: object) -> Setup:
    return prepared.with_config(data=prepared.config.data.model_copy(update=settings))


@pytest.mark.parametrize("processes", [1, 2])
def test_real_steps_are_timed_and_leave_no_trace(processes: int, prepared: Setup) -> None:
    parts, _ = initial_trunk(prepared.config, weights=None)
    state = training.build_state(prepared, parts)
    before = deepcopy({**state.model.state_dict(), **state.method.state_dict()})
    random = torch.get_rng_state()
    plan = BatchPlan(84, 20, 16, 16, seed=0)
    cost = measure_step(state, prepared, plan, processes=processes)
    assert min(cost.load, cost.trunk, cost.branches) > 0
    assert cost.views == 2 * 32 // processes
    assert 50e6 < cost.memory < 100e9
    assert torch.equal(random, torch.get_rng_state())
    after = {**state.model.state_dict(), **state.method.state_dict()}
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert not state.optimizer.state_dict()["state"]


def test_on_a_gpu_its_own_memory_counts_and_time_is_taken_when_it_is_done(
    prepared: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, _ = initial_trunk(prepared.config, weights=None)
    state, asked = training.build_state(prepared, parts), []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "Tesla T4")
    monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", lambda: asked.append("reset"))
    monkeypatch.setattr("torch.cuda.synchronize", lambda: asked.append("wait"))
    monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda: 123_000_000)
    cost = measure_step(state, prepared, BatchPlan(84, 20, 16, 16, seed=0), slow=0)
    assert cost.memory == 123_000_000 and asked == ["reset", *["wait"] * 4]
    assert device_name() == "cuda (Tesla T4)"
    # One core feeds the GPU; it does not compute beside it.
    assert cost.step_seconds(workers=1, cached=False) >= max(cost.load, cost.trunk + cost.branches)
    assert configured_trunk(prepared.config.model_copy(update={"optim": OptimConfig(onnx_trunk=True)})) is None


def test_seconds_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: CORES)
    cost = StepCost(views=10, load=8.0, trunk=2.0, branches=1.0, memory=0)
    assert cost.step_seconds(workers=0, cached=False) == 11
    assert cost.step_seconds(workers=0, cached=True) == 1
    # One loader is slower than all that the cores have to do beside it.
    assert cost.step_seconds(workers=1, cached=False) == pytest.approx(max(8.0, 3.0 + 8.0 / CORES))
    # Loaders and computation share the cores.
    assert cost.step_seconds(workers=8, cached=False) == pytest.approx(3.0 + 8.0 / CORES)
    assert cost.cache_seconds(30, workers=0) == 30


def test_the_line_says_what_is_counted(prepared: Setup) -> None:
    cost = StepCost(views=64, load=0.5, trunk=0.25, branches=0.25, memory=1_240_000_000)
    twice = [*prepared.manifest.labelled, *prepared.manifest.labelled]
    manifest = replace(prepared.manifest, labelled=twice[:64], unlabelled=prepared.manifest.images[:40])
    line = expected_cost(prepared.config, cost, manifest, steps=5).line
    # 64 labelled images / 64 x (0.5 s + 0.25 s + 0.25 s / 2 branches) are 0.9 s.
    stage = "1 s for 1 epoch of supervised training"
    assert line == (
        f"about 11 s (1 s per step, 5 steps per epoch, {stage}), not counting 1 epoch of rotations; 1.2 GB of memory"
    )
    # 104 images x 8 views / 64 x 0.75 s; 0.1 s for the stage.
    line = expected_cost(with_data(prepared, cache_views=8).config, cost, manifest, steps=5).line
    assert "(0.25 s per step, 5 steps per epoch, 10 s to cache views, 0 s for" in line
    assert line.startswith("about 12 s")


def test_a_run_of_more_than_a_day_is_asked_about() -> None:
    class Terminal(Progress):
        def __init__(self, answer: bool) -> None:
            super().__init__(Console(quiet=True))
            self.answer, self.asked = answer, 0

        def confirm(self, question: str) -> bool:
            self.asked += 1
            return self.answer

    announce_cost(Expected(86_400, "a day"), short := Terminal(False))
    announce_cost(Expected(90_000, "more"), willing := Terminal(True))
    assert (short.asked, willing.asked) == (0, 1)
    with pytest.raises(UsageError, match="not started"):
        announce_cost(Expected(90_000, "more"), Terminal(False))
    # Nobody can answer where the output is no terminal.
    assert Progress(Console(quiet=True)).confirm("?") and Progress(Console(file=io.StringIO())).confirm("?")


@pytest.mark.slow
def test_a_dry_run_answers_and_leaves_nothing(
    ncd: object, glyphs: Path, tiny_settings: list[str], tmp_path: Path
) -> None:
    done = ncd("train", "--dataset", "glyphs", "--data-root", glyphs, "--dry-run", *tiny_settings, cwd=tmp_path)  # type: ignore[operator]
    assert done.returncode == 0, done.stderr
    for words in ("84 labelled images of 21 known classes", "2 epochs of 5 steps", "about", "GB of memory"):
        assert words in done.stdout.replace("\n", " ")
    assert list(tmp_path.iterdir()) == []


def test_measuring_ends_after_a_slow_first_step(prepared: Setup) -> None:
    parts, _ = initial_trunk(prepared.config, weights=None)
    state = training.build_state(prepared, parts)
    asked = []

    class Counting(BatchPlan):
        def __iter__(self):  # type: ignore[no-untyped-def]
            for requests in super().__iter__():
                asked.append(requests)
                yield requests

    measure_step(state, prepared, Counting(84, 20, 16, 16, seed=0), slow=0)
    assert len(asked) == 1
    measure_step(state, prepared, Counting(84, 20, 16, 16, seed=0), slow=math.inf)
    assert len(asked) == 3
