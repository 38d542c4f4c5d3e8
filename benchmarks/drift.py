"""Verdicts of `drift` on batches of an unseen class, and on new images of the trained classes.

    .venv/bin/python benchmarks/drift.py [SEED ...]

Letters as in the demo, for seeds 0, 1 and 2: five batches of 100 new vowels, and a batch of 100 for each digit from
2 to 9 (0 and 1 look like O and I). Exit code 1 if a verdict is wrong.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from ncd_training.data.datasets.glyphs import NOVEL, draw_glyph, write_glyphs
from rich.console import Console
from rich.table import Table

BATCH, FRESH, UNSEEN = 100, 5, "23456789"


def ncd(*arguments: object) -> str:
    command = [sys.executable, "-m", "ncd_serve", *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def draw(folder: Path, characters: str, rng: np.random.Generator) -> Path:
    """Draw a batch of these characters in turn."""
    folder.mkdir(parents=True)
    for number in range(BATCH):
        draw_glyph(characters[number % len(characters)], rng).save(folder / f"{number}.png")
    return folder


def drift(images: Path, bundle: Path) -> dict[str, Any]:
    """Return the output of the command for a batch."""
    rows = images.with_suffix(".csv")
    ncd("assign", images, "--bundle", bundle, "--out", rows)
    answer: dict[str, Any] = json.loads(ncd("drift", rows, "--bundle", bundle, "--json"))
    return answer


def judge(seed: int, folder: Path, table: Table) -> bool:
    """Return the rows of the table for a seed, and True if all verdicts are right."""
    data = write_glyphs(folder / "data", seed=seed)
    ncd("train", "--dataset", "glyphs", "--data-root", data, "--seed", seed, "--out", folder / "run")
    ncd("export", folder / "run", "--repository", folder / "repository")
    right = True
    batches = {"fresh vowels": ["".join(NOVEL)] * FRESH, "a digit": list(UNSEEN)}
    for number, (kind, characters) in enumerate(batches.items()):
        found = [
            drift(
                draw(folder / kind / str(order), each, np.random.default_rng([seed, number, order])),
                folder / "run/bundle",
            )
            for order, each in enumerate(characters)
        ]
        flagged = [answer["drifted"] for answer in found]
        right &= all(flagged) if kind == "a digit" else not any(flagged)
        ranges = [_range(found, name) for name in ("cluster shares", "confidence", "fit")]
        table.add_row(str(seed), kind, f"{sum(flagged)} of {len(flagged)}", *ranges)
    return right


def _range(found: list[dict[str, Any]], name: str) -> str:
    differences = [
        measure["difference"] for answer in found for measure in answer["measures"] if measure["name"] == name
    ]
    return f"{min(differences):.2f} to {max(differences):.2f}"


def main() -> None:
    table = Table("seed", "batches of", "called drifted", "cluster shares", "confidence", "fit")
    right = True
    for seed in map(int, sys.argv[1:] or (0, 1, 2)):
        with TemporaryDirectory() as folder:
            right &= judge(seed, Path(folder), table)
    Console(width=100).print(table)
    sys.exit(not right)


if __name__ == "__main__":
    main()
