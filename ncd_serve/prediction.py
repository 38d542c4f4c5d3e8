"""One row of an answer: an image and its cluster. The columns are the same everywhere."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ncd_serve.fit import Fit


class Candidate(NamedTuple):
    """One of the likeliest clusters of an image."""

    cluster_id: int
    cluster_name: str
    probability: float


@dataclass(frozen=True)
class Prediction:
    """Row of an image: its cluster, or the reason why there is none.

    An `unsure` row has the likeliest cluster too, but less confidence than was asked for.
    """

    path: str
    status: Literal["ok", "unsure", "error"]
    cluster_id: int | None = None
    cluster_name: str | None = None
    confidence: float | None = None
    margin: float | None = None
    fit: Fit | None = None  # similarity to the cluster's images; None if the model has no such output
    outside: float | None = None  # probability that the image is in none of the clusters; or None
    known: float | None = None  # probability that the image is of a known class; or None
    is_novel: bool | None = None  # False if the image shows a known class; None if the model does not tell
    top_k: list[Candidate] = field(default_factory=list)
    error: str | None = None

    @classmethod
    def failed(cls, path: str, error: str) -> Prediction:
        """Return the row of an image that could not be read."""
        return cls(path=path, status="error", error=error)

    @classmethod
    def from_probabilities(
        cls,
        path: str,
        probabilities: NDArray[np.float32],
        fit: Fit | None = None,
        outside: float | None = None,
        known: float | None = None,
        is_novel: bool | None = None,
        *,
        names: Sequence[str],
        top_k: int,
        min_confidence: float = 0.0,
    ) -> Prediction:
        """Return the row of an image with cluster probabilities [C]; `margin` is the lead over the second cluster."""
        order = np.argsort(-probabilities, kind="stable")
        ranked = [Candidate(int(i), names[i], float(probabilities[i])) for i in order[: max(top_k, 2)]]
        best = ranked[0]
        margin = best.probability - (ranked[1].probability if len(ranked) > 1 else 0.0)
        return cls(
            path,
            "ok" if best.probability >= min_confidence else "unsure",
            *best,
            margin,
            fit,
            outside,
            known,
            is_novel,
            # Clusters that were merged into others have no probability left.
            [candidate for candidate in ranked[:top_k] if candidate.probability > 0],
        )


COLUMNS = tuple(column.name for column in fields(Prediction))
