"""Every family of timm: cut as timm computes, trained, resumed to the same bits, and exported to ONNX."""

from __future__ import annotations

import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ncd_export.graph import ExportGraph
from ncd_training.base.vision import timm
from ncd_training.config.resolve import resolve_config
from ncd_training.config.schema import TrainConfig
from ncd_training.model import weights as weights_room
from ncd_training.model.backbone import build_trunk
from ncd_training.model.branches import DualBranchModel
from ncd_training.model.cut import MeanOf, WithConstants, cut_network
from ncd_training.model.onnx import write_onnx
from ncd_training.model.trunk import AdapterTail, PooledTail, TrunkParts
from ncd_training.model.weights import load_weights, settle
from ncd_training.objective.method import build_method
from ncd_training.run.step import TrainState, train_step
from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor

from ncd_serve.progress import Progress
from ncd_serve.runners import open_session
from tests.training.model.families import SMALL_FAMILIES, WHOLE

TINY = {name: ({}, 160) for name in timm.list_models("test_*")}
FAMILIES: dict[str, tuple[dict[str, Any], int]] = {**TINY, **SMALL_FAMILIES}
# Tiny networks of families that are exported from SMALL_FAMILIES: for them, the cut is enough.
EXPORTED_ELSEWHERE = re.compile(r"test_(vit|convnext|resnet)\d*")
KNOWN, NOVEL = 3, 2


def cut(name: str, *, adapter: bool = False) -> tuple[TrunkParts, int]:
    arguments, size = FAMILIES[name]
    torch.manual_seed(0)
    network = timm.create_model(name, num_classes=0, **arguments)
    return cut_network(network, resolution=size, adapter=adapter), size


def pictures(count: int, size: int) -> Tensor:
    return torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def state_of(parts: TrunkParts) -> TrainState:
    sizes = {"model": {"bank_size": 8, "dictionary_size": 16}, "pseudo_labels": {"local_top_k": 4}}
    config = TrainConfig.model_validate(sizes)
    torch.manual_seed(0)
    model = DualBranchModel(parts, known=KNOWN, novel=NOVEL, model=config.model, labels=config.pseudo_labels)
    method = build_method(config, model, images=4, clusters=NOVEL)
    optimizer = torch.optim.SGD(model.branches.parameters(), 0.01, momentum=0.9)
    return TrainState(model.train(), method.train(), optimizer)


def step(state: TrainState, size: int, number: int) -> None:
    first = pictures(7, size)
    generator = torch.Generator().manual_seed(number)
    labels, rows = torch.arange(3) % KNOWN, torch.arange(4)
    train_step(state, [first, first.flip(3)], labels, rows=rows, ramp=1.0, generator=generator)


def weights(state: TrainState) -> dict[str, Tensor]:
    return {**state.model.state_dict(), **{f"method.{k}": v for k, v in state.method.state_dict().items()}}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_cut_trained_resumed_and_exported(name: str, tmp_path: Path) -> None:
    parts, size = cut(name)
    assert isinstance(parts.tail, AdapterTail) == (name in WHOLE)
    network: Any = parts.network
    images = torch.rand(3, 3, size, size, generator=torch.Generator().manual_seed(2)) - 0.5
    with torch.no_grad():
        found = parts.tail(parts.frozen(images))
        expected = network.forward_head(network.forward_features(images), pre_logits=True).relu()
    torch.testing.assert_close(found.embedding, expected, rtol=1e-5, atol=1e-5)
    assert (found.parts >= 0).all() and found.parts.shape[:2] == found.embedding.shape == (3, parts.dim)

    if EXPORTED_ELSEWHERE.fullmatch(name):
        return
    state = state_of(parts)
    step(state, size, 0)
    kept = {name: tensor.clone() for name, tensor in weights(state).items()}
    optimizer = deepcopy(state.optimizer.state_dict())
    resumed = state_of(cut(name)[0])
    resumed.model.load_state_dict({key: tensor for key, tensor in kept.items() if not key.startswith("method.")})
    resumed.method.load_state_dict({key[7:]: tensor for key, tensor in kept.items() if key.startswith("method.")})
    resumed.optimizer.load_state_dict(optimizer)
    for one in (state, resumed):
        step(one, size, 1)
    after = weights(resumed)
    assert all(torch.equal(tensor, after[key]) for key, tensor in weights(state).items())
    assert any(not torch.equal(tensor, after[key]) for key, tensor in kept.items() if "branches.0.tail" in key)

    model = state.model.eval()
    write_onnx(ExportGraph(model), tmp_path / "model.onnx", resolution=size, metadata={})
    batch = pictures(2, size)
    answer = open_session(tmp_path / "model.onnx").run(["embedding"], {"image": batch.permute(0, 2, 3, 1).numpy()})[0]
    with torch.no_grad():
        wanted = model(model.to_maps(batch))[0].embedding.numpy()
    np.testing.assert_allclose(answer, wanted, rtol=1e-4, atol=1e-4 * max(1.0, float(np.abs(wanted).max())))


def test_at_least_25_families_beside_the_tiny_networks() -> None:
    assert len(SMALL_FAMILIES) >= 25 and len(TINY) >= 15


@pytest.mark.parametrize("name", ["test_resnet", "test_vit"])
def test_any_network_can_be_frozen_whole(name: str) -> None:
    parts, size = cut(name, adapter=True)
    tokens = parts.frozen(torch.zeros(2, 3, size, size))
    assert tokens.shape == (2, 1 + 16, parts.dim)
    assert parts.tail(tokens).parts.shape == (2, parts.dim, 4, 4)
    assert parts.cut == "frozen whole, with a trained adapter"


def test_a_network_that_computes_more_than_its_units_is_not_cut_wrongly() -> None:
    """A unit that changes its result outside of the units' chain must end as an adapter, not as a wrong tail."""
    network = timm.create_model("test_resnet", num_classes=0)
    plain = type(network).forward_features

    class Twisted(type(network)):  # type: ignore[misc]
        def forward_features(self, images: Tensor) -> Tensor:
            features: Tensor = plain(self, images)
            return features * (1 + images.mean())

    network.__class__ = Twisted
    assert isinstance(cut_network(network, resolution=160).tail, AdapterTail)


def test_blocks_that_hardly_count_when_they_are_new_are_compared_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """DINOv3's blocks are scaled by 1e-5 at first: without its rotary embedding, the tail would seem to be right."""
    before = {key: tensor.clone() for key, tensor in cut("vit_small_patch16_dinov3")[0].network.state_dict().items()}
    monkeypatch.setattr(WithConstants, "forward", lambda self, features: self.module(features))
    parts, _ = cut("vit_small_patch16_dinov3")
    assert isinstance(parts.tail, AdapterTail)
    assert all(torch.equal(tensor, before[key]) for key, tensor in parts.network.state_dict().items())


def test_a_pooling_to_another_space_than_that_of_the_tokens_is_replaced_by_the_mean() -> None:
    network = timm.create_model("test_vit", num_classes=0)
    network.fc_norm = torch.nn.Linear(64, 16)
    parts = cut_network(network, resolution=160)
    assert isinstance(parts.tail, PooledTail) and isinstance(parts.tail.pool, MeanOf) and "mean" in parts.cut


def test_weights_of_a_file_reach_a_network_that_is_frozen_whole(tmp_path: Path) -> None:
    network = timm.create_model("test_vit")
    save_file(network.state_dict(), tmp_path / "file.safetensors")
    parts = build_trunk("test_vit", resolution=160, adapter=True)
    assert load_weights(parts, tmp_path / "file.safetensors").matched == len(parts.network.state_dict())
    images = torch.rand(2, 3, 160, 160)
    with torch.no_grad():
        expected = network.eval().forward_head(network.forward_features(images), pre_logits=True).relu()
        torch.testing.assert_close(parts.tail(parts.frozen(images)).embedding, expected)


@pytest.mark.parametrize(("room", "chosen"), [(10**9, (8, 160, "stage")), (2 * 10**6, (8, 160, "adapter"))])
def test_the_best_cache_that_fits_is_chosen(
    room: int, chosen: tuple[int, int, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(weights_room, "cache_room", lambda _folder: room)
    overrides = {"model.backbone": "test_vit", "model.weights": "none", "data.cache_views": "auto"}
    config = settle(resolve_config(overrides=overrides), images=100, progress=Progress(Console(soft_wrap=True)))
    assert (config.data.cache_views, config.data.resolution, config.model.tail) == chosen
    assert f"cache: {chosen[0]} views per image at 160 px" in capsys.readouterr().out
