"""Base class of discovery methods, and the inputs of a method."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from ncd_serve.errors import UsageError, did_you_mean
from ncd_training import objective as room
from ncd_training.base.randomness import Purpose, seed_for
from ncd_training.config.resolve import explained
from ncd_training.config.schema import Section
from ncd_training.data.views import ViewRequest, Views, batches
from ncd_training.model.branches import Modules

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray
    from typing_extensions import Self

    from ncd_serve.progress import Track
    from ncd_training.config.schema import BranchKind, TrainConfig
    from ncd_training.data.carried import Carried
    from ncd_training.model.branches import Branch, BranchOutput, DualBranchModel
    from ncd_training.objective.pseudo_labels import PseudoLabels


_BATCH_IMAGES = 256


@dataclass(frozen=True)
class Material:
    """Inputs of a method beside the batches; true classes of unlabelled images are not among them."""

    views: Views  # of the labelled images, then of the unlabelled images
    labels: Tensor
    unlabelled: Sequence[Path]
    config: TrainConfig
    track: Track
    stages: Path | None = None  # folder of checkpoints of stages before discovery
    carried: Carried | None = None  # clusters and labels of the generation before

    @property
    def unlabelled_rows(self) -> range:
        """Row numbers of the unlabelled images among all images."""
        return range(len(self.labels), len(self.labels) + len(self.unlabelled))


class Lesson(NamedTuple):
    """Images of the supervised stage, as row numbers among all images, and their classes; clusters follow the known."""

    rows: NDArray[np.int64]
    classes: Tensor


class Batch(NamedTuple):
    """Outputs of every branch for two views of some images, labelled images first."""

    first: list[BranchOutput]
    second: list[BranchOutput]
    labels: Tensor  # [N], of the first N images
    rows: Tensor  # [M], row numbers of the unlabelled images, which follow
    ramp: float  # grows from 0 to 1 as the run warms up (Eq. 10)


class Method(nn.Module):
    """Base class of discovery methods. Data, trunk, loop, checkpoints, evaluation and export are common to all.

    A method computes the loss terms of a batch. State that must survive a resume is registered as buffers. Its own
    parameters are trained with the branches, and never served.
    To add a method, write a module in this folder with a subclass that has a name, and a recipe of that name.
    """

    name: ClassVar[str] = ""  # as in `--method`
    title: ClassVar[str] = ""  # for reports and model cards
    needs: ClassVar[Mapping[str, str]] = {}  # settings of the section `model` that the method requires
    teaches_known: ClassVar[bool] = False  # discovery trains a head on the known classes
    has_epochs: ClassVar[bool] = True  # False: heads are set before the first epoch, and there is none
    takes_self_labels: ClassVar[bool] = False  # the method supports the section `self_labels`
    Settings: ClassVar[type[Section]] = Section  # the method's own settings: the section `method` without `name`

    def __init__(self, kinds: Sequence[BranchKind] = ("global",)) -> None:
        super().__init__()
        self.kinds = list(kinds)
        # One for each branch; reports show the quality of these pseudo labels.
        self.pseudo_labels: Modules[PseudoLabels] = Modules()

    @classmethod
    def build(cls, config: TrainConfig, model: DualBranchModel, *, images: int, clusters: int) -> Self:
        """Create the method for these numbers of unlabelled images and clusters."""
        raise NotImplementedError

    @classmethod
    def check(cls, config: TrainConfig) -> None:
        """Raise UsageError for settings that the method cannot work with."""
        if not cls.needs.items() <= config.model.model_dump().items():
            needed = " and ".join(f"model.{key}={value}" for key, value in cls.needs.items())
            raise _unfit(f"the method {cls.name} needs {needed}: give --method {cls.name}, whose recipe sets this")
        if config.model.head_form == "centres" and cls.needs.get("head_form") != "centres":
            raise _unfit("only the method dtc supports model.head_form=centres")
        if config.self_labels.weight and not cls.takes_self_labels:
            raise _unfit(f"the method {cls.name} does not support self_labels.weight: do not use the recipe own-images")
        if config.optim.epochs and not cls.has_epochs:
            hint = f"set optim.epochs=0, as in the recipe {cls.name}"
            raise UsageError(f"the method {cls.name} has no training", hint=hint)
        if not config.optim.labelled_batch and cls.teaches_known_in(config):
            raise _unfit("optim.labelled_batch must be at least 1: known classes are learned from labelled images")

    @classmethod
    def teaches_known_in(cls, config: TrainConfig) -> bool:
        """Return True if discovery with these settings trains a head on the known classes."""
        return cls.teaches_known

    def before_stages(self, model: DualBranchModel, material: Material) -> Lesson:
        """Prepare once, and return what the supervised stage learns. What is kept need not survive a resume."""
        return Lesson(np.arange(len(material.labels)), material.labels)

    def before_training(self, model: DualBranchModel, material: Material) -> None:
        """Prepare once, before the first epoch. The changes are in the initial checkpoint."""

    def before_epoch(self, model: DualBranchModel, epoch: int, material: Material) -> None:
        """Prepare an epoch, e.g. refresh targets. The result must be the same on every rank and after a resume."""

    def after_epoch(self, model: DualBranchModel, epoch: int, material: Material) -> None:
        """Finish an epoch, now the number of finished ones: set the heads that are evaluated and served."""

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Return the loss terms by name; their sum is minimised."""
        raise NotImplementedError

    def remember(self, batch: Batch, *, branches: Modules[Branch], generator: torch.Generator) -> None:
        """Store features or predictions of this step for later steps."""

    def branch_name(self, number: int) -> str:
        """Return `global`, `local`, or `global2` for the second branch of a kind."""
        earlier = self.kinds[:number].count(self.kinds[number])
        return f"{self.kinds[number]}{earlier + 1 if earlier else ''}"


@torch.no_grad()
def mean_over_views(
    model: DualBranchModel,
    material: Material,
    rows: Sequence[int],
    see: Callable[[Tensor], list[Tensor]],
    *,
    views: int,
    epoch: int = 0,
) -> list[Tensor]:
    """Apply `see` to trunk maps of some images and average each result over views of an image: [rows, ...] each."""
    config = material.config
    requests = [
        ViewRequest(
            row,
            tuple(seed_for(config.optim.seed, Purpose.SELF_LABELS, epoch, row, view) for view in range(views)),
        )
        for row in rows
    ]
    chunks = [requests[start : start + _BATCH_IMAGES] for start in range(0, len(requests), _BATCH_IMAGES)]
    model.eval()
    found = []
    for stacked in batches(material.views, chunks, workers=config.data.workers, device=model.device):
        sights = [see(model.to_maps(model.placed(view))) for view in stacked]
        found.append([torch.stack(same).mean(dim=0).float().cpu() for same in zip(*sights, strict=True)])
    return [torch.cat(column) for column in zip(*found, strict=True)]


def _unfit(text: str) -> UsageError:
    return UsageError(text, hint="`ncd-serve config show` lists all settings and their origins")


def method_named(name: str) -> type[Method]:
    """Return the class of a method."""
    if name not in _methods():
        raise UsageError(f"unknown method '{name}'", hint=did_you_mean(name, _methods()))
    return _methods()[name]


def checked(config: TrainConfig) -> TrainConfig:
    """Return the configuration with its method's own settings complete; UsageError if they do not fit the method."""
    kind = method_named(config.method.name)
    try:
        settings = kind.Settings.model_validate(config.method.own)
    except ValidationError as error:
        raise explained(error, kind.Settings, "method") from None
    method = config.method.model_copy(update=settings.model_dump())
    config = config.model_copy(update={"method": method})
    kind.check(config)
    return config


def build_method(config: TrainConfig, model: DualBranchModel, *, images: int, clusters: int) -> Method:
    """Create the configured method for these numbers of unlabelled images and clusters."""
    return method_named(config.method.name).build(config, model, images=images, clusters=clusters)


@cache
def _methods() -> dict[str, type[Method]]:
    """Return every method class with a name, from the modules of this folder."""
    for module in pkgutil.iter_modules(room.__path__):
        import_module(f"{room.__name__}.{module.name}")
    return {kind.name: kind for kind in _below(Method) if kind.name}


def _below(kind: type[Method]) -> Iterator[type[Method]]:
    for child in kind.__subclasses__():
        yield child
        yield from _below(child)
