"""`doctor` on real parts: whole ones, and broken ones that it has to explain."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from ncd_serve.bundle import HASHED, MANIFEST, MODEL, BundleManifest
from ncd_serve.doctor import checks as doctor
from ncd_serve.doctor import installation
from ncd_serve.doctor.checks import Check, examine
from ncd_serve.files import sha256
from ncd_serve.preprocess import PreprocessSpec
from ncd_serve.triton import TritonServer, install
from tests.serve.small_models import (
    CONFIG,
    LABELS,
    READY_SECONDS,
    make_classifier,
    make_export,
    make_lookup,
    needs_triton,
    needs_wheel,
    save_model,
)

EXPORTED = CONFIG + 'parameters { key: "ncd_preprocess" value { string_value: "{\\"resolution\\":4,\\"resize\\":4}" } }'


@pytest.fixture
def asked_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what is named: asking torch takes seconds."""
    monkeypatch.setattr(doctor, "installation_steps", lambda: iter(()))
    monkeypatch.setattr(doctor, "machine_steps", lambda: iter(()))


def run_doctor(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ncd_serve", "doctor", *map(str, arguments)]
    settings = {**os.environ, "COLUMNS": "80", **environment}
    return subprocess.run(command, env=settings, capture_output=True, text=True, timeout=120, check=False)


def by_name(checks: Iterator[Check]) -> dict[str, Check]:
    return {check.what: check for check in checks}


def make_bundle(folder: Path) -> Path:
    """A small model with everything that a bundle of the first schema has."""
    make_classifier(folder)
    shutil.move(folder / "1" / "model.onnx", folder / MODEL)
    for name in HASHED[2:]:
        (folder / name).write_text("{}")
    return write_manifest(folder)


def write_manifest(folder: Path) -> Path:
    hashes = {name: sha256(folder / name) for name in HASHED}
    facts: dict[str, Any] = {"bundle_id": "1", "created": "", "dataset": "", "method": "dual", "schema_version": 1}
    manifest = BundleManifest(
        **facts,
        preprocess=PreprocessSpec(resolution=4, resize=4),
        known_classes=[],
        cluster_names=LABELS,
        training={},
        versions={},
        sha256=hashes,
    )
    (folder / MANIFEST).write_text(manifest.model_dump_json())
    return folder


class Shown(NamedTuple):
    text: str
    checks: list[dict[str, Any]]


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    """What the command prints, both ways, with a bundle in a folder whose name is longer than a line."""
    folder = tmp_path_factory.mktemp("doctor") / ("x" * 120)
    make_bundle(folder)
    told, as_json = run_doctor("--bundle", folder), run_doctor("--bundle", folder, "--json")
    assert told.returncode == as_json.returncode == 0, told.stdout + told.stderr
    return Shown(told.stdout, json.loads(as_json.stdout))


def test_everything_installed_is_told_with_its_version(shown: Shown) -> None:
    checks = {check["what"]: check for check in shown.checks}
    assert list(checks)[:2] == ["python", "ncd-serve"]
    assert {"extra train", "extra export", "extra triton", "extra tensorboard"} <= set(checks)
    assert not {"extra all", "extra dev", "extra docs"} & set(checks)
    assert f"numpy {np.__version__}" in checks["ncd-serve"]["found"]
    assert f"onnx {onnx.__version__}" in checks["extra export"]["found"]
    assert checks["torch"]["verdict"] == "ok"
    assert "computes on the CPU" in checks["onnxruntime"]["found"]
    assert "GB" in checks["working folder"]["found"] and "cores" in checks["cores, memory"]["found"]
    assert {tuple(check) for check in shown.checks} == {("group", "what", "verdict", "found", "fix", "code")}
    assert {check["verdict"] for check in shown.checks} <= {"ok", "missing"}
    assert all(check["fix"] for check in shown.checks if check["verdict"] == "missing")


def test_nothing_is_cut_on_80_columns(shown: Shown) -> None:
    together = "".join(shown.text.split())
    assert "…" not in shown.text
    for check in shown.checks:
        if "free" not in check["found"]:  # sizes differ between two calls
            for part in ("group", "what", "found", "fix"):
                assert "".join(check[part].split()) in together, check
    folded = [line for line in shown.text.splitlines() if "fix:" not in line and "x" * 120 not in line]
    assert max(map(len, folded)) <= 80


@needs_wheel
def test_triton_and_its_stub_really_start(shown: Shown) -> None:
    checks = {check["what"]: check for check in shown.checks}
    assert checks["triton"]["found"].startswith("2.")
    assert "numpy 1." in checks["triton stub"]["found"]


def test_a_torch_that_cannot_be_imported_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.99: cannot open shared object file')")
    done = run_doctor("--json", PYTHONPATH=str(tmp_path))
    (torch,) = [check for check in json.loads(done.stdout) if check["what"] == "torch"]
    assert torch["verdict"] == "problem" and "libcudart.so.99" in torch["found"]
    assert torch["fix"].startswith("pip install") and done.returncode == torch["code"] == 6


def test_packages_that_are_absent_or_too_old_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        installation,
        "requires",
        lambda _: ["numpy>=99", "nothing-like-it>=1; extra == 'train'", "pillow<1; extra == 'export'", "rich>=1"],
    )
    steps = dict(installation.installation_steps())
    with pytest.raises(installation.BrokenInstallationError, match=r"needs 'numpy>=99'; installed: .*rich") as base:
        steps["ncd-serve"]()
    assert base.value.hint == "pip install 'numpy>=99'"
    with pytest.raises(installation.MissingExtraError, match="not installed: nothing-like-it") as absent:
        steps["extra train"]()
    assert absent.value.hint == "pip install 'ncd-serve[train]'"
    with pytest.raises(installation.BrokenInstallationError, match="needs 'pillow<1'"):
        steps["extra export"]()


@needs_wheel
def test_numpy_2_under_the_stub_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "version", lambda name: "2.1.0")
    monkeypatch.setattr(doctor, "installation_steps", lambda: iter([("triton stub", installation._stub)]))
    (stub,) = (check for check in examine() if check.what == "triton stub")
    assert stub.verdict == "problem" and stub.code == 5 and "numpy<2" in stub.fix


def test_a_full_disk_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=10**7))
    monkeypatch.setattr(doctor, "installation_steps", lambda: iter(()))
    checks = by_name(examine())
    for what, code, fix in (
        ("working folder", 3, "--out"),
        ("temporary files", 3, "TMPDIR"),
        ("shared memory", 5, "shm"),
    ):
        assert (checks[what].verdict, checks[what].code) == ("problem", code)
        assert "10 MB free" in checks[what].found and fix in checks[what].fix


@pytest.mark.usefixtures("asked_only")
def test_a_whole_bundle_is_asked_about_a_test_image(tmp_path: Path) -> None:
    checks = by_name(examine(bundle=make_bundle(tmp_path / "bundle")))
    assert [check.verdict for check in checks.values()] == ["ok", "ok", "ok", "missing"]
    assert "schema 1" in checks["files"].found and "5 of them named: finch" in checks["clusters"].found
    assert "5 probabilities out, which sum to 1" in checks["test image"].found
    assert "export" in checks["reference"].fix


@pytest.mark.usefixtures("asked_only")
def test_broken_bundles_are_told_by_their_first_fault(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "bundle")
    (bundle / "labels.txt").write_text("changed")
    (changed,) = examine(bundle=bundle)
    assert changed.verdict == "problem" and changed.code == 3
    assert "labels.txt is missing or not the file that was verified" in changed.found
    (bundle / MODEL).write_bytes(b"no model, but hashed")
    *_, no_model = examine(bundle=write_manifest(bundle))
    assert no_model.what == "test image" and "ONNX Runtime cannot run" in no_model.found and no_model.code == 3
    make_no_probabilities(bundle)
    *_, no_probabilities = examine(bundle=write_manifest(bundle))
    assert "sum to" in no_probabilities.found and "no probabilities" in no_probabilities.found
    (nowhere,) = examine(bundle=tmp_path / "nowhere")
    assert "it has no bundle.json" in nowhere.found and "ncd-serve export" in nowhere.fix


def make_no_probabilities(bundle: Path) -> None:
    """A model with the right shapes that answers with sums of pixels."""
    nodes = [
        helper.make_node("Cast", ["image"], ["pixels"], to=TensorProto.FLOAT),
        helper.make_node("Flatten", ["pixels"], ["flat"]),
        helper.make_node("MatMul", ["flat", "ones"], ["probabilities"]),
    ]
    image = helper.make_tensor_value_info("image", TensorProto.UINT8, ["N", 4, 4, 3])
    answer = helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["N", 5])
    save_model(bundle, nodes, [image], [answer], {"ones": np.ones((48, 5), np.float32)})
    shutil.move(bundle / "1" / "model.onnx", bundle / MODEL)


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """An exported model with its companion for image files, and one of somebody else."""
    make_export(tmp_path / "models", config=EXPORTED)
    make_lookup(tmp_path / "models" / "lookup")
    return tmp_path / "models"


@pytest.mark.usefixtures("asked_only")
def test_every_model_of_a_repository_has_its_line(models: Path) -> None:
    checks = by_name(examine(repository=models))
    assert {check.verdict for check in checks.values()} == {"ok"}
    assert "versions 1; 5 clusters" in checks["birds"].found and "which sum to 1" in checks["birds"].found
    assert "takes image files for 'birds'" in checks["birds_jpeg"].found
    assert "not exported by ncd-serve" in checks["lookup"].found


@pytest.mark.usefixtures("asked_only")
def test_a_broken_model_does_not_hide_the_others(models: Path) -> None:
    (models / "birds" / "labels.txt").write_text("finch\nowl")
    (models / "lookup" / "1" / "model.onnx").unlink()
    checks = by_name(examine(repository=models))
    assert checks["birds"].found == "2 labels for 5 clusters" and checks["birds"].code == 3
    assert "no version with a model.onnx" in checks["lookup"].found
    assert checks["birds_jpeg"].verdict == "ok"
    shutil.rmtree(models / "birds")
    assert "'birds', which does not exist" in by_name(examine(repository=models))["birds_jpeg"].found
    (nowhere,) = examine(repository=models / "nowhere")
    assert nowhere.verdict == "problem" and nowhere.code == 3


@pytest.mark.usefixtures("asked_only")
@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_a_dead_server_is_told_with_what_starts_one(scheme: str) -> None:
    (check,) = examine(url=f"{scheme}://127.0.0.1:1")
    assert check.verdict == "problem" and check.code == 5
    assert check.found == "no Triton server answers at 127.0.0.1:1" and "ncd-serve serve" in check.fix


@needs_triton
@pytest.mark.triton
@pytest.mark.usefixtures("asked_only")
def test_a_live_server_is_asked_for_its_contract(models: Path) -> None:
    with TritonServer(models) as server:
        server.wait_ready(READY_SECONDS)
        for url in (f"grpc://{server.grpc_url}", f"http://{server.http_url}"):
            checks = by_name(examine(url=url, model="birds"))
            assert [check.verdict for check in checks.values()] == ["ok", "ok", "ok"], checks
            assert "is ready" in checks["server"].found and "lookup 1 READY" in checks["server"].found
            assert "5 clusters, 5 of them named: finch, wren: house" in checks["model birds"].found
            assert "which sum to 1" in checks["test image"].found
            _, foreign = examine(url=url, model="lookup")
            assert "is not a model that ncd-serve exported" in foreign.found and "--model-name" in foreign.fix
            _, absent = examine(url=url)
            assert absent.verdict == "problem" and absent.code == 5 and "ncd_global" in absent.found


@needs_triton
@pytest.mark.triton
@pytest.mark.usefixtures("asked_only")
def test_a_server_that_hides_its_models_is_still_asked(models: Path) -> None:
    with TritonServer(models, live_updates=True) as server:
        server.wait_ready(READY_SECONDS)
        checks = by_name(examine(url=server.grpc_url, model="birds"))
    assert "does not list its models" in checks["server"].found and checks["test image"].verdict == "ok"
