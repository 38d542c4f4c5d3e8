"""The files of a run, by name."""

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

from safetensors import SafetensorError

from ncd_serve.errors import DataError, UsageError
from ncd_serve.files import write_json, write_text
from ncd_serve.reference import REFERENCE
from ncd_training.base.launch import Launch
from ncd_training.base.scores import InitialWeights, Summary
from ncd_training.config.resolve import resolve_config
from ncd_training.config.schema import TrainConfig

ALONE = Launch()
PRETRAINED = "weights.safetensors"  # what `ncd-serve pretrain` leaves for `train --weights`
_REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO)
_PACKAGES = ("ncd-serve", "torch", "torchvision", "timm", "numpy", "scikit-learn")


@dataclass(frozen=True)
class RunDir:
    """A run directory: resolved configuration, metrics, plots, checkpoint, environment."""

    path: Path

    @classmethod
    def create(cls, path: Path, config: TrainConfig, *, command: str = "train", launch: Launch = ALONE) -> RunDir:
        """Make a new run directory, by the first process alone; an existing run is never written over."""
        run = cls(path)
        if not launch.is_leader:
            return run
        try:
            path.mkdir(parents=True, exist_ok=True)
            if any(path.iterdir()):
                raise UsageError(f"{path} already holds a run", hint=f"{run.next_step}, or choose another --out")
            run.plots.mkdir()
        except OSError as error:
            raise DataError(f"cannot write to {path}: {error.strerror}", hint="choose another --out") from None
        run.write_config(config)
        write_json(run.environment, {"made_by": command, **_environment(launch)})
        return run

    @classmethod
    def of_this_job(cls, path: Path, config: TrainConfig, launch: Launch) -> RunDir | None:
        """Return the run that torchrun began here with the same settings before it restarted its processes."""
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
        """An existing run directory that a command made."""
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
        """Whether there is a run to go on with."""
        return self._config_file.is_file()

    def config(self) -> TrainConfig:
        """The configuration that the run was started with."""
        return resolve_config(config_file=self._config_file)

    def write_config(self, config: TrainConfig) -> None:
        """Keep a resolved configuration."""
        write_text(self._config_file, config.to_toml())

    @property
    def _config_file(self) -> Path:
        return self.path / "config.toml"

    @property
    def environment(self) -> Path:
        """What the run was started with: command, machine, packages."""
        return self.path / "environment.json"

    @property
    def made_by(self) -> str:
        """The command that made the run: train or pretrain."""
        return str(self._facts.get("made_by", "train"))

    @property
    def _facts(self) -> dict[str, Any]:
        return json.loads(self.environment.read_text()) if self.environment.exists() else {}

    @property
    def next_step(self) -> str:
        """What its owner may want to do with it, for hints."""
        if self.made_by == "estimate-k":  # made in one go
            return f"look at {self.estimate}"
        return f"resume with `ncd-serve {self.made_by} --resume {self.path}`"

    @property
    def manifest(self) -> Path:
        """The images that the run was started with: paths, labels, sizes, times, hashes."""
        return self.path / "manifest.parquet"

    @property
    def skipped(self) -> Path:
        """List of images that were left out, with the reason."""
        return self.path / "skipped.txt"

    @property
    def plots(self) -> Path:
        """Where pictures go."""
        return self.path / "plots"

    @property
    def cache(self) -> Path:
        """Where cached trunk views go."""
        return self.path / "cache"

    @property
    def checkpoint(self) -> Path:
        """The newest complete state."""
        return self.path / "checkpoints" / "last.safetensors"

    @property
    def stages(self) -> Path:
        """Where the epochs of stages before discovery are kept until it starts."""
        return self.path / "stages"

    @property
    def initial(self) -> Path:
        """The state that discovery started from."""
        return self.path / "checkpoints" / "initial.safetensors"

    @property
    def reference(self) -> Path:
        """What the finished model makes of the unlabelled images."""
        return self.path / REFERENCE

    @property
    def report(self) -> Path:
        """All of it on one page, for people."""
        return self.path / "report.html"

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Turn what the disk refuses into DataError."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            if isinstance(error, OSError) and error.errno not in _REFUSALS:
                raise
            raise DataError(f"cannot write: {error}", hint=f"make room, then {self.next_step}") from error

    def drop_unfinished(self) -> None:
        """Remove the large files that a killed process was writing."""
        for folder in (self.cache, self.stages, self.checkpoint.parent):
            for leftover in folder.rglob(".*"):
                if leftover.is_file():
                    leftover.unlink()

    def drop_cache(self) -> None:
        """Remove cached trunk views that nobody asked to keep elsewhere."""
        shutil.rmtree(self.cache, ignore_errors=True)

    def drop_stages(self) -> None:
        """Remove what only a stage before discovery would go on from."""
        shutil.rmtree(self.stages, ignore_errors=True)

    @property
    def estimate(self) -> Path:
        """How the number of novel classes was estimated, if it was."""
        return self.path / "estimate.json"

    @property
    def log(self) -> Path:
        """What was printed."""
        return self.path / "log.txt"

    @property
    def metrics(self) -> Path:
        """One JSON object for each epoch."""
        return self.path / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        """Final scores by split, and the baselines."""
        return self.path / "summary.json"

    def read_summary(self) -> Summary:
        """Read baselines and scores so far."""
        return Summary.model_validate_json(self.summary.read_text()) if self.summary.exists() else Summary()

    def write_summary(self, summary: Summary) -> None:
        """Replace the summary."""
        write_json(self.summary, summary.as_json())

    def note_start(self, *, device: str, weights: InitialWeights | None) -> None:
        """Keep the device and the file of initial weights that training starts with."""
        write_json(self.environment, {**self._facts, "device": device})
        if weights:
            self.write_summary(self.read_summary().model_copy(update={"weights": weights}))

    @property
    def images_digest(self) -> str | None:
        """Fingerprint of the images, in runs that were made before runs kept their manifest."""
        return self._facts.get("images")

    def read_metrics(self) -> list[dict[str, Any]]:
        """All epochs so far."""
        return [json.loads(line) for line in self.metrics.read_text().splitlines()] if self.metrics.exists() else []

    def write_metrics(self, rows: list[dict[str, Any]]) -> None:
        """Replace the metrics file; whole rows only, whenever it is read."""
        write_text(self.metrics, "".join(json.dumps(row) + "\n" for row in rows))


def weights_path(path: Path) -> Path:
    """The file of weights that a path means: itself, or in a run directory what pretraining or training left there."""
    if path.is_dir():
        found = [file for file in (path / PRETRAINED, RunDir(path).checkpoint) if file.is_file()]
        if not found:
            raise DataError(f"{path} is a folder without weights", hint="give a file of weights, or a run directory")
        return found[0]
    if not path.is_file():
        raise DataError(f"no weights at {path}", hint="check the path; `ncd-serve pretrain` makes weights from images")
    return path


def default_run_name(dataset: str) -> str:
    """`<dataset>-<time>`."""
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
