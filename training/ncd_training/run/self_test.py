"""Training half of `ncd-serve doctor --self-test`: steps in every precision, compared with float32 on the CPU."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from rich.console import Console
from torch import Tensor
from torch.utils.data import default_collate

from ncd_serve.errors import MissingExtraError, NcdError
from ncd_serve.progress import Progress
from ncd_training.base.precision import Precision
from ncd_training.base.randomness import generator_for
from ncd_training.config.resolve import resolve_config
from ncd_training.data.datasets.glyphs import write_glyphs
from ncd_training.data.prepare import list_images
from ncd_training.data.views import BatchPlan, FileViews
from ncd_training.model.weights import initial_trunk
from ncd_training.run.step import TrainState, build_state, train_step
from ncd_training.run.train import set_up

if TYPE_CHECKING:
    from ncd_serve.doctor.installation import Step

_STEPS = 3  # the first one fills the memories that the terms of later ones read
_IMAGES_PER_LETTER = 4
_BATCH = 16  # labelled images, and as many unlabelled ones
# A small learning rate: otherwise rounding errors grow over the steps and hide real defects.
_SETTINGS = {"optim.learning_rate": 0.01, "optim.labelled_batch": _BATCH, "optim.unlabelled_batch": _BATCH}
_MIN_TERM = 0.01  # smaller loss terms are compared as if they had this value


class Limits(NamedTuple):
    """Largest accepted differences from float32 on the CPU, relative to it, and a remedy for larger ones."""

    terms: float
    updates: float
    fix: str


# On CPUs, other threads and kernels moved float32 by 7e-5 and 0.0014; autocast to float16, which has as many bits as
# TF32, gave 0.005 and 0.026, to bfloat16 0.018 and 0.063. A pairwise term without its gradient gives 0.017 and 0.05.
FLOAT32 = Limits(
    terms=1e-3, updates=0.02, fix="update the GPU's driver and torch; CUDA_VISIBLE_DEVICES= trains on the CPU"
)
TF32 = FLOAT32._replace(terms=0.02, updates=0.1)
MIXED = Limits(terms=0.06, updates=0.2, fix="train with --set optim.mixed_precision=false")
COMPILED = FLOAT32._replace(fix="train without optim.compile")


class Trained(NamedTuple):
    """Result of a few training steps."""

    terms: list[dict[str, float]]  # of each step
    updates: dict[str, Tensor]  # change of every weight of the branches, on the CPU


class SmallRun:
    """A few images of the embedded letters, the small model of the `glyphs` recipe, and its first batches."""

    def __init__(self, folder: Path) -> None:
        letters = write_glyphs(folder / "glyphs", train=_IMAGES_PER_LETTER, test=1)
        settings = {"data.root": str(letters), "data.workers": 0, **_SETTINGS}
        config, silent = resolve_config(recipes=["glyphs"], overrides=settings), Progress(Console(quiet=True))
        self.setup = set_up(list_images(config, track=silent.track), progress=silent)
        parts, _ = initial_trunk(self.setup.config, weights=None)
        self._state = build_state(self.setup, parts)
        self.device = self._state.model.device
        self._batches = list(self._read_batches())
        self._expected: Trained | None = None  # float32 on the CPU

    def steps(self) -> Iterator[Step]:
        """Yield the checks of training, one for each precision."""
        yield "float32", partial(self._compared, self.device, FLOAT32)
        if self.device.type == "cuda":
            yield "tf32", partial(self._compared, self.device, TF32, tf32=True)
        yield "mixed precision", self._mixed_precision
        yield "compiled", self._compiled

    def trained(self) -> TrainState:
        """Return the state after the steps, in float32 on the CPU."""
        state = self._copy(torch.device("cpu"))
        self._train(state)
        return state

    def train(self, device: torch.device, *, mixed: bool = False, compiled: bool = False) -> Trained:
        """Train a copy of the model on a device, and return loss terms and weight updates."""
        state = self._copy(device, mixed=mixed)
        if compiled:
            state.model.compile()
        before = {name: weight.detach().cpu().clone() for name, weight in state.model.branches.named_parameters()}
        terms = self._train(state)
        after = {name: weight.detach().cpu() for name, weight in state.model.branches.named_parameters()}
        return Trained(terms, {name: after[name] - before[name] for name in before})

    def _compared(
        self, device: torch.device, limits: Limits, *, mixed: bool = False, compiled: bool = False, tf32: bool = False
    ) -> str:
        if self._expected is None:
            self._expected = self.train(torch.device("cpu"))
        with _tf32(tf32):
            found = self.train(device, mixed=mixed, compiled=compiled)
        return f"{_name(device)}: {compare(found, self._expected, limits)}"

    def _mixed_precision(self) -> str:
        if self.device.type != "cuda":
            raise MissingExtraError("mixed precision needs an NVIDIA GPU", hint="none needed: a CPU trains in float32")
        dtype = Precision.on(self.device, mixed=True).dtype
        return f"{str(dtype).removeprefix('torch.')} on {self._compared(self.device, MIXED, mixed=True)}"

    def _compiled(self) -> str:
        try:
            return self._compared(self.device, COMPILED, compiled=True)
        except NcdError:
            raise
        except Exception as error:  # the same steps ran uncompiled, so the error comes from the compiler
            reason = str(error).strip().partition("\n")[0]
            raise MissingExtraError(
                f"torch.compile does not work here: {reason or type(error).__name__}",
                hint="none needed unless optim.compile is on; it needs a C++ compiler and, on a GPU, OpenAI's triton",
            ) from None

    def _copy(self, device: torch.device, *, mixed: bool = False) -> TrainState:
        """Copy the initial state, all in one call, so that the optimiser refers to the copied weights."""
        model, method, optimizer = deepcopy((self._state.model, self._state.method, self._state.optimizer))
        precision = Precision.on(device, mixed=mixed)
        return replace(
            self._state,
            model=model.to(device),
            method=method.to(device),
            optimizer=optimizer,
            precision=precision,
        )

    def _train(self, state: TrainState) -> list[dict[str, float]]:
        state.model.train()
        labels, terms = torch.from_numpy(self.setup.labels), []
        for step, (rows, views) in enumerate(self._batches):
            unlabelled = rows[_BATCH:] - len(labels)
            draws = generator_for(0, step)
            found = train_step(state, views, labels[rows[:_BATCH]], rows=unlabelled, ramp=1.0, generator=draws)
            terms.append({name: float(value) for name, value in found.items()})
        return terms

    def _read_batches(self) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """Yield rows and views of the first batches, which all precisions share."""
        manifest, data = self.setup.manifest, self.setup.config.data
        plan = BatchPlan(len(manifest.labelled), len(manifest.unlabelled), _BATCH, _BATCH, seed=0)
        views = FileViews(manifest.images, data)
        for requests in islice(plan, _STEPS):
            rows = torch.tensor([request.index for request in requests])
            yield rows, default_collate([views[request] for request in requests])


def compare(found: Trained, expected: Trained, limits: Limits) -> str:
    """Return both differences with their limits; raise NcdError if one is beyond its limit."""
    terms = max(
        _relative(abs(other[name] - one[name]), max(abs(one[name]), _MIN_TERM))
        for one, other in zip(expected.terms, found.terms, strict=True)
        for name in one
    )
    wanted = expected.updates
    updates = _relative(
        _length({name: found.updates[name] - update for name, update in wanted.items()}), _length(wanted)
    )
    text = (
        f"loss terms differ by {terms:.1e} (limit {limits.terms:g}), "
        f"weight updates by {updates:.1e} (limit {limits.updates:g})"
    )
    if terms > limits.terms or updates > limits.updates:
        raise NcdError(text, hint=limits.fix)
    return text


def _relative(difference: float, of: float) -> float:
    return difference / of if math.isfinite(difference) else math.inf  # NaN would pass every limit


def _length(tensors: dict[str, Tensor]) -> float:
    return float(torch.linalg.vector_norm(torch.cat([tensor.flatten() for tensor in tensors.values()])))


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


@contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    """Allow or forbid TF32 in the convolutions of a GPU; torch allows it by default."""
    before = torch.backends.cudnn.allow_tf32
    try:
        torch.backends.cudnn.allow_tf32 = allowed
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before
