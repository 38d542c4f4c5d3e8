"""A digit that training never saw among new vowels: what `discover` proposes, and how it is served under a new name.

    .venv/bin/python benchmarks/second_round.py [--runs DIR] [--seeds 0 1 2]

Letters as in the demo. For each seed: 10 batches of 300 images with 80 of one digit, 10 batches of vowels alone. A
digit is found if a candidate has more than half of its images and is at least 90% pure. AUROC is that of single images
of the digit against vowels: by the distance that `fit` has its limits on, and by the output `outside`. A second table
compares the strength of candidates, weak ones too, with the share of them that are mostly of a digit. Then the first
digit that was found is named: a real Triton serves the vowels by name, generation 2 with the digit is exported while a
client asks without a pause, and that client asks about 30 other images of the digit and 60 other vowels. Finished runs
in --runs are used again. Exit code 1 if fewer than 7 of 10 digits are found, more than one of 10 batches of vowels
raises a candidate, `outside` is not better than `fit`, a request fails, a vowel that does not go to the new name is
answered otherwise than before, fewer than half of the digit's images get the new name or more than one vowel in 20, or
the server's rows are not those of `assign`.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ncd_export.append import append_generation
from ncd_export.rename import rename_bundle
from ncd_export.repository import add_to_repository
from ncd_training import discover as train
from ncd_training import open_run
from ncd_training.data.datasets.glyphs import NOVEL, draw_glyph, write_glyphs
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from ncd_serve.bundle import Bundle
from ncd_serve.client.client import Client
from ncd_serve.discovery.find import (
    MIN_GROUP_STRENGTH,
    MIN_STRENGTH,
    Batch,
    Candidate,
    Candidates,
    discover,
    mixture_of,
    read_batch,
)
from ncd_serve.fit import directions
from ncd_serve.naming import Names
from ncd_serve.prediction import Prediction
from ncd_serve.progress import SILENT
from ncd_serve.rows.assignment import assign_images
from ncd_serve.runners import OnnxRunner
from ncd_serve.triton import TritonServer

DIGITS, IMAGES, UNSEEN, NULLS = "0123456789", 300, 80, 10
STRENGTHS = (MIN_GROUP_STRENGTH, 0.8, MIN_STRENGTH, 1.01)  # limits of the second table
LATER, MODEL = (30, 90), "letters"  # images of the digit, and of all, that are served
COLUMNS = ("seed", "digits found", "not found", "false candidates in 10", "AUROC of fit", "AUROC of outside",
           "served: digit", "named", "vowels so named", "answered otherwise", "failed", "as assign")  # fmt: skip
Floats = NDArray[Any]


def draw(folder: Path, digit: str, seed: int, number: int, *, sizes: tuple[int, int] = (UNSEEN, IMAGES)) -> Path:
    """Draw a batch: vowels in turn, and images of a digit if one is given."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng([seed, 3, number])
    letters = digit * sizes[0] + "".join(NOVEL) * sizes[1]
    for order, letter in enumerate(letters[: sizes[1]]):
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


def share_of_digits(images: list[str]) -> float:
    return sum(Path(path).name[0].isdigit() for path in images) / len(images)


def is_found(images: list[str]) -> bool:
    share = share_of_digits(images)
    return share * len(images) > UNSEEN / 2 and share >= 0.9


def scores_of(bundle: Bundle, batch: Batch) -> tuple[float, float]:
    """Return the AUROC of the distance to the nearest centre of a cluster, and of `outside`."""
    reference, mixture = mixture_of(bundle)
    new = np.array([Path(path).name[0].isdigit() for path in batch.paths])
    distances = 1 - (directions(batch.embeddings) @ reference.limits().centres.T).max(1)
    return auroc(distances, new), auroc(mixture.outside(batch.embeddings), new)


def candidates_in(batch: Batch, bundle: Bundle, groups: list[tuple[float, bool]]) -> list[Candidate]:
    """Return what is proposed in a batch; add the strength of every group, and whether it is new, to `groups`."""
    found = discover(batch, bundle, min_strength=MIN_GROUP_STRENGTH).candidates.candidates
    groups += [(each.strength, share_of_digits(each.images) > 0.5) for each in found]
    return [each for each in found if each.strength >= MIN_STRENGTH]


def calibration(groups: list[tuple[float, bool]]) -> Table:
    """Return a table of the share of candidates that are new, by their strength."""
    table = Table("strength", "candidates", "mean strength", "share that is new")
    for low, high in pairwise(STRENGTHS):
        chosen = [group for group in groups if low <= group[0] < high]
        means = [f"{value:.2f}" for value in np.mean(chosen, axis=0)] if chosen else ["-", "-"]
        table.add_row(f"{low:.2f} to {min(high, 1):.2f}", str(len(chosen)), *means)
    return table


class Served(NamedTuple):
    """Answers of the server after generation 2 was exported."""

    named: int  # images of the digit that have the new name
    moved: int  # vowels that have it
    changed: int  # other vowels that are answered otherwise than before
    failed: int  # requests
    same: bool  # whether the rows are those of `assign`

    @property
    def good(self) -> bool:
        """Return whether all is as it should be."""
        return self.named >= 0.5 * LATER[0] and self.moved <= 3 and not self.changed and not self.failed and self.same

    def cells(self) -> list[str]:
        digits, vowels = LATER[0], LATER[1] - LATER[0]
        named, moved = f"{self.named} of {digits}", f"{self.moved} of {vowels}"
        return [named, moved, str(self.changed), str(self.failed), "yes" if self.same else "no"]


def serve(folder: Path, digit: str, seed: int) -> Served:
    """Serve generation 1, find and name a digit, and export generation 2 while a client asks."""
    place = folder / "served"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(folder / "run" / "bundle", place / "bundle")
    names = {
        number: {"name": name} for number, name in enumerate(Bundle.read(place / "bundle").reference().matched) if name
    }
    rename_bundle(place / "bundle", Names.model_validate({"clusters": names}), repository=place / "models", name=MODEL)
    later = sorted(draw(place / "later", digit, seed, 200, sizes=LATER).iterdir())
    with TritonServer(place / "models", live_updates=True) as server:
        server.wait_ready(120)
        over = threading.Event()
        with Client(server.grpc_url, model=MODEL) as client, ThreadPoolExecutor() as pool:
            asking = pool.submit(ask_until, over, client)
            try:
                before = list(client.assign(later))
                grown = _appended(place, folder / f"batch-{digit}", digit)
                add_to_repository(grown, place / "models", name=MODEL)
                if reason := server.probe.load(MODEL):
                    raise RuntimeError(reason)
                after = list(client.assign(later))
            finally:
                over.set()
    new = [row.cluster_name == digit for row in after]
    digits = [Path(row.path).name[0] == digit for row in after]
    return Served(
        named=sum(is_new and right for is_new, right in zip(new, digits, strict=True)),
        moved=sum(is_new and not right for is_new, right in zip(new, digits, strict=True)),
        changed=sum(not is_new and not alike(*pair) for is_new, *pair in zip(new, before, after, strict=True)),
        failed=asking.result(),
        same=all(map(alike, after, assign_images(later, OnnxRunner(grown)))),
    )


def alike(one: Prediction, other: Prediction) -> bool:
    """Return whether two rows say the same; requests that a server puts together may differ in the last bits."""
    facts = ("path", "cluster_id", "cluster_name", "fit")
    near = abs((one.confidence or 0) - (other.confidence or 0)) < 1e-5
    return near and all(getattr(one, name) == getattr(other, name) for name in facts)


def _appended(place: Path, batch: Path, digit: str) -> Bundle:
    found = discover(batch, place / "bundle").candidates
    entries = [each.model_copy(update={"name": digit}) for each in found.candidates if is_found(each.images)]
    accepted = Candidates(**{**found.model_dump(), "candidates": entries[:1]})
    (place / "candidates.json").write_text(accepted.model_dump_json())
    options: dict[str, Any] = {"accept": place / "candidates.json", "out": place / "bundle-2", "progress": SILENT}
    return append_generation(place / "bundle", batch, **options)


def ask_until(over: threading.Event, client: Client) -> int:
    """Ask without a pause; return the number of requests that failed."""
    side, failed = client.preprocess.resolution, 0
    while not over.is_set():
        try:
            client.answer(np.zeros((1, side, side, 3), np.uint8))
        except Exception:
            failed += 1
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs") / "second-round")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    table = Table(*COLUMNS)
    good, groups = True, list[tuple[float, bool]]()
    for seed in options.seeds:
        folder = options.runs / f"g{seed}"
        bundle, found, missed, fits = bundle_of(folder, seed), 0, "", []
        for digit in DIGITS:
            batch = read_batch(draw(folder / f"batch-{digit}", digit, seed, int(digit)), bundle)
            candidates = candidates_in(batch, bundle, groups)
            hit = any(is_found(candidate.images) for candidate in candidates)
            found, missed = found + hit, missed + ("" if hit else digit)
            fits.append(scores_of(bundle, batch))
        nulls = [draw(folder / f"null-{number}", "", seed, 100 + number) for number in range(NULLS)]
        false = sum(len(candidates_in(read_batch(images, bundle), bundle, groups)) for images in nulls)
        by_fit, by_outside = np.mean(fits, axis=0)
        digit = next((digit for digit in DIGITS[4:] + DIGITS[:4] if digit not in missed), DIGITS[0])
        served = serve(folder, digit, seed)
        cells = [f"{found} of 10", missed or "-", str(false), f"{by_fit:.3f}", f"{by_outside:.3f}", digit]
        table.add_row(str(seed), *cells, *served.cells())
        good &= found >= 7 and false <= 1 and by_outside > by_fit and served.good
    console = Console(width=180)
    console.print(table)
    console.print(calibration(groups))
    sys.exit(not good)


if __name__ == "__main__":
    main()
