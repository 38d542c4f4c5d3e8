"""The Python API: the options, checks and errors of the command line, tables, and runs that resume."""

from __future__ import annotations

import inspect
import shutil
from pathlib import Path
from typing import Any

import pytest
from ncd_training import api, discover, dry_run, estimate_classes, open_run, pretrain
from ncd_training.base.run_dir import RunDir
from ncd_training.config.resolve import parse_override
from ncd_training.run import train as training

from ncd_serve.cli.compare import compare as compare_command
from ncd_serve.cli.estimate_k import estimate_k
from ncd_serve.cli.export import export as export_command
from ncd_serve.cli.pretrain import pretrain as pretrain_command
from ncd_serve.cli.train import train as train_command
from ncd_serve.errors import DataError, NcdError, UsageError

# What a command spells otherwise, and what only one side has.
SPELLED = {"set_": "settings", "out_": "out", "output": "out"}
COMMAND_ALONE = {"device", "resume", "dry_run", "as_json", "list_", "after", "add", "accept", "retrain", "promote"}


@pytest.fixture
def folders(glyphs: Path, tmp_path: Path) -> dict[str, str]:
    """Images as a user has them: class folders, and a pile."""
    for letter in "BCDF":
        shutil.copytree(glyphs / "train" / letter, tmp_path / "known" / letter)
    (tmp_path / "pile").mkdir()
    for letter in "AE":
        for file in (glyphs / "train" / letter).iterdir():
            shutil.copy(file, tmp_path / "pile")
    return {"labelled": str(tmp_path / "known"), "unlabelled": str(tmp_path / "pile")}


@pytest.fixture
def settings(tiny_settings: list[str]) -> dict[str, Any]:
    small = {"data.resolution": 32, "data.resize": 32, "data.augmentation": "glyph", "model.backbone": "small_resnet"}
    return {**small, **dict(parse_override(text) for text in tiny_settings[1::2])}


@pytest.mark.parametrize(
    ("function", "command"),
    [
        (discover, train_command),
        (pretrain, pretrain_command),
        (estimate_classes, estimate_k),
        (api.compare, compare_command),
        (api.Run.export, export_command),
    ],
)
def test_functions_take_the_options_of_their_commands(function: Any, command: Any) -> None:
    mine = set(inspect.signature(function).parameters) - {"progress", "self"}
    theirs = {SPELLED.get(name, name) for name in inspect.signature(command).parameters}
    assert mine == theirs - (COMMAND_ALONE - mine) - {"run"}


def test_two_folders_to_clusters(folders: dict[str, str], settings: dict[str, Any], tmp_path: Path) -> None:
    run = discover(**folders, novel_classes=2, settings=settings, out=str(tmp_path / "run"), progress=False)
    assert list(run.clusters.columns) == ["id", "name", "size", "confidence", "fit", "nearest known class"]
    assert run.clusters["size"].sum() == len(run.assignments) == 8
    assert set(run.assignments["fit"]) <= {"typical", "unusual", "outlier"}
    assert list(run.metrics["epoch"]) == [1, 2]
    assert run.plot()._repr_png_().startswith(b"\x89PNG")
    assert run.headlines == [] and run.summary.scores == {}
    assert run.verdict[0].startswith("expect about ") and run.summary.verdict is not None
    assert run.verdict[0] in (run.path / "report.html").read_text()
    again = open_run(tmp_path / "run", progress=False)
    assert again.clusters.equals(run.clusters) and again.gallery().read_text().startswith("<!doctype html>")


def test_a_pile_alone_is_clustered_and_exported(
    folders: dict[str, str], settings: dict[str, Any], tmp_path: Path
) -> None:
    alone = {"unlabelled": folders["unlabelled"], "settings": settings, "progress": False}
    with pytest.raises(UsageError, match="the number of classes cannot be estimated") as caught:
        discover(**alone)
    assert "--novel-classes N" in (caught.value.hint or "")
    with pytest.raises(UsageError, match="--pile mixed needs labelled images"):
        discover(**alone, pile="mixed", novel_classes=2)
    with pytest.raises(UsageError, match="only the recipe own-images"):
        discover(**alone, method="rankstat", novel_classes=2)

    run = discover(**alone, novel_classes=2, out=tmp_path / "run")
    assert run.clusters["size"].sum() == 8 and run.clusters["nearest known class"].isna().all()
    assert run.verdict[0].startswith("expect about ")
    assert "no labelled images" in (run.path / "log.txt").read_text()
    bundle = run.export(repository=tmp_path / "repository")
    assert bundle.manifest.known_classes == [] and len(bundle.manifest.cluster_names) == 2
    assert open_run(run.path, progress=False).gallery().exists()


def test_tables_without_pandas(tiny_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins

    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name == "pandas":
            raise ModuleNotFoundError(name=name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    table = open_run(tiny_run, progress=False).clusters
    assert isinstance(table, list) and {"id", "name", "size"} < set(table[0])
    assert "<th>size</th>" in table._repr_html_()


@pytest.mark.parametrize(
    ("options", "kind", "words", "hint"),
    [
        ({}, UsageError, "no images to train on", "--dataset"),
        ({"labelled": "nowhere", "unlabelled": "there"}, DataError, "no such folder", "check the path"),
        ({"dataset": "cub20"}, UsageError, "unknown dataset 'cub20'", "did you mean 'cub200'?"),
        ({"dataset": "glyphs", "recipe": "glyhps"}, UsageError, "unknown recipe", "did you mean 'glyphs'?"),
        ({"dataset": "glyphs", "settings": {"optim.epoch": 3}}, UsageError, "optim.epoch", "did you mean 'epochs'?"),
        ({"dataset": "glyphs", "method": "dct"}, UsageError, "unknown method", "did you mean 'dtc'?"),
        ({"dataset": "glyphs", "weights": "no.pth"}, DataError, "no weights at", "check the path"),
    ],
)
def test_mistakes_raise_with_a_hint(
    options: dict[str, Any], kind: type[NcdError], words: str, hint: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(kind, match=words) as caught:
        discover(**options, progress=False)
    assert hint in (caught.value.hint or "")
    assert not (tmp_path / "runs").exists()


def test_a_wrong_option_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="novel_clases"):
        dry_run(novel_clases=3)


def test_an_interrupted_call_leaves_a_run_that_resumes(
    folders: dict[str, str], settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_epoch = training.train_epoch

    def interrupted(state: Any, *rest: Any) -> Any:
        if state.epoch == 1:
            raise KeyboardInterrupt
        return train_epoch(state, *rest)

    monkeypatch.setattr(training, "train_epoch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        discover(**folders, novel_classes="2", settings=settings, out=tmp_path / "run", progress=False)
    monkeypatch.setattr(training, "train_epoch", train_epoch)
    assert list(open_run(tmp_path / "run", progress=False).resume().metrics["epoch"]) == [1, 2]


def test_a_run_knows_its_images(
    folders: dict[str, str], settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluating, exporting and resuming never list or decode images again, and never take others without a word."""
    run = discover(**folders, novel_classes=2, settings=settings, out=tmp_path / "run", progress=False)
    (tmp_path / "pile" / "new.png").write_bytes(b"not an image")  # a later scan would skip it with a message
    monkeypatch.setattr("ncd_training.data.scan.open_image", lambda *_, **__: pytest.fail("an image was scanned"))
    monkeypatch.chdir(tmp_path)
    open_run("run", progress=False).evaluate()
    assert len(run.assignments) == 8

    image = next((tmp_path / "pile").glob("A-*.png"))
    content = image.read_bytes()
    image.write_bytes(content)  # another time, the same content
    open_run("run", progress=False).evaluate()
    image.write_bytes(content[:-1] + b"x")
    with pytest.raises(
        DataError, match=r"1 of the 24 images of run have changed since the run was started.*its content has changed"
    ) as caught:
        open_run("run", progress=False).evaluate()
    assert caught.value.hint == "restore the images, or start another run"
    image.unlink()
    with pytest.raises(DataError, match=r"cannot be read: No such file"):
        open_run("run", progress=False).resume()


def test_a_run_made_before_runs_kept_their_images_still_opens(tiny_run: Path, tmp_path: Path) -> None:
    import json

    old = RunDir(shutil.copytree(tiny_run, tmp_path / "old"))
    digest = training.load_manifest_of_run(old.manifest).fingerprint
    old.manifest.unlink()
    facts = json.loads(old.environment.read_text())
    old.environment.write_text(json.dumps({**facts, "images": digest}))
    before = old.read_summary()
    assert open_run(old.path, progress=False).evaluate() == before
    old.environment.write_text(json.dumps({**facts, "images": "another"}))
    with pytest.raises(DataError, match="the images have changed"):
        open_run(old.path, progress=False).evaluate()


def test_a_damaged_manifest_is_named(tiny_run: Path, tmp_path: Path) -> None:
    run = RunDir(shutil.copytree(tiny_run, tmp_path / "run"))
    whole = run.manifest.read_bytes()
    for less in (whole[:-10], whole[: whole[:-1].rindex(b"\n") + 1]):
        run.manifest.write_bytes(less)
        with pytest.raises(DataError, match=r"manifest\.jsonl is damaged"):
            open_run(run.path, progress=False).evaluate()


def test_a_damaged_summary_is_named(tiny_run: Path, tmp_path: Path) -> None:
    run = RunDir(shutil.copytree(tiny_run, tmp_path / "run"))
    run.summary.write_text('{"scores": {"unlabelled-train": {"acc": "good"}}}')
    with pytest.raises(DataError, match=r"summary\.json is damaged") as caught:
        open_run(run.path, progress=False).evaluate()
    assert "ncd-serve evaluate" in (caught.value.hint or "")
