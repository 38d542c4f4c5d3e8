"""Run directory: names of its files, access to the small ones, and the scores in its summary."""

from __future__ import annotations

import errno
import json
import platform
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError

from ncd_serve.errors import DataError, UsageError
from ncd_serve.files import held, write_json, write_text
from ncd_serve.reference import REFERENCE
from ncd_serve.text import first_problem
from ncd_serve.verdict import SUMMARY, Verdict
from ncd_training.base.processes import Launch
from ncd_training.config.resolve import resolve_config
from ncd_training.config.schema import TrainConfig

ALONE = Launch()
PRETRAINED = "weights.safetensors"  # written by `ncd-serve pretrain`, for `train --weights`
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO)
_PACKAGES = ("ncd-serve", "torch", "torchvision", "timm", "numpy", "scikit-learn")


@dataclass(frozen=True)
class RunDir:
    """Run directory: resolved configuration, metrics, plots, checkpoint, environment."""

    path: Path

    @classmethod
    def create(cls, path: Path, config: TrainConfig, *, command: str = "train", launch: Launch = ALONE) -> RunDir:
        """Create a new run directory, in the first process alone; an existing run is never overwritten."""
        run = cls(path)
        if not launch.is_leader:
            return run
        try:
            run.check_new()
            path.mkdir(parents=True, exist_ok=True)
            run.plots.mkdir()
        except OSError as error:
            raise DataError(f"cannot write to {path}: {error.strerror}", hint="choose another --out") from None
        run.write_config(config)
        write_json(run.environment, {"made_by": command, **_environment(launch)})
        return run

    def check_new(self) -> None:
        """Raise UsageError if the directory holds anything."""
        if self.path.is_dir() and any(self.path.iterdir()):
            raise UsageError(f"{self.path} already holds a run", hint=f"{self.next_step}, or choose another --out")

    @classmethod
    def of_this_job(cls, path: Path, config: TrainConfig, launch: Launch) -> RunDir | None:
        """Return the run that this torchrun job started with the same settings before a restart, or None."""
        run = cls(path)
        if (
            launch.job is None
            or run._facts.get("job") != launch.job
            or run._config_file.read_text() != config.to_toml()
        ):
            return None
        return run

    @classmethod
    def open(cls, path: Path, *, command: str = "train") -> RunDir:
        """Open an existing run directory; DataError if `command` did not make it."""
        run = cls(path)
        if not run.begun:
            raise DataError(f"{path} is not a run directory", hint=f"ncd-serve {command} makes one")
        if run.made_by != command:
            raise DataError(
                f"{path} is a run of `ncd-serve {run.made_by}`, not of `ncd-serve {command}`",
                hint=run.next_step,
            )
        return run

    @property
    def begun(self) -> bool:
        """True if the directory holds a run."""
        return self._config_file.is_file()

    def config(self) -> TrainConfig:
        """Return the configuration that the run was started with."""
        return resolve_config(config_file=self._config_file)

    def write_config(self, config: TrainConfig) -> None:
        """Write a resolved configuration."""
        write_text(self._config_file, config.to_toml())

    @property
    def _config_file(self) -> Path:
        return self.path / "config.toml"

    @property
    def environment(self) -> Path:
        """File that records command, machine and packages of the run."""
        return self.path / "environment.json"

    @property
    def made_by(self) -> str:
        """Command that made the run: train, pretrain or estimate-k."""
        return str(self._facts.get("made_by", "train"))

    @property
    def _facts(self) -> dict[str, Any]:
        return json.loads(self.environment.read_text()) if self.environment.exists() else {}

    @property
    def next_step(self) -> str:
        """Next action for the run's owner, as text of a hint."""
        if self.made_by == "estimate-k":  # cannot be resumed
            return f"look at {self.estimate}"
        return f"resume with `ncd-serve {self.made_by} --resume {self.path}`"

    @property
    def manifest(self) -> Path:
        """List of the images that the run was started with: paths, labels, sizes, times, hashes."""
        return self.path / "manifest.jsonl"

    @property
    def carried(self) -> Path:
        """File with clusters, labels and ids of the generation before, if there is one."""
        return self.path / "carried.json"

    @property
    def placed(self) -> Path:
        """Newest checkpoint after its clusters got their ids, until it replaces `checkpoint`."""
        return self.path / "checkpoints" / "placed.safetensors"

    @property
    def skipped(self) -> Path:
        """List of skipped images, each with the reason."""
        return self.path / "skipped.txt"

    @property
    def plots(self) -> Path:
        """Folder of plots."""
        return self.path / "plots"

    @property
    def cache(self) -> Path:
        """Folder of cached trunk maps."""
        return self.path / "cache"

    @property
    def checkpoint(self) -> Path:
        """Newest checkpoint."""
        return self.path / "checkpoints" / "last.safetensors"

    @property
    def stages(self) -> Path:
        """Folder that keeps checkpoints of stages before discovery until discovery starts."""
        return self.path / "stages"

    @property
    def initial(self) -> Path:
        """Checkpoint that discovery started from."""
        return self.path / "checkpoints" / "initial.safetensors"

    @property
    def reference(self) -> Path:
        """Predictions of the finished model for the unlabelled images."""
        return self.path / REFERENCE

    @property
    def report(self) -> Path:
        """Report on the whole run, one HTML page."""
        return self.path / "report.html"

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Turn errors of the disk into DataError."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            if isinstance(error, OSError) and error.errno not in _DISK_ERRORS:
                raise
            raise DataError(
                f"cannot write: {error}", hint=f"free disk space or make it writable, then {self.next_step}"
            ) from error

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep the run to this process; UsageError if another one is training it."""
        with held(self.path) as free:
            if not free:
                raise UsageError(f"{self.path} is being trained by another process", hint="wait for it, or stop it")
            yield

    def drop_unfinished(self) -> None:
        """Remove large files that a killed process left unfinished."""
        for folder in (self.cache, self.stages, self.checkpoint.parent):
            for leftover in folder.rglob(".*"):
                if leftover.is_file():
                    leftover.unlink()

    def drop_cache(self) -> None:
        """Remove the run's own cache of trunk maps."""
        shutil.rmtree(self.cache, ignore_errors=True)

    def drop_stages(self) -> None:
        """Remove checkpoints that only a stage before discovery would resume from."""
        shutil.rmtree(self.stages, ignore_errors=True)

    @property
    def estimate(self) -> Path:
        """Estimate of the number of novel classes, if there is one."""
        return self.path / "estimate.json"

    @property
    def log(self) -> Path:
        """Log of everything that was printed."""
        return self.path / "log.txt"

    @property
    def metrics(self) -> Path:
        """Metrics, one JSON object for each epoch."""
        return self.path / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        """Final scores by split, and the baselines."""
        return self.path / SUMMARY

    def read_summary(self) -> Summary:
        """Read the baselines and scores so far."""
        if not self.summary.exists():
            return Summary()
        try:
            return Summary.model_validate_json(self.summary.read_bytes())
        except ValidationError as error:
            text = f"{self.summary} is damaged: {first_problem(error)}"
            raise DataError(text, hint=f"rm {self.summary}, then ncd-serve evaluate {self.path}") from None

    def write_summary(self, summary: Summary) -> None:
        """Replace the summary."""
        write_json(self.summary, summary.as_json())

    def note_start(self, *, device: str, weights: InitialWeights | None) -> None:
        """Record the device and the file of initial weights that training starts with."""
        write_json(self.environment, {**self._facts, "device": device})
        if weights:
            self.write_summary(self.read_summary().model_copy(update={"weights": weights}))

    @property
    def images_digest(self) -> str | None:
        """Fingerprint of the images; only in runs that are older than `manifest`."""
        return self._facts.get("images")

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return the metrics of all epochs so far."""
        return [json.loads(line) for line in self.metrics.read_text().splitlines()] if self.metrics.exists() else []

    def write_metrics(self, rows: list[dict[str, Any]]) -> None:
        """Replace the metrics file atomically: a reader never sees part of a row."""
        write_text(self.metrics, "".join(json.dumps(row) + "\n" for row in rows))


def weights_path(path: Path) -> Path:
    """Return a file of weights: `path` itself, or the file in a run directory that pretraining or training wrote."""
    if path.is_dir():
        found = [file for file in (path / PRETRAINED, RunDir(path).checkpoint) if file.is_file()]
        if not found:
            raise DataError(f"{path} is a folder without weights", hint="give a file of weights, or a run directory")
        return found[0]
    if not path.is_file():
        raise DataError(f"no weights at {path}", hint="check the path; `ncd-serve pretrain` makes weights from images")
    return path


def default_run_name(dataset: str) -> str:
    """Return `<dataset>-<time>`."""
    return f"{dataset}-{datetime.now():%Y%m%d-%H%M%S}"


def _environment(launch: Launch) -> dict[str, Any]:
    return {
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": sys.argv,
        "job": launch.job,
        "folder": str(Path.cwd()),
        "python": platform.python_version(),
        "machine": platform.platform(),
        "packages": {name: version(name) for name in _PACKAGES},
    }


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


class ClassScore(_Record):
    """Accuracy on the images of one true class; `cluster` is the cluster that the class was matched with."""

    name: str = Field(alias="class")
    images: int
    cluster: int | None = None  # None: the head knows the class by name
    share: float


class Score(_Record):
    """Scores of one split."""

    images: int
    acc: float
    nmi: float | None = None  # None: not a clustering
    ari: float | None = None
    classes: list[ClassScore] = []


class InitialWeights(_Record):
    """File of weights that trunk and tail started from."""

    file: str
    format: str
    sha256: str
    repository: str | None = None
    revision: str | None = None
    licence: str | None = None


class Summary(_Record):
    """Final scores of a run, each by the name of a baseline, a split or a branch, and the verdict without labels."""

    weights: InitialWeights | None = None
    baselines: dict[str, Score] = {}
    method: str | None = None  # None: not evaluated yet
    scores: dict[str, Score] = {}
    pseudo_labels: dict[str, dict[str, float]] = {}
    verdict: Verdict | None = None  # None: not evaluated yet, by an older version, or diverged

    def as_json(self) -> dict[str, Any]:
        """Return the content of summary.json: baselines and scores always, other fields only if set."""
        content = self.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)
        return {"baselines": {}, "scores": {}, **content}
