"""`doctor`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from ncd_serve.cli.console import out


def doctor(
    bundle: Annotated[Path | None, typer.Option(help="Also check a bundle.")] = None,
    repository: Annotated[Path | None, typer.Option(help="Also check a model repository.")] = None,
    url: Annotated[str | None, typer.Option(help="Also check a Triton server.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check the installation, and what else is named."""
    from ncd_serve.doctor import examine

    checks = examine(bundle=bundle, repository=repository, url=url)
    if as_json:
        out.print_json(json.dumps([asdict(check) for check in checks]))
    else:
        colours = {"ok": "green", "missing": "yellow", "problem": "red"}
        table = Table("check", "verdict", "found", "fix")
        for check in checks:
            table.add_row(check.what, f"[{colours[check.verdict]}]{check.verdict}", check.found, check.fix)
        out.print(table)
    if any(check.verdict == "problem" for check in checks):
        raise typer.Exit(1)
