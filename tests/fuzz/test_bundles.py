"""All bundles made to hurt, at all commands that take one: a documented exit code, and two lines if it is an error."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from ncd_serve.bundle import CARD, LABELS, MANIFEST, MAX_CLUSTERS, MODEL, VERIFICATION, Bundle
from ncd_serve.cli.app import main
from ncd_serve.doctor import checks
from ncd_serve.files import sha256
from ncd_serve.reference import REFERENCE
from tests.conftest import Ncd

Damage = Callable[[Path], None]
OK, REFUSED = 0, 3
ODD_TEXT = "[/bold] \x1b[2J '\";$(id)\u202e {{ x }} %s </script>"


def says(**changes: Any) -> Damage:
    """Another description; its hashes are those of its files as they are."""

    def damage(folder: Path) -> None:
        content = {**json.loads((folder / MANIFEST).read_text()), **changes}
        if "sha256" not in changes:
            content["sha256"] = {name: sha256(folder / name) for name in content["sha256"]}
        (folder / MANIFEST).write_text(json.dumps(content))

    return damage


def has(name: str, content: bytes) -> Damage:
    """Another file, with the right hash unless it is the description itself."""

    def damage(folder: Path) -> None:
        (folder / name).write_bytes(content)
        if name != MANIFEST:
            says()(folder)

    return damage


def is_no_file(name: str, make: Callable[[Path], object]) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return damage


def model(change: Callable[[Any], None]) -> Damage:
    """A model that was changed, with the right hash."""

    def damage(folder: Path) -> None:
        loaded = onnx.load(folder / MODEL)
        change(loaded.graph)
        onnx.save(loaded, folder / MODEL)
        says()(folder)

    return damage


def other_input(graph: Any) -> None:
    graph.input[0].name = "picture"
    for node in graph.node:
        node.input[:] = ["picture" if name == "image" else name for name in node.input]


def answers(kind: int, dims: list[int], value: object, *, output: str = "probabilities") -> Damage:
    """A model with a constant for one of its outputs, whatever was asked; what it declares stays as it was."""

    def change(graph: Any) -> None:
        _unhook(graph, output)
        tensor = helper.make_tensor("value", kind, dims, [value] * int(np.prod(dims)))
        graph.node.append(helper.make_node("Constant", [], [output], value=tensor))

    return model(change)


def takes_a_terabyte(graph: Any) -> None:
    _unhook(graph, "probabilities")
    shape = helper.make_tensor("value", TensorProto.INT64, [2], [10**6] * 2)
    fill = helper.make_tensor("fill", TensorProto.FLOAT, [1], [0.2])
    graph.node.append(helper.make_node("Constant", [], ["shape"], value=shape))
    graph.node.append(helper.make_node("ConstantOfShape", ["shape"], ["probabilities"], value=fill))


def _unhook(graph: Any, output: str) -> None:
    for node in graph.node:
        for names in (node.output, node.input):
            names[:] = ["unused" if name == output else name for name in names]


def other_files(folder: Path) -> None:
    loaded = onnx.load(folder / MODEL)
    onnx.save(loaded, folder / MODEL, save_as_external_data=True, location="weights.bin", size_threshold=0)
    says()(folder)


def reference(**changes: Any) -> Damage:
    def damage(folder: Path) -> None:
        with np.load(folder / REFERENCE) as stored:
            arrays = {**stored, **changes}
        np.savez(folder / REFERENCE, **{name: value for name, value in arrays.items() if value is not None})
        says()(folder)

    return damage


def huge_array() -> bytes:
    """A header that announces four terabytes."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (10**12,)})
    return header.getvalue()


def many(count: int) -> Damage:
    return says(cluster_names=[str(number) for number in range(count)])


SIDE = {"resolution": 32, "resize": 32}
# All commands refuse these.
DESCRIPTIONS: dict[str, Damage] = {
    "empty": has(MANIFEST, b""),
    "no JSON": has(MANIFEST, b"\xff\xfe{"),
    "a list": has(MANIFEST, b"[]"),
    "nested deeply": has(MANIFEST, b"[" * 200_000),
    "20 MB": has(MANIFEST, b'{"a": "' + b"x" * 20_000_000),
    "newer schema": says(schema_version=99),
    "schema of 400 digits": says(schema_version=10**400),
    "schema of 9,000 digits": has(MANIFEST, b'{"schema_version": ' + b"9" * 9_000 + b"}"),
    "no schema": says(schema_version=None),
    "unknown field": says(surprise=1),
    "names are a text": says(cluster_names="one"),
    "100,001 names": many(MAX_CLUSTERS + 1),
    "1,000,000 names": many(1_000_000),
    "names of two lines": says(cluster_names=["a\nb", "c", "d", "e", "f"]),
    "names that steer a terminal": says(cluster_names=["\x1b[2J", "c", "d", "e", "f"]),
    "merged into none": says(merged={"99": 0}),
    "junk that is none": says(junk=[-1]),
    "more known classes": says(open_world=True),
    "paths for names": says(sha256={"../../etc/passwd": "0"}),
    "no hashes": says(sha256={}),
    "no pixels": says(preprocess={**SIDE, "resolution": 0}),
    "many pixels": says(preprocess={**SIDE, "resolution": 10**9}),
    "model is a folder": is_no_file(MODEL, Path.mkdir),
    "model is a device": is_no_file(MODEL, lambda path: path.symlink_to("/dev/zero")),
    "model is a circle": is_no_file(MODEL, lambda path: path.symlink_to(path)),
}
# Commands that compute refuse these; others may not look at the model.
MODELS: dict[str, Damage] = {
    "no names": says(cluster_names=[]),
    "fewer names": says(cluster_names=["a", "b"]),
    "20,000 names": many(20_000),
    "other pixels": says(preprocess={"resolution": 4096, "resize": 1}),
    "no model": has(MODEL, b"\x08\x07nonsense"),
    "empty model": has(MODEL, b""),
    "another input": model(other_input),
    "other files": other_files,
    "another shape": answers(TensorProto.FLOAT, [1, 7], 0.2),
    "one answer": answers(TensorProto.FLOAT, [5], 0.2),
    "a terabyte": model(takes_a_terabyte),
}
# Refused or harmless.
OTHERS: dict[str, Damage] = {
    "whole": lambda _: None,
    "description is a folder": is_no_file(MANIFEST, Path.mkdir),
    "description is a pipe": is_no_file(MANIFEST, os.mkfifo),
    "markup for names": says(cluster_names=["[/bold]", "</script>", "=1+1", "{{ x }}", "$(id)"]),
    "merged in a circle": says(merged={"0": 1, "1": 0}),
    "all junk": says(junk=[0, 1, 2, 3, 4]),
    "odd texts": says(bundle_id=ODD_TEXT, created=ODD_TEXT, dataset=ODD_TEXT, method=ODD_TEXT, precision=ODD_TEXT),
    "odd facts": says(training={ODD_TEXT: ODD_TEXT, "view_bytes": 1e300}, versions={ODD_TEXT: ODD_TEXT}),
    "facts that are no numbers": says(training={"view_bytes": float("nan")}),
    "texts": answers(TensorProto.STRING, [2, 5], b"x"),
    "the same answer to all": answers(TensorProto.FLOAT, [1, 5], 0.2),
    "no numbers": answers(TensorProto.FLOAT, [2, 5], float("nan")),
    "fits that are none": answers(TensorProto.INT64, [2], 99, output="fit"),
    "other embeddings": answers(TensorProto.FLOAT, [2, 3], 0.2, output="embedding"),
    "no reference": has(REFERENCE, b"PK\x03\x04"),
    "reference of an array": has(REFERENCE, huge_array()),
    "reference of objects": reference(paths=np.array([{}], dtype=object)),
    "reference of other images": reference(cluster_ids=np.array([0, 1])),
    "reference of other clusters": reference(cluster_ids=np.full(20, 300_000_000)),
    "reference without numbers": reference(confidences=np.full(20, np.nan, np.float32)),
    "reference with a part too few": reference(embeddings=None),
    "labels of no text": has(LABELS, b"\xff\xfe\0"),
    "more labels": has(LABELS, b"a\n" * 100_000),
    "card of no text": has(CARD, b"\xff"),
    "nested comparison": has(VERIFICATION, b"[" * 200_000),
}
KINDS = DESCRIPTIONS | MODELS | OTHERS
# Every command that takes a bundle, but Ray's engine, which opens it as `assign` does; and whether it computes.
COMMANDS = {
    "assign {images} --bundle {bundle}": True,
    "assign {images} --bundle {bundle} --out {out}/rows.parquet": True,
    "gallery {bundle} --out {out}/a.html": False,
    "gallery {rows} --bundle {bundle} --out {out}/b.html": True,
    "name list --bundle {bundle}": False,
    "name list --bundle {bundle} --json": False,
    "name export --bundle {bundle}": False,
    "drift {rows} --bundle {bundle} --plot {out}/drift.svg": False,
    "plan --bundle {bundle} --sample {images} --images-per-day 1e6": True,
    "deploy render compose --bundle {bundle} --repository {repository} --out {out}/deploy": True,
    "doctor --bundle {bundle}": True,
    "name apply {names} --bundle {bundle} --repository {out}/models": True,  # last: it changes the bundle
}


@pytest.fixture(scope="module")
def places(
    bundle: Path, repository: Path, glyphs: Path, tmp_path_factory: pytest.TempPathFactory, ncd: Ncd
) -> dict[str, Path]:
    """Rows that the bundle wrote while it was whole, names for it, and a repository that serves any of its id."""
    folder = tmp_path_factory.mktemp("beside")
    done = ncd("assign", glyphs / "test", "--bundle", bundle, "--out", folder / "rows.csv")
    assert done.returncode == 0, done.stderr
    (folder / "names.json").write_text('{"clusters": {"0": {"name": "gull"}}}')
    config = Path(shutil.copytree(repository, folder / "models")) / "ncd_global" / "config.pbtxt"
    config.write_text(config.read_text().replace(Bundle.read(bundle).digest, ""))  # as older versions wrote it
    own = {"rows": folder / "rows.csv", "names": folder / "names.json", "repository": folder / "models"}
    return {**own, "images": glyphs / "test" / "E"}


@pytest.mark.parametrize("kind", KINDS)
def test_every_command(
    kind: str,
    bundle: Path,
    places: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(checks, "installation_steps", lambda: iter(()))  # of `doctor`: they say nothing of bundles
    monkeypatch.setattr(checks, "machine_steps", lambda: iter(()))
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # those of the tests stay as they are
    copy = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    KINDS[kind](copy)
    for command, computes in COMMANDS.items():
        words = command.format(bundle=copy, out=tmp_path, **places).split()
        monkeypatch.setattr(sys, "argv", ["ncd-serve", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        printed, code = capsys.readouterr(), ended.value.code or OK
        must_refuse = kind in DESCRIPTIONS or (kind in MODELS and computes)
        assert code in ((REFUSED,) if must_refuse else (OK, REFUSED)), (command, printed)
        assert kind != "whole" or code == OK, (command, printed)
        if code and words[0] != "doctor":
            assert re.fullmatch(r"error: .+", printed.err.splitlines()[-2]), (command, printed)
            assert re.fullmatch(r"hint: .+", printed.err.splitlines()[-1]), (command, printed)
        assert "\x1b[2J" not in printed.out + printed.err
    assert (code == OK) == (tmp_path / "models").exists(), "what is refused is not published"
