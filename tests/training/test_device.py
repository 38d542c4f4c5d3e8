"""Training steps on a device that is not the CPU: torch's `meta` device computes shapes alone.

It raises where a tensor was left on the CPU, and where a number is read from the device. `OneDevice` forbids the rest:
indices on the CPU, and copies for which the device would be waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ncd_training.base.distributed import GlobalBatchNorm, Ranks
from ncd_training.base.precision import Precision
from ncd_training.config.resolve import method_recipes, resolve_config
from ncd_training.config.schema import TrainConfig
from ncd_training.data.views import BatchPlan, Views
from ncd_training.model.backbone import build_trunk
from ncd_training.model.branches import DualBranchModel
from ncd_training.model.predict import run_model
from ncd_training.objective.method import Material, build_method
from ncd_training.pretext import Stages
from ncd_training.run import pretrain
from ncd_training.run.step import TrainState, build_optimizer, build_state, train_epoch, train_step
from ncd_training.score.pair_quality import PairProbe, pair_quality
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ncd_serve import progress
from tests.runs import ready

META = torch.device("meta")
KNOWN, NOVEL, LABELLED, UNLABELLED = 5, 3, 6, 4
RESOLUTIONS = {"small_resnet": 32, "cifar_resnet18": 32, "resnet18": 64, "efficientnet_lite0": 64, "vit_small": 64}
METHODS: dict[str, dict[str, Any]] = {
    "dual": {},
    "rankstat": {},
    **{f"dtc {variant}": {"method.variant": variant} for variant in ("baseline", "pi", "te", "tep")},
    "kcl": {},
    "mcl": {},
    "orca": {},
}
MODELS: dict[str, dict[str, Any]] = {
    **{f"branches {kinds}": {"model.branches": kinds} for kinds in ("global", "local", "global+global", "local+local")},
    **{f"heads {heads}": {"model.heads": heads} for heads in ("separate", "joint", "open_world")},
    "cosine heads": {"model.head_form": "cosine"},
    **{f"sampling {name}": {"model.dictionary_sampling": name} for name in ("random", "all", "cam")},
    "inner parts": {"model.dictionary_border": False},
    "cosine scores": {"pseudo_labels.score": "cosine"},
    "hard scores": {"pseudo_labels.hard": True},
    "other sources": {"model.branches": "local", "pseudo_labels.positives": "global"},
    "all terms": {
        "loss.balance_weight": 1.0,
        "loss.divergence": "jensen_shannon",
        "loss.bank_positive": True,
        "loss.consistency_form": "paper",
    },
    "targets": {"self_labels.weight": 1.0},
    "released code": {
        "compat.local_head_input": "global",
        "compat.local_views": "one",
        "compat.trunk_batch_norm": "train",
    },
    "adam": {"optim.optimizer": "adam"},
}


class OneDevice(TorchDispatchMode):
    """Operations take tensors of one device. Copies to it are listed if the host waits for them."""

    def __init__(self) -> None:
        super().__init__()
        self.awaited: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        devices = {tensor.device.type for tensor in given if tensor.dim()}
        assert len(devices) < 2, f"{func}: {devices}"
        out = func(*args, **kwargs)
        copied = func is torch.ops.aten._to_copy.default and devices == {"cpu"} and out.device.type != "cpu"
        if copied and not kwargs.get("non_blocking"):
            self.awaited.append(tuple(out.shape))
        return out


def configured(method: str = "dual", **settings: Any) -> TrainConfig:
    small = {
        "data.novel_classes": NOVEL,
        "data.workers": 0,
        "data.cache_views": 0,
        "model.bank_size": 16,
        "model.dictionary_size": 32,
        "optim.epochs": 1,
        "optim.labelled_batch": LABELLED,
        "optim.unlabelled_batch": UNLABELLED,
        "optim.batch_by_size": False,
    }
    return resolve_config(recipes=["glyphs", *method_recipes(method)], overrides={**small, **settings})


def build(config: TrainConfig, trunk: str = "small_resnet", device: torch.device = META) -> TrainState:
    """As a run builds it, without images."""
    parts = build_trunk(trunk, resolution=RESOLUTIONS[trunk])
    settings = {"model": config.model, "labels": config.pseudo_labels, "compat": config.compat}
    model = DualBranchModel(parts, known=KNOWN, novel=NOVEL, **settings)
    clusters = KNOWN + NOVEL if config.model.heads == "open_world" else NOVEL
    objective = build_method(config, model, images=3 * UNLABELLED, clusters=clusters).to(device)
    model.to(memory_format=torch.channels_last)
    model.to(device)
    precision = Precision.on(device, mixed=config.optim.mixed_precision)
    return TrainState(model.train(), objective, build_optimizer(model, objective, config.optim), precision)


def pictures(trunk: str = "small_resnet", images: int = LABELLED + UNLABELLED) -> Tensor:
    return torch.zeros(images, 3, RESOLUTIONS[trunk], RESOLUTIONS[trunk], dtype=torch.uint8)


def take_steps(state: TrainState, trunk: str = "small_resnet", *, steps: int = 2) -> None:
    """From the second step on, banks and dictionaries are filled."""
    with OneDevice() as mode:
        for _ in range(steps):
            views, labels, rows = [pictures(trunk)] * 2, torch.arange(LABELLED) % KNOWN, torch.arange(UNLABELLED)
            terms = train_step(state, views, labels, rows=rows, ramp=0.5, generator=torch.Generator())
    assert mode.awaited == []
    assert terms and all(term.device == state.model.device and term.dtype == torch.float32 for term in terms.values())


@pytest.mark.parametrize("method", METHODS)
def test_every_method_takes_steps_on_another_device(method: str) -> None:
    take_steps(build(configured(method.split()[0], **METHODS[method])))


@pytest.mark.parametrize("model", MODELS)
def test_every_model_takes_steps_on_another_device(model: str) -> None:
    take_steps(build(configured(**MODELS[model])))


@pytest.mark.parametrize("trunk", RESOLUTIONS)
@pytest.mark.parametrize("method", ["dual", "dtc", "kcl", "orca"])
def test_every_trunk_takes_steps_on_another_device(method: str, trunk: str) -> None:
    take_steps(build(configured(method), trunk), trunk)


class Blank(Views):
    """Black images for whatever is asked."""

    whole_batches = True

    def __getitems__(self, requests: list[Any]) -> list[Tensor]:
        return [pictures(images=len(requests)) for _ in requests[0].seeds]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ways in which numbers were read from the device, which has none: random ones are answered."""
    ways: list[str] = []

    def answering(way: str, read: Any) -> Any:
        def answer(tensor: Tensor, *rest: Any) -> Any:
            ways.extend([way] * tensor.is_meta)
            return read(torch.rand(tensor.shape).to(tensor.dtype) if tensor.is_meta else tensor, *rest)

        return answer

    for way in ("tolist", "cpu", "__float__", "__bool__"):
        monkeypatch.setattr(Tensor, way, answering(way, getattr(Tensor, way)))
    return ways


def test_an_epoch_reads_the_figures_of_a_step_at_once(reads: list[str]) -> None:
    config = configured()
    plan = BatchPlan(3 * LABELLED, 3 * UNLABELLED, LABELLED, UNLABELLED, seed=0)
    state, loader = build(config), [[pictures(), pictures()] for _ in plan]
    with OneDevice() as mode:
        figures = train_epoch(state, loader, plan, torch.arange(3 * LABELLED) % KNOWN, config)
    assert mode.awaited == []
    assert reads == ["tolist"] * 3 and len(figures) == 5


def test_stages_read_one_figure_of_an_epoch(reads: list[str]) -> None:
    stage = {"epochs": 2, "batch": 4}
    config = configured(rotations=stage, from_labels=stage, supervised=stage)
    stages = Stages(build(config).model, config, progress.silent)
    labels = torch.arange(8) % KNOWN
    with OneDevice() as mode:
        stages.rotations(Blank(), 8)
        stages.from_labels(Blank(), labels)
        stages.supervised(Blank(), labels)
    assert reads == ["__float__"] * 6
    assert mode.awaited == [(4, 512), (4,), (KNOWN, 512), (KNOWN,), (8,), (8,)]  # new heads and labels, but no batch


@pytest.mark.parametrize("method", ["rotnet", "moco"])
def test_pretraining_reads_the_figures_of_a_step_at_once(
    method: str, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ncd_training.run.pretrain.compute_device", lambda: META)
    config = configured(**{"pretrain.method": method, "pretrain.queue": 6})
    state = pretrain.build_state(config, build_trunk("small_resnet", resolution=32))
    plan = BatchPlan(8, 1, 4, 0, seed=0, views=state.task.views)
    loader = [[pictures(images=4)] * state.task.views for _ in plan]
    with OneDevice() as mode:
        pretrain.train_epoch(state, loader, plan, config.pretrain)
    assert mode.awaited == []
    assert reads == ["cpu"] * 2


@pytest.mark.parametrize("heads", ["separate", "joint", "open_world"])
def test_images_are_read_from_the_device_in_the_end(heads: str, glyphs: Path, reads: list[str]) -> None:
    """Evaluation, with an eye on pairs: six columns of a batch are read, and scores of each branch."""
    config = configured(**{"model.heads": heads})
    state = build(config)
    take_steps(state, steps=1)
    reads.clear()
    paths = sorted(glyphs.rglob("*.png"))[:10]
    probe = PairProbe(state.method, np.arange(0, 10, 2))
    run = partial(run_model, state.model, paths, config.data.preprocess, workers=0, track=progress.silent, what="")
    with OneDevice() as mode:
        outputs = run(see=probe)
    assert mode.awaited == []
    assert reads == ["cpu"] * 6 and outputs.embedding.shape == (10, state.model.dim)
    pair_quality(probe.scores()["local"], np.arange(5) % 2)
    assert reads == ["cpu"] * 7


@pytest.mark.parametrize("method", [*METHODS, "kmeans", "own-images"])
def test_what_methods_do_around_steps_ends_on_the_device(method: str, glyphs: Path, reads: list[str]) -> None:
    settings = {"self_labels.weight": 1.0} if method == "own-images" else METHODS.get(method, {})
    if method in ("kcl", "mcl"):
        settings = {"similarity.epochs": 1, "similarity.batch": 4}
    if method == "kmeans":
        settings = {"optim.epochs": 0}
    config = configured("dual" if method == "own-images" else method.split()[0], **settings)
    paths, labels = sorted(glyphs.rglob("*.png"))[: 3 * UNLABELLED], torch.arange(3 * LABELLED) % KNOWN
    state, material = build(config), Material(Blank(), labels, paths, config, progress.silent)
    state.method.before_training(state.model, material)
    state.method.before_epoch(state.model, state.epoch, material)
    if method != "kmeans":
        take_steps(state)
    tensors = {**state.model.state_dict(), **state.method.state_dict()}
    assert {tensor.device for tensor in tensors.values()} == {META}


def test_a_run_s_state_is_built_on_the_device(glyphs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ncd_training.run.step.compute_device", lambda: META)
    setup = ready(configured(**{"data.root": str(glyphs)}))
    state = build_state(setup, build_trunk("small_resnet", resolution=32), Ranks(size=2))
    tensors = {**state.model.state_dict(), **state.method.state_dict()}
    assert {tensor.device for tensor in tensors.values()} == {META}
    convolutions = [tensor for tensor in tensors.values() if tensor.dim() == 4 and min(tensor.shape) > 1]
    assert convolutions and all(c.is_contiguous(memory_format=torch.channels_last) for c in convolutions)
    assert state.model.placed(pictures()).is_contiguous(memory_format=torch.channels_last)
    assert any(isinstance(module, GlobalBatchNorm) for module in state.model.branches.modules())


def test_mistakes_are_noticed() -> None:
    here, there = torch.arange(2), torch.zeros(2, 2, device=META)
    mistakes: list[Callable[[], object]] = [
        lambda: there[here],
        lambda: there + torch.zeros(2),
        lambda: there.sum().item(),
        lambda: bool(there.any()),
    ]
    for mistake in mistakes:
        with OneDevice(), pytest.raises((AssertionError, RuntimeError)):
            mistake()
    with OneDevice() as mode:
        assert there[here.to(META, non_blocking=True)].shape == there[here.to(META)].shape
    assert mode.awaited == [(2,)]


def fake_steps(trunk: str, device: torch.device, precision: Precision) -> None:
    """Steps on tensors without numbers, which know their dtypes and devices nonetheless."""
    config = configured()
    state = build(config, trunk, torch.device("cpu"))
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        with FakeTensorMode() as mode:
            for module in (state.model, state.method):
                module._apply(lambda tensor: mode.from_tensor(tensor).to(device))
            optimizer = build_optimizer(state.model, state.method, config.optim)
            take_steps(replace(state, optimizer=optimizer, precision=precision), trunk)
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("trunk", ["small_resnet", "vit_small"])
def test_terms_are_float32_in_mixed_precision(trunk: str, dtype: torch.dtype) -> None:
    fake_steps(trunk, torch.device("cpu"), Precision(dtype))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="fake CUDA tensors need torch with CUDA and a GPU")
@pytest.mark.parametrize("trunk", RESOLUTIONS)
def test_every_trunk_takes_steps_on_fake_cuda(trunk: str) -> None:
    for mixed in (False, True):
        fake_steps(trunk, torch.device("cuda"), Precision.on(torch.device("cuda"), mixed=mixed))
