"""Verdict on a clustering of images whose true classes nobody knows: what was measured, in words first."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

SUMMARY = "summary.json"  # in a run
_LIKE = 0.7  # in 22 of 23 runs of benchmarks/verdict.py, the estimate is 0.8 to 1.2 times the true number of classes
_MAX_NAMED = 3  # pairs of clusters that a sentence names; the others are counted


class Verdict(BaseModel):
    """Measures of a clustering that need no true labels, and the ACC that they let expect."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    images: int = Field(ge=1)
    clusters: int = Field(ge=1)  # that have images
    classes: int | None = Field(None, ge=1)  # that the images show, an estimate; None: not known
    expected: float = Field(ge=0, le=1)  # ACC
    # Share of the images that are nearer to their own cluster than to any other, by features that no training on
    # clusters has changed; None in runs of older versions.
    settled: float | None = None
    silhouette: float  # mean over the images, in the geometry of the known classes
    known_score: float | None = None  # ACC on held-back known classes; None: too few
    agreement: float  # mean ACC of k-means and Ward's linkage against these clusters
    tight: list[int] = []  # clusters that stand apart from the others
    alike: list[tuple[int, int]] = []  # pairs of clusters whose images are often nearer to the other one
    empty: list[int] = []  # novel clusters without an image
    nowhere: int = 0  # images far from the centre of their cluster

    @property
    def likeness(self) -> float:
        """The smaller of both numbers, of clusters and of classes, divided by the larger one."""
        return likeness(self.clusters, self.classes)

    def sentences(self, name: Callable[[int], str] = "cluster {}".format) -> list[str]:
        """Return the verdict in words, the most important first; `name` gives the name of a cluster by its id."""
        tenths = round(10 * self.expected)
        found = [
            f"expect about {tenths} of 10 images in the right cluster",
            f"{len(self.tight)} of {self.clusters} clusters {'is' if len(self.tight) == 1 else 'are'} tight",
        ]
        if self.likeness < _LIKE:
            found.insert(1, f"the images look like about {self.classes} classes, not {self.clusters}")
        pairs = [f"{name(one)} and {name(other)}" for one, other in self.alike]
        if pairs:
            others = len(pairs) - _MAX_NAMED
            more = f" and {others} more pair{'s' * (others > 1)}" if others > 0 else ""
            found.append(f"{'; '.join(pairs[:_MAX_NAMED])}{more} look like one" + ("" if len(pairs) == 1 else " each"))
        if self.empty:
            found.append(f"{len(self.empty)} {'cluster has' if len(self.empty) == 1 else 'clusters have'} no images")
        if self.nowhere:
            found.append(f"{self.nowhere:,} {'image fits' if self.nowhere == 1 else 'images fit'} nowhere")
        return found


def likeness(clusters: int, classes: int | None) -> float:
    """Return the smaller number divided by the larger one; 1 where the number of classes is not known."""
    return 1.0 if classes is None else min(clusters, classes) / max(clusters, classes)


def read_verdict(run: Path) -> Verdict | None:
    """Return the verdict on a run; None if it has none, as runs of older versions and unfinished ones."""
    try:
        content = json.loads((run / SUMMARY).read_bytes())
        return Verdict.model_validate(content["verdict"])
    except (OSError, ValueError, KeyError, TypeError, ValidationError):
        return None
