"""Figures of a run for people: figures by group, curves over the epochs, headlines, tables of scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich.table import Table

from ncd_training.base.run_dir import ClassScore, Score, Summary
from ncd_training.config.schema import TrainConfig
from ncd_training.data.manifest import KNOWN_TEST, NOVEL_TEST, UNLABELLED_TRAIN, Manifest

EpochRow = Mapping[str, Any]  # number and figures of an epoch, as in metrics.jsonl
BALANCE = "cluster_balance"
PSEUDO = "pseudo_"  # begins the names of figures about pseudo labels: pseudo_<branch>_precision
TERMS, QUALITY, PAIRS = "objective terms", UNLABELLED_TRAIN, "pseudo labels"
WORST_CLASSES = 10  # rows of a class table, unless all classes are requested
MAX_MARKED_POINTS = 30  # curves with more points are drawn without markers
PAIR_COLUMNS = {
    "precision": "precision",
    "recall": "recall",
    "auc": "AUC",
    "precision_at_positives": "precision of best",
}


class SplitUse(NamedTuple):
    """Split, its number of images, and their use in the run."""

    split: str
    images: int
    use: str


class ScoreRow(NamedTuple):
    """Scores with the head or baseline that they belong to, and the split."""

    what: str
    split: str
    score: Score


class Curve(NamedTuple):
    """Figure over the epochs, and its look in plots and on the report page."""

    name: str
    points: list[tuple[int, float]]  # epoch and value
    colour: int  # number of the colour, from 0; figures of one branch share it
    dashed: bool


def grouped(row: EpochRow) -> dict[str, dict[str, float]]:
    """Return the figures of an epoch by group and name; an epoch without evaluation has objective terms only."""
    groups: dict[str, dict[str, float]] = {TERMS: {}, QUALITY: {}, PAIRS: {}}
    for name, value in row.items():
        if name.startswith(PSEUDO):
            groups[PAIRS][name.removeprefix(PSEUDO).replace("_", " ")] = value
        elif name in ("acc", "nmi", "ari", BALANCE):
            groups[QUALITY][name.upper() if name != BALANCE else "balance"] = value
        elif name != "epoch":
            groups[TERMS][name] = value
    return groups


def split_uses(manifest: Manifest) -> list[SplitUse]:
    """Return the splits that have images."""
    unlabelled = "known and novel classes" if manifest.open_world else "novel classes"
    rows = [
        SplitUse("labelled-train", len(manifest.labelled), f"trained on, {len(manifest.known_classes)} known classes"),
        SplitUse(UNLABELLED_TRAIN, len(manifest.unlabelled), f"trained on without labels, {unlabelled}"),
        SplitUse(KNOWN_TEST, len(manifest.known_test), "held out, known classes"),
        SplitUse(NOVEL_TEST, len(manifest.novel_test), f"held out, {unlabelled}"),
    ]
    return [row for row in rows if row.images]


def initial_weights(config: TrainConfig, summary: Summary) -> str:
    """Return a description of the initial weights of trunk and tail."""
    if weights := summary.weights:
        origin = "@".join(filter(None, [weights.repository, weights.revision]))
        licence = f"licence {weights.licence}" if weights.licence else ""
        return ", ".join(filter(None, [weights.format, weights.file, origin, licence, f"sha256 {weights.sha256}"]))
    if config.from_labels.epochs:
        return "learned from the known classes"
    return "self-supervised by rotation" if config.rotations.epochs else "random"


def curves(rows: Sequence[EpochRow], group: str) -> list[Curve]:
    """Return the figures of a group over the epochs that have them.

    `global precision` and `global recall` share a colour; recall is dashed.
    """
    points: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        for name, value in grouped(row)[group].items():
            points.setdefault(name, []).append((row["epoch"], value))
    colours: dict[str, int] = {}
    found = []
    for name, series in points.items():
        branch, _, kind = name.rpartition(" ")
        colour = colours.setdefault(branch or name, len(colours))
        found.append(Curve(name, series, colour, dashed=kind == "recall"))
    return found


def stages_before(config: TrainConfig) -> list[str]:
    """Return the stages before discovery, e.g. `3 epochs of rotations`."""
    stages = {
        "rotations": config.rotations.epochs,
        "training from labels": config.from_labels.epochs,
        "supervised training": config.supervised.epochs,
    }
    return [f"{epochs_in_words(epochs)} of {name}" for name, epochs in stages.items() if epochs]


def epochs_in_words(number: int) -> str:
    """Return `1 epoch`, `2 epochs`."""
    return f"{number} epoch{'s' * (number != 1)}"


def headlines(summary: Summary) -> list[str]:
    """Return ACC on the unlabelled images, baselines first; empty where true classes are not known."""
    if UNLABELLED_TRAIN not in summary.scores:
        return []
    scores = {**summary.baselines, summary.method or "": summary.scores[UNLABELLED_TRAIN]}
    return [f"ACC {score.acc:.3f} on {UNLABELLED_TRAIN}: {name}" for name, score in scores.items()]


def score_rows(summary: Summary) -> list[ScoreRow]:
    """Return the baselines, then the scores of every split."""
    rows = [ScoreRow(name, UNLABELLED_TRAIN, score) for name, score in summary.baselines.items()]
    for name, score in summary.scores.items():
        split, _, head = name.partition(", ")
        rows.append(ScoreRow(head or ("known head" if split == KNOWN_TEST else "cluster head"), split, score))
    return rows


def worst_first(score: Score) -> list[ClassScore]:
    """Return the classes of a split, the one with the smallest share of correct images first."""
    return sorted(score.classes, key=lambda row: (row.share, row.name))


def score_tables(summary: Summary, *, every_class: bool) -> list[Table]:
    """Return tables of scores, pseudo labels, and classes: the worst ones, or with `every_class` all of every split."""
    tables = [_scores_table(summary)]
    if summary.pseudo_labels:
        tables.append(_pairs_table(summary.pseudo_labels))
    splits = {name: score for name, score in summary.scores.items() if every_class or name == UNLABELLED_TRAIN}
    return tables + [_classes_table(split, score, every_class) for split, score in splits.items() if score.classes]


def _scores_table(summary: Summary) -> Table:
    table = _table("scores", "what", "split", "images", "ACC", "NMI", "ARI")
    for row in score_rows(summary):
        figures = (row.score.acc, row.score.nmi, row.score.ari)
        cells = ("-" if figure is None else f"{figure:.3f}" for figure in figures)
        table.add_row(row.what, row.split, f"{row.score.images:,}", *cells)
    return table


def _pairs_table(branches: Mapping[str, Mapping[str, float]]) -> Table:
    table = _table(f"{PAIRS}, {UNLABELLED_TRAIN}", "branch", *PAIR_COLUMNS.values())
    for name, quality in branches.items():
        table.add_row(name, *(f"{quality[key]:.3f}" for key in PAIR_COLUMNS))
    return table


def _classes_table(split: str, score: Score, every_class: bool) -> Table:
    rows = worst_first(score)
    shown = rows if every_class else rows[:WORST_CLASSES]
    matched = rows[0].cluster is not None
    which = "all classes" if len(shown) == len(rows) else f"the worst {len(shown)} of {len(rows)} classes"
    table = _table(f"{split}, {which}", "class", "images", *(["cluster"] if matched else []), "right")
    for row in shown:
        cluster = [str(row.cluster)] if matched else []
        table.add_row(row.name, f"{row.images:,}", *cluster, f"{row.share:.3f}")
    return table


def _table(title: str, first: str, *columns: str) -> Table:
    table = Table(first, title=title, title_justify="left", min_width=len(title))
    for name in columns:
        table.add_column(name, justify="left" if name == "split" else "right")
    return table
