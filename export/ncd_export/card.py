"""MODEL_CARD.md: what the model is, what it was trained on, what it is good for and what not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from ncd_training.manifest import KNOWN_TEST, NOVEL_TEST, UNLABELLED_TRAIN

if TYPE_CHECKING:
    from ncd_training.config import TrainConfig
    from ncd_training.manifest import Manifest
    from ncd_training.setup import Setup

    from ncd_export.verify import Agreement
    from ncd_serve.bundle import BundleManifest

_METHODS = {
    "dual": "dual ranking statistics and mutual knowledge distillation (Zhao and Han, NeurIPS 2021)",
    "rankstat": "ranking statistics (Han et al., ICLR 2020)",
    "dtc": "deep transfer clustering (Han, Vedaldi and Zisserman, ICCV 2019)",
    "kcl": "a constrained clustering network (Hsu, Lv and Kira, ICLR 2018)",
    "mcl": "meta classification likelihood (Hsu et al., ICLR 2019)",
    "kmeans": "k-means on features that were trained on the known classes",
    "orca": "ORCA (Cao, Brbic and Leskovec, ICLR 2022)",
}
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
    manifest: BundleManifest, setup: Setup, summary: dict[str, Any], agreement: Agreement | None, *, scored: bool
) -> str:
    """The card; `scored`: the summary's scores are those of the exported state."""
    environment = Environment(loader=PackageLoader("ncd_export"), undefined=StrictUndefined, trim_blocks=True)
    return environment.get_template("model_card.md.jinja").render(
        manifest=manifest,
        method=_METHODS[manifest.method],
        splits=_splits(setup.manifest),
        baselines=summary["baselines"],
        scores=summary["scores"] if scored else {},
        agreement=agreement,
        tells_known=setup.config.model.heads != "separate",
        data_licence=_data_licence(setup.config.data.dataset),
        weights_file=summary.get("weights", {}).get("file"),
    )


def initial_weights(config: TrainConfig, summary: dict[str, Any]) -> str:
    """Where trunk and tail started from."""
    if "weights" in summary:
        return "{format}, {file}, sha256 {sha256}".format(**summary["weights"])
    return "self-supervised by rotation" if config.rotations.epochs else "random"


def _splits(manifest: Manifest) -> list[tuple[str, int, str]]:
    pile = "known and novel classes" if manifest.open_world else "novel classes"
    rows = [
        ("labelled-train", len(manifest.labelled), f"trained on, {len(manifest.known_classes)} known classes"),
        (UNLABELLED_TRAIN, len(manifest.unlabelled), f"trained on without labels, {pile}"),
        (KNOWN_TEST, len(manifest.known_test), "held out, known classes"),
        (NOVEL_TEST, len(manifest.novel_test), f"held out, {pile}"),
    ]
    return [row for row in rows if row[1]]


def _data_licence(dataset: str | None) -> str:
    known = [text for name, text in _DATA_LICENCES.items() if dataset and dataset.startswith(name)]
    return known[0] if known else "the user's own images: state their licence here before you pass the model on"
