"""`doctor`."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Column, Table

from ncd_serve.cli.console import messages, out
from ncd_serve.contract import DEFAULT_MODEL
from ncd_serve.places import export_place

if TYPE_CHECKING:
    from ncd_serve.doctor.checks import Check

_COLOURS = {"ok": "green", "missing": "yellow", "problem": "bold red"}
_VERDICT_WIDTH, _WHAT_WIDTH = 8, 20


def doctor(
    bundle: Annotated[Path | None, typer.Option(help="Also check a bundle.")] = None,
    repository: Annotated[Path | None, typer.Option(help="Also check a model repository.")] = None,
    url: Annotated[str | None, typer.Option(help="Also check a Triton server.")] = None,
    model_name: Annotated[
        str | None, typer.Option(help="The model's name; default: as the bundle was exported, as the server has it.")
    ] = None,
    self_test: Annotated[
        bool, typer.Option("--self-test", help="Also train, export and serve a small model; about a minute.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check the installation, and a bundle, repository or server if named; print a fix for each problem.

    Parts that are `missing` are needed by some commands only. Exit code 0 unless there is a problem; otherwise that of
    the first one: 3 for a bundle, a repository or a disk, 5 for a server or Triton, 6 for the installation, 1 for a
    wrong result of the self-test, which compares every precision and device of this machine with the CPU.

    Examples:
        ncd-serve doctor
        ncd-serve doctor --self-test
        ncd-serve doctor --bundle runs/birds/bundle --url grpc://127.0.0.1:8001
    """
    from ncd_serve.doctor.checks import examine
    from ncd_serve.doctor.self_test import run_self_test
    from ncd_serve.triton.serve import server_and_model

    served = server_and_model(url, None)[1] if url else DEFAULT_MODEL
    model = model_name or (export_place(bundle).model if bundle else served)
    found = examine(bundle=bundle, repository=repository, url=url, model=model)
    checks: list[Check] = []
    with messages.status("checking"):
        for check in chain(found, run_self_test() if self_test else ()):
            if not as_json:
                _show(check, new_group=not checks or checks[-1].group != check.group)
            checks.append(check)
    if as_json:
        out.print_json(json.dumps([asdict(check) for check in checks]))
    problems = [check for check in checks if check.verdict == "problem"]
    if problems:
        raise typer.Exit(problems[0].code)


def _show(check: Check, *, new_group: bool) -> None:
    if new_group:
        out.print(f"[bold]{escape(check.group)}[/bold]", highlight=False, soft_wrap=True)
    row = Table.grid(
        Column(width=_VERDICT_WIDTH),
        Column(width=_WHAT_WIDTH, overflow="fold"),
        Column(overflow="fold"),
        padding=(0, 1),
    )
    colour = _COLOURS[check.verdict]
    row.add_row(f"[{colour}]{check.verdict}[/]", escape(check.what), escape(check.found))
    out.print(row, highlight=False)
    if check.fix:  # never folded: a command is there to be copied
        indent = " " * (_VERDICT_WIDTH + _WHAT_WIDTH + 2)
        out.print(f"{indent}[bold]fix:[/bold] {escape(check.fix)}", highlight=False, soft_wrap=True)
