"""Clusterings of realistic piles of CUB and CIFAR-10 images, with EfficientNet-Lite0, before any joint training.

    .venv/bin/python benchmarks/piles.py [--data cub cifar10] [--cells clean ...] [--seeds 0 1 2] [--out DIR]

clean      novel classes only, equally many images each, their number given
tail       the same with sizes that fall 20:1
mixed      half of the unlabelled images show known classes
unknown    clean, without the number
wild       known classes, sizes that fall 20:1, no number, 5% images of the other dataset

Rows: `k-means`, `Ward` and `semi-supervised k-means` on the features after the supervised stage, which also learns the
surest clusters of the initial features, so that these rows are better than without `own-images`; `balanced` (clusters
equally large, the former recipe `plus`), and `own-images`, which decides everything by itself. Where the number is not
given, all rows take the estimate of `own-images`. ACC is by one matching over all images but foreign ones. `decided` is
what `own-images` takes the share of known classes and the number of novel ones to be, with the AUROC of its chances of
known against novel, and the minutes of all that comes before the rows. ACC and AUROC are the only use of true novel
classes. Finished cells in --out are kept.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from ncd_training.base.matching import matched_clusters
from ncd_training.config.resolve import resolve_config
from ncd_training.config.schema import TrainConfig
from ncd_training.data.manifest import Manifest
from ncd_training.data.prepare import Setup, with_pile
from ncd_training.data.scan import typical_side
from ncd_training.model.branches import DualBranchModel
from ncd_training.model.map_cache import cache_views
from ncd_training.model.predict import Ids
from ncd_training.model.weights import initial_trunk, settle
from ncd_training.objective.class_cuts import class_orders
from ncd_training.objective.clustering import class_whitening, main_directions
from ncd_training.objective.constrained_kmeans import FREE, constrained_kmeans
from ncd_training.objective.method import Lesson, Material, checked
from ncd_training.objective.self_labels import (
    Geometries,
    described,
    mixed_targets,
    novel_targets,
    with_clusters,
)
from ncd_training.pretext import Stages
from ncd_training.run.step import build_state
from ncd_training.study.class_features import (
    MIN_CLASSES_TO_RECOGNISE,
    by_cuts,
    known_share,
    surely_novel,
)
from ncd_training.study.piles import CELLS, FOREIGN, Pile, draw_pile
from rich.console import Console
from rich.table import Table
from sklearn.cluster import AgglomerativeClustering, KMeans
from sklearn.metrics import roc_auc_score

from ncd_serve.progress import Progress

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
MAX_PER_CLASS = 400
console = Console(width=130)
silent = Progress(Console(quiet=True))


class Data(NamedTuple):
    """Images with their classes, known ones first; foreign images have class -1."""

    images: list[Path]
    classes: Ids
    known: int


def read_cub() -> list[tuple[Path, int]]:
    root = SHARED / "CUB_200_2011"
    columns = {name: dict(line.split() for line in (root / f"{name}.txt").open()) for name in FILES}
    return [
        (root / "images" / path, int(columns["image_class_labels"][number]) - 1)
        for number, path in columns["images"].items()
        if columns["train_test_split"][number] == "1"
    ]


FILES = ("images", "image_class_labels", "train_test_split")
CIFAR = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def read_cifar10() -> list[tuple[Path, int]]:
    folders = [sorted((SHARED / "cifar10_images" / "train" / name).iterdir()) for name in CIFAR]
    return [(path, number) for number, paths in enumerate(folders) for path in paths[:MAX_PER_CLASS]]


def load(name: str) -> Data:
    """Return the images of a dataset, and some of the other one."""
    own, other = (read_cub(), read_cifar10()) if name == "cub" else (read_cifar10(), read_cub())
    foreign = [other[row][0] for row in np.random.default_rng(0).permutation(len(other))[: len(own) // 20]]
    images = [path for path, _ in own] + foreign
    return Data(images, np.array([number for _, number in own] + [FOREIGN] * len(foreign)), 160 if name == "cub" else 5)


class Features:
    """Features of a dataset's images before and after a supervised stage; trunk maps are cached in a folder."""

    def __init__(self, data: Data, folder: Path) -> None:
        overrides = {"data.novel_classes": 2, "data.pile": "novel", "data.labelled": "x", "data.unlabelled": "x"}
        plain = {"model.branches": "global", "self_labels.weight": 0.0}
        config = checked(resolve_config(recipes=["own-images"], overrides={**overrides, **plain}))
        side = typical_side(data.images)
        self.config = settle(config, images=len(data.images), progress=silent, side=side)
        self.data, self.folder = data, folder

    def initial(self, pile: Pile, config: TrainConfig) -> torch.Tensor:
        """Return features of the labelled and then the unlabelled images before any stage."""
        return described(*self.begin(pile, config))[0]

    def after_stage(self, pile: Pile, before: torch.Tensor, config: TrainConfig) -> torch.Tensor:
        """Return features after the supervised stage, which also learns the surest clusters of the features before."""
        model, material = self.begin(pile, config)
        lesson = Lesson(np.arange(len(pile.labelled)), material.labels)
        lesson = with_clusters(lesson, before, material.labels, material)
        Stages(model, config, silent.track).supervised(material.views.only(lesson.rows), lesson.classes)
        return described(model, material)[0]

    def begin(self, pile: Pile, config: TrainConfig) -> tuple[DualBranchModel, Material]:
        images, names = self.data.images, [str(number) for number in range(self.data.known)]
        torch.manual_seed(0)
        setup = Setup(config, Manifest("pile", [], images, names, 2))
        model = build_state(setup, initial_trunk(config, weights=config.model.weights_file)[0]).model
        views = cache_views(model.trunk, images, config.data, folder=self.folder, progress=silent)
        chosen = views.only(np.concatenate([pile.labelled, pile.unlabelled]))
        labels = torch.from_numpy(self.data.classes[pile.labelled])
        return model, Material(chosen, labels, [images[row] for row in pile.unlabelled], config, silent.track)


def rows_of(
    sources: list[torch.Tensor], labels: torch.Tensor, clusters: int, mixed: bool, config: TrainConfig
) -> dict[str, Any]:
    """Return the clusterings of a cell by name, as functions; known classes have the first ids if `mixed`."""
    known, seed = int(labels.max()) + 1, config.optim.seed
    total = clusters + (known if mixed else 0)
    pile = F.normalize(sources[-1], dim=1)[len(labels) :].numpy()
    equal = config.model_copy(update={"self_labels": config.self_labels.model_copy(update={"sizes": "equal"})})

    def anchored() -> torch.Tensor:
        moved = sources[-1] @ class_whitening(
            sources[-1][: len(labels)], labels, shrinkage=config.self_labels.shrinkage
        )
        rows = main_directions(F.normalize(moved - moved[len(labels) :].mean(dim=0), dim=1), config.self_labels.dims)
        fixed = torch.full((len(rows),), FREE)
        fixed[: len(labels)] = labels
        return constrained_kmeans(rows, fixed, known + clusters, starts=5, seed=seed).ids[len(labels) :]

    def ours(config: TrainConfig) -> torch.Tensor:
        if mixed:
            return mixed_targets(sources, labels, clusters, config).argmax(dim=1)
        return novel_targets(Geometries(sources, labels, config.self_labels), clusters, config).targets.argmax(dim=1)

    return {
        "k-means": lambda: KMeans(total, n_init=10, random_state=seed).fit_predict(pile),
        "Ward": lambda: AgglomerativeClustering(total, linkage="ward").fit_predict(pile),
        **({"semi-supervised k-means": anchored} if mixed else {}),
        "balanced": lambda: ours(equal),
        "own-images": lambda: ours(config),
    }


def scores(ids: Ids, true: Ids, known: int) -> dict[str, float]:
    """Return ACC over all, known and novel images by one matching, and the mean over classes; not of foreign images."""
    ids, true = ids[true >= 0], true[true >= 0]
    right = matched_clusters(ids, true)[true] == ids
    classes = [right[true == number].mean() for number in np.unique(true)]
    return {
        "all": right.mean(),
        "known": right[true < known].mean() if (true < known).any() else np.nan,
        "novel": right[true >= known].mean(),
        "mean over classes": float(np.mean(classes)),
    }


def auroc(chances: Ids, true: Ids, known: int) -> float:
    """Return the AUROC of chances to be known, of images of known classes against novel ones; NaN without known."""
    ours, shows = chances[true >= 0], (true < known)[true >= 0]
    return float(roc_auc_score(shows, ours)) if shows.any() else np.nan


def measure(cell: str, seed: int, features: Features) -> dict[str, Any]:
    """Cluster one cell with every row."""
    data, pile = features.data, draw_pile(cell, features.data.classes, known=features.data.known, seed=seed)
    optim = features.config.optim.model_copy(update={"seed": seed})
    config = features.config.model_copy(update={"optim": optim})
    began = time.perf_counter()
    before, labels = features.initial(pile, config), torch.from_numpy(data.classes[pile.labelled])
    true = data.classes[pile.unlabelled]
    novel = len(np.unique(true[true >= data.known]))
    found = known_share(before, labels, config)
    mixed = data.known >= MIN_CLASSES_TO_RECOGNISE and found.mixed
    likely = surely_novel(found) if mixed else torch.arange(len(true))
    orders = class_orders(data.known, draws=config.estimate.draws, seed=seed)
    estimate = by_cuts(before, labels.numpy(), likely, orders, config, silent.track)
    clusters = novel if cell in ("clean", "tail", "mixed") else estimate.classes
    config = settled(config, clusters, mixed=mixed)
    sources = [before, features.after_stage(pile, before, config)]
    decided = f"{found.share:.2f} known, {estimate.line}"
    result: dict[str, Any] = {
        "decided": decided,
        "novel": novel,
        "auroc": auroc(found.chances.numpy(), true, data.known),
    }
    result |= {"minutes": (time.perf_counter() - began) / 60, "rows": {}}
    for row, cluster in rows_of(sources, labels, clusters, mixed, config).items():
        start = time.perf_counter()
        result["rows"][row] = {
            **scores(np.asarray(cluster()), true, data.known),
            "seconds": time.perf_counter() - start,
        }
    return result


def settled(config: TrainConfig, clusters: int, *, mixed: bool) -> TrainConfig:
    """Return the configuration with a number of clusters and a kind of pile, and with the clustering switched on."""
    data = config.data.model_copy(update={"novel_classes": clusters})
    self_labels = config.self_labels.model_copy(update={"weight": 1.0})
    config = config.model_copy(update={"data": data, "self_labels": self_labels})
    return with_pile(config, "mixed" if mixed else "novel")


def show(name: str, cell: str, results: list[dict[str, Any]]) -> None:
    columns = ("all", "known", "novel", "mean over classes", "seconds")
    table = Table(title=f"{name}, {cell}: mean over {len(results)} seed(s)", title_justify="left")
    for column in ("", *columns):
        table.add_column(column, justify="right" if column else "left")
    for row in results[0]["rows"]:
        means = [np.mean([result["rows"][row][column] for result in results]) for column in columns]
        table.add_row(
            row, *("" if np.isnan(value) else f"{value:.3f}" if value < 1.5 else f"{value:.0f}" for value in means)
        )
    console.print(table)
    for result in results:
        known = "" if np.isnan(result["auroc"]) else f"; AUROC of known against novel {result['auroc']:.3f}"
        console.print(f"  decided: {result['decided']}; true {result['novel']}{known}; {result['minutes']:.1f} min")


def measured(name: str, cell: str, seed: int, features: Features, folder: Path) -> dict[str, Any]:
    """Return the result of a cell; measure it unless its file is there."""
    file = folder / f"{name}-{cell}-{seed}.json"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(measure(cell, seed, features), default=float))
    result: dict[str, Any] = json.loads(file.read_text())
    return result


def main() -> None:
    """Measure missing cells, and print all tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", choices=("cub", "cifar10"), default=["cub", "cifar10"])
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=list(CELLS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("build/piles"))
    options = parser.parse_args()
    for name in options.data:
        features = Features(load(name), options.out / f"views-{name}")
        for cell in options.cells:
            show(name, cell, [measured(name, cell, seed, features, options.out) for seed in options.seeds])


if __name__ == "__main__":
    main()
