"""`train --after`: the next generation of a bundle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Column, Table

from ncd_serve.cli.console import answer, out, progress, show_next
from ncd_serve.cli.options import Accelerator, note_newer_generation, use_device
from ncd_serve.errors import UsageError, needs_extra
from ncd_serve.places import bundle_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ncd_training.api import Run

    from ncd_serve.bundle import Change

_PATHS = ("after", "add", "accept", "out_")
_OWN = (*_PATHS, "retrain", "promote")
_DEFAULTS = {"device": "auto"}  # of options that have one


def train_after(options: Mapping[str, object]) -> None:
    """Make the next generation of a bundle; `options` are those of `train`."""
    allowed = (*_OWN, "device") if options["retrain"] else _OWN
    given = [
        name
        for name, value in options.items()
        if value not in (None, [], False, _DEFAULTS.get(name)) and name not in allowed
    ]
    if given:
        option = f"--{given[0].strip('_').replace('_', '-')}"
        why = "which takes the settings of the run before" if options["retrain"] else "which trains nothing"
        raise UsageError(f"{option} is not for --after, {why}", hint="drop it")
    after, add, accept, target = (Path(str(options[name])) if options[name] else None for name in _PATHS)
    together = UsageError("--after and --add belong together", hint="ncd-serve train --after BUNDLE --add NEW")
    if after is None or (accept and add is None):
        raise together
    after = bundle_of(after)
    note_newer_generation(after)
    if options["retrain"]:
        use_device(Accelerator(options["device"]))
        _retrain(after, add, accept, target, promote=bool(options["promote"]))
        return
    if options["promote"]:
        raise UsageError("--promote is for --retrain: an append learns no labels", hint="add --retrain, or drop it")
    if add is None:
        raise together
    _append(after, add, accept, target)


def _append(after: Path, add: Path, accept: Path | None, target: Path | None) -> None:
    with needs_extra("export"):
        from ncd_export.append import append_generation, next_folder

    bundle = append_generation(after, add, accept=accept, out=target or next_folder(after), progress=progress)
    about = bundle.manifest
    show_changes(about.changes, dict(enumerate(about.cluster_names)))
    answer(f"generation {about.generation}, bundle: {bundle.folder}")
    show_next("export", bundle.folder)


def _retrain(after: Path, add: Path | None, accept: Path | None, target: Path | None, *, promote: bool) -> None:
    with needs_extra("train"):
        import ncd_training.api as api

    show_generation(api.retrain(after, add, accept=accept, promote=promote, out=target, progress=progress))


def show_generation(run: Run) -> None:
    """Print what became of the clusters of the generation before, which names are undecided, and what is next."""
    show_changes(run.changes, run.carried_names)
    for name in run.undecided:
        most = "no cluster is like it" if name.like is None else f"cluster {name.like} overlaps by {name.overlap:.0%}"
        answer(f"undecided: '{name.name}' was cluster {name.cluster_id}, now {name.kind}; {most}")
    near = sorted(run.undecided, key=lambda name: name.overlap)  # of several names for a cluster, the nearest counts
    named = {str(name.like): {"name": name.name} for name in near if name.like in run.unnamed}
    if named:
        answer(
            f"to decide: look at ncd-serve gallery {run.path}, export the run, and give ncd-serve name apply a "
            f"names.json with the names that are right: {json.dumps({'clusters': named})}"
        )
    answer(f"run directory: {run.path}")
    show_next("export", run.path)


def show_changes(changes: Sequence[Change], names: Mapping[int, str]) -> None:
    """Print a table of what became of every cluster."""
    trained = any(change.overlap is not None for change in changes)
    table = Table(
        Column("cluster", justify="right"),
        "name",
        "what",
        Column("images before", justify="right"),
        Column("of the batch", justify="right"),
        Column("moved", justify="right"),
        *([Column("overlap", justify="right")] if trained else []),
    )
    for change in changes:
        numbers = [str(number) for number in (change.images, change.added, change.moved)]
        share = [] if not trained else ["-" if change.overlap is None else f"{change.overlap:.2f}"]
        table.add_row(str(change.cluster_id), escape(names.get(change.cluster_id, "-")), change.kind, *numbers, *share)
    out.print(table)
