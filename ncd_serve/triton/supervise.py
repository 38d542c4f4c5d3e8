"""Supervision of a server: restarts it when it or a model's process has died or hangs, loads new exports."""

from __future__ import annotations

import time
from threading import Event, Thread
from typing import TYPE_CHECKING, NoReturn

from ncd_serve.errors import DataError, NcdError
from ncd_serve.files import locked
from ncd_serve.triton.repository import VERSION, load_configs

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ncd_serve.triton.probe import Probe
    from ncd_serve.triton.server import TritonServer

WATCH_SECONDS = 1.0
ASK_SECONDS = 10.0  # between inferences that show that the models answer
# A restart waits the longer the more there were of late; each is forgotten after a while, so that none is the last.
RECENT_SECONDS = 600
LONGEST_PAUSE = 60
# With a dead model process, Triton never finishes its drain: other requests get this long.
BROKEN_STOP_SECONDS = 3
OVERLAP_SECONDS = 5

Fingerprint = frozenset[tuple[str, int, int]]


class Supervisor:
    """Supervisor of one server, which it starts and restarts; `tell` reports its actions."""

    def __init__(self, server: TritonServer, *, start_seconds: float, tell: Callable[[str], None]) -> None:
        self._server, self._start_seconds, self._tell = server, start_seconds, tell
        self._restarts: list[float] = []  # when they were

    def run(self, *, updates: Updates | None = None, show: Callable[[], None]) -> NoReturn:
        """Watch until interrupted. `show` is called every second while the server runs."""
        while True:
            reason = self._watch(updates, show)
            while not self._restart(reason):
                reason = "Triton did not start"

    def _watch(self, updates: Updates | None, show: Callable[[], None]) -> str:
        """Watch the server, and return the reason why it needs a restart."""
        suspected = None
        with _Asking(self._server.probe, self._server.pid) as asking:
            while self._server.is_running():
                lost = self._server.probe.lost_process(self._server.pid)
                if lost is not None and lost == suspected:  # twice: processes come and go while a model is loaded
                    return lost
                if asking.trouble:
                    return asking.trouble
                suspected = lost
                for folder in updates.due() if updates else ():
                    with locked(folder.parent, shared=True):  # nothing is published while Triton reads
                        self._load(folder)
                show()
                time.sleep(WATCH_SECONDS)
        return "Triton has ended by itself"

    def _load(self, folder: Path) -> None:
        """Load a new version beside the old one, and let go of that when its last answers are out.

        Triton itself unloads the old version at once, and then fails requests in flight that ask for class names. Where
        the new configuration does not fit the old version, or memory is short, that is still the way.
        """
        probe, model = self._server.probe, folder.name
        try:
            self._server.check(folder)
            configs = load_configs(folder)
        except DataError as error:
            problem: str | None = str(error)
        else:
            if configs and probe.load(model, configs[0]) is None:
                time.sleep(OVERLAP_SECONDS)
                problem = probe.load(model, configs[1])
            else:
                problem = probe.load(model)
        self._server.protect_memory()
        ready = [entry.version for entry in probe.versions() if entry[:3:2] == (model, "READY")]
        served = f"serving version {', '.join(ready)}" if ready else "not served"
        self._tell(
            f"model '{model}' could not be loaded ({problem}): {served}" if problem else f"model '{model}': {served}"
        )

    def _restart(self, reason: str) -> bool:
        pause = self._next_pause()
        self._tell(f"{reason}: restarting Triton{f' in {pause} s' if pause else ''}")
        self._server.halt(patience=BROKEN_STOP_SECONDS)
        time.sleep(pause)
        try:
            self._server.start()
            self._server.wait_ready(self._start_seconds)
        except NcdError as error:
            self._tell(str(error))
            self._server.halt(patience=BROKEN_STOP_SECONDS)
            return False
        self._tell("Triton is ready again")
        return True

    def _next_pause(self) -> int:
        """Return the seconds before the next restart: none, then twice those of the last one if that was of late."""
        now = time.monotonic()
        self._restarts = [*(then for then in self._restarts if now - then < RECENT_SECONDS), now]
        return min(2 ** (len(self._restarts) - 1) // 2, LONGEST_PAUSE)


class _Asking:
    """Real inferences in the background; `trouble` is the reason why the server hangs, once it does."""

    def __init__(self, probe: Probe, pid: int) -> None:
        self._probe, self._pid, self._over = probe, pid, Event()
        self.trouble: str | None = None

    def __enter__(self) -> _Asking:
        Thread(target=self._run, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _run(self) -> None:
        while not self.trouble and not self._over.wait(ASK_SECONDS):
            self.trouble = self._probe.hanging(self._pid)


class Updates:
    """Tracker of the models in a repository whose files have changed since they were loaded."""

    def __init__(self, repository: Path) -> None:
        self._repository = repository
        self._loaded = self._seen = self._look()

    def due(self) -> list[Path]:
        """Return folders that changed and are complete: no change since the last call. Each is returned once."""
        before, self._seen = self._seen, self._look()
        settled = {folder: mark for folder, mark in self._seen.items() if before.get(folder) == mark}
        due = [folder for folder, mark in sorted(settled.items()) if self._loaded.get(folder) != mark]
        self._loaded.update({folder: settled[folder] for folder in due})
        return due

    def _look(self) -> dict[Path, Fingerprint]:
        try:
            folders = [entry for entry in self._repository.iterdir() if entry.is_dir() and entry.name[0] != "."]
            return {folder: _fingerprint(folder) for folder in folders}
        except OSError:  # files are being moved or removed: checked again at the next look
            return {}


def _fingerprint(model: Path) -> Fingerprint:
    """Return the state of files that an export changes: configuration, labels, versions; no caches."""
    versions = [entry for entry in model.iterdir() if VERSION.fullmatch(entry.name)]
    files = [file for folder in (model, *versions) for file in folder.glob("[!.]*.*")]
    return frozenset((str(file), file.stat().st_mtime_ns, file.stat().st_ino) for file in files)
