"""A model's folder in a repository: its versions, and what is refused without touching anything."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from google.protobuf import text_format
from ncd_export.rename import rename_bundle
from ncd_export.repository import add_to_repository, check_clusters
from ncd_export.triton_config import Device, Hardware, render_config
from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInstanceGroup

from ncd_serve.bundle import MANIFEST, Ancestor, Bundle
from ncd_serve.errors import DataError, UsageError
from ncd_serve.naming import Names
from tests.conftest import Ncd

CHECKED_IN = Path(__file__).parents[2] / "model_repository" / "ncd_global"


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def bundle_of(folder: Path) -> str:
    """The id of the bundle whose model it is."""
    facts = {entry.key: entry.value for entry in onnx.load(folder / "model.onnx").metadata_props}
    return facts["bundle_id"]


def test_exporting_again_adds_a_version(bundle: Path, tmp_path: Path) -> None:
    loaded = Bundle.read(bundle)
    folders = [add_to_repository(loaded, tmp_path, name="birds") for _ in range(2)]
    assert [folder.name for folder in folders] == ["1", "2"]
    assert entries(tmp_path / "birds") == ["1", "2", "config.pbtxt", "labels.txt"]
    assert bundle_of(folders[1]) == loaded.manifest.bundle_id


def test_replace_and_keep(bundle: Path, tmp_path: Path) -> None:
    loaded, folder = Bundle.read(bundle), tmp_path / "birds"
    assert add_to_repository(loaded, tmp_path, name="birds", replace=True).name == "1"
    for _ in range(2):
        add_to_repository(loaded, tmp_path, name="birds")
    (folder / "3" / "model.onnx").write_bytes(b"old")
    assert add_to_repository(loaded, tmp_path, name="birds", replace=True).name == "3"
    assert bundle_of(folder / "3") == loaded.manifest.bundle_id
    assert add_to_repository(loaded, tmp_path, name="birds", keep=2).name == "4"
    assert entries(folder) == ["3", "4", "config.pbtxt", "labels.txt"]
    assert entries(tmp_path / "birds_jpeg") == ["3", "4", "config.pbtxt"]


def test_models_live_side_by_side(bundle: Path, tmp_path: Path) -> None:
    for name in ("birds", "cars"):
        add_to_repository(Bundle.read(bundle), tmp_path, name=name)
    assert entries(tmp_path) == ["birds", "birds_jpeg", "cars", "cars_jpeg"]
    assert 'name: "cars"' in (tmp_path / "cars" / "config.pbtxt").read_text()


def test_a_model_of_somebody_else_is_left_alone(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "birds").mkdir()
    (tmp_path / "birds" / "config.pbtxt").write_bytes(theirs := b'backend: "python"  # \xff')
    with pytest.raises(DataError, match="was not made by ncd-serve"):
        add_to_repository(Bundle.read(bundle), tmp_path, name="birds", replace=True, keep=1)
    assert (tmp_path / "birds" / "config.pbtxt").read_bytes() == theirs
    assert entries(tmp_path) == ["birds"]


def test_a_model_with_the_clusters_of_another_run_is_not_written_over(bundle: Path, tmp_path: Path) -> None:
    loaded = Bundle.read(bundle)
    add_to_repository(loaded, tmp_path, name="birds")
    check_clusters(tmp_path, "birds", loaded.manifest.lineage)
    check_clusters(tmp_path, "terns", ["another"])
    with pytest.raises(DataError, match=r"the model 'birds' .* has the clusters of another run \(glyphs, 5 clusters"):
        check_clusters(tmp_path, "birds", ["another"])
    other = shutil.copytree(bundle, tmp_path / "bundle")
    text = (other / MANIFEST).read_text()
    (other / MANIFEST).write_text(text.replace(loaded.manifest.checkpoint, "0123456789ab"))
    with pytest.raises(DataError) as refused:
        rename_bundle(other, Names(clusters={}), repository=tmp_path, name="birds")
    assert "--replace-model" in str(refused.value.hint)


def test_generations_may_follow_each_other_in_either_order(bundle: Path, tmp_path: Path, ncd: Ncd) -> None:
    later = shutil.copytree(bundle, tmp_path / "later")
    parent = Ancestor.of(Bundle.read(bundle))
    facts = {"checkpoint": "0123456789ab", "generation": 2, "ancestors": [parent]}
    manifest = Bundle.read(bundle).manifest.model_copy(update=facts)
    (later / MANIFEST).write_text(manifest.model_dump_json())
    place = ("--repository", tmp_path / "models", "--model-name", "birds")
    for folder in (bundle, later, bundle):
        assert ncd("export", folder, *place).returncode == 0
    (later / MANIFEST).write_text(manifest.model_copy(update={"ancestors": []}).model_dump_json())
    refused = ncd("export", later, *place)
    assert refused.returncode == 3 and "has the clusters of another run" in refused.stderr
    assert entries(tmp_path / "models" / "birds") == ["1", "2", "3", "config.pbtxt", "labels.txt"]
    assert ncd("export", later, *place, "--replace-model").returncode == 0


def test_a_name_that_triton_cannot_load(bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a valid model name"):
        add_to_repository(Bundle.read(bundle), tmp_path, name="../birds")
    assert entries(tmp_path) == []


def obey_permissions() -> None:
    """In the child: root loses its right to write where permissions forbid it (CAP_DAC_OVERRIDE), as users lack it."""
    if os.geteuid() == 0:
        PR_CAPBSET_DROP, CAP_DAC_OVERRIDE = 24, 1
        assert ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, 0, 0, 0) == 0


def test_a_read_only_repository_is_named_before_any_work(tiny_run: Path, bundle: Path, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    add_to_repository(Bundle.read(bundle), repository, name="birds")
    for folder in (repository / "birds", repository):
        folder.chmod(0o555)
    before = sorted(repository.rglob("*"))
    where = ["--out", str(tmp_path / "bundle"), "--repository", str(repository), "--model-name", "birds"]
    command = [sys.executable, "-m", "ncd_serve", "export", str(tiny_run), *where]
    done = subprocess.run(command, preexec_fn=obey_permissions, capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    assert f"error: cannot write to {repository}" in done.stderr and "hint:" in done.stderr
    assert sorted(repository.rglob("*")) == before
    assert entries(tmp_path) == ["repository"]


def parsed(bundle: Bundle, device: Device) -> ModelConfig:
    return text_format.Parse(render_config(bundle, name="birds", hardware=Hardware(device, cores=4)), ModelConfig())


def test_the_configuration_leaves_nothing_to_guess(bundle: Path) -> None:
    config = parsed(Bundle.read(bundle), "cpu")
    (image,) = config.input
    assert (image.name, list(image.dims)) == ("image", [32, 32, 3])
    names = ["cluster_id", "confidence", "probabilities", "embedding", "fit", "outside", "known"]
    assert [output.name for output in config.output] == names
    assert config.output[2].label_filename == "labels.txt" and list(config.output[2].dims) == [5]
    assert config.max_batch_size == 64 and config.HasField("dynamic_batching")
    (group,) = config.instance_group
    assert (group.kind, group.count) == (ModelInstanceGroup.KIND_CPU, 1)
    assert config.parameters["intra_op_thread_count"].string_value == "4"
    assert [sample.batch_size for sample in config.model_warmup] == [1, 8, 64]
    assert config.version_policy.latest.num_versions == 1


@pytest.mark.parametrize("device", ["cuda", "tensorrt"])
def test_gpu_variants(device: Device, bundle: Path) -> None:
    config = parsed(Bundle.read(bundle), device)
    (group,) = config.instance_group
    assert (group.kind, group.count) == (ModelInstanceGroup.KIND_GPU, 1)
    assert "intra_op_thread_count" not in config.parameters
    (accelerator,) = config.optimization.execution_accelerators.gpu_execution_accelerator
    assert accelerator.name == device
    if device == "tensorrt":
        settings = dict(accelerator.parameters)
        assert settings["precision_mode"] == "FP32" and settings["trt_engine_cache_enable"] == "1"
        assert settings["trt_engine_cache_path"].startswith("/")
        profiles = [settings[f"trt_profile_{size}_shapes"] for size in ("min", "opt", "max")]
        assert profiles == ["image:1x32x32x3", "image:8x32x32x3", "image:64x32x32x3"]


def test_the_checked_in_configuration_is_the_generated_one(bundle: Path) -> None:
    """model_repository/ in git shows what an export of the embedded model writes, but for its id and digest."""
    loaded = Bundle.read(bundle)
    config = render_config(loaded, name="ncd_global", hardware=Hardware(cores=2))
    config = config.replace(loaded.manifest.bundle_id, "BUNDLE_ID").replace(loaded.digest, "BUNDLE_DIGEST")
    assert (CHECKED_IN / "config.pbtxt").read_text() == config
    assert (CHECKED_IN / "labels.txt").read_text() == (bundle / "labels.txt").read_text()
