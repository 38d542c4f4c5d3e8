"""The paper's tables in small: its method, ablations and rivals on CIFAR-10 images or CUB, with EfficientNet-Lite0.

    .venv/bin/python benchmarks/paper.py [--data cifar10|cub200|birds] [--rows full g ...] [--seeds 0 1 2] [--out DIR]

CIFAR-10: 600 labelled images of each of the 5 known classes, 400 unlabelled ones of each novel class, at 96 px. CUB:
160 known and 40 novel classes at 160 px. Birds: 60 of CUB's known classes, and 20 others of them as novel, with which
settings are chosen. All rows use the recipe `quick` (cached views, the paper's learning rate).
ACC in % on the unlabelled training images after the last epoch, beside the paper's figures, which come from other
backbones and 200 epochs. `small-heads`, `euclidean`, `not-centred` and `not-calibrated` each switch off a choice of
`quick` that is not the paper's, `as-published` all of them. `g-small-heads`, `g-large-heads` and `g-cosine-heads` have
other heads on the global branch alone.
Finished runs in --out are kept, so an interrupted benchmark resumes.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import numpy as np
from ncd_training.study.compare import Wishes
from ncd_training.study.compare_rows import Row, RowSet, row_set
from ncd_training.study.compare_run import run_comparison
from ncd_training.study.compare_table import Comparison, ResultRow
from piles import CIFAR, read_cub
from rich.console import Console
from rich.table import Table

from ncd_serve.progress import Progress

SHARED = Path(__file__).resolve().parents[2] / "shared"
KNOWN, LABELLED, UNLABELLED = 5, 600, 400
BIRDS, NOVEL_BIRDS, KNOWN_BIRDS = 160, 20, 60
SETS = {
    "branches": ("g", "p", "g+g", "p+p"),
    "components": ("no-bce", "no-distillation", "no-cross-entropy", "no-consistency"),
    "ranking": ("ranking-hard", "cosine-hard", "cosine-soft"),
    "v-sampling": ("all", "cam"),
    "divergence": ("jensen-shannon",),
    "baselines": ("full", "rankstat", "dtc", "kcl", "mcl", "orca", "kmeans"),
}
GLOBAL = {"model.branches": "global"}
AS_PUBLISHED = {
    "model.head_gain": 1.0,
    "model.dictionary_similarity": "euclidean",
    "pseudo_labels.centred": False,
    "pseudo_labels.calibrated": False,
    "pseudo_labels.global_top_k": 5,
}
OWN = (
    Row(label="kmeans-initial", method="kmeans", settings={"supervised.epochs": 0}),
    Row(label="with-supervised-stage", recipes=("supervised",)),
    Row(label="small-heads", settings={"model.head_gain": 1.0}),
    Row(label="g-small-heads", settings={**GLOBAL, "model.head_gain": 1.0}),
    Row(label="g-large-heads", settings={**GLOBAL, "model.head_gain": 20.0}),
    Row(label="g-cosine-heads", settings={**GLOBAL, "model.head_form": "cosine"}),
    Row(label="euclidean", settings={"model.dictionary_similarity": "euclidean"}),
    Row(label="not-centred", settings={"pseudo_labels.centred": False}),
    Row(label="not-calibrated", settings={"pseudo_labels.calibrated": False}),
    Row(label="as-published", settings=AS_PUBLISHED),
)
console = Console(width=130)


def all_rows() -> list[Row]:
    """Return the rows of the paper's tables, each once, and our own."""
    return [*(row for name, labels in SETS.items() for row in row_set(name).pick(labels)), *OWN]


def cifar10_images() -> list[tuple[Path, str, bool]]:
    """Return the CIFAR-10 images of the benchmark, with their classes, and whether they are labelled."""
    found = []
    for number, name in enumerate(CIFAR):
        paths = sorted((SHARED / "data" / "cifar10_images" / "train" / name).iterdir())
        known = number < KNOWN
        found += [(path, name, known) for path in paths[: LABELLED if known else UNLABELLED]]
    return found


def bird_images() -> list[tuple[Path, str, bool]]:
    """Return images of known birds, some of which play novel ones, with classes, and whether they are labelled."""
    order = np.random.default_rng(5).permutation(BIRDS).tolist()
    novel, known = set(order[:NOVEL_BIRDS]), set(order[NOVEL_BIRDS : NOVEL_BIRDS + KNOWN_BIRDS])
    return [(path, path.parent.name, number in known) for path, number in read_cub() if number in novel | known]


def write_manifest(file: Path, images: list[tuple[Path, str, bool]]) -> None:
    """List images in a file for `--manifest`."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", newline="") as stream:
        lines = csv.writer(stream)
        lines.writerow(["path", "label", "true_label"])
        lines.writerows([path, name if known else "", "" if known else name] for path, name, known in images)


def wishes(data: str, folder: Path) -> Wishes:
    """Return the settings of all rows."""
    weights = {"model.weights": str(SHARED / "weights" / "tf_efficientnet_lite0.safetensors")}
    if data == "cub200":
        places = {"data.dataset": "cub200", "data.root": str(SHARED / "data" / "CUB_200_2011")}
        return Wishes(["quick"], None, {**places, **weights}, {})
    cifar10, file = data == "cifar10", folder / f"{data}.csv"
    write_manifest(file, cifar10_images() if cifar10 else bird_images())
    images = {"data.manifest": str(file), "data.novel_classes": KNOWN if cifar10 else NOVEL_BIRDS}
    small = {"data.resolution": 96, "data.resize": 96} if cifar10 else {}
    return Wishes(["quick"], None, {**images, **weights}, small)


def show(data: str, found: Comparison, rows: list[Row]) -> None:
    published = {row.label: row.figures(data).get("novel", (None,))[0] for row in rows}
    table = Table(title=f"{data}: ACC in %", title_justify="left")
    for name in ("row", "mean", "each seed", "paper", "minutes", "CPU minutes"):
        table.add_column(name, justify="left" if name == "row" else "right")
    for line in sorted(found.lines, key=lambda line: -(mean(line) or 0)):
        paper = published[line.label]
        table.add_row(
            line.label,
            f"{mean(line):.1f}" if line.seeds else "failed",
            " ".join(f"{value:.1f}" for value in line.acc.get("unlabelled-train", [])),
            "" if paper is None else f"{paper:.1f}",
            f"{line.seconds / 60:.0f}",
            f"{line.cpu_seconds / 60:.0f}",
        )
    console.print(table)
    for text in found.errors:
        console.print(text)


def mean(line: ResultRow) -> float | None:
    return line.measured("unlabelled-train")[0]


def main() -> None:
    """Train the missing rows, and print the table."""
    names = [row.label for row in all_rows()]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=("cifar10", "cub200", "birds"), default="cifar10")
    parser.add_argument("--rows", nargs="+", choices=names, default=names)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/paper"))
    options = parser.parse_args()
    rows = [row for row in all_rows() if row.label in options.rows]
    folder = options.out / options.data
    chosen = RowSet(title="the paper in small", rows=tuple(rows))
    given = wishes(options.data, folder)
    found = run_comparison("paper", chosen, [], options.seeds, given, folder, progress=Progress(console))
    show(options.data, found, rows)


if __name__ == "__main__":
    main()
