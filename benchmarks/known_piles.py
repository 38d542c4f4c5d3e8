"""Decisions about piles, on known classes of CUB played as novel: what the settings of `own-images` are chosen with.

    .venv/bin/python benchmarks/known_piles.py [--kinds birds ...] [--seeds 0 1 2] [--out DIR]

birds            40 of the 160 known classes are drawn as novel, all their images are unlabelled
birds-tail       the same with sizes that fall 20:1
birds-mixed      the same, and as many images of the other 120 classes
few-birds        6 novel classes, 15 known ones
families         12 families (gulls, terns, ...) are novel, 12 known; a family has one to 21 kinds, 30 images each
families-mixed   the same, and half of the images of the known families

Features are those of EfficientNet-Lite0 before any training. Columns: the share of known classes and the number of
novel ones, decided and true; the AUROC of known against novel; ACC of `own-images`, by one matching over all images,
with the true number and with the decided one, and of k-means on the same features with the true number. The novel
classes of the benchmark, 161 to 200, have no part in it. Views are cached in --out.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from ncd_training.model.predict import Ids
from ncd_training.objective.class_cuts import class_orders
from ncd_training.objective.clustering import kmeans_ids
from ncd_training.objective.self_labels import Geometries, described, mixed_targets, novel_targets
from ncd_training.score.metrics import cluster_accuracy
from ncd_training.study.class_features import by_cuts, known_share, surely_novel
from ncd_training.study.piles import Pile
from piles import SHARED, Features, auroc, load, settled, silent
from rich.console import Console
from rich.table import Table

KNOWN, RATIO = 160, 20
KINDS = ("birds", "birds-tail", "birds-mixed", "few-birds", "families", "families-mixed")


def family_names() -> list[str]:
    """Return the family of each known class: the last word of its name."""
    lines = (SHARED / "CUB_200_2011" / "classes.txt").read_text().splitlines()
    return [line.split("_")[-1] for line in lines[:KNOWN]]


def split(kind: str, rng: np.random.Generator) -> tuple[Ids, Ids, Ids]:
    """Return the group of each known class, and the groups that are novel and known."""
    if "families" not in kind:
        order = rng.permutation(KNOWN)
        chosen = (order[:6], order[6:21]) if kind == "few-birds" else (order[:40], order[40:])
        return np.arange(KNOWN), *chosen
    groups = np.unique(family_names(), return_inverse=True)[1]
    order, kinds = rng.permutation(int(groups.max()) + 1), np.bincount(groups)
    large, small = order[kinds[order] > 1], order[kinds[order] == 1]
    return groups, np.concatenate([large[:8], small[:4]]), np.concatenate([large[8:16], small[4:8]])


def draw(kind: str, classes: Ids, seed: int) -> tuple[Ids, Ids, Ids, Ids, int]:
    """Return rows and labels of labelled images, rows and true classes of the others, and the number of novel ones."""
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    groups, novel, known = split(kind, rng)
    numbers = groups[classes]
    labelled, labels, pile, true = list[int](), list[int](), list[int](), list[int]()
    for place, group in enumerate(novel):
        rows = rng.permutation(np.flatnonzero(numbers == group))
        share = RATIO ** (-place / (len(novel) - 1)) if kind == "birds-tail" else 1.0
        pile += rows[: max(2, round(share * len(rows)))].tolist()
        true += [len(known) + place] * (len(pile) - len(true))
    each = round(len(pile) / len(known)) if kind == "birds-mixed" else len(classes)
    for place, group in enumerate(known):
        rows = rng.permutation(np.flatnonzero(numbers == group))
        hidden = min(len(rows) // 2, each) if "mixed" in kind else 0
        pile, true = [*pile, *rows[:hidden].tolist()], [*true, *[place] * hidden]
        labelled, labels = [*labelled, *rows[hidden:].tolist()], [*labels, *[place] * (len(rows) - hidden)]
    return np.array(labelled), np.array(labels), np.array(pile), np.array(true), len(novel)


def measure(kind: str, seed: int, features: torch.Tensor, classes: Ids, data: Features) -> list[str]:
    """Return the columns of a pile."""
    labelled, labels, pile, true, novel = draw(kind, classes, seed)
    seen, known = features[np.concatenate([labelled, pile])], int(labels.max()) + 1
    config = data.config.model_copy(update={"optim": data.config.optim.model_copy(update={"seed": seed})})
    numbers = torch.from_numpy(labels)
    found = known_share(seen, numbers, config)
    rows = surely_novel(found) if found.mixed else torch.arange(len(pile))
    orders = class_orders(known, draws=config.estimate.draws, seed=seed)
    estimate = by_cuts(seen, labels, rows, orders, config, silent.track)
    accuracies = []
    for clusters in (novel, estimate.classes):
        chosen = settled(config, clusters, mixed=found.mixed)
        if found.mixed:
            targets = mixed_targets([seen], numbers, clusters, chosen)
        else:
            targets = novel_targets(Geometries([seen], numbers, chosen.self_labels), clusters, chosen).targets
        accuracies.append(cluster_accuracy(targets.argmax(dim=1).numpy(), true))
    total = novel + (known if found.mixed else 0)
    plain = kmeans_ids(F.normalize(seen[len(labelled) :], dim=1).numpy(), total, seed=seed)
    shows = true < known
    return [
        f"{found.share * found.mixed:.2f} / {shows.mean():.2f}",
        "" if not shows.any() else f"{auroc(found.chances.numpy(), true, known):.3f}",
        f"{estimate.classes} ({estimate.interval and '{} to {}'.format(*estimate.interval)}) / {novel}",
        *(f"{value:.3f}" for value in (*accuracies, cluster_accuracy(plain, true))),
    ]


def main() -> None:
    """Measure all piles, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("build/piles"))
    options = parser.parse_args()
    data = Features(load("cub"), options.out / "views-cub")
    rows = np.flatnonzero((data.data.classes >= 0) & (data.data.classes < KNOWN))
    features, *_ = described(*data.begin(Pile(rows, rows[:0]), data.config))
    table = Table("pile", "seed", "known", "AUROC", "novel classes", "ACC", "ACC, decided number", "k-means")
    for kind in options.kinds:
        for seed in options.seeds:
            table.add_row(kind, str(seed), *measure(kind, seed, features, data.data.classes[rows], data))
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
