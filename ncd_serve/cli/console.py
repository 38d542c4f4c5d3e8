"""Consoles of the commands: answers go to standard output, everything about the work to standard error."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from rich.markup import escape

from ncd_serve.errors import NcdError
from ncd_serve.progress import PROGRESS_VARIABLE, Progress
from ncd_serve.text import SafeConsole

out = SafeConsole()
messages = SafeConsole(stderr=True)
progress = Progress(messages, file=Path(told) if (told := os.environ.get(PROGRESS_VARIABLE)) else None)
say = progress.say
_errors = SafeConsole(stderr=True)
FOLLOWER_DELAY_SECONDS = 5


@contextmanager
def one_speaker(*, is_leader: bool) -> Iterator[None]:
    """Let only one of several training processes print. A follower delays its error: usually it is the leader's."""
    out.quiet = messages.quiet = not is_leader
    try:
        yield
    except NcdError as error:
        if not is_leader:
            time.sleep(FOLLOWER_DELAY_SECONDS)  # torchrun ends this process here when the leader has failed too
        if "TORCHELASTIC_ERROR_FILE" in os.environ:
            _tell_torchrun(error, Path(os.environ["TORCHELASTIC_ERROR_FILE"]))
        raise


def exit_with(error: NcdError) -> NoReturn:
    """Print an error and its hint, and exit with the documented code."""
    _errors.print(f"[bold red]error:[/bold red] {escape(str(error))}", soft_wrap=True, highlight=False)
    if error.hint:
        _errors.print(f"[bold]hint:[/bold] {escape(error.hint)}", soft_wrap=True, highlight=False)
    sys.exit(error.exit_code)


def answer(text: str) -> None:
    """Print a line of the answer unchanged: no markup, no line breaks."""
    out.print(text, markup=False, highlight=False, soft_wrap=True)


def show_next(*words: object) -> None:
    """Print the command that comes next as the last line of an answer, so that it can be copied."""
    answer(f"next: ncd-serve {shlex.join(map(str, words))}")


def show_serving(repository: Path) -> None:
    """Print what comes next for a repository with a new version: a running server takes it, or one is to be started."""
    from ncd_serve.triton.registry import server_of

    if server := server_of(repository):
        answer(f"server {server.pid} on {server.grpc_url} answers with it in a moment, unless it runs with --no-watch")
    else:
        show_next("serve", "--repository", repository)


def _tell_torchrun(error: NcdError, target: Path) -> None:
    """Write the error for the summary that torchrun ends with, in the form that it reads."""
    facts = {"message": str(error), "errorCode": error.exit_code, "extraInfo": {"timestamp": int(time.time())}}
    target.write_text(json.dumps({"message": facts}))
