"""Options that commands and Python functions share: type, help, and the setting that each one sets.

`ncd-serve train` and `ncd_training.discover` take the same ones; the key of a setting stands beside its option.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from enum import Enum
from inspect import get_annotations
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_args, get_type_hints

import typer

from ncd_serve.errors import UsageError

if TYPE_CHECKING:  # what Python may pass; the command line makes paths, and a number is a word there
    AnyPath = str | Path
    NumberOrAuto = int | str
else:
    AnyPath, NumberOrAuto = Path, str


_WORDS = ("auto", "none")  # instead of a path


class Sets(NamedTuple):
    """Key of the setting that an option sets."""

    key: str


class Estimator(str, Enum):
    """Estimator of the number of novel classes."""

    BALANCED = "balanced"
    DTC = "dtc"
    GCD = "gcd"


class PileKind(str, Enum):
    """Kind of unlabelled images."""

    AUTO = "auto"
    NOVEL = "novel"
    MIXED = "mixed"


def _images(*names: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="Images", **more)


def _network(*names: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="Network", **more)


def settings_option(*names: str, help: str, **more: Any) -> Any:
    """Return an option that help shows among the settings of training."""
    return typer.Option(*names, help=help, rich_help_panel="Settings", **more)


Dataset = Annotated[
    str | None,
    _images(metavar="NAME", help="A named dataset instead of your own images, e.g. glyphs or cub200."),
    Sets("data.dataset"),
]
DataRoot = Annotated[AnyPath | None, _images(help="Folder of the named dataset; default data."), Sets("data.root")]
Labelled = Annotated[
    AnyPath | None,
    _images(help="Your labelled images: one folder for each known class. Without any, give --novel-classes."),
    Sets("data.labelled"),
]
Unlabelled = Annotated[AnyPath | None, _images(help="Your unlabelled images, flat or nested."), Sets("data.unlabelled")]
ManifestFile = Annotated[
    AnyPath | None, _images(help="Your images in a CSV file: path,label,split."), Sets("data.manifest")
]
StrictData = Annotated[
    bool, _images("--strict-data", help="Stop at unusable images instead of skipping them."), Sets("data.strict")
]
NovelClasses = Annotated[
    NumberOrAuto | None,
    _images(
        metavar="N|auto",
        help="Number of clusters to find; auto estimates it first. Default: as in the named dataset; auto for your "
        "own images.",
    ),
    Sets("data.novel_classes"),
]
Pile = Annotated[
    PileKind | None,
    _images(
        help="What the unlabelled images show: novel classes only, known ones mixed in, or to be found out (auto, "
        "the default for your own images)."
    ),
    Sets("data.pile"),
]
Weights = Annotated[
    AnyPath | None,
    _network(
        metavar="auto|none|PATH",
        help="Initial weights. auto (the default): at hand, with the package, or on the hub. A file may be of MoCo v2, "
        "RotNet, torchvision, timm or DINO; a folder or a run too.",
    ),
    Sets("model.weights"),
]
CacheViews = Annotated[
    NumberOrAuto | None,
    _network(
        metavar="N|auto",
        help="Cache backbone features of N augmented views per image (faster on a CPU); auto: as many as fit; "
        "default: the recipe's.",
    ),
    Sets("data.cache_views"),
]
Epochs = Annotated[
    int | None,
    settings_option(min=0, help="Number of epochs of discovery; default: the recipe's."),
    Sets("optim.epochs"),
]
Seed = Annotated[int | None, settings_option(help="Seed of all random choices; default 0."), Sets("optim.seed")]
TensorBoard = Annotated[
    bool, typer.Option("--tensorboard", help="Write figures for TensorBoard too."), Sets("report.tensorboard")
]
Backbone = Annotated[
    str | None,
    _network(
        "--backbone",
        "--trunk",
        metavar="NAME",
        help="Network by its name in timm, hf-hub:OWNER/NAME, local-dir:PATH; default efficientnet_lite0 for your own "
        "images. `ncd-serve backbones` lists names.",
    ),
    Sets("model.backbone"),
]
Download = Annotated[
    bool, _network("--download", help="Fetch weights from the hub if none are at hand."), Sets("model.download")
]
PretrainImages = Annotated[
    AnyPath | None, _images("--images", "--unlabelled", help="Your images, flat or nested."), Sets("data.unlabelled")
]
PretrainLabelled = Annotated[
    AnyPath | None, _images(help="More of your images; their classes are not used."), Sets("data.labelled")
]
PretrainMethod = Annotated[
    str | None, settings_option(metavar="rotnet|moco", help="Method; default rotnet."), Sets("pretrain.method")
]
PretrainEpochs = Annotated[
    int | None, settings_option(min=1, help="Number of epochs; default 200."), Sets("pretrain.epochs")
]
EstimatorName = Annotated[
    Estimator | None,
    settings_option(help="balanced (the default), or as published: dtc, gcd."),
    Sets("estimate.estimator"),
]
MostClasses = Annotated[
    int | None,
    settings_option(min=2, help="dtc, gcd: largest number to try; default 100, or half the number of images."),
    Sets("estimate.most"),
]


def settings_of(function: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that the options of a call set, by `section.key`, without options that were not given."""
    parameters = {name: hint for name, hint in get_annotations(function).items() if name != "return"}
    owner, known = SimpleNamespace(__annotations__=parameters), vars(sys.modules[function.__module__])
    found = {}
    for name, hint in get_type_hints(owner, known, include_extras=True).items():
        for mark in getattr(hint, "__metadata__", ()):
            if isinstance(mark, Sets) and values[name] not in (None, False):
                found[mark.key] = _plain(values[name], is_path=Path in get_args(get_args(hint)[0]))
    return found


def _plain(value: Any, *, is_path: bool) -> Any:
    """Return an option as a setting: paths are absolute, numbers are numbers."""
    if is_path:
        return str(value) if str(value) in _WORDS else str(Path(value).absolute())
    if isinstance(value, Enum):
        return value.value
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def check_resume(options: Mapping[str, Any]) -> None:
    """Raise UsageError when other options are given with --resume, which would do nothing."""
    if any(value not in (None, [], False) for name, value in options.items() if name != "resume"):
        raise UsageError(
            "--resume continues with the run's own settings", hint="drop the other options, or start a new run"
        )
