"""Images that a model found its clusters in, with its answers: gallery, fit and drift compare with them."""

from __future__ import annotations

import os
import zipfile
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ncd_serve.errors import DataError
from ncd_serve.files import atomic_path
from ncd_serve.fit import FitLimits, calibrate
from ncd_serve.mixture import Mixture

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ids = NDArray[np.int64]
    Floats = NDArray[np.float32]

REFERENCE = "reference.npz"
MAX_IMAGES = 10_000  # embeddings of more would outweigh the model
_MAX_BYTES, _MAX_COUNT = 1 << 30, 1 << 53
# Kinds of numbers or text, and dimensions: images, clusters, known classes, features; of the mixture: space, classes.
_ARRAYS = {
    "checkpoint": ("U", ""),
    "root": ("U", ""),
    "paths": ("U", "N"),
    "cluster_ids": ("iu", "N"),
    "confidences": ("f", "N"),
    "embeddings": ("f", "Nd"),
    "known_ids": ("iu", "N"),
    "known_classes": ("U", "K"),
    "known_clusters": ("iu", ""),
    "counts": ("iu", "C"),
    "truth": ("U", "N"),
    "matched": ("U", "C"),
    "projection": ("f", "dm"),
    "offset": ("f", "m"),
    "means": ("f", "Tm"),
    "weights": ("f", "T"),
    "shape": ("f", "s"),
    "known_places": ("f", "Lm"),
    "known_place_ids": ("iu", "L"),
    "aside_paths": ("U", "A"),
    "aside_ids": ("iu", "A"),
    "aside_confidences": ("f", "A"),
    "aside_embeddings": ("f", "Ad"),
    "aside_known_ids": ("iu", "A"),
}
_MIXTURE = ("projection", "offset", "means", "weights", "shape")
# Numbers of the mixture; files of older versions have the first five.
_SHAPE = ("tail", "spread", "unseen_spread", "slope", "intercept", "known_slope", "known_intercept")
_ASIDE = ("aside_paths", "aside_ids", "aside_confidences", "aside_embeddings", "aside_known_ids")
_HALVES = ("embeddings", "known_places", "aside_embeddings")  # in half precision in the file
_MAY_BE_EMPTY = ("known_classes", "truth", "matched", *_MIXTURE, "known_places", "known_place_ids", *_ASIDE)


def _nothing() -> Floats:
    return np.zeros(0, np.float32)


def _no_ids() -> Ids:
    return np.zeros(0, np.int64)


@dataclass(frozen=True)
class Reference:
    """Unlabelled training images, all of them or an even sample."""

    checkpoint: str  # identifies the state of the model; names and bundles have it as well
    root: Path  # where the images were
    paths: list[str]  # below it
    cluster_ids: Ids  # [N]
    confidences: Floats  # [N]
    embeddings: Floats  # [N, d]
    known_ids: Ids  # [N], the known class that each resembles most
    known_classes: list[str]
    known_clusters: int  # how many of the first clusters are known classes: all or none
    counts: Ids  # [C] images of every cluster, sampled or not
    truth: list[str]  # names of true classes, only for reports; empty if they are not known
    # [C] the true class that each cluster is matched with, "" for none, by all images, sampled or not. For reports
    # alone; empty if true classes are not known, and in files of older versions.
    matched: list[str] = field(default_factory=list)
    # The mixture of all classes, known ones first. Empty in files of older versions.
    projection: Floats = field(default_factory=_nothing)  # [d, m]
    offset: Floats = field(default_factory=_nothing)  # [m]
    means: Floats = field(default_factory=_nothing)  # [T, m]
    weights: Floats = field(default_factory=_nothing)  # [T]
    shape: Floats = field(default_factory=_nothing)  # its other numbers, as `_SHAPE` names them
    known_places: Floats = field(
        default_factory=_nothing
    )  # [L, m] labelled images, all or an even sample, in its space
    known_place_ids: Ids = field(default_factory=_no_ids)  # [L] their known classes
    # Images that a person took out of all clusters. They count for none, and come back if that is taken back.
    aside_paths: list[str] = field(default_factory=list)
    aside_ids: Ids = field(default_factory=_no_ids)  # [A] the clusters that they were in
    aside_confidences: Floats = field(default_factory=_nothing)  # [A]
    aside_embeddings: Floats = field(default_factory=_nothing)  # [A, d]
    aside_known_ids: Ids = field(default_factory=_no_ids)  # [A]

    @property
    def clusters(self) -> int:
        """Number of clusters."""
        return len(self.counts)

    def limits(self) -> FitLimits:
        """Return the limits of fit, calibrated on these images."""
        return calibrate(self.embeddings, self.cluster_ids, self.confidences, clusters=self.clusters)

    @property
    def first_cluster(self) -> int:
        """Number of the class in the mixture that is cluster 0."""
        return len(self.known_classes) - self.known_clusters

    def mixture(self) -> Mixture | None:
        """Return the mixture of all classes; None for a file of an older version."""
        if not len(self.shape):
            return None
        arrays = (getattr(self, name).astype(np.float64) for name in _MIXTURE[:-1])
        shape = dict(zip(_SHAPE, self.shape.tolist(), strict=False))
        return Mixture(
            **dict(zip(_MIXTURE[:-1], arrays, strict=True)),
            known_classes=len(self.known_classes),
            first_cluster=self.first_cluster,
            **shape,
        )

    def places(self) -> tuple[Floats, Ids]:
        """Return all images, labelled ones first, in the space of the mixture, and their classes in it."""
        mixture = self.mixture()
        assert mixture is not None
        places = np.concatenate([self.known_places, mixture.project(self.embeddings)])
        return places, np.concatenate([self.known_place_ids, self.first_cluster + self.cluster_ids])

    def with_mixture(self, mixture: Mixture) -> Reference:
        """Return the reference with another mixture."""
        arrays = {name: getattr(mixture, name).astype(np.float32) for name in _MIXTURE[:-1]}
        return replace(self, **arrays, shape=np.array([getattr(mixture, name) for name in _SHAPE]))

    def files(self, root: Path | None = None) -> list[Path]:
        """Return the image files, below their original folder or another one."""
        return [(root or self.root) / path for path in self.paths]

    def aside_files(self) -> list[Path]:
        """Return the files of the images that are set aside."""
        return [self.root / path for path in self.aside_paths]

    def every_file(self) -> list[Path]:
        """Return the absolute files of all images, those that are set aside last."""
        return [Path(os.path.normpath(file.absolute())) for file in (*self.files(), *self.aside_files())]

    def every_embedding(self) -> Floats:
        """Return the embeddings of the same images."""
        return np.concatenate([self.embeddings, self.aside_embeddings.reshape(-1, self.embeddings.shape[1])])

    def sampled(self) -> Reference:
        """Return a reference with at most `MAX_IMAGES` images, evenly spread."""
        rows = np.arange(0, len(self.paths), -(-len(self.paths) // MAX_IMAGES))
        if len(rows) == len(self.paths):
            return self
        return replace(
            self,
            paths=[self.paths[row] for row in rows],
            truth=[self.truth[row] for row in rows] if self.truth else [],
            **{name: getattr(self, name)[rows] for name in ("cluster_ids", "confidences", "embeddings", "known_ids")},
        )

    def write(self, path: Path) -> None:
        """Write the file; embeddings in half precision, which is plenty for pictures and distances."""
        content = {entry.name: np.array(getattr(self, entry.name)) for entry in fields(self) if entry.name != "root"}
        content |= {name: content[name].astype(np.float16) for name in _HALVES}
        content["root"] = np.array(str(self.root))
        with atomic_path(path) as temporary, temporary.open("wb") as stream:
            np.savez_compressed(stream, **content)

    @classmethod
    def read(cls, path: Path) -> Reference:
        """Open the file of a run or a bundle; DataError when it is missing or damaged."""
        if not path.is_file():
            raise DataError(
                f"{path.parent} has no {path.name}: it was made by an older version, or training has not ended",
                hint="ncd-serve evaluate RUN writes a run's, ncd-serve export RUN a bundle's",
            )
        try:
            content = _unpacked(path)
            _check_arrays(content)
        except Exception as error:  # a damaged archive makes its readers raise anything
            raise DataError(f"{path} is damaged: {error}", hint="write it again: ncd-serve evaluate RUN") from None
        plain = ("checkpoint", "paths", "known_classes", "known_clusters", "truth", "matched", "aside_paths")
        values: dict[str, Any] = {name: content[name].tolist() for name in plain if name in content}
        halves: dict[str, Any] = {name: content[name].astype(np.float32) for name in _HALVES if name in content}
        return cls(**{**content, **values, **halves, "root": Path(str(content["root"]))})


def _unpacked(path: Path) -> dict[str, NDArray[Any]]:
    """Return the arrays of a file, which may be at most `_MAX_BYTES` long together."""
    with zipfile.ZipFile(path) as archive:
        size = sum(entry.file_size for entry in archive.infolist())
    if size > _MAX_BYTES:
        raise ValueError(f"it unpacks to {size:,} bytes")
    with path.open("rb") as stream, np.load(stream) as stored:
        wanted = [entry.name for entry in fields(Reference) if entry.name in stored or _is_required(entry)]
        return {name: stored[name] for name in wanted}


def _check_arrays(content: dict[str, NDArray[Any]]) -> None:
    """Raise ValueError unless types, shapes and values of all arrays fit together."""
    sizes = {"N": len(content["paths"]), "C": len(content["counts"]), "K": len(content["known_classes"])}
    sizes["d"] = content["embeddings"].shape[-1]
    sizes |= {"m": content["offset"].size, "s": len(_SHAPE)} if "offset" in content else {}
    sizes |= {"L": len(content.get("known_place_ids", ())), "A": len(content.get("aside_paths", ()))}
    sizes["T"] = sizes["C"] + sizes["K"] - int(content["known_clusters"])
    if not sizes["N"] or not sizes["C"]:
        raise ValueError("it has no images or no clusters")
    for name, array in content.items():
        kinds, letters = _ARRAYS[name]
        if array.shape == (0,) and name in _MAY_BE_EMPTY:
            continue
        if array.dtype.kind not in kinds or array.shape != tuple(sizes[letter] for letter in letters):
            raise ValueError(f"{name} is {array.dtype} {list(array.shape)}")
    mixture = [name for name in (*_MIXTURE, "known_places") if name in content]
    if len({content[name].size > 0 for name in mixture[: len(_MIXTURE)]}) > 1 or 0 < len(mixture) < len(_MIXTURE):
        raise ValueError("its mixture of classes is incomplete")
    if len({len(content[name]) for name in _ASIDE if name in content}) > 1:
        raise ValueError("its images of no cluster are incomplete")
    numbers = ("confidences", "embeddings", "aside_confidences", "aside_embeddings")
    if not all(np.isfinite(content[name]).all() for name in (*numbers, *mixture) if name in content):
        raise ValueError("it has values that are not finite")
    if mixture and min(content["weights"].min(initial=1), content["shape"][:3].min(initial=1)) <= 0:
        raise ValueError("a weight, tail or spread of its mixture is not positive")
    known = max(sizes["K"], 1)
    limits = {"cluster_ids": sizes["C"], "known_ids": known, "known_place_ids": known, "counts": _MAX_COUNT}
    limits |= {"aside_ids": sizes["C"], "aside_known_ids": known}
    for name, limit in limits.items():
        if name in content and content[name].size and not 0 <= content[name].min() <= content[name].max() < limit:
            raise ValueError(f"{name} is outside of 0 to {limit - 1}")
    if content["known_clusters"] not in (0, sizes["K"]):
        raise ValueError(f"{content['known_clusters']} clusters are known classes, of {sizes['K']}")


def _is_required(entry: Field[Any]) -> bool:
    return entry.default is MISSING and entry.default_factory is MISSING
