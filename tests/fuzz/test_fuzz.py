"""Files made at random or damaged at random: whatever reads them returns, or raises an NcdError, in bounded memory."""

from __future__ import annotations

import csv
import io
import json
import random
import struct
import tarfile
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ncd_training.config.resolve import resolve_config
from ncd_training.data.manifest import from_csv
from ncd_training.model.weight_files import read_weights
from onnx import TensorProto, helper, numpy_helper
from PIL import Image
from safetensors.torch import save_file

from benchmarks.fuzz_images import SPEC, mutated, originals
from ncd_serve.bundle import HASHED, MANIFEST, Bundle
from ncd_serve.errors import DataError, NcdError
from ncd_serve.files import sha256
from ncd_serve.inputs.sources import find_sources
from ncd_serve.naming import Names, apply_names, cluster_states
from ncd_serve.onnx_file import check_self_contained
from ncd_serve.prediction import COLUMNS
from ncd_serve.preprocess import load_array
from ncd_serve.reference import Reference
from ncd_serve.rows.tables import read_rows
from ncd_serve.text import check_name, from_spreadsheet_cell, labels_text, printable, spreadsheet_cell
from tests.serve.test_naming import manifest
from tests.serve.test_reference import example

SEEDS = st.integers(0, 2**32)
ORIGINALS = originals()
NUMBERS = st.integers(-(2**70), 2**70) | st.floats() | st.sampled_from([0, -1, 2**31, 2**63, 300_000_000])
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=8,
)


def damaged(data: bytes, seed: int) -> bytes:
    return mutated(data, random.Random(seed))


@given(st.sampled_from(sorted(ORIGINALS)), SEEDS)
def test_images(name: str, seed: int) -> None:
    with suppress(DataError):
        assert load_array(damaged(ORIGINALS[name], seed), SPEC).shape == (64, 64, 3)


TAGS = st.sampled_from([256, 257, 258, 259, 262, 266, 273, 274, 277, 278, 279, 284, 317, 320, 322, 323, 324, 325, 338])
VALUES = st.sampled_from([0, 1, 2, 3, 5, 6, 7, 8, 16, 64, 200, 32773, 50_000]) | st.integers(0, 2**32 - 1)
ENTRIES = st.tuples(TAGS, st.integers(0, 20), VALUES, VALUES)


@given(st.lists(ENTRIES, max_size=6), st.booleans(), st.binary(max_size=300))
def test_tags_of_tiff(odd: list[tuple[int, int, int, int]], little: bool, data: bytes) -> None:
    order, start = ("<", b"II*\0") if little else (">", b"MM\0*")
    usual = [(256, 4, 1, 16), (257, 4, 1, 16), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1), (273, 4, 1, 200)]
    tags = {entry[0]: entry for entry in (*usual, *odd)}
    packed = b"".join(struct.pack(order + "HHII", *tags[number]) for number in sorted(tags))
    file = start + struct.pack(order + "IH", 8, len(tags)) + packed + bytes(4) + data + bytes(300)
    with suppress(DataError):
        load_array(file, SPEC)


def archives() -> dict[str, bytes]:
    image, found = ORIGINALS["PNG L "], {}
    for kind, mode in (("tar", "w:"), ("tar.gz", "w:gz"), ("tar.xz", "w:xz")):
        with tarfile.open(fileobj=(stream := io.BytesIO()), mode=mode) as archive:
            for name in ("a.png", "b/c.png"):
                info = tarfile.TarInfo(name)
                info.size = len(image)
                archive.addfile(info, io.BytesIO(image))
        found[kind] = stream.getvalue()
    with zipfile.ZipFile(stream := io.BytesIO(), "w", zipfile.ZIP_DEFLATED) as packed:
        for name in ("a.png", "b/c.png", "nameless"):
            packed.writestr(name, image)
        packed.infolist()[-1].filename = ""
    return found | {"zip": stream.getvalue()}


ARCHIVES = archives()


@given(st.sampled_from(sorted(ARCHIVES)), SEEDS)
def test_archives(tmp_path: Path, kind: str, seed: int) -> None:
    file = tmp_path / f"images.{kind}"
    file.write_bytes(damaged(ARCHIVES[kind], seed))
    with suppress(DataError):
        for source in find_sources(file).images:
            with suppress(DataError):
                load_array(source.read(), SPEC)


def test_a_zip_with_a_member_without_a_name(tmp_path: Path) -> None:
    (tmp_path / "images.zip").write_bytes(ARCHIVES["zip"])
    assert find_sources(tmp_path / "images.zip").total == 2


@pytest.fixture(scope="module")
def empty_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle")
    for name in HASHED:
        (folder / name).write_text("{}")
    return folder


FIELDS = st.sampled_from(sorted(manifest().model_dump()))


@given(st.dictionaries(FIELDS, JSON, max_size=2), st.none() | SEEDS)
def test_bundles(empty_bundle: Path, changes: dict[str, Any], seed: int | None) -> None:
    content = manifest().model_copy(update={"sha256": {name: sha256(empty_bundle / name) for name in HASHED}})
    text = json.dumps({**content.model_dump(mode="json"), **changes}).encode()
    (empty_bundle / MANIFEST).write_bytes(text if seed is None else damaged(text, seed))
    with suppress(DataError):
        bundle = Bundle.read(empty_bundle)
        assert len(cluster_states(bundle.manifest)) == len(bundle.manifest.cluster_names)
        assert labels_text(bundle.manifest.cluster_names).count("\n") == len(bundle.manifest.cluster_names)
        apply_names(bundle.manifest, Names.of(bundle))


ENTRY = st.fixed_dictionaries({}, optional={"name": JSON, "merge_into": JSON, "junk": JSON, "other": JSON})


@given(st.dictionaries(st.integers(-9, 9).map(str) | st.text(max_size=5), ENTRY, max_size=5) | JSON, st.none() | SEEDS)
def test_names(tmp_path: Path, clusters: object, seed: int | None) -> None:
    text = json.dumps({"clusters": clusters}).encode()
    (tmp_path / "names.json").write_bytes(text if seed is None else damaged(text, seed))
    with suppress(DataError):
        naming = apply_names(manifest(), Names.read(tmp_path / "names.json"))
        assert labels_text(naming.cluster_names).count("\n") == len(naming.cluster_names)


@given(st.text(max_size=300))
def test_text(text: str) -> None:
    assert from_spreadsheet_cell(spreadsheet_cell(text)) == text
    assert len(printable(text).splitlines()) <= 1 and printable(text).isprintable() is not None
    with suppress(ValueError):
        assert labels_text([check_name(text)]).splitlines() == [text]


ROW = {"path": "a.png", "status": "ok", "cluster_id": 1, "confidence": 0.5, "margin": 0.1, "fit": "typical"}
COLUMN = st.sampled_from(COLUMNS)


@given(st.lists(st.dictionaries(COLUMN, JSON, max_size=3), max_size=3), st.none() | SEEDS, st.booleans())
def test_rows(tmp_path: Path, changes: list[dict[str, Any]], seed: int | None, as_csv: bool) -> None:
    stream, records = io.StringIO(newline=""), [{**ROW, **change} for change in changes]
    if as_csv:
        writer = csv.DictWriter(stream, COLUMNS)
        writer.writeheader()
        writer.writerows(records)
    else:
        stream.writelines(json.dumps(record) + "\n" for record in records)
    file = tmp_path / ("rows.csv" if as_csv else "rows.jsonl")
    data = stream.getvalue().encode("utf-8", "backslashreplace")
    file.write_bytes(data if seed is None else damaged(data, seed))
    with suppress(DataError):
        for row in read_rows(file):
            json.dumps(row.__dict__, allow_nan=False)  # as a page has it
            assert row.cluster_id is None or 0 <= row.cluster_id < 100_000


@given(SEEDS)
def test_rows_in_parquet(tmp_path: Path, seed: int) -> None:
    stream = io.BytesIO()
    pq.write_table(pa.table({name: [value] * 20 for name, value in ROW.items()}), stream)
    (tmp_path / "rows.parquet").write_bytes(damaged(stream.getvalue(), seed))
    with suppress(DataError):
        read_rows(tmp_path / "rows.parquet")


@given(st.lists(st.tuples(st.sampled_from(["path", "label", "split", "true_label"]), st.text()), max_size=8), SEEDS)
def test_lists_of_images(tmp_path: Path, cells: list[tuple[str, str]], seed: int) -> None:
    text = "path,label,split,true_label\na.png,gull,train,\nb.png,,,\n" + "".join(f"{cell},x,,\n" for _, cell in cells)
    (tmp_path / "images.csv").write_bytes(damaged(text.encode("utf-8", "backslashreplace"), seed))
    with suppress(DataError):
        for name in from_csv(tmp_path / "images.csv").known_classes:
            check_name(name)


SETTINGS = "[data]\nresolution = 32\nresize = 36\n[optim]\nepochs = 3\nlr = 0.1\n[model]\ntrunk = 'resnet18'\n"
KEYS = st.sampled_from(["data.resolution", "data.workers", "optim.epochs", "optim.lr", "model.trunk", "model", "x.y"])


@given(st.dictionaries(KEYS, JSON, max_size=2), SEEDS)
def test_configurations(tmp_path: Path, overrides: dict[str, Any], seed: int) -> None:
    (tmp_path / "config.toml").write_bytes(damaged(SETTINGS.encode(), seed))
    with suppress(NcdError):
        resolve_config(recipes=["glyphs"], config_file=tmp_path / "config.toml", overrides=overrides)


def reference_bytes() -> bytes:
    arrays = {name: np.array(value) for name, value in example().__dict__.items() if name != "root"}
    np.savez(stream := io.BytesIO(), root=np.array("/"), **arrays)
    return stream.getvalue()


REFERENCE = reference_bytes()
DTYPES = st.sampled_from(["int64", "float32", "float16", "U5", "bool", "complex64", "datetime64[s]", "uint8"])
SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)


@given(SEEDS)
def test_damaged_references(tmp_path: Path, seed: int) -> None:
    (tmp_path / "reference.npz").write_bytes(damaged(REFERENCE, seed))
    with suppress(DataError):
        Reference.read(tmp_path / "reference.npz").limits()


@given(st.sampled_from(sorted(example().__dict__)), DTYPES, SHAPES, st.sampled_from([0, 1, -5, 2**40]))
def test_references_of_other_shapes(tmp_path: Path, name: str, dtype: str, shape: tuple[int, ...], fill: int) -> None:
    with np.load(io.BytesIO(REFERENCE)) as stored:
        arrays = {**stored}
    with np.errstate(all="ignore"):
        arrays[name] = np.full(shape, fill).astype(dtype)
    np.savez(tmp_path / "reference.npz", **arrays)
    with suppress(DataError):
        found = Reference.read(tmp_path / "reference.npz")
        assert np.isfinite(found.limits().judge(found.embeddings, found.cluster_ids, found.confidences)).all()


def onnx_bytes() -> bytes:
    weight = numpy_helper.from_array(np.arange(9, dtype=np.float32), "w")
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [9]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Add", ["x", "w"], ["y"])], "g", ends[:1], ends[1:], [weight])
    return helper.make_model(graph).SerializeToString()


ONNX = onnx_bytes()


@given(st.none() | SEEDS, st.binary(max_size=50))
def test_models(tmp_path: Path, seed: int | None, more: bytes) -> None:
    (tmp_path / "model.onnx").write_bytes(more if seed is None else damaged(ONNX, seed) + more)
    with suppress(DataError):
        check_self_contained(tmp_path / "model.onnx")


def weight_files() -> dict[str, bytes]:
    tensors = {"conv1.weight": torch.zeros(4, 3, 3, 3), "fc.weight": torch.ones(2, 4)}
    new, old = io.BytesIO(), io.BytesIO()
    torch.save({"state_dict": tensors, "epoch": 3}, new)
    torch.save(tensors, old, _use_new_zipfile_serialization=False)
    return {"new": new.getvalue(), "old": old.getvalue()}


WEIGHTS = weight_files()


@given(st.sampled_from([*WEIGHTS, "safetensors"]), SEEDS)
def test_weights(tmp_path: Path, kind: str, seed: int) -> None:
    if kind == "safetensors":
        facts = {"method": "moco", "trunk": "x", "mean": "[1, 1, 1]", "std": "[1, 1, 1]"}
        save_file({"w": torch.zeros(4)}, tmp_path / "plain", metadata=facts)
    data = WEIGHTS[kind] if kind in WEIGHTS else (tmp_path / "plain").read_bytes()
    (tmp_path / "weights").write_bytes(damaged(data, seed))
    with suppress(DataError):
        read_weights(tmp_path / "weights")


def test_what_is_whole_is_read(tmp_path: Path) -> None:
    """The originals of all this are good: what is refused is refused for its damage."""
    for name, data in ORIGINALS.items():
        assert load_array(data, SPEC).shape == (64, 64, 3), name
    for kind, data in WEIGHTS.items():
        (tmp_path / kind).write_bytes(data)
        assert len(read_weights(tmp_path / kind).tensors) == 2
    (tmp_path / "reference.npz").write_bytes(REFERENCE)
    assert Reference.read(tmp_path / "reference.npz").clusters == 4
    (tmp_path / "model.onnx").write_bytes(ONNX)
    check_self_contained(tmp_path / "model.onnx")
    assert isinstance(Image.open(io.BytesIO(ORIGINALS["PNG L "])), Image.Image)
