"""What a person reads of a run: figures by group, headlines, tables of scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich.table import Table

from ncd_training.base.scores import ClassScore, Score, Summary
from ncd_training.config.schema import TrainConfig
from ncd_training.data.manifest import KNOWN_TEST, NOVEL_TEST, UNLABELLED_TRAIN, Manifest

BALANCE = "cluster_balance"
PSEUDO = "pseudo_"  # begins the names of figures about pseudo labels: pseudo_<branch>_precision
TERMS, QUALITY, PAIRS = "objective terms", UNLABELLED_TRAIN, "pseudo labels"
WORST = 10  # classes that are shown unless all are asked for
PAIR_COLUMNS = {
    "precision": "precision",
    "recall": "recall",
    "auc": "AUC",
    "precision_at_positives": "precision of best",
}


class SplitUse(NamedTuple):
    """Images, and what for."""

    split: str
    images: int
    use: str


class ScoreRow(NamedTuple):
    """Scores, what made them and on which split."""

    what: str
    split: str
    score: Score


def grouped(row: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """An epoch's figures by what they are about; an epoch that was not looked at has terms alone."""
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
    """The splits that have images."""
    pile = "known and novel classes" if manifest.open_world else "novel classes"
    rows = [
        SplitUse("labelled-train", len(manifest.labelled), f"trained on, {len(manifest.known_classes)} known classes"),
        SplitUse(UNLABELLED_TRAIN, len(manifest.unlabelled), f"trained on without labels, {pile}"),
        SplitUse(KNOWN_TEST, len(manifest.known_test), "held out, known classes"),
        SplitUse(NOVEL_TEST, len(manifest.novel_test), f"held out, {pile}"),
    ]
    return [row for row in rows if row.images]


def initial_weights(config: TrainConfig, summary: Summary) -> str:
    """Return in words what trunk and tail started from."""
    if weights := summary.weights:
        return f"{weights.format}, {weights.file}, sha256 {weights.sha256}"
    if config.from_labels.epochs:
        return "learned from the known classes"
    return "self-supervised by rotation" if config.rotations.epochs else "random"


def curves(rows: Sequence[Mapping[str, Any]], group: str) -> dict[str, list[tuple[int, float]]]:
    """The figures of a group over the epochs in which they were looked at."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        for figure, value in grouped(row)[group].items():
            found.setdefault(figure, []).append((row["epoch"], value))
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
    """Return ACC on the unlabelled images beside the baselines; nothing where no true classes are known."""
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
    """Return the classes of a split by the share of their images that is right."""
    return sorted(score.classes, key=lambda row: (row.share, row.name))


def score_tables(summary: Summary, *, every_class: bool) -> list[Table]:
    """Return tables of scores, pseudo labels, and classes (the worst, or all of each split). Each names its split."""
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
    shown = rows if every_class else rows[:WORST]
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
