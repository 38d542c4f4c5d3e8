"""Commands that a studio runs in processes of their own: training, with its plan, and exports."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from ncd_serve.errors import DataError, NcdError, UsageError
from ncd_serve.files import held
from ncd_serve.gallery.read import read_run
from ncd_serve.places import FORMING
from ncd_serve.progress import PROGRESS_VARIABLE
from ncd_serve.reference import REFERENCE

if TYPE_CHECKING:
    from collections.abc import Sequence

_STOP_SECONDS = 60.0
_PLAN_SECONDS = 900.0
_LINES = 12  # of a log that the page shows
_INTERRUPTED = 130
_METRICS = "metrics.jsonl"
_SETTINGS = "config.toml"  # of a run that has begun
_CARRIED = "carried.json"  # of one that had a generation before
_ERROR = re.compile(r"^error: (?P<what>.*)\n(?:hint: (?P<hint>.*)\n?)?", re.MULTILINE)


class TrainingForm(BaseModel):
    """Content of the form: two folders, perhaps a number of clusters, a name and settings."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    labelled: Path
    unlabelled: Path
    clusters: int | None = Field(None, ge=2)
    name: str = Field("", pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$|^$", max_length=80)
    settings: list[str] = []

    def arguments(self) -> list[str]:
        """Return the options of `ncd-serve train`."""
        for folder in (self.labelled, self.unlabelled):
            if not folder.is_dir():
                raise DataError(f"no such folder: {folder}", hint="choose a folder of images")
        chosen = ["--labelled", str(self.labelled), "--unlabelled", str(self.unlabelled)]
        chosen += ["--novel-classes", str(self.clusters or "auto")]
        return [*chosen, *(word for setting in self.settings for word in ("--set", setting))]


def run_command(*words: str, seconds: float = _PLAN_SECONDS) -> str:
    """Run a command of ours to its end and return what it printed; raise its error as one of ours."""
    try:
        done = subprocess.run(
            _command(words), env=_environment(), capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        raise NcdError(f"ncd-serve {words[0]} has not ended in {seconds / 60:.0f} minutes") from None
    if done.returncode:
        raise error_in(done.stderr, done.returncode)
    return done.stdout


def error_in(text: str, code: int) -> NcdError:
    """Return the error that a command ended with."""
    kind = next((kind for kind in NcdError.__subclasses__() if kind.exit_code == code), NcdError)
    found = _ERROR.search(text)
    if found is None:
        last = (text.strip().splitlines() or [f"it ended with code {code}"])[-1]
        return kind(last)
    return kind(found["what"], hint=found["hint"])


@dataclass
class Training:
    """A training that the studio has started, or could resume; its log is in the run directory's folder."""

    run: Path
    process: subprocess.Popen[bytes] | None = None  # None: it was interrupted before this studio began
    _verdict: list[str] | None = None  # in words, once it is finished
    _changes: list[dict[str, Any]] = field(default_factory=list)  # then, too, if it had a generation before

    @classmethod
    def start(cls, form: TrainingForm) -> Training:
        """Start a new run."""
        name = form.name or f"{form.unlabelled.resolve().name}-{time.strftime('%Y%m%d-%H%M%S')}"
        run = Path("runs") / name
        if run.exists():
            raise UsageError(f"{run} exists", hint="choose another name, or resume it")
        return cls.launch(run, ["train", *form.arguments(), "--out", str(run)])

    @classmethod
    def resume(cls, run: Path) -> Training:
        """Continue an interrupted run."""
        if not (run / _SETTINGS).is_file():
            raise DataError(f"{run} is not a run directory", hint="start a new run")
        return cls.launch(run, ["train", "--resume", str(run)])

    @classmethod
    def launch(cls, run: Path, words: Sequence[str]) -> Training:
        """Run a command that trains into a run directory."""
        run.parent.mkdir(parents=True, exist_ok=True)
        training = cls(run)
        environment = _environment() | {PROGRESS_VARIABLE: str(training._progress.absolute())}
        with training._log.open("wb") as log:
            # A group of its own: Ctrl-C in the studio's terminal reaches it through `stop` alone.
            training.process = subprocess.Popen(
                _command(words),
                env=environment,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        return training

    @property
    def going(self) -> bool:
        """True while the process runs."""
        return self.process is not None and self.process.poll() is None

    @property
    def _log(self) -> Path:
        return self.run.with_name(f".{self.run.name}.studio.log")

    @property
    def _progress(self) -> Path:
        return self.run.with_name(f".{self.run.name}.studio.json")

    def stop(self) -> None:
        """Interrupt it as Ctrl-C does: it writes a checkpoint that `resume` continues from."""
        if self.process is not None and self.going:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()

    def state(self) -> dict[str, Any]:
        """Return what the page shows: state, last lines, figures of the epochs, and how clusters form."""
        state, text = self._state(), self._log.read_text(errors="replace") if self._log.is_file() else ""
        error = error_in(text, self.process.returncode) if state == "failed" and self.process else None
        if state == "finished" and self._verdict is None:
            self._verdict, self._changes = read_run(self.run).verdict, changes_since(self.run)
        return {
            "run": str(self.run),
            "state": state,
            "resumable": state in ("stopped", "failed") and (self.run / _SETTINGS).is_file(),
            "lines": text.strip().splitlines()[-_LINES:],
            "progress": _read_json(self._progress) if state == "running" else None,
            "epochs": _json_lines(self.run / _METRICS),
            "forming": _read_json(self.run / FORMING),
            "verdict": self._verdict or [],
            "changes": self._changes,
            "error": str(error) if error else None,
            "hint": error.hint if error else None,
        }

    def _state(self) -> str:
        if self.going:
            return "running"
        if (self.run / REFERENCE).is_file() and (self.process is None or self.process.returncode == 0):
            return "finished"
        if self.process is None:
            with held(self.run) as free:
                return "stopped" if free else "elsewhere"
        return "stopped" if self.process.returncode == _INTERRUPTED else "failed"


def _command(words: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "ncd_serve", *words]


def _environment() -> dict[str, str]:
    # From Python 3.11 on, a file of the present folder, as `random.py`, is not taken for a module.
    return {**os.environ, "PYTHONSAFEPATH": "1"}


def changes_since(run: Path) -> list[dict[str, Any]]:
    """Return what became of every cluster of the generation before, if the run had one."""
    carried = _read_json(run / _CARRIED) or {"changes": [], "names": {"clusters": {}}}
    names = {number: entry["name"] for number, entry in carried["names"]["clusters"].items()}
    return [
        {"name": names.get(str(number)) or f"cluster-{number}", **change}
        for change in carried["changes"]
        for number in [change["cluster_id"]]
    ]


def _json_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def _read_json(path: Path) -> Any:
    """Return the content of a file; None if there is none, or no more."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
