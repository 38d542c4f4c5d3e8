"""Background process: the work continues in a new process; the first one waits for one message and returns."""

from __future__ import annotations

import json
import os
import signal
from typing import TYPE_CHECKING

from ncd_serve.errors import NcdError, ServerError

if TYPE_CHECKING:
    from pathlib import Path

    from ncd_serve.progress import Progress


class Background:
    """Pipe from a detached process to the one that started it, which waits for one message."""

    def __init__(self, line: int) -> None:
        self._line: int | None = line

    def ready(self, text: str) -> None:
        """Send the text that the first process returns."""
        self._send({"text": text})

    def failed(self, error: NcdError) -> None:
        """Send an error that the first process raises. After `ready`, it has no effect."""
        self._send({"code": error.exit_code, "error": str(error), "hint": error.hint})

    def _send(self, message: dict[str, object]) -> None:
        if self._line is not None:
            with os.fdopen(self._line, "w") as line:
                json.dump(message, line)
            self._line = None


def detach(log: Path, *, progress: Progress) -> Background | str:
    """Split in two: the new process gets a Background, the old one the text that the new one sent when it was ready.

    No terminal can end the new process, and its output goes to `log`. The first one raises the error of the new one.
    """
    try:
        log_file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError as error:
        raise ServerError(f"cannot write the log {log}: {error.strerror}", hint="choose another --log") from error
    receiver, sender = os.pipe()
    if pid := os.fork():
        os.close(sender)
        os.close(log_file)
        with progress.status("starting Triton"):
            return _wait(pid, receiver, log)
    os.close(receiver)
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log_file, 1), (log_file, 2)):
        os.dup2(source, target)
    return Background(sender)


def _wait(pid: int, receiver: int, log: Path) -> str:
    try:
        with os.fdopen(receiver) as line:
            message = json.loads(line.read() or "{}")
    except KeyboardInterrupt:
        os.kill(pid, signal.SIGTERM)
        raise
    if "text" in message:
        return str(message["text"])
    see_log = f"see the log {log}"
    if "error" not in message:
        raise NcdError("the server process exited without a message", hint=see_log)
    kinds = {kind.exit_code: kind for kind in NcdError.__subclasses__()}
    raise kinds.get(message["code"], NcdError)(message["error"], hint=message["hint"] or see_log)
