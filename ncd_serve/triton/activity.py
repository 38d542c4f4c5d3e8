"""Show the requests of a server: live on a terminal, a line a minute elsewhere."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from rich.live import Live
from rich.table import Table

if TYPE_CHECKING:
    from types import TracebackType

    from rich.console import Console

    from ncd_serve.triton.probe import Activity
    from ncd_serve.triton.server import TritonServer

_LINE_SECONDS = 60


class ActivityDisplay:
    """Display of requests, rate and latency of each model. Use it as a context, and call `update` every second."""

    def __init__(self, server: TritonServer, console: Console) -> None:
        self._server, self._console = server, console
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._before, self._then = server.activity(), time.monotonic()

    def __enter__(self) -> ActivityDisplay:
        """Start the display."""
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restore the terminal."""
        if self._live:
            self._live.stop()

    def update(self) -> None:
        """Show the present figures."""
        seconds = time.monotonic() - self._then
        if not self._live and seconds < _LINE_SECONDS:
            return
        now = self._server.activity()
        rates = {model: _rate(activity, self._before.get(model), seconds) for model, activity in now.items()}
        if self._live:
            self._live.update(_table(now, rates), refresh=True)
        else:
            for model in (model for model in now if rates[model]):
                line = f"{time.strftime('%H:%M:%S')} {model}: {_line(now[model], rates[model])}"
                self._console.print(line, highlight=False)
        self._before, self._then = now, time.monotonic()


def _rate(now: Activity, before: Activity | None, seconds: float) -> float:
    """Return requests per second. The counters of a restarted server begin at zero."""
    return max(0, now.answered - (before.answered if before else 0)) / seconds


def _table(activities: dict[str, Activity], rates: dict[str, float]) -> Table:
    table = Table("model", *("requests", "failed", "images", "requests/s", "p50 ms", "p99 ms"))
    for column in table.columns[1:]:
        column.justify = "right"
    for model, now in activities.items():
        latency = [_milliseconds(value) for value in (now.p50, now.p99)]
        table.add_row(model, f"{now.answered:,}", f"{now.failed:,}", f"{now.images:,}", f"{rates[model]:.1f}", *latency)
    return table


def _line(now: Activity, rate: float) -> str:
    latency = f"p50 {_milliseconds(now.p50)} ms, p99 {_milliseconds(now.p99)} ms"
    return f"{now.answered:,} requests, {now.failed:,} failed, {rate:.1f} a second, {latency}"


def _milliseconds(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1f}"
