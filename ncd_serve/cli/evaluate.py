"""`evaluate`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ncd_serve.cli.console import out, progress
from ncd_serve.cli.options import RunArgument, run_or_newest
from ncd_serve.errors import needs_extra


def evaluate(
    run: RunArgument = None,
    per_class: Annotated[bool, typer.Option("--per-class", help="Show all classes of all splits.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Score a run on every split that has true classes: ACC, NMI, ARI, classes, quality of pseudo labels.

    Examples:
        ncd-serve evaluate
        ncd-serve evaluate runs/birds --per-class
    """
    with needs_extra("train"):
        from ncd_training.api import open_run
        from ncd_training.summary.figures import score_tables

        run = run_or_newest(run)
        opened = open_run(run, progress=progress)
        summary = opened.evaluate()
    if as_json:
        out.print_json(json.dumps(summary.as_json()))
    elif not summary.scores:
        out.print(*opened.verdict, sep="\n", highlight=False, markup=False, soft_wrap=True)
        out.print(
            f"the unlabelled images have no true labels, so there is nothing to score; look at the clusters: "
            f"ncd-serve gallery {run}, and at {run / 'report.html'}",
            highlight=False,
            soft_wrap=True,
        )
    else:
        for table in score_tables(summary, every_class=per_class):
            out.print(table)
