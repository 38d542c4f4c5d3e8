"""Paths that users need not type: the newest run, its bundle, and what that was exported to."""

from __future__ import annotations

import json
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ncd_serve.bundle import Ancestor
from ncd_serve.errors import DataError
from ncd_serve.places import (
    ExportPlace,
    bundle_of,
    bundle_of_checkpoint,
    exported_to,
    never_exported,
    newest_bundle,
    newest_descendant,
    newest_run,
    remember_export,
)
from ncd_serve.triton.registry import holder_of
from tests.serve.small_gallery import CHECKPOINT, make_bundle, make_run


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def add_run(run: Path, created: str, *, made_by: str = "train", finished: bool = True) -> Path:
    run.mkdir(parents=True)
    if finished:
        make_run(run)
    (run / "environment.json").write_text(json.dumps({"made_by": made_by, "created": created}))
    return run


def test_the_newest_finished_training_is_found_two_levels_down(here: Path) -> None:
    with pytest.raises(DataError, match="no finished run in this folder"):
        newest_run()
    add_run(here / "birds", "2026-01-01T00:00:00+00:00")
    newest = add_run(here / "runs" / "terns", "2026-01-03T00:00:00+00:00")
    add_run(here / "runs" / "unfinished", "2026-01-04T00:00:00+00:00", finished=False)
    add_run(here / "runs" / "pretrained", "2026-01-05T00:00:00+00:00", made_by="pretrain")
    add_run(here / "too" / "deep" / "runs", "2026-01-06T00:00:00+00:00")
    (here / "runs" / "damaged").mkdir()
    (here / "runs" / "damaged" / "environment.json").write_text("[")
    assert newest_run().resolve() == newest


def test_a_run_stands_for_its_bundle(here: Path) -> None:
    old = add_run(here / "old", "2026-01-01T00:00:00+00:00")
    add_run(here / "new", "2026-01-02T00:00:00+00:00")
    with pytest.raises(DataError, match="no exported run"):
        newest_bundle()
    with pytest.raises(DataError, match="not exported yet") as raised:
        bundle_of(old)
    assert raised.value.hint == f"ncd-serve export {old}" and never_exported(old)
    bundle = make_bundle(old, old / "bundle", cluster_names=["a", "b", "c", "d"])
    assert bundle_of(old) == bundle_of(bundle) == bundle and not (never_exported(old) or never_exported(bundle))
    assert newest_bundle() == Path("old/bundle") == bundle_of_checkpoint(CHECKPOINT)
    assert bundle_of_checkpoint("another") is None
    third = make_bundle(old, old / "bundle-3", cluster_names=["a", "b", "c", "d"], generation=3)
    other = make_bundle(old, old / "bundle-4", cluster_names=["a", "b", "c", "d"], generation=4) / "bundle.json"
    other.write_text(other.read_text().replace(CHECKPOINT, "another"))
    assert bundle_of(old) == third and bundle_of(bundle) == bundle, "of the same training, the newest generation"
    assert newest_bundle() == Path("old/bundle-3") == bundle_of_checkpoint(CHECKPOINT)


def test_a_run_that_was_trained_after_another_has_its_newest_generation(here: Path) -> None:
    names = ["a", "b", "c", "d"]
    old, after, apart = (add_run(here / name, "2026-01-01T00:00:00+00:00") for name in ("old", "old-3", "old-4"))
    make_bundle(old, old / "bundle", cluster_names=names)
    second = make_bundle(old, old / "bundle-2", cluster_names=names, generation=2)
    make_bundle(apart, apart / "bundle", cluster_names=names, generation=9)
    assert newest_descendant(second) == newest_descendant(old / "bundle") == second
    parent = Ancestor(generation=2, bundle_id="0", checkpoint=CHECKPOINT, digest="", folder="", created="", clusters=4)
    third = make_bundle(after, after / "bundle", cluster_names=names, generation=3, ancestors=[parent]) / "bundle.json"
    third.write_text(third.read_text().replace(CHECKPOINT, "another", 1))
    assert newest_descendant(second) == newest_descendant(old / "bundle") == Path("old-3/bundle")
    assert newest_descendant(after / "bundle") == after / "bundle"


def test_a_bundle_remembers_its_model_and_both_may_be_moved(here: Path) -> None:
    bundle, repository = here / "project" / "bundle", here / "project" / "models"
    (repository / "birds").mkdir(parents=True)
    bundle.mkdir()
    assert exported_to(bundle) is None
    remember_export(bundle, ExportPlace(repository, "birds"), bundle=bundle)
    assert exported_to(bundle) == (Path("project/models"), "birds")
    shutil.move(here / "project", here / "moved")
    assert exported_to(here / "moved" / "bundle") == (Path("moved/models"), "birds")
    shutil.rmtree(here / "moved" / "models")
    assert exported_to(here / "moved" / "bundle") is None


@pytest.fixture
def port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_who_holds_a_port_is_named(port: int) -> None:
    name = Path(f"/proc/{threading.get_native_id()}/comm").read_text().strip()
    assert holder_of(port).endswith(f"({name})") and holder_of(port).startswith("process ")
    assert holder_of(1) == "another program"
