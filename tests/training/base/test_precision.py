"""Mixed precision: questions about CUDA are answered by the tests, as no GPU is at hand."""

from __future__ import annotations

from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from ncd_training.base.precision import Precision, compute_device
from torch import nn

from ncd_serve.errors import UsageError

CUDA = torch.device("cuda")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Properties of a GPU that torch believes to be there; it computes in bfloat16 or emulates it."""
    properties = SimpleNamespace(major=8)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: properties)
    monkeypatch.setattr("torch.cuda._check_bf16_tensor_supported", lambda device: True)
    return properties


def test_a_gpu_since_ampere_takes_bfloat16(gpu: SimpleNamespace) -> None:
    assert compute_device() == CUDA
    precision = Precision.on(CUDA, mixed=True)
    assert precision.dtype == torch.bfloat16 and not precision.scaler.is_enabled()
    context = precision.autocast(CUDA)
    assert isinstance(context, torch.autocast) and context.device == "cuda" and context.fast_dtype == torch.bfloat16


def test_a_gpu_before_ampere_takes_float16_and_scales_gradients(gpu: SimpleNamespace) -> None:
    gpu.major = 7
    precision = Precision.on(CUDA, mixed=True)
    assert precision.dtype == torch.float16 and precision.scaler.is_enabled()
    context = precision.autocast(CUDA)
    assert isinstance(context, torch.autocast) and context.fast_dtype == torch.float16


def test_without_a_gpu_or_when_told_so_everything_is_float32(gpu: SimpleNamespace) -> None:
    for precision in (Precision.on(CUDA, mixed=False), Precision.on(torch.device("cpu"), mixed=True)):
        assert precision.dtype == torch.float32 and not precision.scaler.is_enabled()
        with precision.autocast(torch.device("cpu")):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_an_update_says_whether_it_was_skipped(optimizer: type[torch.optim.Optimizer]) -> None:
    weight = nn.Parameter(torch.ones(2))
    updates = optimizer([weight], lr=0.1)  # type: ignore[call-arg]
    for precision in (Precision(), Precision(torch.float16, torch.amp.GradScaler("cpu", init_scale=4.0))):
        before = weight.detach().clone()
        updates.zero_grad()
        assert precision.step(weight.sum(), updates, [])
        assert not torch.equal(before, weight)
    before = weight.detach().clone()
    updates.zero_grad()
    assert not precision.step((weight * torch.inf).sum(), updates, [])
    assert torch.equal(before, weight) and precision.scaler.get_scale() == 2.0
    updates.zero_grad()
    assert precision.step(weight.sum(), updates, [])


def test_a_skipped_update_leaves_the_statistics_of_batch_norm_as_they_were() -> None:
    network = nn.Sequential(nn.BatchNorm2d(2), nn.BatchNorm2d(2).eval())
    updates = torch.optim.SGD(network.parameters(), 0.1)
    precision = Precision(torch.float16, torch.amp.GradScaler("cpu"))
    for factor in (1.0, torch.inf):
        before, statistics = deepcopy(network.state_dict()), precision.statistics(network)
        assert precision.step(network(torch.rand(4, 2, 3, 3) * factor).sum(), updates, statistics) == (factor == 1.0)
        after = network.state_dict()
        same = [name for name in after if torch.equal(before[name], after[name])]
        assert ("0.running_mean" in same and "0.num_batches_tracked" in same) == (factor != 1.0)
    assert Precision().statistics(network) == []


def test_divergence_is_an_error_where_no_step_is_skipped() -> None:
    scaled = Precision(torch.float16, torch.amp.GradScaler("cpu"))
    scaled.check_finite({"loss": float("nan")}, epoch=2)
    with pytest.raises(UsageError, match="diverged in epoch 3: loss is nan"):
        Precision().check_finite({"loss": float("nan")}, epoch=2)
