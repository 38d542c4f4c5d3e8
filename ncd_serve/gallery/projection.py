"""Places of images on the map: two dimensions in which near embeddings stay near."""

from __future__ import annotations

from enum import Enum
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np

from ncd_serve.errors import needs_extra
from ncd_serve.fit import directions

if TYPE_CHECKING:
    from ncd_serve.gallery.collection import Floats

MAX_TSNE_IMAGES = 5000  # a minute; the time grows faster than the images
_MIN_TSNE_IMAGES = 10
_ONE_PLACE = 1e-6  # of directions that are all the same: a collapsed model, or a damaged file
_PCA_DIM = 50  # t-SNE's authors reduce to this first: distances stay, noise and time shrink


class MapKind(str, Enum):
    """Method that draws the map."""

    PCA = "pca"
    TSNE = "tsne"
    NONE = "none"


def choose_kind(images: int) -> MapKind:
    """Return the kind of map: t-SNE if it is installed and fast enough, else PCA."""
    possible = _MIN_TSNE_IMAGES <= images <= MAX_TSNE_IMAGES and find_spec("sklearn") is not None
    return MapKind.TSNE if possible else MapKind.PCA


def places(embeddings: Floats, kind: MapKind) -> Floats:
    """Return places [N, 2] around the middle of a unit square; deterministic."""
    few = len(embeddings) < _MIN_TSNE_IMAGES
    found = tsne(embeddings) if kind is MapKind.TSNE and not few else principal(directions(embeddings), 2)
    middle, reach = (found.max(0) + found.min(0)) / 2, float(np.ptp(found, axis=0).max()) or 1.0
    return (0.5 + (found - middle) / reach).astype(np.float32)


def principal(vectors: Floats, count: int) -> Floats:
    """Project vectors [N, d] onto their first `count` principal directions, the largest entry of each positive."""
    centred = (vectors - vectors.mean(0)).astype(np.float64)
    _, axes = np.linalg.eigh(centred.T @ centred)
    axes = axes[:, ::-1][:, :count]
    axes *= np.sign(axes[np.abs(axes).argmax(0), np.arange(axes.shape[1])])
    found = centred @ axes
    return np.pad(found, ((0, 0), (0, count - found.shape[1]))).astype(np.float32)


def tsne(embeddings: Floats, *, seed: int = 0) -> Floats:
    """Return places [N, 2] by t-SNE of the embeddings' directions; they depend on the seed only. Needs scikit-learn."""
    with needs_extra("train"):
        from sklearn.manifold import TSNE

    units = directions(embeddings)
    reduced = principal(units, min(_PCA_DIM, *units.shape))
    if np.ptp(reduced) < _ONE_PLACE:  # it would divide by a spread of zero, and crash
        return reduced[:, :2] if reduced.shape[1] > 1 else np.zeros((len(reduced), 2), np.float32)
    perplexity = min(30.0, (len(reduced) - 1) / 3)
    found: Floats = TSNE(perplexity=perplexity, init="pca", random_state=seed).fit_transform(reduced)
    return found
