"""Images that a person should look at first: those between two clusters, where one answer decides about the most."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ncd_serve.fit import directions

if TYPE_CHECKING:
    from ncd_serve.gallery.collection import Collection

_DOUBTFUL_SHARE = 10  # one in ten images is doubtful enough to be asked about
_MOST_QUESTIONS = 12


def find_questions(shown: Collection, order: list[int]) -> list[dict[str, Any]]:
    """Return one image for each pair of clusters that doubtful images lie between, the most frequent pair first.

    The margin of an image is its cosine with the centre of its own cluster less that with the nearest other one. The
    tenth of the images with the smallest margins is doubtful. An image stands for its pair if it is nearest to their
    mean direction; `like` are the others of the pair, about which its answer says most.
    """
    if shown.embeddings is None or shown.kind == "rows":
        return []
    units, ids = directions(shown.embeddings), shown.cluster_ids
    present = np.unique(ids)
    if len(present) < 2:
        return []
    centres = directions(np.stack([units[ids == number].sum(0) for number in present]))
    cosines = units @ centres.T
    own = np.searchsorted(present, ids)
    rows = np.arange(len(ids))
    own_cosines = cosines[rows, own]
    cosines[rows, own] = -np.inf
    rivals = cosines.argmax(1)
    margins = own_cosines - cosines[rows, rivals]
    doubtful = np.argsort(margins, kind="stable")[: max(1, len(ids) // _DOUBTFUL_SHARE)]
    pairs: dict[tuple[int, int], list[int]] = {}
    for row in doubtful.tolist():
        pairs.setdefault((int(present[own[row]]), int(present[rivals[row]])), []).append(row)
    number_of = {row: number for number, row in enumerate(order)}
    largest = sorted(pairs.items(), key=lambda pair: (-len(pair[1]), pair[0]))[:_MOST_QUESTIONS]
    return [
        {"image": number_of[first], "other": other, "like": [number_of[row] for row in like if row != first]}
        for (_, other), like in largest
        for first in [like[int((units[like] @ units[like].sum(0)).argmax())]]
    ]
