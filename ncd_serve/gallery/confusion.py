"""Clusters against true classes: images that each pair shares, in the order of the matching that training stored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ncd_serve.gallery.collection import Collection, Ids


def confusion_data(shown: Collection, numbers: Sequence[int]) -> dict[str, Any] | None:
    """Return the table for the page's script, None without true classes; `numbers` are the clusters, the largest first.

    Matched clusters and classes come first, on the diagonal. Where no matching is stored, clusters stay in their order,
    each class is at its largest cluster, and there is no accuracy.
    """
    if not shown.truth:
        return None
    classes, table = contingency(shown.cluster_ids, shown.truth, clusters=len(shown.counts))
    counts = table[list(numbers)]
    pairs = _stored_pairs(shown.matched, numbers, classes)
    rows = _first([row for row, _ in pairs], list(range(len(numbers))))
    columns = _first([column for _, column in pairs], np.argsort(counts.argmax(0), kind="stable").tolist())
    ordered = counts[rows][:, columns]
    right = sum(int(counts[pair]) for pair in pairs)
    return {
        "clusters": [numbers[row] for row in rows],
        "classes": [classes[column] for column in columns],
        "matched": len(pairs),
        "accuracy": round(right / len(shown.truth), 4) if shown.matched else None,
        "cells": [[int(row), int(column), int(ordered[row, column])] for row, column in np.argwhere(ordered)],
    }


def contingency(cluster_ids: Ids, truth: list[str], *, clusters: int) -> tuple[list[str], Ids]:
    """Return the names of the true classes, and the number of images of each cluster and class [C, T]."""
    classes, class_ids = np.unique(np.array(truth), return_inverse=True)
    table = np.zeros((clusters, len(classes)), np.int64)
    np.add.at(table, (cluster_ids, class_ids), 1)
    return classes.tolist(), table


def _stored_pairs(matched: Sequence[str], numbers: Sequence[int], classes: list[str]) -> list[tuple[int, int]]:
    """Return (row, column) of each cluster and its class, if both are shown."""
    column_of = {name: column for column, name in enumerate(classes)}
    return [
        (row, column_of[matched[number]])
        for row, number in enumerate(numbers)
        if matched and matched[number] in column_of
    ]


def _first(chosen: list[int], all_of_them: list[int]) -> list[int]:
    return chosen + [number for number in all_of_them if number not in set(chosen)]
