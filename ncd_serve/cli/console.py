"""Where the commands write: answers to standard output, everything about the work to standard error."""

from __future__ import annotations

import sys
from typing import NoReturn

from rich.console import Console
from rich.markup import escape

from ncd_serve.errors import NcdError

out = Console()
messages = Console(stderr=True)


def exit_with(error: NcdError) -> NoReturn:
    """Say what is wrong and what to do, and end with the documented code."""
    messages.print(f"[bold red]error:[/bold red] {escape(str(error))}", soft_wrap=True, highlight=False)
    if error.hint:
        messages.print(f"[bold]hint:[/bold] {escape(error.hint)}", soft_wrap=True, highlight=False)
    sys.exit(error.exit_code)
