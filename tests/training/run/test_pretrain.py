"""Weights from images alone: whole runs, that they resume exactly, and that `train` takes what they leave."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from ncd_training.base.run_dir import RunDir
from ncd_training.config.resolve import resolve_config
from ncd_training.config.schema import PretrainConfig, TrainConfig
from ncd_training.data import prepare as setup
from ncd_training.model.weight_files import read_weights
from ncd_training.model.weights import initial_trunk, settle
from ncd_training.run import pretrain as pretraining
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import load_file

from ncd_serve.errors import DataError
from ncd_serve.progress import Progress
from tests.runs import SILENT, again

QUIET = Console(quiet=True)
METHODS = ("rotnet", "moco")


def make_config(glyphs: Path, method: str, **more: Any) -> TrainConfig:
    settings = {"data.root": str(glyphs), "data.workers": 0, "pretrain.batch": 16, "pretrain.epochs": 2, **more}
    return resolve_config(recipes=["glyphs", "moco"] if method == "moco" else ["glyphs"], overrides=settings)


def pretrain(config: TrainConfig, folder: Path, console: Console = QUIET) -> RunDir:
    prepared = setup.prepare_unlabelled(config, progress=Progress(console))
    run = RunDir.create(folder, prepared.config, command="pretrain")
    pretraining.pretrain(prepared, run, progress=Progress(console))
    return run


@pytest.fixture(scope="module")
def rotnet_run(glyphs: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return pretrain(make_config(glyphs, "rotnet"), tmp_path_factory.mktemp("pretrained") / "run")


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_two_and_two_epochs_are_four(
    method: str, glyphs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(glyphs, method, **{"pretrain.epochs": 4})
    whole = pretrain(config, tmp_path / "whole")
    train_epoch = pretraining.train_epoch

    def interrupted(state: Any, *rest: Any) -> Any:
        if state.epoch == 2:
            raise KeyboardInterrupt
        return train_epoch(state, *rest)

    monkeypatch.setattr(pretraining, "train_epoch", interrupted)
    console = Console(file=io.StringIO(), width=300)
    with pytest.raises(KeyboardInterrupt):
        pretrain(config, tmp_path / "parts", console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert f"interrupted; resume with: ncd-serve pretrain --resume {tmp_path / 'parts'}" in text
    monkeypatch.setattr(pretraining, "train_epoch", train_epoch)
    parts = RunDir.open(tmp_path / "parts", command="pretrain")
    pretraining.pretrain(again(parts), parts, progress=SILENT)
    for name in ("checkpoints/last.safetensors", "weights.safetensors"):
        a, b = load_file(whole.path / name), load_file(parts.path / name)
        assert a.keys() == b.keys()
        assert [key for key in a if not torch.equal(a[key], b[key])] == []
    assert parts.read_metrics() == whole.read_metrics()
    losses = [row["loss"] for row in whole.read_metrics()]
    assert losses[-1] < 0.9 * losses[0] or method == "moco"  # MoCo's queue fills first: the task becomes harder


def test_a_run_holds_everything(rotnet_run: RunDir) -> None:
    rows = rotnet_run.read_metrics()
    assert [set(row) for row in rows] == [{"epoch", "loss", "accuracy", "held_out_accuracy"}] * 2
    assert any(rotnet_run.plots.iterdir())
    assert rotnet_run.made_by == "pretrain"
    with safe_open(rotnet_run.path / "weights.safetensors", framework="pt") as stored:
        facts = stored.metadata()
    best = max(rows, key=lambda row: row["held_out_accuracy"])
    assert (facts["method"], facts["trunk"], facts["epoch"]) == ("rotnet", "small_resnet", str(best["epoch"]))


def test_the_weights_of_the_best_epoch_are_kept(glyphs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accuracies = iter([0.3, 0.5, 0.5])
    monkeypatch.setattr(pretraining, "held_out_accuracy", lambda *_: next(accuracies))
    run = pretrain(make_config(glyphs, "rotnet", **{"pretrain.epochs": 3}), tmp_path / "run")
    with safe_open(run.path / "weights.safetensors", framework="pt") as stored:
        assert stored.metadata()["epoch"] == "2"


def test_train_starts_from_a_pretrained_run(rotnet_run: RunDir, tmp_path: Path) -> None:
    told = {"model.mean": [0.1, 0.2, 0.3]}
    config = resolve_config(recipes=["glyphs"], overrides={"model.weights": str(rotnet_run.path), **told})
    settle(config, images=10, progress=SILENT)
    parts, report = initial_trunk(config, weights=rotnet_run.path)
    assert report is not None and report.unused == []
    assert report.line.startswith("ncd-serve pretrain rotnet weights: 40 of 40 tensors from")
    assert parts.mean == (0.1, 0.2, 0.3)  # what is told wins over what the file says
    stored = load_file(rotnet_run.path / "weights.safetensors")
    state = parts.network.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in stored.items() if "num_batches" not in name)


def test_weights_bring_their_normalisation(glyphs: Path, tmp_path: Path) -> None:
    moments = {"model.mean": [0.1, 0.2, 0.3], "model.std": [0.4, 0.5, 0.6], "pretrain.epochs": 1}
    run = pretrain(make_config(glyphs, "moco", **moments), tmp_path / "run")
    file = read_weights(run.path)
    assert (file.mean, file.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    parts, _ = initial_trunk(make_config(glyphs, "moco"), weights=run.path)
    assert (parts.mean, parts.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))


def test_pretraining_can_start_from_weights_and_go_on_without_them(
    rotnet_run: RunDir, glyphs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = tmp_path / "start"
    shutil.copytree(rotnet_run.path, start)
    config = make_config(glyphs, "moco", **{"model.weights": str(start), "pretrain.epochs": 1})
    run = pretrain(config, tmp_path / "run")
    shutil.rmtree(start)
    pretraining.pretrain(again(run), run, progress=SILENT)


def test_held_out_images_are_a_part_that_depends_on_the_seed_alone() -> None:
    images = [Path(str(number)) for number in range(100)]
    learn, held_out = pretraining.split_images(images, PretrainConfig(held_out=0.1), seed=0)
    assert len(held_out) == 10 and sorted(map(str, learn + held_out)) == sorted(map(str, images))
    assert (learn, held_out) == pretraining.split_images(images, PretrainConfig(held_out=0.1), seed=0)
    assert held_out != pretraining.split_images(images, PretrainConfig(held_out=0.1), seed=1)[1]
    assert pretraining.split_images(images, PretrainConfig(method="moco"), seed=0) == (images, [])


def test_a_pile_of_images_without_any_labels(glyphs: Path) -> None:
    folders = {"data.dataset": None, "data.unlabelled": str(glyphs / "train")}
    prepared = setup.prepare_unlabelled(make_config(glyphs, "moco", **folders), progress=SILENT)
    assert len(prepared.manifest.images) == len(list((glyphs / "train").rglob("*.png")))
    assert prepared.config.pretrain.queue == len(prepared.manifest.images) // 2
    both = {**folders, "data.labelled": str(glyphs / "test")}
    more = setup.prepare_unlabelled(make_config(glyphs, "moco", **both), progress=SILENT)
    assert len(more.manifest.images) > len(prepared.manifest.images)


def test_too_few_images(glyphs: Path) -> None:
    folders = {"data.dataset": None, "data.unlabelled": str(glyphs / "train" / "A")}
    with pytest.raises(DataError, match="4 images are too few"):
        setup.prepare_unlabelled(make_config(glyphs, "moco", **folders), progress=SILENT)


def test_runs_of_two_commands_are_not_mixed_up(rotnet_run: RunDir, tiny_run: Path) -> None:
    with pytest.raises(DataError, match="is a run of `ncd-serve pretrain`") as caught:
        RunDir.open(rotnet_run.path)
    assert caught.value.hint == f"resume with `ncd-serve pretrain --resume {rotnet_run.path}`"
    with pytest.raises(DataError, match="is a run of `ncd-serve train`"):
        RunDir.open(tiny_run, command="pretrain")


@pytest.mark.slow
def test_the_command(ncd: Any, glyphs: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ["--trunk", "small_resnet", "--epochs", 1, "--set", "data.resolution=32", "--set", "data.resize=32"]
    done = ncd("pretrain", "--method", "moco", "--images", glyphs / "train", "--out", run, *options)
    assert done.returncode == 0, done.stderr
    assert f"train --weights {run}" in done.stdout.replace("\n", "")
    assert "104 images, no labels, queue of 52 keys" in done.stderr
    assert RunDir(run).config().pretrain.learning_rate == 0.03
