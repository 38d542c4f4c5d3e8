"""Novel-class ACC of the embedded problem beside both k-means baselines, for seeds 0, 1 and 2.

    .venv/bin/python benchmarks/demo.py

A seed changes the drawn images, the weights and the order. Exit code 1 if a seed is below the README's figure.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from ncd_training import discover
from ncd_training.data.datasets.glyphs import write_glyphs
from rich.console import Console
from rich.table import Table

LEAST_ACC, LEAST_LEAD = 0.90, 0.05


def accuracies(seed: int, folder: Path) -> dict[str, float]:
    """Train with a seed, and return its ACC figures."""
    root = write_glyphs(folder / "data", seed=seed)
    summary = discover(dataset="glyphs", data_root=root, seed=seed, out=folder / "run").summary
    return {name: score.acc for name, score in {**summary.baselines, **summary.scores}.items()}


def main() -> None:
    console = Console()
    table = Table("seed", "k-means on raw pixels", "k-means on initial features", "unlabelled-train", "novel-test", "s")
    missed = False
    for seed in map(int, sys.argv[1:] or (0, 1, 2)):
        start = time.perf_counter()
        with TemporaryDirectory() as folder:
            acc = accuracies(seed, Path(folder))
        cells = [f"{acc[str(column.header)]:.3f}" for column in table.columns[1:-1]]
        table.add_row(str(seed), *cells, f"{time.perf_counter() - start:.0f}")
        lead = acc["unlabelled-train"] - max(acc["k-means on raw pixels"], acc["k-means on initial features"])
        missed |= acc["unlabelled-train"] < LEAST_ACC or lead < LEAST_LEAD
    console.print(table)
    sys.exit(missed)


if __name__ == "__main__":
    main()
