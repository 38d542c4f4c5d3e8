"""The trunk in ONNX Runtime: torch's maps, whatever its weights are now, and a word where it cannot be used."""

from __future__ import annotations

import pytest
import torch
from ncd_training.config.schema import ModelConfig, TrainConfig
from ncd_training.model import onnx as onnx_trunk
from ncd_training.model.backbone import build_trunk
from ncd_training.model.branches import DualBranchModel, Trunk
from ncd_training.model.onnx import OnnxTrunk
from ncd_training.model.weights import settle

from ncd_serve.errors import MissingExtraError
from ncd_serve.progress import SILENT


def in_onnx(name: str, resolution: int) -> tuple[Trunk, torch.Tensor]:
    torch.manual_seed(0)
    trunk = Trunk(build_trunk(name, resolution=resolution))
    trunk.in_onnx = OnnxTrunk(ModelConfig(backbone=name), resolution)
    return trunk, torch.randint(0, 256, (6, 3, resolution, resolution), dtype=torch.uint8)


def assert_torchs(trunk: Trunk, images: torch.Tensor) -> None:
    with torch.no_grad():
        expected = trunk(images)
    found = trunk.maps(images)
    assert found.shape == expected.shape and not found.requires_grad
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "resolution"), [("efficientnet_lite0", 64), ("test_vit", 160)])
def test_maps_are_torchs(name: str, resolution: int) -> None:
    assert_torchs(*in_onnx(name, resolution))


@pytest.mark.slow
def test_other_weights_or_sizes_are_noticed_and_equal_ones_share_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    trunk, images = in_onnx("small_resnet", 48)
    assert_torchs(trunk, images)
    trunk, images = in_onnx("small_resnet", 32)
    assert_torchs(trunk, images)
    with torch.no_grad():
        for parameter in trunk.parameters():
            parameter.mul_(1.1)
    assert_torchs(trunk, images)
    same = Trunk(build_trunk("small_resnet", resolution=32))
    same.load_state_dict(trunk.state_dict())
    same.in_onnx = OnnxTrunk(ModelConfig(backbone="small_resnet"), 32)
    monkeypatch.setattr(onnx_trunk.subprocess, "run", lambda *_, **__: pytest.fail("made again"))
    assert_torchs(same, images)


def test_branches_get_maps_in_the_format_that_they_like() -> None:
    model = DualBranchModel(build_trunk("small_resnet", resolution=32), known=3, novel=2)
    model.trunk.in_onnx = OnnxTrunk(ModelConfig(backbone="small_resnet"), 32)
    maps = model.to_maps(torch.zeros(2, 3, 32, 32, dtype=torch.uint8))
    assert maps.is_contiguous(memory_format=torch.channels_last)


def test_what_is_missing_is_said_before_anything_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_trunk, "_PACKAGES", ("onnx", "no_such_package"))
    with pytest.raises(MissingExtraError, match="no_such_package") as caught:
        settle(TrainConfig.model_validate({"optim": {"onnx_trunk": True}}), images=10, progress=SILENT)
    assert "onnx_trunk=false" in caught.value.hint


def test_a_trunk_that_drifts_cannot_be_handed_over() -> None:
    with pytest.raises(ValueError, match="onnx_trunk must be false"):
        TrainConfig.model_validate({"compat": {"trunk_batch_norm": "train"}, "optim": {"onnx_trunk": True}})
