"""Methods and variants on the same images: one run of `ncd-serve train` for each row and seed, in a process of its own.

So time and memory are a run's own, a run that fails takes no other down, and a comparison goes on where it stopped.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ncd_serve.errors import DataError, UsageError
from ncd_serve.files import write_json, write_text
from ncd_serve.memory import peak_memory, rusage_memory
from ncd_serve.progress import Progress
from ncd_training.base.run_dir import RunDir
from ncd_training.config.resolve import config_layers, merged, method_recipes, recipe_for, resolve_config
from ncd_training.config.schema import TrainConfig
from ncd_training.data.manifest import Manifest
from ncd_training.data.prepare import list_images
from ncd_training.objective import checked
from ncd_training.run.train import set_up
from ncd_training.study.compare_rows import Row

# Where images are and what is left to look at makes no run another than the paper's.
_SAME_ANYHOW = ("data.root", "data.cache_dir", "data.cache_views", "data.workers", "data.strict", "model.weights")

_LOOK_AGAIN = 0.1  # s


@dataclass(frozen=True)
class Wishes:
    """What the user asks of every row."""

    recipes: Sequence[str]
    config_file: Path | None
    flags: dict[str, Any]  # settings that options mean: weaker than a row's own
    overrides: dict[str, Any]  # --set: stronger

    @property
    def dataset(self) -> str | None:
        """The named dataset, if it is one."""
        name: str | None = self.flags.get("data.dataset")
        return name

    def config(self, row: Row) -> TrainConfig:
        """The settings of a row."""
        settings = row.settings | row.for_dataset.get(self.dataset or "", {})
        own = recipe_for(self.dataset) if self.dataset else None
        recipes = [*filter(None, [own]), *method_recipes(row.method), *row.recipes, *self.recipes]
        flags = {key: value for key, value in self.flags.items() if row.weights or key != "model.weights"}
        overrides = {**flags, **settings, **self.overrides}
        try:
            layers = config_layers(recipes=recipes, config_file=self.config_file, overrides=overrides)
            return checked(merged(layers))
        except UsageError as error:
            raise UsageError(f"row {row.label}: {error}", hint=error.hint) from None

    def published(self) -> Wishes:
        """The same images with nothing of the user's own: what the paper did."""
        return Wishes([], None, {"data.dataset": self.dataset} if self.dataset else {}, {})


@dataclass(frozen=True)
class Cost:
    """What a run took, all its parts together."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    memory: int = 0  # bytes at the highest, of the process that trains
    cached: bool = False  # it also filled the cache that all runs share
    error: str | None = None
    exit_code: int = 0


@dataclass(frozen=True)
class Job:
    """One run of a row."""

    row: Row
    config: TrainConfig
    folder: Path  # of the whole comparison

    @property
    def name(self) -> str:
        """`<row>-<seed>`."""
        return f"{self.row.label}-{self.config.optim.seed}"

    @property
    def run(self) -> RunDir:
        """Where it trains."""
        return RunDir(self.folder / self.name)

    @property
    def asked(self) -> Path:
        """The settings that it is started with."""
        return self.folder / "settings" / f"{self.name}.toml"

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to do."""
        summary = self.run.read_summary()
        return summary.method is not None and len(self.run.read_metrics()) >= self.config.optim.epochs

    def check(self) -> None:
        """An existing run must be one of the same settings."""
        if not self.run.path.exists():
            return
        hint = "choose another --out"
        if not self.asked.exists():
            raise UsageError(f"{self.run.path} was not made by this comparison", hint=hint)
        changed = differences(resolve_config(config_file=self.asked), self.config)
        if changed:
            key, (before, now) = next(iter(changed.items()))
            raise UsageError(f"{self.run.path} was run with {key} = {before}, not {now}", hint=hint)


class Ledger:
    """comparison.json: what each run took so far."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "comparison.json"
        kept = json.loads(self._path.read_text()) if self._path.exists() else {}
        self._costs = {name: Cost(**facts) for name, facts in kept.items()}

    def __getitem__(self, job: Job) -> Cost:
        """What a run took; nothing, if it never began."""
        return self._costs.get(job.name, Cost())

    def add(self, job: Job, cost: Cost) -> None:
        """Another part of a run has ended."""
        before = self[job]
        self._costs[job.name] = replace(
            cost,
            seconds=before.seconds + cost.seconds,
            cpu_seconds=before.cpu_seconds + cost.cpu_seconds,
            memory=max(before.memory, cost.memory),
            cached=before.cached or cost.cached,
        )
        write_json(self._path, {name: asdict(kept) for name, kept in self._costs.items()})

    def forget(self, job: Job) -> None:
        """A run is gone, and with it what it took."""
        self._costs.pop(job.name, None)


def plan(rows: Sequence[Row], seeds: Sequence[int], wishes: Wishes, folder: Path) -> list[Job]:
    """All runs, seed by seed, so that the first table is complete early; raises for rows that cannot be resolved."""
    cached = {"data.cache_dir": str((folder / "views").absolute()), "report.tsne_epochs": []}
    wishes = replace(wishes, flags=cached | wishes.flags)
    configs = [wishes.config(row) for row in rows]
    return [
        Job(row, config.model_copy(update={"optim": config.optim.model_copy(update={"seed": seed})}), folder)
        for seed in seeds
        for row, config in zip(rows, configs, strict=True)
    ]


def check(jobs: Sequence[Job], *, progress: Progress) -> Manifest:
    """Check everything that can be wrong before training: earlier runs, images, weights."""
    for job in jobs:
        job.check()
    manifests = {}
    for config in (job.config for job in jobs):
        key = (config.data, config.model.trunk, config.model.weights)
        if key not in manifests:
            listed = list_images(config, track=progress.track)
            manifests[key] = set_up(listed, progress=progress).manifest
    manifest = next(iter(manifests.values()))
    if manifest.truth is None:
        raise DataError(
            "the unlabelled images have no true labels, so rows cannot be compared",
            hint="give them as true_label in a --manifest FILE.csv; they are for scores alone",
        )
    return manifest


def differences(ours: TrainConfig, other: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """Settings that are not the same, by `section.key`."""
    mine, theirs = ours.model_dump(mode="json"), other.model_dump(mode="json")
    return {
        f"{section}.{key}": (value, theirs[section].get(key))
        for section, values in mine.items()
        for key, value in values.items()
        if value != theirs[section].get(key)
    }


def departures(rows: Sequence[Row], wishes: Wishes) -> list[str]:
    """Where the rows' settings are not those of the paper: a line for each setting."""
    found: dict[str, list[str]] = {}
    for row in rows:
        for key, (ours, theirs) in differences(wishes.config(row), wishes.published().config(row)).items():
            if key not in _SAME_ANYHOW and not key.startswith("report."):
                found.setdefault(key, []).append(f"{ours} for {theirs}")
    return [f"{key}: {', '.join(dict.fromkeys(pairs))}" for key, pairs in found.items()]


def run_all(jobs: Sequence[Job], ledger: Ledger, *, progress: Progress) -> Iterator[Job]:
    """Run what is not finished; yields each run as it ends, well or not."""
    with progress.bar("comparing", len(jobs)) as advance:
        for number, job in enumerate(jobs, start=1):
            what = f"run {number} of {len(jobs)}: {job.name}"
            advance(0, what)
            if not job.finished:
                if not progress.console.is_terminal:
                    progress.say(what)
                _train(job, ledger)
            advance(1, what)
            yield job


def _train(job: Job, ledger: Ledger) -> None:
    """Begin a run or go on with it; a run that fails leaves its error in the ledger."""
    if job.run.begun:
        arguments = ["--resume", str(job.run.path)]
    else:
        shutil.rmtree(job.run.path, ignore_errors=True)  # killed while its folder was being made
        ledger.forget(job)
        write_text(job.asked, job.config.to_toml())
        arguments = ["--config", str(job.asked), "--out", str(job.run.path)]
    said, views = job.asked.with_suffix(".log"), _files_in(job.config.data.cache_dir)
    cost, stopped = _measured([sys.executable, "-m", "ncd_serve", "train", *arguments], said)
    error = _error(said, cost.exit_code) if cost.exit_code and stopped is None else None
    ledger.add(job, replace(cost, error=error, cached=_files_in(job.config.data.cache_dir) > views))
    if stopped is not None:
        raise stopped


def _measured(command: list[str], said: Path) -> tuple[Cost, BaseException | None]:
    """What a command took, and what interrupted us meanwhile: the command is then asked to stop and waited for."""
    stopped: BaseException | None = None
    start = time.monotonic()
    with said.open("w", encoding="utf-8") as stream:
        # In a session of its own a Ctrl-C of the terminal does not reach it: it is told once, by us.
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status, usage, memory = _wait(child.pid)
        except (KeyboardInterrupt, SystemExit) as interrupt:
            stopped = interrupt
            os.kill(child.pid, signal.SIGTERM)  # a background process may be deaf to SIGINT
            status, usage, memory = _wait(child.pid)
    child.returncode = os.waitstatus_to_exitcode(status)
    cpu = usage.ru_utime + usage.ru_stime
    return Cost(time.monotonic() - start, cpu, memory, exit_code=child.returncode), stopped


def _wait(pid: int) -> tuple[int, resource.struct_rusage, int]:
    """Exit status, resource usage and peak memory of a process, once it has ended.

    Looks now and then: an interrupt must not fall between end and answer, and the peak can be read only before the end.
    """
    memory = 0
    while True:
        memory = peak_memory(pid) or memory
        ended, status, usage = os.wait4(pid, os.WNOHANG)
        if ended:
            return status, usage, memory or rusage_memory(usage)
        time.sleep(_LOOK_AGAIN)


def _error(said: Path, code: int) -> str:
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    lines = [line.strip() for line in said.read_text(encoding="utf-8").splitlines() if line.strip()]
    named = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (named or lines or [f"ended with {code}"])[-1]


def _files_in(folder: Path | None) -> int:
    return len(list(folder.glob("*.npy"))) if folder is not None else 0
