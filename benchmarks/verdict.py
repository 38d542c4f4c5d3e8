"""Verdict without labels against the truth, on good and bad runs of letters, CIFAR-10 and CUB images.

    .venv/bin/python benchmarks/verdict.py [--data letters cifar10 cub] [--splits N] [--out build/verdict] [--plot FILE]
        [--finished]

Small runs: classes are drawn by split, half of the variants are bad on purpose. Finished runs in --out are kept; with
`--finished` only those are shown. Splits after the first are fresh: the formula was chosen on the first one.
`expected` is the ACC that `train` prints. `left out` is the same formula with coefficients from the runs of the other
two datasets; the root of the ratio of clusters and classes is not fitted. Rank correlations (Spearman) and mean errors
of both end the table; so do coefficients from all runs of split 0, which `score/verdict.py` has, and the purity of
tight clusters and of the others. True classes score, and nothing else.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from ncd_training import discover, open_run
from ncd_training.data.datasets.glyphs import KNOWN, NOVEL, write_glyphs
from ncd_training.score.verdict import Weights, expected_accuracy
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from scipy.stats import spearmanr

from ncd_serve.reference import REFERENCE, Reference

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
HIDDEN_SHARE = 3  # one in three images of known classes joins a mixed pile
console = Console(width=110)


class Source(NamedTuple):
    """Numbers of known and novel classes, of images of each, side of the images in px, and splits."""

    known: int
    novel: int
    images: int
    side: int
    splits: int


class Variant(NamedTuple):
    """Options and settings of a run, and its number of clusters for every novel class."""

    options: dict[str, Any]
    settings: dict[str, Any]
    clusters: float = 1.0


class Result(NamedTuple):
    """Figures of a run."""

    data: str
    split: int
    variant: str
    acc: float
    expected: float
    settled: float
    likeness: float
    classes: str  # estimated, and clusters
    purities: dict[bool, list[float]]  # of tight clusters, and of the others


SOURCES = {
    "letters": Source(16, 10, 40, 48, 2),
    "cifar10": Source(5, 5, 80, 80, 2),
    "cub": Source(40, 20, 20, 128, 1),
}
OWN, QUICK = {"recipe": "own-images"}, {"recipe": "quick"}
NOVEL_ONLY = {"data.pile": "novel"}
SHORT = {"optim.epochs": 1, "optim.milestones": [1], "supervised.epochs": 1}
VARIANTS = {
    "own-images": Variant(OWN, NOVEL_ONLY),
    "too few clusters": Variant(OWN, NOVEL_ONLY, 0.5),
    "too many clusters": Variant(OWN, NOVEL_ONLY, 2.0),
    "random weights": Variant(OWN, {**NOVEL_ONLY, "model.weights": "none"}),
    "quick": Variant(QUICK, {}),
    "quick, few epochs": Variant(QUICK, SHORT),
    "k-means": Variant({"recipe": ["quick", "kmeans-quick"], "method": "kmeans"}, {}),
    "mixed pile": Variant(OWN, {"data.pile": "mixed"}),
}


def images_of(name: str, out: Path) -> dict[str, list[Path]]:
    """Return the images of a dataset by class."""
    if name == "letters":
        root = write_glyphs(out / "letters", train=80, test=1, seed=22) / "train"
        folders = [root / letter for letter in KNOWN + NOVEL]
    elif name == "cifar10":
        folders = sorted((SHARED / "cifar10_images" / "train").iterdir())
    else:
        folders = sorted((SHARED / "CUB_200_2011" / "images").iterdir())
    return {folder.name: sorted(folder.iterdir()) for folder in folders}


def write_manifest(name: str, split: int, mixed: bool, out: Path) -> Path:
    """Draw known and novel classes and some images of each, and write them as a manifest."""
    source, found = SOURCES[name], images_of(name, out)
    rng = np.random.default_rng([22, split])
    drawn = [list(found)[number] for number in rng.permutation(len(found))[: source.known + source.novel]]
    file = out / f"{name}-{split}{'-mixed' * mixed}.csv"
    with file.open("w", newline="") as stream:
        rows = csv.writer(stream)
        rows.writerow(["path", "label", "true_label"])
        for place, label in enumerate(drawn):
            for number, row in enumerate(rng.permutation(len(found[label]))[: source.images].tolist()):
                hidden = place >= source.known or (mixed and number % HIDDEN_SHARE == 0)
                rows.writerow([found[label][row].absolute(), "" if hidden else label, label if hidden else ""])
    return file


def train(name: str, split: int, variant: str, folder: Path) -> None:
    """Train a run, or continue it."""
    source, (options, settings, share), out = SOURCES[name], VARIANTS[variant], folder.parent
    mixed = variant == "mixed pile"
    size = {"data.resolution": source.side, "data.resize": source.side, "report.tsne_epochs": []}
    views = {"data.cache_dir": str((out / f"views-{name}-{split}{'-mixed' * mixed}").absolute())}
    upright = {"data.augmentation": "glyph"} if name == "letters" else {}
    if folder.exists():
        open_run(folder, progress=False).resume()
        return
    discover(
        manifest=write_manifest(name, split, mixed, out),
        novel_classes=max(2, round(share * source.novel)),
        settings={**size, **views, **upright, **settings},
        out=folder,
        seed=split,
        progress=False,
        **options,
    )


def folder_of(name: str, split: int, variant: str, out: Path) -> Path:
    """Return the run's directory."""
    return out / f"{name}-{split}-{variant.replace(',', '').replace(' ', '-')}"


def measured(name: str, split: int, variant: str, out: Path) -> Result:
    """Return the figures of a run; train or evaluate it if it has none."""
    folder = folder_of(name, split, variant, out)
    if not (folder / "reference.npz").exists():
        train(name, split, variant, folder)
    run = open_run(folder, progress=False)
    verdict = run.summary.verdict
    summary = run.evaluate() if verdict is None or verdict.settled is None else run.summary
    verdict = summary.verdict
    assert verdict is not None and verdict.settled is not None
    acc, measures = summary.scores["unlabelled-train"].acc, (verdict.settled, verdict.likeness)
    console.print(f"{folder.name}: ACC {acc:.3f}, {'; '.join(verdict.sentences())}", soft_wrap=True, highlight=False)
    numbers = f"{verdict.classes} / {verdict.clusters}"
    purities = purities_of(Reference.read(folder / REFERENCE), verdict.tight)
    # Computed again, not `verdict.expected`: a run that is kept may be older than the coefficients.
    return Result(name, split, variant, acc, expected_accuracy(*measures), *measures, numbers, purities)


def purities_of(reference: Reference, tight: list[int]) -> dict[bool, list[float]]:
    """Return the shares of the most frequent true class in tight clusters and in the others."""
    found: dict[bool, list[float]] = {True: [], False: []}
    truth = np.array(reference.truth)
    for number in np.unique(reference.cluster_ids).tolist():
        counts = np.unique(truth[reference.cluster_ids == number], return_counts=True)[1]
        found[number in tight].append(float(counts.max() / counts.sum()))
    return found


def fitted(results: list[Result]) -> Weights:
    """Return the coefficients that predict the ACC of these runs best, by least squares."""
    ratios = np.array([[result.likeness**0.5] for result in results])
    rows = np.array([[1.0, result.settled] for result in results])
    return Weights(*np.linalg.lstsq(ratios * rows, np.array([result.acc for result in results]), rcond=None)[0])


def left_out(results: list[Result]) -> list[float]:
    """Return the expected ACC of each run, with coefficients from the other datasets."""
    weights = {name: fitted([other for other in results if other.data != name]) for name in SOURCES}
    return [expected_accuracy(result.settled, result.likeness, weights[result.data]) for result in results]


def show(results: list[Result]) -> None:
    """Print the table, and how well ACC is predicted."""
    columns = ("data", "split", "run", "ACC", "expected", "left out", "classes / clusters")
    table = Table(*columns, title="ACC without labels")
    predicted, true = left_out(results), np.array([result.acc for result in results])
    for result, guess in sorted(zip(results, predicted, strict=True), key=lambda pair: -pair[0].acc):
        figures = (f"{value:.2f}" for value in (result.acc, result.expected, guess))
        table.add_row(result.data, str(result.split), result.variant, *figures, result.classes)
    console.print(table)
    expected = np.array([result.expected for result in results])
    fresh = np.array([result.split > 0 for result in results])
    for name, guesses in (("expected", expected), ("left out", np.array(predicted))):
        console.print(f"{name}: {_fit_line(guesses, true)}")
        if fresh.sum() > 2:
            console.print(f"{name}, other splits: {_fit_line(guesses[fresh], true[fresh])}")
    for name, tight in (("tight clusters", True), ("other clusters", False)):
        purities = [purity for result in results for purity in result.purities[tight]]
        console.print(f"{name}: mean purity {np.mean(purities):.2f}, {len(purities)} clusters")
    console.print(f"coefficients of split 0: {fitted([result for result in results if result.split == 0])}")


def _fit_line(guesses: NDArray[np.float64], true: NDArray[np.float64]) -> str:
    rank = spearmanr(guesses, true).statistic
    return f"rank correlation {rank:.3f}, mean error {np.abs(guesses - true).mean():.3f}, {len(true)} runs"


def draw(results: list[Result], target: Path) -> None:
    """Draw expected against true ACC, with coefficients from other datasets."""
    figure = Figure(figsize=(5, 4.4), layout="constrained")
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color="0.75", linewidth=1)
    pairs = [*zip(results, left_out(results), strict=True)]
    for name, marker in zip(SOURCES, "osD", strict=True):
        points = np.array([(guess, result.acc) for result, guess in pairs if result.data == name]).reshape(-1, 2)
        axes.scatter(points[:, 0], points[:, 1], marker=marker, s=34, alpha=0.8, label=name)
    axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="expected ACC, coefficients from the other datasets", ylabel="true ACC")
    axes.legend(frameon=False, loc="upper left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(target, metadata={"Date": None})


def main() -> None:
    """Train missing runs, print all figures, draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", choices=SOURCES, default=[*SOURCES])
    parser.add_argument("--splits", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("build/verdict"))
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--finished", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    wanted = [
        (name, split, variant)
        for split in range(options.splits)
        for variant in VARIANTS
        for name in options.data
        if split < SOURCES[name].splits and not (name == "cifar10" and variant == "mixed pile")  # 5 known are too few
    ]
    if options.finished:
        wanted = [each for each in wanted if (folder_of(*each, options.out) / "reference.npz").exists()]
    results = [measured(*each, options.out) for each in wanted]
    show(results)
    if options.plot:
        draw(results, options.plot)


if __name__ == "__main__":
    main()
