"""log.txt: everything that a run prints, as plain text with the time in front; going on appends to it."""

from __future__ import annotations

import io
from datetime import datetime
from pathlib import Path
from types import TracebackType

from rich.console import Console, ConsoleRenderable, RenderHook
from rich.control import Control

from ncd_serve.errors import NcdError


class RunLog(RenderHook):
    """While it is open, what the console prints goes to the file as well; without a path, nowhere."""

    def __init__(self, path: Path | None, console: Console) -> None:
        self._path, self._console = path, console

    def write(self, text: str) -> None:
        """Add to the file alone, e.g. what a terminal shows in a live table."""
        if self._path is None:
            return
        with self._path.open("a", encoding="utf-8") as stream:
            for line in filter(None, (line.rstrip() for line in text.splitlines())):
                stream.write(f"{datetime.now():%Y-%m-%d %H:%M:%S}  {line}\n")

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Called by the console with all that it is about to print; live displays print only control codes here."""
        words = [item for item in renderables if not isinstance(item, Control)]
        if words:
            plain = Console(file=io.StringIO(), width=1000, color_system=None)
            plain.print(*words)
            self.write(plain.file.getvalue())  # type: ignore[attr-defined]
        return renderables

    def __enter__(self) -> RunLog:
        """Begin to listen."""
        self._console.push_render_hook(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        """Stop listening; what ended the run is its last line."""
        self._console.pop_render_hook()
        if kind is not None:
            self.write(f"ended by {kind.__name__}: {error}" if str(error) else f"ended by {kind.__name__}")
        if isinstance(error, NcdError) and error.hint:
            self.write(f"hint: {error.hint}")
