"""What an export writes, in which precision, and that nothing is lost when it fails."""

from __future__ import annotations

import json
import resource
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from ncd_export import export as exporter
from ncd_export.export import ExportOptions, export_run
from ncd_export.graph import ExportGraph
from ncd_export.precision import PRECISIONS, to_int8
from ncd_export.repository import add_to_repository
from ncd_export.triton_config import Hardware
from ncd_training.base.run_dir import RunDir
from ncd_training.data.prepare import Setup
from ncd_training.model.onnx import write_onnx
from rich.console import Console
from safetensors.torch import load_file, save_file
from tritonclient import grpc

from ncd_serve.bundle import Bundle
from ncd_serve.contract import OUTPUTS, Precision
from ncd_serve.errors import DataError, ExportMismatchError, NcdError, UsageError
from ncd_serve.preprocess import load_array
from ncd_serve.runners import open_session
from ncd_serve.triton import TritonServer, find_triton
from tests.export.folders import unchanged
from tests.runs import SILENT, again

QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def setup(tiny_run: Path) -> Setup:
    return again(RunDir.open(tiny_run))


@pytest.fixture
def place(bundle: Path, tmp_path: Path) -> dict[str, Any]:
    """Where to export to: a bundle and a repository that hold an older export."""
    folder = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    add_to_repository(Bundle.read(folder), tmp_path / "repository", name="m")
    return {"out": folder, "repository": tmp_path / "repository", "name": "m"}


def test_the_bundle_says_what_was_compared(bundle: Path) -> None:
    verification = json.loads((bundle / "verification.json").read_text())
    assert verification["passed"] and verification["equal_ids"] == 1.0
    assert verification["batch_sizes"] == [1, 2, 7, 64]
    assert max(verification["max_difference"].values()) <= 1e-4


def test_the_model_says_where_it_comes_from(bundle: Path) -> None:
    facts = {entry.key: entry.value for entry in onnx.load(bundle / "model.onnx").metadata_props}
    manifest = Bundle.read(bundle).manifest
    assert facts["bundle_id"] == manifest.bundle_id and facts["torch"] == torch.__version__
    assert (facts["dataset"], facts["method"], facts["precision"]) == ("glyphs", "dual", "fp32")


def test_the_graph_judges_fit_as_the_bundle_does(bundle: Path, glyphs: Path) -> None:
    opened = Bundle.read(bundle)
    images = np.stack([load_array(path, opened.manifest.preprocess) for path in sorted(glyphs.glob("*/*/*-000.png"))])
    names = ["fit", "embedding", "cluster_id", "confidence"]
    fits, *seen = open_session(opened.model_path).run(names, {"image": images})
    assert fits.tolist() == opened.reference().limits().judge(*seen).tolist()  # type: ignore[arg-type]
    assert len(set(fits.tolist())) > 1  # consonants are not what the clusters were found in


def test_the_reference_is_of_the_state_that_is_exported(
    setup: Setup, tiny_run: Path, bundle: Path, place: dict[str, Any]
) -> None:
    """The first checkpoint of the run knows its clusters less well than the last."""
    run = RunDir(tiny_run)
    exported = export_run(setup, run, **place, options=ExportOptions(checkpoint=run.initial), progress=SILENT).bundle
    last, first = Bundle.read(bundle).reference(), exported.reference()
    assert last.checkpoint != first.checkpoint == exported.manifest.checkpoint
    assert first.paths == last.paths and first.confidences.tolist() != last.confidences.tolist()
    assert (bundle / "reference.npz").read_bytes() == run.reference.read_bytes()


def test_the_card_is_complete(bundle: Path) -> None:
    card = (bundle / "MODEL_CARD.md").read_text()
    for line in (
        "- initial weights: self-supervised by rotation",
        "| labelled-train | 84 | trained on, 21 known classes |",
        "| novel-test | 10 | held out, novel classes |",
        "| k-means on supervised features | unlabelled-train | 20 |",
        "| this model | novel-test | 10 |",
        "## Intended use",
        "- The number of clusters is fixed before training.",
        "- Data: drawn by ncd-serve (Apache-2.0)",
        "- Weights: trained on the data above only",
    ):
        assert line in card, line


def test_a_mismatch_leaves_the_old_bundle_and_repository(
    setup: Setup, tiny_run: Path, place: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoiled(graph: ExportGraph, *arguments: Any, **keywords: Any) -> None:
        write_onnx(graph, *arguments, **keywords)
        with torch.no_grad():  # the file holds other weights than the model that it is compared with
            graph.cluster_head.weight.mul_(-1)

    monkeypatch.setattr(exporter, "write_onnx", spoiled)
    with unchanged(tmp_path), pytest.raises(ExportMismatchError, match="differs from the trained one"):
        export_run(setup, RunDir(tiny_run), **place, progress=SILENT)


def test_a_model_that_has_diverged_is_not_exported(
    setup: Setup, tiny_run: Path, place: dict[str, Any], tmp_path: Path
) -> None:
    tensors = load_file(RunDir(tiny_run).checkpoint)
    tensors["model.branches.0.cluster_head.weight"].fill_(torch.nan)
    save_file(tensors, tmp_path / "diverged.safetensors", metadata={"epoch": "2"})
    options = ExportOptions(checkpoint=tmp_path / "diverged.safetensors")
    with unchanged(tmp_path), pytest.raises(DataError, match="NaN or infinity"):
        export_run(setup, RunDir(tiny_run), **place, options=options, progress=SILENT)


def test_a_disk_that_fills_up_leaves_the_old_bundle_and_repository(
    setup: Setup, tiny_run: Path, place: dict[str, Any], tmp_path: Path
) -> None:
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    with unchanged(tmp_path), pytest.raises(DataError, match="cannot write") as failure:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, old[1]))  # no file may grow larger: the model would
        try:
            export_run(setup, RunDir(tiny_run), **place, progress=SILENT)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert "nothing was changed" in str(failure.value.hint)


def test_a_repository_that_fills_up_keeps_its_versions(place: dict[str, Any], tmp_path: Path) -> None:
    loaded, old = Bundle.read(place["out"]), resource.getrlimit(resource.RLIMIT_FSIZE)
    with unchanged(tmp_path):
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, old[1]))
        try:
            for name, replace in (("m", True), ("m", False), ("new", False)):
                with pytest.raises(OSError, match="File too large"):
                    add_to_repository(loaded, place["repository"], name=name, replace=replace, keep=1)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, old)


def test_a_folder_of_the_user_is_never_written_over(
    setup: Setup, tiny_run: Path, place: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "holiday.jpg").touch()
    with unchanged(tmp_path), pytest.raises(DataError, match="is not a bundle"):
        export_run(setup, RunDir(tiny_run), **{**place, "out": tmp_path / "photos"}, progress=SILENT)


def test_runs_without_a_usable_checkpoint(setup: Setup, tiny_run: Path, place: dict[str, Any], tmp_path: Path) -> None:
    stranger = tmp_path / "stranger.safetensors"
    save_file({"weight": torch.zeros(1)}, stranger)  # it says nothing of an epoch
    with unchanged(tmp_path):
        for checkpoint, reason in ((tmp_path / "none", "no checkpoint"), (stranger, "not a checkpoint of a run")):
            with pytest.raises(DataError, match=reason):
                export_run(
                    setup, RunDir(tiny_run), **place, options=ExportOptions(checkpoint=checkpoint), progress=SILENT
                )
        stranger_run = RunDir(tmp_path / "empty")
        with pytest.raises(DataError, match="no checkpoint"):
            export_run(setup, stranger_run, **place, progress=SILENT)
    stranger.write_bytes(RunDir(tiny_run).checkpoint.read_bytes()[:1000])
    with unchanged(tmp_path), pytest.raises(DataError, match="damaged"):
        export_run(setup, RunDir(tiny_run), **place, options=ExportOptions(checkpoint=stranger), progress=SILENT)


def test_the_state_of_an_interrupted_run_is_exported_without_scores(
    setup: Setup, tiny_run: Path, place: dict[str, Any]
) -> None:
    run = RunDir(tiny_run)
    exported = export_run(setup, run, **place, options=ExportOptions(checkpoint=run.initial), progress=SILENT)
    training = exported.bundle.manifest.training
    assert (training["epochs"], training["planned_epochs"]) == (0, 2)
    assert "| this model |" not in (exported.bundle.folder / "MODEL_CARD.md").read_text()
    assert exported.version_folder.name == "2"


@pytest.fixture(scope="module")
def reduced(setup: Setup, tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bundle]:
    """The run in fp16 and in int8, side by side in one repository."""
    folder, bundles = tmp_path_factory.mktemp("reduced"), {}
    for precision in ("fp16", "int8"):
        options = ExportOptions(precision=precision, min_agreement=0.9)
        where = {"out": folder / precision, "repository": folder / "repository", "name": precision}
        bundles[precision] = export_run(setup, RunDir(tiny_run), **where, options=options, progress=SILENT).bundle
    return bundles


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_fewer_bits_keep_the_contract(precision: str, reduced: dict[str, Bundle], bundle: Path) -> None:
    small, fp32 = (onnx.load(path / "model.onnx") for path in (reduced[precision].folder, bundle))
    assert list(small.graph.input) == list(fp32.graph.input)
    assert list(small.graph.output) == list(fp32.graph.output)
    assert {entry.key for entry in small.metadata_props} == {entry.key for entry in fp32.metadata_props}
    # The mixture of classes comes after the network, and keeps its precision.
    mixture = sum(len(tensor.raw_data) for tensor in fp32.graph.initializer if tensor.name.startswith("generation-"))
    sizes = [path.stat().st_size - mixture for path in (reduced[precision].model_path, bundle / "model.onnx")]
    assert sizes[0] < sizes[1] * (0.55 if precision == "fp16" else 0.32)
    assert reduced[precision].manifest.precision == precision
    (head,) = (tensor for tensor in small.graph.initializer if tensor.name == "cluster_head.weight")
    assert head.data_type == onnx.TensorProto.FLOAT, "what follows the embedding stays fp32"
    agreement = json.loads((reduced[precision].folder / "verification.json").read_text())["agreement"]
    assert agreement["equal_ids"] >= 0.9
    assert (agreement["images"], agreement["calibrated_on"]) == (20, 84 if precision == "int8" else 0)


def test_int8_is_quantised_by_channel_with_weights_that_cannot_overflow(reduced: dict[str, Bundle]) -> None:
    graph = onnx.load(reduced["int8"].model_path).graph
    stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    kernels = [array for array in stored.values() if array.dtype == np.int8 and array.ndim == 4]
    assert len(kernels) == len([node for node in graph.node if node.op_type == "Conv"])
    assert max(int(np.abs(kernel.astype(int)).max()) for kernel in kernels) <= 64
    scales = {node.input[0]: node.input[1] for node in graph.node if node.op_type == "DequantizeLinear"}
    assert all(stored[scales[name]].shape == (array.shape[0],) for name, array in stored.items() if array is kernels[0])


def test_images_that_are_compared_did_not_calibrate(
    setup: Setup, tiny_run: Path, place: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[np.ndarray] = []

    def black(source: Path, target: Path, batches: Any) -> None:
        seen.extend(batches)
        to_int8(source, target, [np.zeros_like(batch) for batch in seen])

    kind = PRECISIONS[Precision.INT8]._replace(reduce=black)
    monkeypatch.setitem(PRECISIONS, Precision.INT8, kind)  # ranges of black images fit no others, so that int8 fails
    with unchanged(tmp_path), pytest.raises(ExportMismatchError, match=r"int8 assigns \d+\.\d% of 20 images"):
        export_run(setup, RunDir(tiny_run), **place, options=ExportOptions(precision="int8"), progress=SILENT)
    calibrated = {image.tobytes() for image in np.concatenate(seen)}
    spec = setup.config.data.preprocess
    assert len(calibrated) == 84
    assert not calibrated & {load_array(path, spec).tobytes() for path in setup.manifest.unlabelled}


def test_every_precision_has_a_row_and_others_are_refused_with_a_hint() -> None:
    assert list(PRECISIONS) == list(Precision)
    assert all(kind.refusal and kind.instead for kind in PRECISIONS.values() if len(kind.devices) < 3)
    with pytest.raises(UsageError, match="'fp8' is not a precision") as refused:
        ExportOptions(precision="fp8").check()
    assert "int8" in str(refused.value.hint)


def test_the_exported_graph_answers_by_the_table_of_outputs(bundle: Path) -> None:
    graph = onnx.load(bundle / "model.onnx").graph
    table = {output.name: output for output in OUTPUTS}
    names = [value.name for value in graph.output]
    assert names == [output.name for output in OUTPUTS if not output.optional or output.name in names]
    for value in graph.output:
        kind = value.type.tensor_type
        assert onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type) == table[value.name].numpy_dtype
        assert len(kind.shape.dim) == 1 + len(table[value.name].shape)


def test_int8_is_for_cpus(setup: Setup, tiny_run: Path, place: dict[str, Any], tmp_path: Path) -> None:
    options = ExportOptions(precision="int8", hardware=Hardware("tensorrt"))
    with unchanged(tmp_path), pytest.raises(UsageError, match="int8 is quantised for CPUs"):
        export_run(setup, RunDir(tiny_run), **place, options=options, progress=SILENT)


@pytest.mark.triton
def test_strict_triton_serves_all_precisions_bit_for_bit(reduced: dict[str, Bundle], setup: Setup) -> None:
    try:
        find_triton()
    except NcdError as error:
        pytest.skip(f"no Triton here: {error}")
    spec = setup.config.data.preprocess
    images = np.stack([load_array(path, spec) for path in setup.manifest.unlabelled])
    repository = reduced["int8"].folder.parent / "repository"
    with TritonServer(repository, extra_arguments=["--disable-auto-complete-config"]) as server:
        server.wait_ready(120)
        client = grpc.InferenceServerClient(server.grpc_url)
        for name, bundle in reduced.items():
            asked = grpc.InferInput("image", list(images.shape), "UINT8").set_data_from_numpy(images)
            answer = client.infer(name, [asked])
            outputs = ["cluster_id", "confidence", "probabilities", "embedding"]
            session = open_session(bundle.model_path, threads=2)
            for output, direct in zip(outputs, session.run(outputs, {"image": images}), strict=True):
                np.testing.assert_array_equal(answer.as_numpy(output).reshape(direct.shape), direct)
