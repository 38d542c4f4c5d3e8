"""Scores of a run, as `summary.json` holds them."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


class ClassScore(_Record):
    """Accuracy on the images of one true class; `cluster` is the cluster that the class was matched with."""

    name: str = Field(alias="class")
    images: int
    cluster: int | None = None  # None: the head knows the class by name
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
    """Final scores of a run, each by the name of a baseline, a split or a branch."""

    weights: InitialWeights | None = None
    baselines: dict[str, Score] = {}
    method: str | None = None  # None: not evaluated yet
    scores: dict[str, Score] = {}
    pseudo_labels: dict[str, dict[str, float]] = {}

    def as_json(self) -> dict[str, Any]:
        """Return the content of summary.json: baselines and scores always, other fields only if set."""
        content = self.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)
        return {"baselines": {}, "scores": {}, **content}
