"""A digit that training never saw among new vowels: what `discover` proposes, and how single images are judged.

    .venv/bin/python benchmarks/second_round.py [--runs DIR] [--seeds 0 1 2]

Letters as in the demo. For each seed: 10 batches of 300 images with 80 of one digit, 10 batches of vowels alone. A
digit is found if a candidate has more than half of its images and is at least 90% pure. AUROC is that of single images
of the digit against vowels: by the distance that `fit` has its limits on, and by the output `outside`. Finished runs in
--runs are used again. Exit code 1 if fewer than 7 of 10 digits are found, more than one of 10 batches of vowels raises
a candidate, or `outside` is not better than `fit`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
from ncd_training import discover as train
from ncd_training import open_run
from ncd_training.data.datasets.glyphs import NOVEL, draw_glyph, write_glyphs
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from ncd_serve.bundle import Bundle
from ncd_serve.discovery.find import Batch, discover, mixture_of, read_batch
from ncd_serve.fit import directions

DIGITS, IMAGES, UNSEEN, NULLS = "0123456789", 300, 80, 10
Floats = NDArray[Any]


def draw(folder: Path, digit: str, seed: int, number: int) -> Path:
    """Draw a batch: vowels in turn, and 80 images of a digit if one is given."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng([seed, 3, number])
    letters = digit * UNSEEN + "".join(NOVEL) * IMAGES
    for order, letter in enumerate(letters[:IMAGES]):
        draw_glyph(letter, rng).save(folder / f"{letter}-{order:03d}.png")
    return folder


def auroc(scores: Floats, new: NDArray[np.bool_]) -> float:
    ranks = scores.argsort().argsort()
    return float((ranks[new].mean() - (new.sum() - 1) / 2) / (~new).sum())


def bundle_of(folder: Path, seed: int) -> Bundle:
    run = folder / "run"
    if not (run / "summary.json").exists():
        data = write_glyphs(folder / "data", seed=seed)
        train(dataset="glyphs", data_root=data, seed=seed, out=run, progress=False)
    if not (run / "bundle").exists():
        open_run(run, progress=False).export(repository=folder / "repository")
    return Bundle.read(run / "bundle")


def is_found(images: list[str]) -> bool:
    right = sum(Path(path).name[0].isdigit() for path in images)
    return right > UNSEEN / 2 and right >= 0.9 * len(images)


def scores_of(bundle: Bundle, batch: Batch) -> tuple[float, float]:
    """Return the AUROC of the distance to the nearest centre of a cluster, and of `outside`."""
    reference, mixture = mixture_of(bundle)
    new = np.array([Path(path).name[0].isdigit() for path in batch.paths])
    distances = 1 - (directions(batch.embeddings) @ reference.limits().centres.T).max(1)
    return auroc(distances, new), auroc(mixture.outside(batch.embeddings), new)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs") / "second-round")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    table = Table("seed", "digits found", "not found", "false candidates in 10", "AUROC of fit", "AUROC of outside")
    good = True
    for seed in options.seeds:
        folder = options.runs / f"g{seed}"
        bundle, found, missed, fits = bundle_of(folder, seed), 0, "", []
        for digit in DIGITS:
            batch = read_batch(draw(folder / f"batch-{digit}", digit, seed, int(digit)), bundle)
            candidates = discover(batch, bundle).candidates.candidates
            hit = any(is_found(candidate.images) for candidate in candidates)
            found, missed = found + hit, missed + ("" if hit else digit)
            fits.append(scores_of(bundle, batch))
        nulls = [draw(folder / f"null-{number}", "", seed, 100 + number) for number in range(NULLS)]
        false = sum(len(discover(images, bundle).candidates.candidates) for images in nulls)
        by_fit, by_outside = np.mean(fits, axis=0)
        table.add_row(str(seed), f"{found} of 10", missed or "-", str(false), f"{by_fit:.3f}", f"{by_outside:.3f}")
        good &= found >= 7 and false <= 1 and by_outside > by_fit
    Console(width=110).print(table)
    sys.exit(not good)


if __name__ == "__main__":
    main()
