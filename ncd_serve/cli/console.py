"""Where the commands write: answers to standard output, everything about the work to standard error."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from rich.console import Console
from rich.markup import escape

from ncd_serve.errors import NcdError

# Of the processes that torchrun starts, only the first one speaks.
_FOLLOWS = int(os.environ.get("RANK", "0")) > 0
out = Console(quiet=_FOLLOWS)
messages = Console(stderr=True, quiet=_FOLLOWS)
_errors = Console(stderr=True)


def exit_with(error: NcdError) -> NoReturn:
    """Say what is wrong and what to do, and end with the documented code."""
    _errors.print(f"[bold red]error:[/bold red] {escape(str(error))}", soft_wrap=True, highlight=False)
    if error.hint:
        _errors.print(f"[bold]hint:[/bold] {escape(error.hint)}", soft_wrap=True, highlight=False)
    sys.exit(error.exit_code)
