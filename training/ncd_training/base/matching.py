"""One-to-one matching of two groupings of the same rows (Hungarian algorithm)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment


def matched_clusters(predicted: NDArray[np.int64], true: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the cluster of each class [classes] under the matching with the most rows in common."""
    size = int(max(predicted.max(), true.max())) + 1
    counts = np.zeros((size, size), np.int64)
    np.add.at(counts, (true, predicted), 1)
    _, clusters = linear_sum_assignment(counts, maximize=True)
    matched: NDArray[np.int64] = clusters
    return matched
