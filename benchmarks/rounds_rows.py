"""Rows of `rounds.py`: what can be done about new classes, from nothing to training again."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rounds_tail import Tail
from sklearn.cluster import KMeans

from ncd_serve.discovery.carry import MIN_OVERLAP, overlap
from ncd_serve.discovery.find import MIN_GROUP_STRENGTH, MIN_STRENGTH
from ncd_serve.discovery.groups import find_groups, join_groups
from ncd_serve.fit import directions
from ncd_serve.mixture import fit_mixture, grow, squared_distances

Floats = NDArray[Any]
Ids = NDArray[Any]
KNOWN, ROUNDS, NEW = 100, 4, 20
SEEN, AGREE, BUDGET = 5, 3, 30
JUNK = -1
FIRST_EPOCHS, EPOCHS, SURE_SHARE = 3, 1, 0.7  # epochs of a tail that begins, and of one that goes on


@dataclass
class Stream:
    """Images of a round: rows of the data, true classes, and whether each class is new."""

    rows: Ids
    truth: Ids
    new: NDArray[np.bool_]


@dataclass
class World:
    """Start of all rows: labelled images, and features before and after training on them."""

    labelled: Ids
    labels: Ids
    frozen: Tail
    first: Tail
    junk: set[int]
    seed: int


@dataclass
class Figures:
    """Scores of one row for one class order, by round."""

    named: list[float] = field(default_factory=list)
    old: list[float] = field(default_factory=list)
    new: list[float] = field(default_factory=list)
    churn: list[float] = field(default_factory=list)
    identical: list[bool] = field(default_factory=list)
    auroc: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)  # precision among the 200 images that look newest
    looked: int = 0
    right: int = 0
    false_new: int = 0
    known: list[float] = field(default_factory=list)  # accuracy on the classes of the beginning
    found: int = 0
    seconds: float = 0.0
    alarms: int = 0  # batches of known classes, of 5, in which something new is proposed

    def cells(self) -> list[float]:
        mean = statistics.mean
        effort = self.looked / self.right if self.right else float("nan")
        error = abs(self.found - ROUNDS * NEW)
        return [mean(self.named), mean(self.old), mean(self.new), self.known[0] - self.known[-1], mean(self.churn),
                mean(self.auroc), mean(self.first), effort, self.false_new, error, self.seconds / 60]  # fmt: skip


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

    def __init__(self, world: World) -> None:
        self.world, self.names = world, [*range(KNOWN)]
        self.tail = world.first.copy()  # it computes features anew, so that each row's minutes are its own
        self.rows, self.classes = world.labelled, world.labels
        self.fit()

    def fit(self) -> None:
        """Make the mixture of all classes, from the images of training."""
        features = self.tail.features(self.rows)
        self.mixture = fit_mixture(features, self.classes, number=len(self.names), known=0)

    def learn(self, stream: Stream, figures: Figures) -> None:
        """Take in a round."""

    def scores(self, rows: Ids) -> Floats:
        """Return a score of every class for each image."""
        return self.mixture.log_joint(self.mixture.project(self.tail.features(rows)))

    def answer(self, rows: Ids) -> Ids:
        """Return the name of each image."""
        return np.array(self.names)[self.scores(rows).argmax(1)]

    def newness(self, rows: Ids) -> Floats:
        return self.mixture.outside(self.tail.features(rows))


class Append(Nothing):
    """`discover`, and `train --after`: new columns for what a person names."""

    def learn(self, stream: Stream, figures: Figures) -> None:
        self.accept(self.proposed(stream), stream, figures)

    def places(self, rows: Ids) -> Floats:
        return self.mixture.project(self.tail.features(rows))

    def proposed(self, stream: Stream) -> list[Ids]:
        """Return groups of the stream, as numbers of its images."""
        return self._groups(np.arange(len(stream.rows)), stream, MIN_GROUP_STRENGTH, MIN_STRENGTH)

    def _groups(self, chosen: Ids, stream: Stream, least: float, strong: float) -> list[Ids]:
        places, training = self.places(stream.rows[chosen]), self.places(self.rows)
        groups = find_groups(self.mixture, places, training, min_strength=least)
        joined = [group for group in join_groups(groups, places, training, self.classes) if group.strength >= strong]
        return [chosen[group.rows] for group in sorted(joined, key=lambda group: -len(group.rows))]

    def accept(self, groups: list[Ids], stream: Stream, figures: Figures) -> None:
        person, named = Person(stream.truth, self.world.junk, figures), list[tuple[int, Ids]]()
        for rows in groups:
            name = person.name(rows, {*self.names, *(name for name, _ in named)})
            if name != JUNK:
                named.append((name, rows))
        if not named:
            return
        members = np.concatenate([rows for _, rows in named])
        places, training = self.places(stream.rows), (self.places(self.rows), self.classes)
        others = np.delete(places, members, axis=0)
        self.mixture = grow(self.mixture, [places[rows] for _, rows in named], others, training)
        numbers = [np.full(len(rows), len(self.names) + number) for number, (_, rows) in enumerate(named)]
        self.rows = np.concatenate([self.rows, stream.rows[members]])
        self.classes = np.concatenate([self.classes, *numbers])
        self.names += [name for name, _ in named]


class Oracle(Append):
    """As `Append`, but it is told which images are of new classes."""

    def proposed(self, stream: Stream) -> list[Ids]:
        return self._groups(np.flatnonzero(stream.new), stream, 0.0, 0.0)


class Retrain(Append):
    """`train --after --retrain --promote`: as `Append`, then the tail learns what was named, from where it is."""

    def learn(self, stream: Stream, figures: Figures) -> None:
        before = len(self.names)
        super().learn(stream, figures)
        if len(self.names) > before:
            self.tail = self.tail.copy()
            self.tail.learn(self.rows, self.classes, epochs=EPOCHS, seed=self.world.seed)
            self.fit()


class Threshold(Nothing):
    """Frozen features, nearest class mean, and k-means of the images that are farther than 95% of training images."""

    def fit(self) -> None:
        units = directions(self.tail.features(self.rows))
        self.means = np.stack([units[self.classes == number].mean(0) for number in range(KNOWN)])
        self.limit = float(np.quantile(self.newness(self.rows), 0.95))

    def scores(self, rows: Ids) -> Floats:
        return -squared_distances(directions(self.tail.features(rows)), self.means)

    def newness(self, rows: Ids) -> Floats:
        return -self.scores(rows).max(1)

    def learn(self, stream: Stream, figures: Figures) -> None:
        person = Person(stream.truth, self.world.junk, figures)
        far = np.flatnonzero(self.newness(stream.rows) > self.limit)
        if len(far) < NEW:
            return
        for rows, mean in clustered(directions(self.tail.features(stream.rows[far])), NEW):
            name = person.name(far[rows], set(self.names))
            if name != JUNK:
                self.means, self.names = np.concatenate([self.means, mean[None]]), [*self.names, name]


class Scratch(Nothing):
    """All images again in each round: clusters beside the known classes, and names by overlap with the round before."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.pile, self.truth, self.rounds = world.labelled[:0], world.labels[:0], 0

    def learn(self, stream: Stream, figures: Figures) -> None:
        before, old, self.rounds = self.scores(self.pile).argmax(1), self.names, self.rounds + 1
        self.pile, self.truth = np.concatenate([self.pile, stream.rows]), np.concatenate([self.truth, stream.truth])
        person = Person(self.truth, self.world.junk, figures)
        fresh = self._clusters()
        self._train(fresh)
        ids = self.scores(self.pile).argmax(1)
        both = overlap(before, ids[: len(before)], before=len(old), after=KNOWN + len(fresh))
        for number, rows in enumerate(fresh):
            best = int(both[:, KNOWN + number].argmax())
            same = both[best, KNOWN + number] > MIN_OVERLAP
            self.names[KNOWN + number] = old[best] if same else person.name(rows, set(old))

    def _clusters(self) -> list[Ids]:
        """Return clusters of the pile by features of the first weights, as numbers of its images."""
        world, features = self.world, self.world.frozen.features
        mixture = fit_mixture(features(world.labelled), world.labels, number=KNOWN, known=0)
        limit = np.quantile(mixture.outside(features(world.labelled)), 0.95)
        unlike = np.flatnonzero(mixture.outside(features(self.pile)) > limit)
        number = min(NEW * self.rounds, len(unlike))
        return [unlike[rows] for rows, _ in clustered(mixture.project(features(self.pile[unlike])), number)]

    def _train(self, fresh: list[Ids]) -> None:
        sure = [self.pile[rows[: max(2, round(SURE_SHARE * len(rows)))]] for rows in fresh]
        self.rows = np.concatenate([self.world.labelled, *sure])
        numbers = [np.full(len(rows), KNOWN + number) for number, rows in enumerate(sure)]
        self.classes = np.concatenate([self.world.labels, *numbers])
        self.names = [*range(KNOWN), *([JUNK] * len(fresh))]
        self.tail = self.world.frozen.copy()
        self.tail.learn(self.rows, self.classes, epochs=FIRST_EPOCHS, seed=self.world.seed)
        self.fit()


def clustered(places: Floats, number: int) -> list[tuple[Ids, Floats]]:
    """Return rows, the most central first, and mean of each cluster of k-means."""
    ids = KMeans(number, n_init=3, random_state=0).fit_predict(places)
    found = []
    for each in range(number):
        rows = np.flatnonzero(ids == each)
        mean = places[rows].mean(0)
        found.append((rows[np.argsort(((places[rows] - mean) ** 2).sum(1))], mean))
    return sorted(found, key=lambda pair: -len(pair[0]))
