"""Candidates for new categories among the images that a page has asked about."""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ncd_serve.discovery.find import MIN_IMAGES, Batch, discover

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ncd_serve.bundle import Bundle
    from ncd_serve.runners import Answer, OnnxRunner

    Floats = NDArray[np.float32]

_MOST_IMAGES = 10_000  # some 20 MB


class NewImage(NamedTuple):
    """Image that a page shows: a word that only this page uses, and the image's number in it."""

    page: str
    number: int


class EmbeddingRunner:
    """Runner that keeps the embeddings of the images that it was asked about last."""

    def __init__(self, runner: OnnxRunner) -> None:
        self._runner = runner
        self.preprocess, self.cluster_names = runner.preprocess, runner.cluster_names
        self.max_batch, self.in_flight = runner.max_batch, runner.in_flight
        self.embeddings: Floats | None = None

    def answer(self, images: NDArray[np.uint8]) -> Answer:
        """Ask the model about images uint8 [N, H, W, 3]."""
        self.embeddings = self._runner.embed(images)
        return self._runner.answer(images)


class NewImages:
    """Embeddings of the images of one page, the newest that has asked."""

    def __init__(self) -> None:
        self._page, self._lock = "", Lock()
        self._embeddings: dict[int, Floats] = {}

    def keep(self, image: NewImage, embedding: Floats) -> None:
        """Keep an image; those of another page are forgotten."""
        with self._lock:
            if image.page != self._page:
                self._page, self._embeddings = image.page, {}
            if len(self._embeddings) < _MOST_IMAGES:
                self._embeddings[image.number] = embedding

    def candidates(self, page: str, bundle: Bundle) -> list[dict[str, Any]]:
        """Return groups of a page's images that are probably new categories, by their numbers; copies count once."""
        with self._lock:
            kept = dict(sorted(self._embeddings.items())) if page == self._page else {}
        if len(kept) < MIN_IMAGES:
            return []
        vectors, rows = np.unique(np.stack([*kept.values()]), axis=0, return_index=True)
        if len(vectors) < MIN_IMAGES:
            return []
        numbers = [*kept]
        batch = Batch([str(numbers[row]) for row in rows], vectors, [])
        return [
            {"images": [int(number) for number in found.images], "nearest": found.nearest, "strength": found.strength}
            for found in discover(batch, bundle).candidates.candidates
        ]
