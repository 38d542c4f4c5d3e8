"""Model card of a bundle, MODEL_CARD.md: training data, scores, intended use and limits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jinja2 import Environment, PackageLoader, StrictUndefined
from ncd_training.model.hub import restriction
from ncd_training.objective.method import method_named
from ncd_training.summary.figures import split_uses

from ncd_serve.naming import known_clusters

if TYPE_CHECKING:
    from ncd_training.base.run_dir import Summary
    from ncd_training.data.prepare import Setup

    from ncd_export.verify import Agreement
    from ncd_serve.bundle import BundleManifest

_RESEARCH = "for non-commercial research and education; the photographs belong to those who took them"
_DATA_LICENCES = {
    "aircraft": f"FGVC-Aircraft is {_RESEARCH}",
    "cifar": "CIFAR's authors state no licence; its images were collected from the web",
    "cub200": f"CUB-200-2011 is {_RESEARCH}",
    "glyphs": "drawn by ncd-serve (Apache-2.0) with fonts that ship inside matplotlib",
    "imagenet": f"ImageNet is {_RESEARCH}, by its terms of access",
    "stanford-cars": f"Stanford Cars is {_RESEARCH}",
}


def render_card(
    manifest: BundleManifest, setup: Setup, summary: Summary, agreement: Agreement | None, *, scored: bool
) -> str:
    """Return the model card; `scored`: the scores in the summary are those of the exported state."""
    environment = Environment(loader=PackageLoader("ncd_export"), undefined=StrictUndefined, trim_blocks=True)
    return environment.get_template("model_card.md.jinja").render(
        manifest=manifest,
        clusters=len(manifest.cluster_names) - known_clusters(manifest),
        method=method_named(manifest.method).title,
        splits=split_uses(setup.manifest),
        baselines=summary.baselines,
        scores=summary.scores if scored else {},
        agreement=agreement,
        tells_known=setup.config.model.heads != "separate",
        data_licence=_data_licence(setup.config.data.dataset),
        weights=summary.weights,
        restriction=restriction(summary.weights.licence) if summary.weights else None,
    )


def _data_licence(dataset: str | None) -> str:
    known = [text for name, text in _DATA_LICENCES.items() if dataset and dataset.startswith(name)]
    return known[0] if known else "the user's own images: state their licence here before you distribute the model"
