"""The README's commands as a newcomer types them, from an empty environment and two folders of photographs.

    .venv/bin/python benchmarks/first_hour.py --data-root data [--folder DIR] [--images 28]

Photographs are of CUB-200-2011: 12 known kinds of birds, 25 photographs each, and a pile of 6 novel kinds, whose files
have numbers for names. A person's naming is played: a cluster gets the name of the kind that most of its images show.
Prints the time of each step, the end of what it printed, and how many images were right.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from scipy.optimize import linear_sum_assignment

from ncd_serve.reference import Reference

ROOT = Path(__file__).resolve().parents[1]
KNOWN, NOVEL, LABELLED, NEW = 12, 6, 25, 5
LINES = 8  # of what a step printed, from its end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, default=Path("data"))
    parser.add_argument("--folder", type=Path, default=Path("first-hour"))
    parser.add_argument("--images", type=int, default=28, help="of each novel kind")
    options = parser.parse_args()
    folder = options.folder.absolute()
    folder.mkdir()
    truth = make_folders(options.data_root / "CUB_200_2011" / "images", folder, options.images)
    walk = Walk(folder)
    walk.step("environment", sys.executable, "-m", "venv", "env")
    pins = ["--constraint", ROOT / "constraints.txt"]  # torch for CPUs; PyPI's for Linux brings CUDA
    walk.step("install", "pip", "install", "--quiet", *pins, f"{ROOT}[train]")
    print(f"environment: {size(folder / 'env'):,} MB")
    walk.step("train", "ncd-serve", "train", "--labelled", "known", "--unlabelled", "pile", "--out", "runs/birds")
    walk.step("gallery", "ncd-serve", "gallery")
    found = Reference.read(folder / "runs" / "birds" / "reference.npz")
    names, matched, right = play_person(found, truth)
    content = {"checkpoint": found.checkpoint, "clusters": {str(key): {"name": name} for key, name in names.items()}}
    (folder / "names.json").write_text(json.dumps(content))
    walk.step("name apply", "ncd-serve", "name", "apply", "names.json")
    walk.step("serve", "ncd-serve", "serve", "--detach")
    print(f"from an empty environment to a served model with names: {walk.seconds / 60:.1f} min")
    walk.step("query", "ncd-serve", "query", "new", "--out", "rows.csv")
    walk.step("stop", "ncd-serve", "stop")
    with (folder / "rows.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    answered = sum(row["cluster_name"] == Path(row["path"]).parent.name for row in rows)
    print(f"{right} of {len(found.paths)} images of the pile got the right name; {matched} by one-to-one matching")
    print(f"{answered} of {len(rows)} new photographs got the right name; environment: {size(folder / 'env'):,} MB")


class Walk:
    """Steps in a folder with an environment of its own, and their seconds."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.seconds = folder, 0.0
        path = os.pathsep.join([str(folder / "env" / "bin"), os.environ["PATH"]])
        self._variables = {**os.environ, "PATH": path, "COLUMNS": "120"}
        self._variables.pop("PYTHONPATH", None)

    def step(self, name: str, *command: object) -> None:
        """Run a command, and print its time and the end of what it printed."""
        start, before = time.perf_counter(), cpu_seconds()
        words = [str(word) for word in command]
        words[0] = shutil.which(words[0], path=self._variables["PATH"]) or words[0]
        done = subprocess.run(words, cwd=self._folder, env=self._variables, capture_output=True, text=True, check=False)
        seconds = time.perf_counter() - start
        self.seconds += seconds
        spent = f"{seconds:.0f} s, {cpu_seconds() - before:.0f} s of CPU time"
        print(f"{name}: {spent}", *done.stdout.splitlines()[-LINES:], sep="\n    ", flush=True)
        if done.returncode:
            sys.exit(f"{' '.join(words)} ended with {done.returncode}\n{done.stdout}{done.stderr}")


def make_folders(birds: Path, folder: Path, images: int) -> dict[str, str]:
    """Copy photographs into known/, pile/ and new/, and return the true kind of each file of the pile."""
    kinds = sorted(birds.iterdir())
    known, novel = kinds[::16][:KNOWN], kinds[8::33][:NOVEL]  # spread over the alphabet, and apart
    for kind in known:
        copy(sorted(kind.iterdir())[:LABELLED], folder / "known" / kind.name)
    for kind in novel:
        copy(sorted(kind.iterdir())[images : images + NEW], folder / "new" / kind.name)
    piled = [file for kind in novel for file in sorted(kind.iterdir())[:images]]
    random.Random(0).shuffle(piled)
    (folder / "pile").mkdir()
    truth = {f"{number:03d}.jpg": file for number, file in enumerate(piled)}
    for name, file in truth.items():
        shutil.copy(file, folder / "pile" / name)
    return {name: file.parent.name for name, file in truth.items()}


def copy(files: list[Path], target: Path) -> None:
    target.mkdir(parents=True)
    for file in files:
        shutil.copy(file, target)


def play_person(found: Reference, truth: dict[str, str]) -> tuple[dict[int, str], int, int]:
    """Return a name for each cluster, and how many images are right: by the best matching, and by these names."""
    seen = [truth[Path(path).name] for path in found.paths]
    kinds = sorted(set(seen))
    counts = np.zeros((found.clusters, len(kinds)), int)
    for cluster, kind in zip(found.cluster_ids, seen, strict=True):
        counts[cluster, kinds.index(kind)] += 1
    names = {cluster: kinds[row.argmax()] for cluster, row in enumerate(counts) if cluster >= found.known_clusters}
    return names, int(counts[linear_sum_assignment(-counts)].sum()), int(counts.max(1).sum())


def cpu_seconds() -> float:
    """Return the CPU time of all programs that were run and have ended: other work beside them does not change it."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def size(folder: Path) -> int:
    """Return the size of a folder in MB, as `du -sm` says."""
    done = subprocess.run(["du", "-sm", folder], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[0])


if __name__ == "__main__":
    main()
