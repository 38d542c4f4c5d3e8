"""Rounds of discovery on CUB-200-2011: new classes arrive, are found, named and served, and old names have to stay.

    .venv/bin/python benchmarks/rounds.py [--data DIR] [--cache FILE] [--orders 0 1 2]

100 known classes, then 4 rounds with 20 new ones each; 20 classes are junk and never named. A round's stream has 25
images of each new class, 3 of each known and 1 of each other old class, and 5% junk. A simulated person sees the five
most central images of each proposed cluster: three of one class give it that class's name, otherwise it is thrown away;
at most 30 are looked at. Test images are scored by name, without any matching. Features are those of the frozen
EfficientNet-Lite0 for all rows; they are computed once and cached. True classes name clusters and score, nothing else.

Rows: `nothing` keeps the first model. `scratch` clusters all images again each round and carries names by overlap; it
is told the number of classes. `threshold` clusters images that are far from all class means; it is told the number as
well. `append` is `discover` and `train --after`. `oracle` is `append` with the images of new classes given.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from ncd_training.config.resolve import resolve_config
from ncd_training.model.branches import DualBranchModel
from ncd_training.model.predict import run_model
from ncd_training.model.weights import initial_trunk, settle
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from sklearn.cluster import KMeans

from ncd_serve.discovery.carry import MIN_OVERLAP, overlap
from ncd_serve.discovery.find import MIN_GROUP_STRENGTH, MIN_STRENGTH
from ncd_serve.discovery.groups import find_groups, join_groups
from ncd_serve.fit import directions
from ncd_serve.mixture import fit_mixture, grow, squared_distances
from ncd_serve.progress import Progress

Floats = NDArray[Any]
Ids = NDArray[Any]
SHARED = Path(__file__).resolve().parents[2] / "shared"
KNOWN, ROUNDS, NEW, LABELLED, JUNK_SHARE = 100, 4, 20, 18, 0.05
SEEN, AGREE, BUDGET = 5, 3, 30
JUNK = -1
COLUMNS = ("named", "old", "new", "forgetting", "churn", "AUROC", "p@200", "looked/right", "false new", "K error", "s")


@dataclass
class Stream:
    """Images of a round: features, true classes, and whether each class is new."""

    features: Floats
    truth: Ids
    new: NDArray[np.bool_]


@dataclass
class Figures:
    """Scores of one row for one class order, by round."""

    named: list[float] = field(default_factory=list)
    old: list[float] = field(default_factory=list)
    new: list[float] = field(default_factory=list)
    churn: list[float] = field(default_factory=list)
    auroc: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)  # precision among the 200 images that look newest
    looked: int = 0
    right: int = 0
    false_new: int = 0
    known: list[float] = field(default_factory=list)  # accuracy on the classes of the beginning
    found: int = 0
    seconds: float = 0.0

    def cells(self) -> list[float]:
        mean = statistics.mean
        ranks = [mean(values) if values else float("nan") for values in (self.auroc, self.first)]
        effort = self.looked / self.right if self.right else float("nan")
        error = abs(self.found - ROUNDS * NEW)
        lost = self.known[0] - self.known[-1]
        return [mean(self.named), mean(self.old), mean(self.new), lost, mean(self.churn), *ranks, effort,
                self.false_new, error, self.seconds]  # fmt: skip


class Person:
    """Simulated namer: sees central images of clusters, and knows birds."""

    def __init__(self, truth: Ids, junk: set[int], figures: Figures) -> None:
        self._truth, self._junk, self._figures = truth, junk, figures
        self._left = BUDGET

    def name(self, rows: Ids, named: set[int]) -> int:
        """Return the name for a cluster with these rows of the stream, the most central first; JUNK for none."""
        if self._left == 0:
            return JUNK
        self._left -= 1
        self._figures.looked += 1
        name, count = Counter(self._truth[rows[:SEEN]].tolist()).most_common(1)[0]
        if count < AGREE or name in self._junk:
            return JUNK
        self._figures.false_new += name in named
        self._figures.right += name not in named
        return int(name)


class Nothing:
    """The first model, for ever; also the base of the other rows."""

    def __init__(self, features: Floats, labels: Ids, junk: set[int]) -> None:
        self.names = [*range(KNOWN)]
        self.mixture = fit_mixture(features, labels, number=KNOWN, first_cluster=0)
        self.training, self.classes, self.junk = self.mixture.project(features), labels, junk

    def learn(self, stream: Stream, figures: Figures) -> None:
        """Take in a round."""

    def answer(self, features: Floats) -> Ids:
        """Return the name of each image."""
        return np.array(self.names)[self.mixture.log_joint(self.mixture.project(features)).argmax(1)]

    def newness(self, features: Floats) -> Floats:
        return self.mixture.outside(features)


class Append(Nothing):
    """`discover`, and `train --after`: new columns for what a person names."""

    def learn(self, stream: Stream, figures: Figures) -> None:
        places = self.mixture.project(stream.features)
        self.accept(self.proposed(places, stream), places, stream, figures)

    def proposed(self, places: Floats, stream: Stream) -> list[Ids]:
        groups = find_groups(self.mixture, places, self.training, min_strength=MIN_GROUP_STRENGTH)
        joined = join_groups(groups, places, self.training, self.classes)
        strong = [group for group in joined if group.strength >= MIN_STRENGTH]
        return [group.rows for group in sorted(strong, key=lambda group: -len(group.rows))]

    def accept(self, groups: list[Ids], places: Floats, stream: Stream, figures: Figures) -> None:
        person, named = Person(stream.truth, self.junk, figures), list[tuple[int, Ids]]()
        for rows in groups:
            name = person.name(rows, {*self.names, *(name for name, _ in named)})
            if name != JUNK:
                named.append((name, rows))
        if not named:
            return
        members = np.concatenate([rows for _, rows in named])
        others = np.delete(places, members, axis=0)
        self.mixture = grow(self.mixture, [places[rows] for _, rows in named], others)
        numbers = [np.full(len(rows), len(self.names) + number) for number, (_, rows) in enumerate(named)]
        self.training = np.concatenate([self.training, places[members]])
        self.classes = np.concatenate([self.classes, *numbers])
        self.names += [name for name, _ in named]


class Oracle(Append):
    """As `Append`, but it is told which images are of new classes."""

    def proposed(self, places: Floats, stream: Stream) -> list[Ids]:
        rows = np.flatnonzero(stream.new)
        groups = find_groups(self.mixture, places[rows], self.training)
        joined = join_groups(groups, places[rows], self.training, self.classes)
        return [rows[group.rows] for group in sorted(joined, key=lambda group: -len(group.rows))]


class Threshold(Nothing):
    """Frozen features, nearest class mean, and k-means of the images that are farther than 95% of training images."""

    def __init__(self, features: Floats, labels: Ids, junk: set[int]) -> None:
        self.names, self.junk = [*range(KNOWN)], junk
        units = directions(features)
        self.means = np.stack([units[labels == number].mean(0) for number in range(KNOWN)])
        self.limit = float(np.quantile(self.newness(features), 0.95))

    def answer(self, features: Floats) -> Ids:
        return np.array(self.names)[squared_distances(directions(features), self.means).argmin(1)]

    def newness(self, features: Floats) -> Floats:
        return squared_distances(directions(features), self.means).min(1)

    def learn(self, stream: Stream, figures: Figures) -> None:
        person, units = Person(stream.truth, self.junk, figures), directions(stream.features)
        far = np.flatnonzero(self.newness(stream.features) > self.limit)
        if len(far) < NEW:
            return
        for rows, mean in clustered(units[far], NEW):
            name = person.name(far[rows], set(self.names))
            if name != JUNK:
                self.means, self.names = np.concatenate([self.means, mean[None]]), [*self.names, name]


class Scratch(Nothing):
    """All images again in each round: k-means beside the known classes, and names by overlap with the round before."""

    def __init__(self, features: Floats, labels: Ids, junk: set[int]) -> None:
        super().__init__(features, labels, junk)
        self.labelled = features, labels
        self.pile, self.truth = features[:0], labels[:0]
        self.rounds = 0

    def learn(self, stream: Stream, figures: Figures) -> None:
        person, self.rounds = Person(np.concatenate([self.truth, stream.truth]), self.junk, figures), self.rounds + 1
        before = self.mixture.log_joint(self.mixture.project(self.pile)).argmax(1) if len(self.pile) else None
        self.pile, self.truth = np.concatenate([self.pile, stream.features]), np.concatenate([self.truth, stream.truth])
        places = self.mixture.project(self.pile)
        limit = np.quantile(self.mixture.outside(self.labelled[0]), 0.95)
        unlike = np.flatnonzero(self.mixture.outside(self.pile) > limit)
        fresh = clustered(places[unlike], min(NEW * self.rounds, len(unlike)))
        ids = np.full(len(self.pile), -1)
        for number, (rows, _) in enumerate(fresh):
            ids[unlike[rows]] = number
        names = [*range(KNOWN)]
        old = self.names
        for number, (rows, _) in enumerate(fresh):
            carried = JUNK
            if before is not None:
                both = overlap(before, np.where(ids[: len(before)] == number, 0, 1), before=len(old), after=2)[:, 0]
                carried = old[int(both.argmax())] if both.max() > MIN_OVERLAP else JUNK
            names.append(carried if carried != JUNK else person.name(unlike[rows], set(old)))
        features = np.concatenate([self.labelled[0], *(self.pile[unlike[rows]] for rows, _ in fresh)])
        labels = np.concatenate(
            [self.labelled[1], *(np.full(len(rows), KNOWN + i) for i, (rows, _) in enumerate(fresh))]
        )
        self.names = names
        self.mixture = fit_mixture(features, labels, number=len(names), first_cluster=0)


def clustered(places: Floats, number: int) -> list[tuple[Ids, Floats]]:
    """Return rows, the most central first, and mean of each cluster of k-means."""
    ids = KMeans(number, n_init=3, random_state=0).fit_predict(places)
    found = []
    for each in range(number):
        rows = np.flatnonzero(ids == each)
        mean = places[rows].mean(0)
        found.append((rows[np.argsort(((places[rows] - mean) ** 2).sum(1))], mean))
    return sorted(found, key=lambda pair: -len(pair[0]))


def features_of(data: Path, cache: Path, console: Console) -> dict[str, Any]:
    """Return features, classes and the split of all images; computed once."""
    if not cache.exists():
        config = settle(resolve_config(recipes=["plus"]), images=10_000, progress=Progress(console))
        parts, _ = initial_trunk(config, weights=config.model.weights_file)
        names = [line.split()[1] for line in (data / "images.txt").read_text().splitlines()]
        split = [int(line.split()[1]) for line in (data / "train_test_split.txt").read_text().splitlines()]
        paths = [data / "images" / name for name in names]
        model, track = DualBranchModel(parts, known=2, novel=2), Progress(console).track
        outputs = run_model(model, paths, config.data.preprocess, workers=2, track=track, what="features")
        classes = np.array([int(name[:3]) - 1 for name in names])
        np.savez(cache, e=outputs.embedding, y=classes, train=np.array(split))
    with np.load(cache) as stored:
        return {"features": stored["e"], "classes": stored["y"], "train": stored["train"] == 1}


def streams_of(data: dict[str, Any], order: Ids, rng: np.random.Generator) -> tuple[Floats, Ids, list[Stream]]:
    """Return labelled features, their classes (numbers in the order), and the streams; no image comes twice."""
    classes = np.argsort(order)[data["classes"]]  # known first, then by round, then junk
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
        streams.append(Stream(data["features"][rows], classes[rows], np.arange(len(rows)) < fresh))
    return data["features"][labelled], classes[labelled], streams


def auroc(scores: Floats, new: NDArray[np.bool_]) -> float:
    ranks = scores.argsort().argsort()
    return float((ranks[new].mean() - (new.sum() - 1) / 2) / (~new).sum())


def play(row: type[Nothing], data: dict[str, Any], order: Ids, seed: int) -> Figures:
    """Play all rounds of one row."""
    labelled, labels, streams = streams_of(data, order, np.random.default_rng(seed))
    classes, figures = np.argsort(order)[data["classes"]], Figures()
    start = time.perf_counter()
    model = row(labelled, labels, set(range(KNOWN + ROUNDS * NEW, 200)))
    test = data["features"][~data["train"]]
    truth = classes[~data["train"]]
    before = model.answer(test)
    figures.known.append(float((before == truth)[truth < KNOWN].mean()))
    for turn, stream in enumerate(streams):
        scores = model.newness(stream.features)
        figures.auroc.append(auroc(scores, stream.new))
        figures.first.append(float(stream.new[np.argsort(-scores)[:200]].mean()))
        model.learn(stream, figures)
        answer, first = model.answer(test), KNOWN + turn * NEW
        old, new = truth < first, (truth >= first) & (truth < first + NEW)
        figures.named.append(float((answer == truth)[old | new].mean()))
        figures.old.append(float((answer == truth)[old].mean()))
        figures.new.append(float((answer == truth)[new].mean()))
        figures.churn.append(float((answer != before)[old].mean()))
        figures.known.append(float((answer == truth)[truth < KNOWN].mean()))
        before = answer
    figures.found = len({name for name in model.names if name >= KNOWN})
    figures.seconds = time.perf_counter() - start
    return figures


def false_alarms(data: dict[str, Any], order: Ids, seed: int) -> int:
    """Return in how many of 5 batches of images of known classes something new is proposed."""
    labelled, labels, _ = streams_of(data, order, np.random.default_rng(seed))
    model, rng = Append(labelled, labels, set()), np.random.default_rng(seed)
    classes = np.argsort(order)[data["classes"]]
    rows = rng.permutation(np.flatnonzero(~data["train"] & (classes < KNOWN)))
    batches = [data["features"][part] for part in np.array_split(rows, 5)]
    nothing = Stream(rows, rows, np.zeros(0, bool))
    return sum(bool(model.proposed(model.mixture.project(batch), nothing)) for batch in batches)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=SHARED / "data" / "CUB_200_2011")
    parser.add_argument("--cache", type=Path, default=Path("/tmp/ncd-cub-features.npz"))
    parser.add_argument("--orders", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    console = Console(width=150)
    data = features_of(options.data, options.cache, console)
    rows = {"nothing": Nothing, "scratch": Scratch, "threshold": Threshold, "append": Append, "oracle": Oracle}
    table = Table("row", *COLUMNS, "named, each order", title=f"CUB, class orders {options.orders}, mean of rounds")
    means, alarms = {}, []
    for name, row in rows.items():
        played = []
        for seed in options.orders:
            order = np.random.default_rng(seed).permutation(200)
            played.append(play(row, data, order, seed))
            if row is Append:
                alarms.append(false_alarms(data, order, seed))
        cells = np.array([figures.cells() for figures in played])
        means[name] = cells[:, 0].mean()
        each = " ".join(f"{value:.3f}" for value in cells[:, 0])
        table.add_row(name, *(f"{v:.3f}" if i < 7 else f"{v:.1f}" for i, v in enumerate(cells.mean(0))), each)
        if row is Append:
            churn, lost = cells[:, 4].max(), cells[:, 3].max()
    console.print(table)
    console.print(f"batches of known classes with a false candidate: {alarms} of 5; append: most churn {churn:.3f}")
    ahead = means["append"] > max(value for name, value in means.items() if name not in ("append", "oracle"))
    sys.exit(not (ahead and churn <= 0.05 and lost <= 0.05 and max(alarms) <= 1))


if __name__ == "__main__":
    main()
