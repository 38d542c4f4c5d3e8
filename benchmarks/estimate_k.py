"""Estimated number of novel classes of the embedded data and of CUB-200-2011, with the time taken.

    .venv/bin/python benchmarks/estimate_k.py [--problems glyphs cub200] [--estimators balanced dtc gcd] [--cache DIR]

`by size` is a baseline that uses no image: unlabelled images divided by the images per known class. It is right here,
since all classes of these data have one size; an estimator that uses sizes only could not be distinguished from it.
Exit code 1 if the first estimator is outside the README's limits: glyphs within 1, CUB within 15%.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ncd_training.base.run_dir import RunDir
from ncd_training.config.resolve import resolve_config
from ncd_training.data.prepare import list_images
from ncd_training.run.train import set_up
from ncd_training.study.class_features import estimate
from rich.console import Console
from rich.table import Table

from ncd_serve.progress import Progress

SHARED = Path(__file__).resolve().parents[2] / "shared"
CUB = {
    "data.root": str(SHARED / "data" / "CUB_200_2011"),
    "model.weights": str(SHARED / "weights" / "tf_efficientnet_lite0.safetensors"),
}
# Recipes, settings, the true number and how far from it an estimate may be.
PROBLEMS: dict[str, tuple[list[str], dict[str, Any], int, float]] = {
    "glyphs": (["glyphs"], {}, 5, 1),
    "cub200": (["cub200", "quick"], CUB, 40, 6),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=[*PROBLEMS])
    parser.add_argument("--estimators", nargs="+", default=["balanced"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--cache", type=Path, help="Where trunk maps are kept; default: made anew each time.")
    options = parser.parse_args()
    console, missed = Console(), False
    progress = Progress(console)
    table = Table("images", "estimator", "seed", "true", "by size", "estimate", "minutes", "CPU minutes")
    for problem in options.problems:
        recipes, settings, true, off = PROBLEMS[problem]
        for estimator in options.estimators:
            for seed in options.seeds:
                more = {"data.novel_classes": "auto", "estimate.estimator": estimator, "optim.seed": seed}
                cache = {"data.cache_dir": str(options.cache)} if options.cache else {}
                config = resolve_config(recipes=recipes, overrides={**settings, **more, **cache})
                setup = set_up(list_images(config, track=progress.track), progress=progress)
                start, worked = time.monotonic(), time.process_time()
                with tempfile.TemporaryDirectory() as folder:
                    found = estimate(setup, RunDir(Path(folder)), progress=progress).classes
                minutes = (time.monotonic() - start) / 60, (time.process_time() - worked) / 60
                manifest = setup.manifest
                by_size = len(manifest.unlabelled) * len(manifest.known_classes) / len(manifest.labelled)
                numbers = (str(seed), str(true), f"{by_size:.1f}", str(found))
                table.add_row(problem, estimator, *numbers, *(f"{m:.1f}" for m in minutes))
                missed |= estimator == options.estimators[0] and abs(found - true) > off
    console.print(table)
    sys.exit(missed)


if __name__ == "__main__":
    main()
