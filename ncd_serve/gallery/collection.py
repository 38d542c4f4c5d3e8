"""Images with their clusters, as a gallery shows them, read from a run, a bundle or rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ncd_serve.naming import WRONG, Correction

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]
Kind = Literal["run", "bundle", "rows"]


@dataclass(frozen=True)
class GivenNames:
    """Names, merges and junk marks that people have given so far."""

    defaults: list[str]  # what every cluster is called while it has no name, by id
    names: dict[int, str] = field(default_factory=dict)
    merged: dict[int, int] = field(default_factory=dict)
    junk: list[int] = field(default_factory=list)
    images: dict[str, Correction] = field(default_factory=dict)  # single images given to another cluster, by path
    new_names: dict[int, str] = field(default_factory=dict)  # clusters that exist by such images alone
    checkpoint: str | None = None  # the state of the model whose clusters these are
    bundle: Path | None = None  # where the names are kept
    fixed: int = 0  # the first clusters, which are known classes and keep their names

    @property
    def labels(self) -> list[str]:
        """Name of every cluster, given or default, by id."""
        return [self.names.get(number, default) for number, default in enumerate(self.defaults)]


@dataclass(frozen=True)
class Collection:
    """Images in clusters. N images are shown, `counts` has all of them."""

    kind: Kind
    source: Path
    naming: GivenNames
    root: Path  # of the paths
    paths: list[str]
    files: list[Path]  # where the images are now
    cluster_ids: Ids  # [N]
    confidences: Floats  # [N]
    counts: Ids  # [C]
    fits: Ids | None = None  # [N] numbers into `fit.FITS`
    embeddings: Floats | None = None  # [N, d]
    centres: Floats | None = None  # [C, d] mean directions of the clusters in training; None: those of these images
    background: Floats | None = None  # [B, d] embeddings of training images, that new ones are seen among
    rivals: Ids | None = None  # [N] the second likeliest clusters, -1 where there is none
    known_ids: dict[int, Ids] = field(default_factory=dict)  # by cluster: the known classes that its images resemble
    known_classes: list[str] = field(default_factory=list)
    truth: list[str] = field(default_factory=list)  # true classes, only for reports; empty if not known
    matched: list[str] = field(default_factory=list)  # [C] the true class of each cluster, "" for none; or empty
    failures: list[tuple[str, str]] = field(default_factory=list)  # images without a cluster, and why
    verdict: list[str] = field(default_factory=list)  # in words, the most important first; empty if there is none
    tight: list[int] | None = None  # clusters that stand apart; None where there is no verdict
    alike: list[tuple[int, int]] = field(default_factory=list)  # pairs of clusters that may be one

    @property
    def left_out(self) -> list[str]:
        """Paths of images that a person put into no cluster, and that this generation was made without."""
        if self.kind == "rows":
            return []
        shown = set(self.paths)
        return [path for path, to in self.naming.images.items() if to == WRONG and path not in shown]

    @property
    def pictures(self) -> list[Path]:
        """Files that have a thumbnail: those of the images, then those of images that were left out."""
        return [*self.files, *(self.root / path for path in self.left_out)]

    @property
    def total(self) -> int:
        """Images in clusters, shown or not."""
        return int(self.counts.sum())
