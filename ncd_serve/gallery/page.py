"""Page of the gallery: data as JSON, sheets as text, one script and one style that its policy allows by hash."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from ncd_serve import __version__
from ncd_serve.fit import FITS
from ncd_serve.gallery.confusion import confusion_data
from ncd_serve.gallery.questions import find_questions
from ncd_serve.gallery.thumbnails import COLUMNS, more_parts, parts
from ncd_serve.text import printable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import BinaryIO

    from ncd_serve.gallery.clusters import Cluster
    from ncd_serve.gallery.collection import Collection, Floats
    from ncd_serve.gallery.projection import MapKind
    from ncd_serve.gallery.thumbnails import Part, Sheet

# In this order, in one scope.
SCRIPTS = (
    "data",
    "sheets",
    "naming",
    "tiles",
    "cards",
    "choose",
    "selection",
    "detail",
    "questions",
    "filter",
    "map",
    "lasso",
    "matrix",
    "keys",
    "main",
)
_MAX_FAILURES_LISTED = 200  # listed; all are counted


@dataclass(frozen=True)
class Layout:
    """Clusters in the order in which they are shown, and the places of their images."""

    clusters: list[Cluster]
    central: Floats  # [N] centrality of each image in its cluster
    kind: MapKind
    where: Floats | None  # [N + B, 2] of the images, then of the background
    left_out: int = 0  # images that come after all others, and in no cluster

    @cached_property
    def order(self) -> list[int]:
        """Rows of the images, cluster by cluster: the number of an image in the page is its place here."""
        return [row for cluster in self.clusters for row in cluster.images]

    @cached_property
    def parts(self) -> list[Part]:
        """Images of each sheet."""
        return [*parts(self.clusters), *more_parts(range(len(self.order), len(self.order) + self.left_out))]

    @cached_property
    def sheets(self) -> list[list[int]]:
        """Rows of each sheet."""
        return [part.rows for part in self.parts]

    @cached_property
    def starts(self) -> list[int]:
        """Number of the first image of each sheet, and that of all images."""
        return [0, *accumulate(len(rows) for rows in self.sheets)]


def page_data(shown: Collection, layout: Layout, *, missing: Sequence[int], title: str) -> dict[str, Any]:
    """Return the data of the page's script: images in the order of the sheets, column by column."""
    naming, order, where, clusters = shown.naming, layout.order, layout.where, layout.clusters
    return {
        "title": title,
        "kind": shown.kind,
        "source": printable(shown.source),
        "root": _root(shown),
        "checkpoint": naming.checkpoint,
        "bundle": printable(naming.bundle) if naming.bundle else None,
        "version": __version__,
        "defaults": naming.defaults,
        "fixed": naming.fixed,
        **naming_data(shown, order),
        "total": shown.total,
        "verdict": shown.verdict,
        "tight": shown.tight,
        "alike": shown.alike,
        "map": layout.kind.value,
        "embedded": shown.embeddings is not None,
        "columns": COLUMNS,
        "sheets": layout.starts,
        "missing": list(missing),
        "fits": FITS if shown.fits is not None else [],
        "clusters": [_cluster_data(cluster) for cluster in clusters],
        "images": _image_data(shown, order, layout.central, where),
        "questions": find_questions(shown, order),
        "background": [_rounded(axis, 4) for axis in where[len(order) :].T] if where is not None else [[], []],
        "confusion": confusion_data(shown, [cluster.number for cluster in clusters]),
        "left_out": [printable(path) for path in shown.left_out],
        "failures": [[printable(path), error] for path, error in shown.failures[:_MAX_FAILURES_LISTED]],
        "failed": len(shown.failures),
    }


def naming_data(shown: Collection, order: list[int]) -> dict[str, Any]:
    """Return what people have said so far: about clusters by id, about images by their number in the page."""
    naming = shown.naming
    corrected = [(number, naming.images.get(printable(shown.paths[row]))) for number, row in enumerate(order)]
    return {
        "names": naming.names,
        "merged": naming.merged,
        "junk": naming.junk,
        "corrected": [[number, target] for number, target in corrected if target is not None] if naming.images else [],
        "new_names": naming.new_names,
    }


def _root(shown: Collection) -> str | None:
    """Return the common folder of all paths, for links to the files."""
    together = all(shown.root / path == file for path, file in zip(shown.paths, shown.files, strict=True))
    return printable(shown.root.absolute()) if together else None


def _cluster_data(cluster: Cluster) -> dict[str, Any]:
    return {
        "id": cluster.number,
        "count": cluster.count,
        "shown": len(cluster.images),
        "introduced": cluster.introduced,
        "confidence": round(cluster.confidence, 4),
        "nearest": [[other, round(near, 3)] for other, near in cluster.nearest],
        "known": [cluster.known[0], round(cluster.known[1], 4)] if cluster.known else None,
        "truths": cluster.truths,
        "purity": None if cluster.purity is None else round(cluster.purity, 4),
        "fits": cluster.fits,
    }


def _image_data(shown: Collection, order: list[int], central: Floats, where: Floats | None) -> dict[str, Any]:
    classes = sorted(set(shown.truth))
    number = {name: index for index, name in enumerate(classes)}
    return {
        "path": [printable(shown.paths[row]) for row in order],
        "confidence": _rounded(shown.confidences[order], 4),
        "central": _rounded(central[order], 4),
        "fit": shown.fits[order].tolist() if shown.fits is not None else None,
        "truth": [number[shown.truth[row]] for row in order] if shown.truth else None,
        "classes": classes,
        "x": _rounded(where[order, 0], 4) if where is not None else None,
        "y": _rounded(where[order, 1], 4) if where is not None else None,
    }


def _rounded(values: Floats, digits: int) -> list[float]:
    return [round(float(value), digits) for value in values]


def write_page(data: dict[str, Any], sheets: Sequence[Sheet], stream: BinaryIO) -> None:
    """Render the page; sheets come last, those that clusters are introduced by before the others."""
    from jinja2 import Environment, PackageLoader

    environment = Environment(loader=PackageLoader("ncd_serve.gallery"), autoescape=True, trim_blocks=True)
    numbered = sorted(enumerate(sheets), key=lambda pair: not pair[1].first)
    style, script = _style(), _script()
    environment.get_template("gallery.html.jinja").stream(
        data=data, style=style, script=script, style_hash=_hash(style), script_hash=_hash(script), sheets=numbered
    ).dump(stream, encoding="utf-8")


@cache
def _style() -> str:
    return template_part("gallery.css")


@cache
def _script() -> str:
    return script_of([template_part(f"{name}.js") for name in SCRIPTS])


def script_of(*parts: Sequence[str]) -> str:
    """Return scripts as one, in a scope of their own."""
    return '"use strict";\n(() => {\n' + "\n".join(text for part in parts for text in part) + "})();\n"


def template_part(name: str) -> str:
    """Return a script or style of the page."""
    return (files("ncd_serve.gallery") / "templates" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """Return the hash of an inline script or style in the form of a content security policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
