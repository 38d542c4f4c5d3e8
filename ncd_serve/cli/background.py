"""Go on in a process of its own, while the command that was typed waits until all is well and returns."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import typer

from ncd_serve.cli.console import messages, out
from ncd_serve.errors import ServerError


class Background:
    """The line from a detached process to the command that started it, which waits for one message."""

    def __init__(self, line: int) -> None:
        self._line: int | None = line

    def ready(self, text: str) -> None:
        """All is well: the command may print this and end."""
        self._send(0, text)

    def failed(self, code: int, text: str) -> None:
        """It could not start: the command prints the reason and ends with the code. Once it was ready, nobody waits."""
        self._send(code, text)

    def _send(self, code: int, text: str) -> None:
        if self._line is not None:
            with os.fdopen(self._line, "w") as line:
                json.dump([code, text], line)
            self._line = None


def detach(log: Path) -> Background:
    """Return in a new process that no terminal can end, with its output in `log`; the old one does not return."""
    try:
        log_file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError as error:
        raise ServerError(f"cannot write the log {log}: {error.strerror}", hint="choose another --log") from error
    receiver, sender = os.pipe()
    if pid := os.fork():
        os.close(sender)
        _wait_and_exit(pid, receiver)
    os.close(receiver)
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log_file, 1), (log_file, 2)):
        os.dup2(source, target)
    return Background(sender)


def _wait_and_exit(pid: int, receiver: int) -> None:
    try:
        with os.fdopen(receiver) as line, messages.status("starting Triton"):
            code, text = json.loads(line.read() or '[1, "the server ended without a word"]')
    except KeyboardInterrupt:
        os.kill(pid, signal.SIGTERM)
        raise
    (messages if code else out).print(text, highlight=False, markup=False, soft_wrap=True)
    raise typer.Exit(code)
