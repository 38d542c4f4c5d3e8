"""What a person reads of a run: figures by group, headlines, tables of scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich.table import Table

from ncd_training.config.schema import TrainConfig
from ncd_training.data.manifest import KNOWN_TEST, NOVEL_TEST, UNLABELLED_TRAIN, Manifest

BALANCE = "cluster_balance"
PSEUDO = "pseudo_"  # begins the names of figures about pseudo labels: pseudo_<branch>_precision
TERMS, QUALITY, PAIRS = "objective terms", UNLABELLED_TRAIN, "pseudo labels"
METHODS = {
    "dual": "dual ranking statistics and mutual knowledge distillation (Zhao and Han, NeurIPS 2021)",
    "rankstat": "ranking statistics (Han et al., ICLR 2020)",
    "dtc": "deep transfer clustering (Han, Vedaldi and Zisserman, ICCV 2019)",
    "kcl": "a constrained clustering network (Hsu, Lv and Kira, ICLR 2018)",
    "mcl": "meta classification likelihood (Hsu et al., ICLR 2019)",
    "kmeans": "k-means on the features that training would start from",
    "orca": "ORCA (Cao, Brbic and Leskovec, ICLR 2022)",
}
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
    score: Mapping[str, Any]


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


def initial_weights(config: TrainConfig, summary: Mapping[str, Any]) -> str:
    """Where trunk and tail started from."""
    if "weights" in summary:
        return "{format}, {file}, sha256 {sha256}".format(**summary["weights"])
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


def headlines(summary: Mapping[str, Any]) -> list[str]:
    """ACC on the unlabelled images and what it has to beat; nothing where no true classes are known."""
    if UNLABELLED_TRAIN not in summary["scores"]:
        return []
    scores = {**summary["baselines"], summary["method"]: summary["scores"][UNLABELLED_TRAIN]}
    return [f"ACC {score['acc']:.3f} on {UNLABELLED_TRAIN}: {name}" for name, score in scores.items()]


def score_rows(summary: Mapping[str, Any]) -> list[ScoreRow]:
    """Baselines, then the scores of every split."""
    rows = [ScoreRow(name, UNLABELLED_TRAIN, score) for name, score in summary["baselines"].items()]
    for name, score in summary["scores"].items():
        split, _, head = name.partition(", ")
        rows.append(ScoreRow(head or ("known head" if split == KNOWN_TEST else "cluster head"), split, score))
    return rows


def worst_first(score: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The classes of a split, by the share of their images that is right."""
    return sorted(score["classes"], key=lambda row: (row["share"], row["class"]))


def score_tables(summary: Mapping[str, Any], *, every_class: bool) -> list[Table]:
    """Scores, quality of the pseudo labels, and classes (the worst, or all of each split). Each names its split."""
    tables = [_scores_table(summary)]
    if summary.get("pseudo_labels"):
        tables.append(_pairs_table(summary["pseudo_labels"]))
    splits = summary["scores"] if every_class else {UNLABELLED_TRAIN: summary["scores"].get(UNLABELLED_TRAIN)}
    return tables + [
        _classes_table(split, score, every_class) for split, score in splits.items() if score and "classes" in score
    ]


def _scores_table(summary: Mapping[str, Any]) -> Table:
    table = _table("scores", "what", "split", "images", "ACC", "NMI", "ARI")
    for row in score_rows(summary):
        table.add_row(row.what, row.split, *_cells(row.score))
    return table


def _pairs_table(branches: Mapping[str, Mapping[str, float]]) -> Table:
    table = _table(f"{PAIRS}, {UNLABELLED_TRAIN}", "branch", *PAIR_COLUMNS.values())
    for name, quality in branches.items():
        table.add_row(name, *(f"{quality[key]:.3f}" for key in PAIR_COLUMNS))
    return table


def _classes_table(split: str, score: Mapping[str, Any], every_class: bool) -> Table:
    rows = worst_first(score)
    shown = rows if every_class else rows[:WORST]
    matched = "cluster" in rows[0]
    which = "all classes" if len(shown) == len(rows) else f"the worst {len(shown)} of {len(rows)} classes"
    table = _table(f"{split}, {which}", "class", "images", *(["cluster"] if matched else []), "right")
    for row in shown:
        cluster = [str(row["cluster"])] if matched else []
        table.add_row(row["class"], f"{row['images']:,}", *cluster, f"{row['share']:.3f}")
    return table


def _table(title: str, first: str, *columns: str) -> Table:
    table = Table(first, title=title, title_justify="left", min_width=len(title))
    for name in columns:
        table.add_column(name, justify="left" if name == "split" else "right")
    return table


def _cells(score: Mapping[str, float]) -> list[str]:
    return [f"{score['images']:,}", *(f"{score[name]:.3f}" if name in score else "-" for name in ("acc", "nmi", "ari"))]
