"""Rounds of discovery on CUB-200-2011: new classes arrive, are found, named and served, and old names have to stay.

    .venv/bin/python benchmarks/rounds.py [--data DIR] [--out DIR] [--orders 0 1 2]

100 known classes, then 4 rounds with 20 new ones each; 20 classes are junk and never named. A round's stream has 25
images of each new class, 3 of each known and 1 of each other old class, and 5% junk. A simulated person sees the five
most central images of each proposed cluster: three of one class give it that class's name, otherwise it is thrown away;
at most 30 are looked at. Test images are scored by name, without any matching. All rows begin with the same model: a
frozen EfficientNet-Lite0 at 160 px whose tail has learned the known classes. Trunk maps are computed once. True classes
of new images name clusters and score, nothing else.

Rows: `nothing` keeps the first model. `scratch` trains the tail anew in each round, on known classes and clusters of
all images, and carries names by overlap; it is told the number of classes. `threshold` clusters images that are far
from all class means; it is told the number as well. `append` is `discover` and `train --after`. `retrain` also lets the
tail learn what was named. `oracle` is `append` with the images of new classes given. Minutes are those of a row's four
rounds, without trunk maps and the first model. Finished parts in --out are used again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from ncd_training.config.schema import TrainConfig
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from rounds_rows import (
    FIRST_EPOCHS,
    KNOWN,
    NEW,
    ROUNDS,
    Append,
    Figures,
    Nothing,
    Oracle,
    Retrain,
    Scratch,
    Stream,
    Threshold,
    World,
)
from rounds_tail import Tail, configured, maps_of

Floats = NDArray[Any]
Ids = NDArray[Any]
SHARED = Path(__file__).resolve().parents[2] / "shared"
LABELLED, JUNK_SHARE = 18, 0.05
COLUMNS = ("named", "old", "new", "forgotten", "churn", "AUROC", "p@200", "looked/right", "false new", "K error", "min")
ROWS = {"nothing": Nothing, "threshold": Threshold, "append": Append, "oracle": Oracle, "retrain": Retrain,
        "scratch": Scratch}  # fmt: skip
OURS = ("append", "retrain")


def streams_of(data: dict[str, Any], order: Ids, seed: int) -> tuple[Ids, Ids, list[Stream]]:
    """Return labelled images, their classes (numbers in the order), and the streams; no image comes twice."""
    rng, classes = np.random.default_rng(seed), np.argsort(order)[data["classes"]]  # known, then by round, then junk
    left = {number: list(rng.permutation(np.flatnonzero(data["train"] & (classes == number)))) for number in range(200)}

    def take(number: int, count: int) -> list[int]:
        return [left[number].pop() for _ in range(min(count, len(left[number])))]

    labelled = [row for number in range(KNOWN) for row in take(number, LABELLED)]
    streams = []
    for turn in range(ROUNDS):
        first = KNOWN + turn * NEW
        rows = [row for number in range(first, first + NEW) for row in take(number, 25)]
        fresh = len(rows)
        rows += [row for number in range(KNOWN) for row in take(number, 3)]
        rows += [row for number in range(KNOWN, first) for row in take(number, 1)]
        junk = rng.choice(np.arange(KNOWN + ROUNDS * NEW, 200), int(JUNK_SHARE * len(rows)))
        rows += [row for number in junk.tolist() for row in take(number, 1)]
        streams.append(Stream(np.array(rows), classes[rows], np.arange(len(rows)) < fresh))
    return np.array(labelled), classes[labelled], streams


def auroc(scores: Floats, new: NDArray[np.bool_]) -> float:
    ranks = scores.argsort().argsort()
    return float((ranks[new].mean() - (new.sum() - 1) / 2) / (~new).sum())


def play(kind: type[Nothing], world: World, streams: list[Stream], test: Ids, truth: Ids) -> Figures:
    """Play all rounds of one row."""
    figures, start = Figures(), time.perf_counter()
    model = kind(world)
    before, scores = model.answer(test), model.scores(test)
    figures.known.append(float((before == truth)[truth < KNOWN].mean()))
    if kind is Append:
        figures.alarms = false_alarms(model, test[truth < KNOWN], world.seed)
    for turn, stream in enumerate(streams):
        newness = model.newness(stream.rows)
        figures.auroc.append(auroc(newness, stream.new))
        figures.first.append(float(stream.new[np.argsort(-newness)[:200]].mean()))
        model.learn(stream, figures)
        answer, now, first = model.answer(test), model.scores(test), KNOWN + turn * NEW
        old, new = truth < first, (truth >= first) & (truth < first + NEW)
        for values, chosen in ((figures.named, old | new), (figures.old, old), (figures.new, new)):
            values.append(float((answer == truth)[chosen].mean()))
        figures.churn.append(float((answer != before)[old].mean()))
        figures.known.append(float((answer == truth)[truth < KNOWN].mean()))
        figures.identical.append(bool(np.array_equal(scores, now[:, : scores.shape[1]])))
        before, scores = answer, now
    figures.found = len({name for name in model.names if name >= KNOWN})
    figures.seconds = time.perf_counter() - start
    return figures


def false_alarms(model: Nothing, known: Ids, seed: int) -> int:
    """Return in how many of 5 batches of images of known classes something new is proposed."""
    assert isinstance(model, Append)
    parts = np.array_split(np.random.default_rng(seed).permutation(known), 5)
    return sum(bool(model.proposed(Stream(rows, rows, np.zeros(len(rows), bool)))) for rows in parts)


def show(played: dict[str, dict[int, Figures]], console: Console) -> None:
    """Print the table of what was played so far."""
    table = Table("row", *COLUMNS, "identical", "named, each order", title="CUB, mean of rounds and class orders")
    for name, orders in played.items():
        cells = np.array([figures.cells() for figures in orders.values()])
        each = " ".join(f"{value:.3f}" for value in cells[:, 0])
        identical = all(same for figures in orders.values() for same in figures.identical)
        values = [f"{value:.3f}" if place < 7 else f"{value:.1f}" for place, value in enumerate(cells.mean(0))]
        table.add_row(name, *values, "yes" if identical else "no", each)
    console.print(table)


def show_rounds(played: dict[str, dict[int, Figures]], console: Console) -> None:
    """Print accuracies by name in each round."""
    kinds = ("named", "old", "new")
    table = Table("row", *kinds, title="CUB, rounds one by one, mean of class orders")
    for name, orders in played.items():
        means = (np.mean([getattr(figures, kind) for figures in orders.values()], axis=0) for kind in kinds)
        table.add_row(name, *(" ".join(f"{value:.3f}" for value in values) for values in means))
    console.print(table)


def worlds_of(data: dict[str, Any], config: TrainConfig) -> Callable[[int], tuple[World, list[Stream], Ids]]:
    """Return a function that gives what rows of a class order begin with, its streams, and all classes."""
    frozen = Tail(data, config)

    @cache
    def world(seed: int) -> tuple[World, list[Stream], Ids]:
        order, first = np.random.default_rng(seed).permutation(200), frozen.copy()
        labelled, labels, streams = streams_of(data, order, seed)
        first.learn(labelled, labels, epochs=FIRST_EPOCHS, seed=seed)
        junk = set(range(KNOWN + ROUNDS * NEW, 200))
        return World(labelled, labels, frozen, first, junk, seed), streams, np.argsort(order)[data["classes"]]

    return world


def play_all(options: argparse.Namespace, console: Console) -> dict[str, dict[int, Figures]]:
    """Play every row for every class order; those that were finished before are read."""
    config, played = configured(console), dict[str, dict[int, Figures]]()
    data = maps_of(options.data, options.out, config, console)
    test, world = np.flatnonzero(~data["train"]), worlds_of(data, config)
    for name, kind in ROWS.items():
        for seed in options.orders:
            done = options.out / f"{name}-{seed}.json"
            if not done.exists():
                begin, streams, classes = world(seed)
                done.write_text(json.dumps(asdict(play(kind, begin, streams, test, classes[test]))))
            played.setdefault(name, {})[seed] = Figures(**json.loads(done.read_text()))
        show(played, console)
    return played


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=SHARED / "data" / "CUB_200_2011")
    parser.add_argument("--out", type=Path, default=Path("runs") / "rounds")
    parser.add_argument("--orders", type=int, nargs="+", default=[0, 1, 2])
    console = Console(width=170)
    played = play_all(parser.parse_args(), console)
    means = {name: statistics.mean(figures.cells()[0] for figures in each.values()) for name, each in played.items()}
    alarms = [figures.alarms for figures in played["append"].values()]
    forgotten, churn = (max(figures.cells()[place] for figures in played["append"].values()) for place in (3, 4))
    show_rounds(played, console)
    console.print(
        f"batches of known classes with a false candidate: {alarms} of 5; "
        f"append: most churn {churn:.3f}, most forgotten {forgotten:.3f}"
    )
    others = max(value for name, value in means.items() if name not in (*OURS, "oracle"))
    sys.exit(not (min(means[name] for name in OURS) > others and max(churn, forgotten) <= 0.01 and max(alarms) <= 1))


if __name__ == "__main__":
    main()
