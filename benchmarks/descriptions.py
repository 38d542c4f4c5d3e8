"""Mean and cubic mean of an image's parts as its description, on known classes of CUB played as novel.

    .venv/bin/python benchmarks/descriptions.py [--out DIR]

Four blocks of 40 neighbouring known classes are clustered in turn, with EfficientNet-Lite0 before any training, in the
geometry of the other 120 known classes; once with all their images, once with sizes that fall 20:1. Columns: ACC of
clusters that are kept equally large and of linked ones, with the number given; the number that `own-images` estimates;
and the AUROC of known against novel, where a sixth of the labelled images are hidden among the others.
True novel classes, 161 to 200, have no part in it. Views are cached in --out.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from ncd_training.model.predict import Ids
from ncd_training.objective.class_cuts import class_orders
from ncd_training.objective.clustering import discovered_assignment
from ncd_training.objective.self_labels import Geometries, described
from ncd_training.score.metrics import cluster_accuracy
from ncd_training.study.class_features import by_cuts, known_share
from ncd_training.study.piles import Pile
from numpy.typing import NDArray
from piles import Features, load, silent
from rich.console import Console
from rich.table import Table
from sklearn.metrics import roc_auc_score

BLOCK, BLOCKS, RATIO, HIDDEN = 40, 4, 20, 1 / 6
COLUMNS = ("equally large", "linked", "number", "AUROC")


def block_of(classes: Ids, number: int, *, falling: bool) -> tuple[Ids, Ids]:
    """Return rows of the labelled images and of those that are played as novel."""
    rng, first = np.random.default_rng(number), BLOCK * number
    novel = []
    for place, chosen in enumerate(rng.permutation(np.arange(first, first + BLOCK))):
        rows = rng.permutation(np.flatnonzero(classes == chosen))
        share = RATIO ** (-place / (BLOCK - 1)) if falling else 1.0
        novel += rows[: max(2, round(share * len(rows)))].tolist()
    known = (classes >= 0) & (classes < BLOCK * BLOCKS) & ((classes < first) | (classes >= first + BLOCK))
    return np.flatnonzero(known), np.array(sorted(novel))


def measure(
    features: torch.Tensor, labels: torch.Tensor, true: Ids, hidden: NDArray[np.bool_], data: Features
) -> list[float]:
    """Return the columns for features of labelled images, then of others; some labelled ones are `hidden`."""
    config, known = data.config, int(labels.max()) + 1
    spaces = Geometries([features], labels, config.self_labels).spaces()
    starts, temperature = config.self_labels.starts, config.self_labels.temperature
    ids = [
        discovered_assignment(spaces, BLOCK, equal=equal, starts=starts, temperature=temperature, seed=0).argmax(dim=1)
        for equal in (True, False)
    ]
    orders = class_orders(known, draws=config.estimate.draws, seed=0)
    estimate = by_cuts(features, labels.numpy(), torch.arange(len(true)), orders, config, silent.track)
    order = np.concatenate([np.flatnonzero(~hidden), np.flatnonzero(hidden), np.arange(len(hidden), len(features))])
    found = known_share(features[order], labels[~torch.from_numpy(hidden)], config)
    auroc = roc_auc_score(np.arange(len(found.chances)) < hidden.sum(), found.chances.numpy())
    return [*(cluster_accuracy(each.numpy(), true) for each in ids), estimate.classes, float(auroc)]


def main() -> None:
    """Measure all blocks, and print a table for each kind of sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/piles/views-cub"))
    data = Features(load("cub"), parser.parse_args().out)
    classes = data.data.classes
    rows = np.flatnonzero((classes >= 0) & (classes < BLOCK * BLOCKS))
    seen = described(*data.begin(Pile(rows, rows[:0]), data.config))
    console = Console(width=110)
    for falling in (False, True):
        table = Table(title="sizes fall 20:1" if falling else "equally large classes", title_justify="left")
        for column in ("block", *(f"{kind}: {name}" for name in COLUMNS for kind in ("mean", "cubic"))):
            table.add_column(column)
        for number in range(BLOCKS):
            known, novel = block_of(classes[rows], number, falling=falling)
            labels = torch.from_numpy(np.unique(classes[rows][known], return_inverse=True)[1])
            hidden = np.random.default_rng(number).random(len(known)) < HIDDEN
            true = np.unique(classes[rows][novel], return_inverse=True)[1]
            order = np.concatenate([known, novel])
            cubic, mean = (measure(features[order], labels, true, hidden, data) for features in seen[:2])
            pairs = [
                f"{value:.3f}" if value < 2 else f"{value:.0f}"
                for pair in zip(mean, cubic, strict=True)
                for value in pair
            ]
            table.add_row(str(number), *pairs)
        console.print(table)


if __name__ == "__main__":
    main()
