"""Where the commands write: answers to standard output, everything about the work to standard error."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.markup import escape

from ncd_serve.errors import NcdError

# Of the processes that torchrun starts, only the first one speaks.
_FOLLOWS = int(os.environ.get("RANK", "0")) > 0
out = Console(quiet=_FOLLOWS)
messages = Console(stderr=True, quiet=_FOLLOWS)
_errors = Console(stderr=True)
_MANNERS = 5  # s


def say(text: str) -> None:
    """A line about the work, as it is: no markup, no breaks."""
    messages.print(text, markup=False, highlight=False, soft_wrap=True)


def exit_with(error: NcdError) -> NoReturn:
    """Say what is wrong and what to do, and end with the documented code."""
    if _FOLLOWS:
        # Mostly the first process says the same; then torchrun ends this one here.
        time.sleep(_MANNERS)
    _errors.print(f"[bold red]error:[/bold red] {escape(str(error))}", soft_wrap=True, highlight=False)
    if error.hint:
        _errors.print(f"[bold]hint:[/bold] {escape(error.hint)}", soft_wrap=True, highlight=False)
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        _tell_torchrun(error, Path(os.environ["TORCHELASTIC_ERROR_FILE"]))
    sys.exit(error.exit_code)


def _tell_torchrun(error: NcdError, target: Path) -> None:
    """For the summary that torchrun ends with, in the form that it reads."""
    facts = {"message": str(error), "errorCode": error.exit_code, "extraInfo": {"timestamp": int(time.time())}}
    target.write_text(json.dumps({"message": facts}))
