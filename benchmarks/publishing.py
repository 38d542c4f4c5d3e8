"""Publish a bundle from many processes at once, and kill processes that publish it: nothing is lost, nothing mixed.

    .venv/bin/python benchmarks/publishing.py BUNDLE [--concurrent 100] [--killed 100]

Each process gives one cluster a name of its own, as `ncd-serve name apply` does. Of those that run at once, every name
has to be in the version that its process added, and in all later ones until it is named again. Others are killed with
SIGKILL at a random moment. Meanwhile a reader compares model, configuration, labels and names for image files, and
opens the bundle. Exit code 1 if anything was lost, mixed or left behind.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import onnx
from ncd_export.rename import rename_bundle
from ncd_export.repository import add_to_repository

from ncd_serve.bundle import Bundle
from ncd_serve.files import locked
from ncd_serve.naming import Names
from ncd_serve.triton.repository import read_config

NAME = "m"


def apply_name(place: Path, number: int) -> int:
    """Name a cluster; return 0 if it was published."""
    clusters = len(Bundle.read(place / "bundle").manifest.cluster_names)
    names = Names.model_validate({"clusters": {number % clusters: {"name": f"name-{number}"}}})
    rename_bundle(place / "bundle", names, repository=place / "models", name=NAME)
    return 0


def in_child(work: Callable[[], int]) -> int:
    """Return the id of a process that does the work and exits with its result; 1 for an exception."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        code = work()
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        os._exit(code)


def exit_code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def mixture(place: Path) -> str:
    """Return what does not belong together in the repository, or an empty text."""
    with locked(place / "models", shared=True):
        model, jpeg = place / "models" / NAME, place / "models" / f"{NAME}_jpeg"
        newest = max((int(entry.name) for entry in model.iterdir() if entry.name.isdigit()), default=0)
        ids = {
            "config": read_config(model / "config.pbtxt").parameters["ncd_bundle"].string_value,
            "model": next(
                entry.value
                for entry in onnx.load(model / str(newest) / "model.onnx").metadata_props
                if entry.key == "bundle_id"
            ),
        }
        told = json.loads((jpeg / str(newest) / "bundle.json").read_bytes())
        labels = (model / "labels.txt").read_text().splitlines()
    ids["image files"] = told["bundle_id"]
    if len(set(ids.values())) > 1:
        return f"version {newest} is of bundles {ids}"
    return "" if labels == told["cluster_names"] else f"version {newest} has labels {labels}, {told['cluster_names']}"


def read_until_told(place: Path, stop: Path) -> int:
    """Read bundle and repository again and again; return 1 if they were ever mixed or missing."""
    reads = 0
    while not stop.exists():
        Bundle.read(place / "bundle")
        if found := mixture(place):
            print(found, file=sys.stderr)
            return 1
        reads += 1
    print(f"a reader found both whole, {reads} times")
    return 0


def names_of_versions(place: Path) -> list[list[str]]:
    folders = sorted((place / "models" / f"{NAME}_jpeg").glob("[0-9]*"), key=lambda folder: int(folder.name))
    return [json.loads((folder / "bundle.json").read_bytes())["cluster_names"] for folder in folders]


def lost_names(versions: list[list[str]], numbers: range) -> set[str]:
    """Return the names that no version has added to those of the version before it."""
    wanted = {f"name-{number}" for number in numbers}
    for before, after in pairwise(versions):
        changed = [new for old, new in zip(before, after, strict=True) if old != new]
        if len(changed) == 1:
            wanted.discard(changed[0])
    return wanted


def leftovers(place: Path) -> list[str]:
    return sorted(str(path.relative_to(place)) for path in place.rglob(".*"))


def publish_at_once(place: Path, number: int) -> int:
    """Return the number of mistakes of processes that publish at once."""
    codes = [exit_code(pid) for pid in [in_child(lambda n=n: apply_name(place, n)) for n in range(number)]]  # type: ignore[misc]
    lost = lost_names(names_of_versions(place), range(number))
    print(f"{number} at once: {codes.count(0)} published, {len(lost)} lost, {len(leftovers(place))} left behind")
    return len(lost) + len(codes) - codes.count(0) + len(leftovers(place))


def kill_publishers(place: Path, number: int, seconds: float, seed: int) -> int:
    """Return the number of mistakes after processes were killed while they published."""
    choose, published, mistakes = random.Random(seed), 0, 0
    for each in range(number):
        name = 1_000_000 + each
        pid = in_child(lambda name=name: apply_name(place, name))  # type: ignore[misc]
        time.sleep(choose.uniform(0, 1.2 * seconds))
        os.kill(pid, signal.SIGKILL)
        ended = exit_code(pid) == 0
        published += ended
        names = Bundle.read(place / "bundle").manifest.cluster_names
        if found := mixture(place) or (f"name-{name} is lost" if ended and f"name-{name}" not in names else ""):
            print(found, file=sys.stderr)
            mistakes += 1
    apply_name(place, 2_000_000)
    same = names_of_versions(place)[-1] == Bundle.read(place / "bundle").manifest.cluster_names
    print(f"{number} killed ({published} had published): {mistakes} mixed, {len(leftovers(place))} left behind", end="")
    print("" if same else "; bundle and repository differ")
    return mistakes + len(leftovers(place)) + (not same)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--concurrent", type=int, default=100)
    parser.add_argument("--killed", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "place")
        shutil.copytree(arguments.bundle, place / "bundle")
        add_to_repository(Bundle.read(arguments.bundle), place / "models", name=NAME)
        stop = Path(folder, "stop")
        reader = in_child(lambda: read_until_told(place, stop))
        mistakes = publish_at_once(place, arguments.concurrent)
        start = time.monotonic()
        apply_name(place, 999_999)
        mistakes += kill_publishers(place, arguments.killed, time.monotonic() - start, arguments.seed)
        stop.touch()
        mistakes += exit_code(reader)
    return 1 if mistakes else 0


if __name__ == "__main__":
    sys.exit(main())
