"""Scores of a run, as `summary.json` holds them."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


class ClassScore(_Record):
    """Share of a true class's images that are right; `cluster` is the one that it was matched with."""

    name: str = Field(alias="class")
    images: int
    cluster: int | None = None  # None: a head that has the class by name
    share: float


class Score(_Record):
    """Scores of one split."""

    images: int
    acc: float
    nmi: float | None = None  # None: not a clustering
    ari: float | None = None
    classes: list[ClassScore] = []


class InitialWeights(_Record):
    """File of weights that trunk and tail started from."""

    file: str
    format: str
    sha256: str


class Summary(_Record):
    """Final figures of a run; each mapping is by the name of a baseline, a split or a branch."""

    weights: InitialWeights | None = None
    baselines: dict[str, Score] = {}
    method: str | None = None  # None: not evaluated yet
    scores: dict[str, Score] = {}
    pseudo_labels: dict[str, dict[str, float]] = {}

    def as_json(self) -> dict[str, Any]:
        """Return the content of summary.json: scores and baselines always, others where there are any."""
        content = self.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)
        return {"baselines": {}, "scores": {}, **content}
