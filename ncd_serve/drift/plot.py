"""Picture of drift as SVG: needs no library, and follows the reader's light or dark mode."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from ncd_serve.files import write_text

if TYPE_CHECKING:
    from pathlib import Path

    from ncd_serve.drift.find import Drift

_MAX_CLUSTERS_DRAWN = 40  # clusters that are drawn: those whose shares changed most


class _Bars(NamedTuple):
    """Group of bars in the picture, with a label for each pair (training and batch)."""

    title: str
    bars: list[tuple[str, float, float]]


def draw_drift(found: Drift, target: Path, *, title: str) -> None:
    """Draw pairs of bars, training beside the batch: shares of clusters, of confidences and of fits."""
    changed = sorted(found.shares, key=lambda share: -abs(share.batch - share.training))[:_MAX_CLUSTERS_DRAWN]
    names = (
        f"the {_MAX_CLUSTERS_DRAWN} clusters that changed most"
        if len(found.shares) > _MAX_CLUSTERS_DRAWN
        else "clusters"
    )
    tenths = [f"{tenth / 10:.1f} to {(tenth + 1) / 10:.1f}" for tenth in range(10)]
    groups = [
        _Bars("confidence", list(zip(tenths, found.confidences["training"], found.confidences["batch"], strict=True))),
        _Bars(
            f"share of {names}",
            [(f"{share.name} ({share.cluster_id})", share.training, share.batch) for share in changed],
        ),
    ]
    if found.fits:
        fits = [(name, share, found.fits["batch"][name]) for name, share in found.fits["training"].items()]
        groups.insert(0, _Bars("fit", fits))
    environment = Environment(loader=PackageLoader("ncd_serve.drift"), autoescape=True, undefined=StrictUndefined)
    verdict = "not like training" if found.drifted else "like training"
    page = environment.get_template("drift.svg.jinja").render(
        title=f"{title}: {found.images} images, {verdict}", groups=groups
    )
    write_text(target, page)
