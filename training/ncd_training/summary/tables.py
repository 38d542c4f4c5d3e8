"""Tables and pictures of a run for notebooks: pandas DataFrames where pandas is installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from ncd_serve.fit import FITS
from ncd_serve.gallery.clusters import describe_clusters
from ncd_serve.gallery.projection import MapKind, choose_kind, places
from ncd_serve.gallery.read import read_run
from ncd_training.summary.figures import PAIRS, QUALITY, TERMS, EpochRow, curves
from ncd_training.summary.plots import COLOURS, Picture, draw_group

_MAX_LEGEND_ENTRIES = 12
_MAX_SIZES = 12


class RowList(list[dict[str, Any]]):
    """Rows of a table without pandas; a notebook shows them as an HTML table."""

    def _repr_html_(self) -> str:
        names = list(dict.fromkeys(name for row in self for name in row))
        head = "".join(f"<th>{escape(name)}</th>" for name in names)
        rows = ("".join(f"<td>{escape(str(row.get(name, '')))}</td>" for name in names) for row in self)
        return f"<table><tr>{head}</tr>{''.join(f'<tr>{cells}</tr>' for cells in rows)}</table>"


def as_table(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return rows as a pandas DataFrame, or as a `RowList` where pandas is not installed."""
    try:
        from pandas import DataFrame
    except ModuleNotFoundError:
        return RowList(dict(row) for row in rows)
    return DataFrame(list(rows))


def clusters_in_words(run: Path) -> str:
    """Return a line about the clusters of a finished run, e.g. `3 clusters of 20, 20, 18 images; ...`."""
    clusters, _ = describe_clusters(read_run(run))
    sizes = sorted((cluster.count for cluster in clusters), reverse=True)
    shown = ", ".join(map(str, sizes)) if len(sizes) <= _MAX_SIZES else f"{sizes[0]} to {sizes[-1]}"
    confidence = sum(cluster.count * cluster.confidence for cluster in clusters) / max(sum(sizes), 1)
    fits = [sum(cluster.fits[number] for cluster in clusters if cluster.fits) for number in range(len(FITS))]
    unusual, outliers = (fits[FITS.index(name)] for name in ("unusual", "outlier"))
    odd = f"{unusual} unusual, {outliers} outlier{'s' * (outliers != 1)}"
    return f"{len(sizes)} cluster{'s' * (len(sizes) != 1)} of {shown} images; mean confidence {confidence:.2f}; {odd}"


def clusters_table(run: Path) -> Any:
    """Return the clusters of a finished run, the largest first."""
    shown = read_run(run)
    clusters, _ = describe_clusters(shown)
    names = shown.naming.labels
    return as_table(
        [
            {
                "id": cluster.number,
                "name": names[cluster.number],
                "size": cluster.count,
                "confidence": cluster.confidence,
                "fit": cluster.fits[FITS.index("typical")] / len(cluster.images) if cluster.fits else None,
                "nearest known class": cluster.known[0] if cluster.known else None,
            }
            for cluster in clusters
        ]
    )


def assignments_table(run: Path) -> Any:
    """Return the unlabelled images of a finished run with their clusters."""
    shown = read_run(run)
    names, fits = shown.naming.labels, shown.fits
    return as_table(
        [
            {
                "path": str(file),
                "cluster_id": int(cluster),
                "cluster_name": names[cluster],
                "confidence": float(confidence),
                "fit": FITS[fits[number]] if fits is not None else None,
            }
            for number, (file, cluster, confidence) in enumerate(
                zip(shown.files, shown.cluster_ids, shown.confidences, strict=True)
            )
        ]
    )


def plot_run(run: Path, metrics: Sequence[EpochRow]) -> Picture:
    """Draw the curves over the epochs and, for a finished run, a map of the clusters."""
    groups = {group: found for group in (TERMS, QUALITY, PAIRS) if (found := curves(metrics, group))}
    finished = (run / "reference.npz").is_file()
    panels = len(groups) + finished
    figure = Figure(figsize=(6.5 * max(1, panels), 4.5), layout="constrained")
    axes = list(figure.subplots(1, max(1, panels), squeeze=False)[0])
    if finished:
        _draw_map(run, axes.pop(0))
    for (group, found), place in zip(groups.items(), axes, strict=False):
        draw_group(group, found, place)
    return Picture(figure)


def _draw_map(run: Path, axes: Any) -> None:
    shown = read_run(run)
    assert shown.embeddings is not None
    kind = choose_kind(len(shown.embeddings))
    spots = places(shown.embeddings, kind)
    for order, cluster in enumerate(np.unique(shown.cluster_ids)):
        here = spots[shown.cluster_ids == cluster]
        name = shown.naming.labels[cluster]
        axes.scatter(here[:, 0], here[:, 1], s=12, linewidths=0, color=COLOURS[order % len(COLOURS)], label=name)
    axes.set(title=f"clusters ({'t-SNE' if kind is MapKind.TSNE else 'PCA'})", xticks=[], yticks=[], aspect="equal")
    if len(np.unique(shown.cluster_ids)) <= _MAX_LEGEND_ENTRIES:
        axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
