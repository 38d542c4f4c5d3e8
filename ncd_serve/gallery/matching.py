"""The best one-to-one match of clusters and true classes, and what it leaves confused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ncd_serve.gallery.collection import Ids


def best_match(gains: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Pairs (row, column) of a matrix [R, C], each row and column at most once, whose sum is as large as can be.

    Shortest augmenting paths with potentials: rows join one by one, and each pushes the others along the cheapest path.
    """
    if gains.shape[0] > gains.shape[1]:
        return sorted((row, column) for column, row in best_match(gains.T))
    costs = (gains.max(initial=0) - gains).astype(np.float64)
    rows, columns = costs.shape
    of_row, of_column = np.zeros(rows), np.zeros(columns)
    owner = np.full(columns, -1)
    for start in range(rows):
        row, paid, before = start, np.full(columns, np.inf), np.full(columns, -1)
        done, column = np.zeros(columns, bool), -1
        spent = 0.0
        while row >= 0:
            offers = spent + costs[row] - of_row[row] - of_column
            better = ~done & (offers < paid)
            paid[better], before[better] = offers[better], column
            column = int(np.where(done, np.inf, paid).argmin())
            spent, done[column], row = paid[column], True, owner[column]
        of_row[start] += spent
        inner = done & (paid < spent)
        of_row[owner[inner]] += spent - paid[inner]
        of_column[inner] -= spent - paid[inner]
        while column >= 0:
            previous = before[column]
            owner[column] = owner[previous] if previous >= 0 else start
            column = previous
    return sorted((int(row), column) for column, row in enumerate(owner) if row >= 0)


def contingency(cluster_ids: Ids, truth: list[str], *, clusters: int) -> tuple[list[str], Ids]:
    """The true classes by name, and how many images of each are in each cluster, [C, T]."""
    classes, class_ids = np.unique(np.array(truth), return_inverse=True)
    table = np.zeros((clusters, len(classes)), np.int64)
    np.add.at(table, (cluster_ids, class_ids), 1)
    return classes.tolist(), table
