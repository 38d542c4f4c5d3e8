"""ACC on CUB-200-2011 (160 known, 40 novel classes) with EfficientNet-Lite0 at 160 px: full method and single branches.

    .venv/bin/python benchmarks/cub.py [--data DIR] [--weights FILE] [--out DIR] [--seeds 0 1 2] [--rows full ...]

Rows use the recipe `own-images`; `paper` is the paper's objective from random heads, with as many epochs as the recipe
`quick`. Scores are those of the last epoch; true novel classes are only reported. Finished runs in --out are skipped,
so an interrupted benchmark resumes. Exit code 1 if the full method is below the README's figure.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from ncd_training import discover, open_run
from rich.console import Console
from rich.table import Table

SHARED = Path(__file__).resolve().parents[2] / "shared"
ROWS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "full": (["own-images"], {}),
    "global": (["own-images"], {"model.branches": "global"}),
    "local": (["own-images"], {"model.branches": "local"}),
    "paper": (["quick"], {"supervised.epochs": 0, "optim.epochs": 6, "optim.milestones": [4], "loss.ramp_epochs": 6}),
}
LEAST_ACC, LEAST_LEAD = 0.50, 0.03


def figures(row: str, seed: int, options: argparse.Namespace) -> dict[str, float]:
    """Return the ACC figures of a row with a seed; train it unless its run is finished."""
    recipes, overrides = ROWS[row]
    folder = options.out / f"{row}-{seed}"
    if not folder.exists():
        discover(
            dataset="cub200",
            data_root=options.data,
            weights=options.weights,
            recipe=recipes,
            settings={"data.cache_dir": str(options.out / "views"), "report.tsne_epochs": [], **overrides},
            seed=seed,
            out=folder,
        )
    run = open_run(folder)
    found = (run if run.summary.scores else run.resume()).summary
    return {name: score.acc for name, score in {**found.baselines, **found.scores}.items()}


def add_row(table: Table, name: str, values: list[float]) -> None:
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    cells = " ".join(f"{value:.3f}" for value in values)
    table.add_row(name, f"{statistics.mean(values):.3f} ± {spread:.3f}", cells)


def main() -> None:
    """Train missing runs, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=SHARED / "data" / "CUB_200_2011")
    parser.add_argument("--weights", type=Path, default=SHARED / "weights" / "tf_efficientnet_lite0.safetensors")
    parser.add_argument("--out", type=Path, default=Path("runs") / "cub-benchmark")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=["full", "global", "local"])
    options = parser.parse_args()
    console = Console()
    found = {row: [figures(row, seed, options) for seed in options.seeds] for row in options.rows}
    table = Table("row", "ACC, mean of seeds", "each seed", title=f"CUB-200-2011, seeds {options.seeds}")
    for name in (name for name in found[options.rows[0]][0] if name.startswith("k-means")):
        add_row(table, f"{name}, unlabelled-train", [run[name] for run in found[options.rows[0]]])
    for row, runs in found.items():
        for split in ("unlabelled-train", "novel-test", "known-test"):
            add_row(table, f"{row}, {split}", [run[split] for run in runs])
    console.print(table)
    sys.exit("full" in found and missed(found))


def missed(found: dict[str, list[dict[str, float]]]) -> bool:
    """Return True if the full method is below the README's figure."""
    acc = {row: statistics.mean(run["unlabelled-train"] for run in runs) for row, runs in found.items()}
    baseline = statistics.mean(run["k-means on supervised features"] for run in found["full"])
    return acc["full"] < max(LEAST_ACC, baseline + LEAST_LEAD)


if __name__ == "__main__":
    main()
