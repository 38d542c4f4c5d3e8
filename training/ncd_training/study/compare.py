"""Comparison of methods on the same images: one `ncd-serve train` process for each row and seed.

Separate processes give each run its own time and memory, isolate failures, and let an interrupted comparison resume.
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
from collections.abc import Iterator, Mapping, Sequence
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
from ncd_training.objective.method import checked
from ncd_training.run.train import set_up
from ncd_training.study.compare_rows import Row

# Settings that are not listed as departures from the paper: places and speed; initial weights have their own note.
_UNLISTED_SETTINGS = ("data.root", "data.cache_dir", "data.cache_views", "data.workers", "data.strict", "model.weights")

_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Wishes:
    """Settings that the user gives for all rows."""

    recipes: Sequence[str]
    config_file: Path | None
    flags: dict[str, Any]  # settings from options: weaker than those of a row
    overrides: dict[str, Any]  # --set: stronger

    @property
    def dataset(self) -> str | None:
        """Name of the dataset; None for the user's own images."""
        name: str | None = self.flags.get("data.dataset")
        return name

    def config(self, row: Row) -> TrainConfig:
        """Return the resolved settings of a row."""
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
        """Return the same dataset without the user's settings, as in the paper."""
        return Wishes([], None, {"data.dataset": self.dataset} if self.dataset else {}, {})


@dataclass(frozen=True)
class RunCost:
    """Time and memory of a run, summed over its sessions, and its error if it failed."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    memory: int = 0  # peak in bytes, of the training process
    cached: bool = False  # True if the run filled the cache that all runs share
    error: str | None = None
    exit_code: int = 0


@dataclass(frozen=True)
class Job:
    """Run of a row with one seed."""

    row: Row
    config: TrainConfig
    folder: Path  # of the whole comparison

    @property
    def name(self) -> str:
        """Name of the run, `<row>-<seed>`."""
        return f"{self.row.label}-{self.config.optim.seed}"

    @property
    def run(self) -> RunDir:
        """Run directory."""
        return RunDir(self.folder / self.name)

    @property
    def asked(self) -> Path:
        """File with the settings that the run is started with."""
        return self.folder / "settings" / f"{self.name}.toml"

    @property
    def finished(self) -> bool:
        """True if all epochs are trained and scored."""
        summary = self.run.read_summary()
        return summary.method is not None and len(self.run.read_metrics()) >= self.config.optim.epochs

    def check(self) -> None:
        """Raise UsageError if the run directory exists with other settings."""
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
    """Time and memory of each run so far, kept in comparison.json."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "comparison.json"
        kept = json.loads(self._path.read_text()) if self._path.exists() else {}
        self._costs = {name: RunCost(**facts) for name, facts in kept.items()}

    def __getitem__(self, job: Job) -> RunCost:
        """Return the cost of a run; zero if it has not started."""
        return self._costs.get(job.name, RunCost())

    def add(self, job: Job, cost: RunCost) -> None:
        """Add the cost of a finished session of a run."""
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
        """Remove the cost of a run that starts anew."""
        self._costs.pop(job.name, None)


def plan_jobs(
    rows: Sequence[Row],
    seeds: Sequence[int],
    wishes: Wishes,
    folder: Path,
    piles: Mapping[int, dict[str, Any]] | None = None,
) -> list[Job]:
    """Return all runs, seed by seed, so that the first table is complete early; raise UsageError for invalid rows.

    `piles` has settings of the section `data` for each seed.
    """
    cached = {"data.cache_dir": str((folder / "views").absolute()), "report.tsne_epochs": []}
    wishes = replace(wishes, flags=cached | wishes.flags)
    configs = [wishes.config(row) for row in rows]
    return [
        Job(row, _of_seed(config, seed, (piles or {}).get(seed, {})), folder)
        for seed in seeds
        for row, config in zip(rows, configs, strict=True)
    ]


def _of_seed(config: TrainConfig, seed: int, pile: dict[str, Any]) -> TrainConfig:
    optim = config.optim.model_copy(update={"seed": seed})
    return config.model_copy(update={"optim": optim, "data": config.data.model_copy(update=pile)})


def check_jobs(jobs: Sequence[Job], *, progress: Progress) -> Manifest:
    """Check earlier runs, images and weights before any training, and return the images."""
    for job in jobs:
        job.check()
    manifests = {}
    for config in (job.config for job in jobs):
        key = (config.data, config.model.backbone, config.model.weights)
        if key not in manifests:
            listed = list_images(config, track=progress.track)
            manifests[key] = set_up(listed, progress=progress).manifest
    manifest = next(iter(manifests.values()))
    if manifest.truth is None:
        raise DataError(
            "the unlabelled images have no true labels, so rows cannot be compared",
            hint="give them as the column true_label of a --manifest FILE.csv; they are used for scores only",
        )
    return manifest


def differences(ours: TrainConfig, other: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ, by `section.key`, with both values."""
    mine, theirs = ours.model_dump(mode="json"), other.model_dump(mode="json")
    return {
        f"{section}.{key}": (value, theirs[section].get(key))
        for section, values in mine.items()
        for key, value in values.items()
        if value != theirs[section].get(key)
    }


def departures(rows: Sequence[Row], wishes: Wishes) -> list[str]:
    """Return a line for each setting in which rows depart from the paper."""
    found: dict[str, list[str]] = {}
    for row in rows:
        for key, (ours, theirs) in differences(wishes.config(row), wishes.published().config(row)).items():
            if key not in _UNLISTED_SETTINGS and not key.startswith("report."):
                found.setdefault(key, []).append(f"{ours} for {theirs}")
    return [f"{key}: {', '.join(dict.fromkeys(pairs))}" for key, pairs in found.items()]


def run_all(jobs: Sequence[Job], ledger: Ledger, *, progress: Progress) -> Iterator[Job]:
    """Run the unfinished jobs; yield each job when it has ended, even if it failed."""
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
    """Start or resume a run; the error of a failed run goes to the ledger."""
    if job.run.begun:
        arguments = ["--resume", str(job.run.path)]
    else:
        shutil.rmtree(job.run.path, ignore_errors=True)  # left by a run that was killed at its start
        ledger.forget(job)
        write_text(job.asked, job.config.to_toml())
        arguments = ["--config", str(job.asked), "--out", str(job.run.path)]
    log, views = job.asked.with_suffix(".log"), _files_in(job.config.data.cache_dir)
    cost, stopped = _run_and_measure([sys.executable, "-m", "ncd_serve", "train", *arguments], log)
    error = _error(log, cost.exit_code) if cost.exit_code and stopped is None else None
    ledger.add(job, replace(cost, error=error, cached=_files_in(job.config.data.cache_dir) > views))
    if stopped is not None:
        raise stopped


def _run_and_measure(command: list[str], log: Path) -> tuple[RunCost, BaseException | None]:
    """Run a command, and return its cost and the interrupt that stopped it, if any."""
    stopped: BaseException | None = None
    start = time.monotonic()
    with log.open("w", encoding="utf-8") as stream:
        # A separate session, so that Ctrl-C does not reach the child twice: it gets one signal, from here.
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status, usage, memory = _wait(child.pid)
        except (KeyboardInterrupt, SystemExit) as interrupt:
            stopped = interrupt
            os.kill(child.pid, signal.SIGTERM)  # a background process may ignore SIGINT
            status, usage, memory = _wait(child.pid)
    child.returncode = os.waitstatus_to_exitcode(status)
    cpu = usage.ru_utime + usage.ru_stime
    return RunCost(time.monotonic() - start, cpu, memory, exit_code=child.returncode), stopped


def _wait(pid: int) -> tuple[int, resource.struct_rusage, int]:
    """Wait for a process to end, and return its exit status, resource usage and peak memory.

    Polls, since the peak can be read only before the end, and an interrupt must not lose the exit status.
    """
    memory = 0
    while True:
        memory = peak_memory(pid) or memory
        ended, status, usage = os.wait4(pid, os.WNOHANG)
        if ended:
            return status, usage, memory or rusage_memory(usage)
        time.sleep(_POLL_SECONDS)


def _error(log: Path, code: int) -> str:
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    lines = [line.strip() for line in log.read_text(encoding="utf-8").splitlines() if line.strip()]
    named = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (named or lines or [f"exit code {code}"])[-1]


def _files_in(folder: Path | None) -> int:
    return len(list(folder.glob("*.npy"))) if folder is not None else 0
