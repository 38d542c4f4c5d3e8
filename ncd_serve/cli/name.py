"""`name apply`, `name list`, `name export` and `name carry`."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer
from rich.markup import escape
from rich.table import Column, Table

from ncd_serve.cli.console import answer, messages, out, progress, say, show_next, show_serving
from ncd_serve.cli.help import Group, command
from ncd_serve.cli.options import bundle_or_newest, note_newer_generation
from ncd_serve.errors import UsageError, needs_extra
from ncd_serve.places import ExportPlace, bundle_of, bundle_of_checkpoint, export_place, find_runs, never_exported

if TYPE_CHECKING:
    from ncd_serve.naming import ClusterState, Names, Naming

BundleFolder = Annotated[
    Path | None, typer.Option("--bundle", help="A bundle or a run; default: the newest exported run.")
]

app = typer.Typer(
    help="Name the clusters of a bundle, merge them, or mark them as junk.", no_args_is_help=True, cls=Group
)


@command(app)
def apply(
    names: Annotated[Path, typer.Argument(help="A names.json, as the gallery saves it.")],
    source: Annotated[
        Path | None,
        typer.Argument(
            metavar="RUN|BUNDLE", help="Whose clusters; default: those that the file names, else the newest run's."
        ),
    ] = None,
    bundle: Annotated[Path | None, typer.Option(help="The same as the second argument.")] = None,
    repository: Annotated[
        Path | None, typer.Option(help="Triton model repository; default: the one that the bundle was exported to.")
    ] = None,
    model_name: Annotated[str | None, typer.Option(help="The model's name there; default: as it was exported.")] = None,
    keep: Annotated[int | None, typer.Option(min=1, help="Remove all versions but the newest N.")] = None,
) -> None:
    """Write names and merges into a bundle, and add it to a Triton model repository as a new version.

    A run that was never exported is exported first.

    Examples:
        ncd-serve name apply names.json
        ncd-serve name apply names.json runs/birds
    """
    from ncd_serve.bundle import Bundle
    from ncd_serve.naming import Names, Naming, State, apply_names, cluster_states, corrections_in_words

    wanted = Names.read(names)
    source = source or bundle
    if run := _unexported(source, wanted):
        say(f"{run} was never exported, so that comes first")
        with needs_extra("train"):
            from ncd_training.api import open_run

            source = open_run(run, progress=progress).export(repository=repository, model_name=model_name).folder
    folder = _bundle_for(source, wanted)
    note_newer_generation(folder)
    place = export_place(folder)
    place = ExportPlace(repository or place.repository, model_name or place.model)
    apply_names(Bundle.read(folder).manifest, wanted)  # what is wrong is said even where nothing can be written
    with needs_extra("export"):
        from ncd_export.rename import rename_bundle
    with messages.status("writing the named model"):
        named, version = rename_bundle(folder, wanted, repository=place.repository, name=place.model, keep=keep)
    about = named.manifest
    _note_same_names(Naming.of(about))
    counts = Counter(cluster.state for cluster in cluster_states(about))
    parts = [f"{counts[state]} {state}" for state in get_args(State) if counts[state]]
    corrections = corrections_in_words(about)
    out.print(
        f"{len(about.cluster_names)} clusters: {', '.join(parts)}\n"
        f"{f'corrected images: {corrections}, for the next round{chr(10)}' if corrections else ''}"
        f"bundle: [bold]{escape(str(named.folder))}[/bold]\ndigest: {named.digest}\n"
        f"model:  [bold]{escape(str(version))}[/bold]",
        highlight=False,
        soft_wrap=True,
    )
    show_serving(place.repository)


@command(app, "list")
def list_(
    bundle: BundleFolder = None, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
) -> None:
    """Show the clusters of a bundle: their names, their images in training, and which are merged or junk.

    Examples:
        ncd-serve name list
        ncd-serve name list --bundle runs/birds --json
    """
    from ncd_serve.bundle import Bundle
    from ncd_serve.naming import cluster_states
    from ncd_serve.reference import REFERENCE

    opened = Bundle.read(bundle_or_newest(bundle))
    clusters = cluster_states(opened.manifest)
    # Bundles of older versions do not know it.
    images = opened.reference().counts.tolist() if REFERENCE in opened.manifest.sha256 else [None] * len(clusters)
    if as_json:
        rows = [{**cluster._asdict(), "images": count} for cluster, count in zip(clusters, images, strict=True)]
        out.print_json(json.dumps(rows))
        return
    table = Table(Column("cluster", justify="right"), "name", Column("images", justify="right"), "state")
    for cluster, count in zip(clusters, images, strict=True):
        shown = "-" if count is None else str(count)
        table.add_row(str(cluster.cluster_id), escape(cluster.cluster_name), shown, _in_words(cluster))
    out.print(table)


@command(app)
def export(
    bundle: BundleFolder = None,
    target: Annotated[Path | None, typer.Option("--out", help="The new file; default: print it.")] = None,
) -> None:
    """Write the names.json that would restore a bundle's names, merges and junk.

    Examples:
        ncd-serve name export --bundle runs/birds --out names.json
    """
    from ncd_serve.bundle import Bundle
    from ncd_serve.files import write_json
    from ncd_serve.naming import Names

    content = Names.of(Bundle.read(bundle_or_newest(bundle))).as_json()
    if target is None:
        out.print_json(json.dumps(content))
        return
    if target.exists():
        raise UsageError(f"{target} exists", hint="choose another --out")
    write_json(target, content)
    answer(str(target))
    show_next("name", "apply", target)


@command(app)
def carry(
    old: Annotated[Path, typer.Argument(help="Bundle that has the names, or its run.")],
    new: Annotated[Path, typer.Argument(help="Bundle of another model, trained later, or its run.")],
    images: Annotated[
        Path | None, typer.Option(help="Ask both about these images; default: compare the images of training.")
    ] = None,
    target: Annotated[Path, typer.Option("--out", help="The new names.json.")] = Path("carried.json"),
) -> None:
    """Carry names, junk marks and corrections over to a model that was trained apart, where clusters are the same.

    Examples:
        ncd-serve name carry runs/old/bundle runs/new/bundle
    """
    from ncd_serve.discovery.carry import carry_names
    from ncd_serve.files import write_json

    if target.exists():
        raise UsageError(f"{target} exists", hint="choose another --out")
    old, new = bundle_of(old), bundle_of(new)
    names, matches = carry_names(old, new, images=images, progress=progress)
    table = Table(
        "name",
        Column("old", justify="right"),
        Column("new", justify="right"),
        Column("overlap", justify="right"),
        "verdict",
    )
    for match in sorted(matches, key=lambda match: -match.overlap):
        verdict = "carried" if match.carried else "[yellow]look at it[/yellow]"
        where = ", ".join(map(str, match.new))
        table.add_row(escape(match.name), str(match.old), where, f"{match.overlap:.2f}", verdict)
    out.print(table)
    carried = f"{sum(match.carried for match in matches)} of {len(matches)} names are carried over"
    if not names.clusters and not names.images:
        answer(carried)
        show_next("gallery", new)
        return
    write_json(target, names.as_json())
    answer(f"{carried}: {target}")
    show_next("name", "apply", target)


def _unexported(given: Path | None, names: Names) -> Path | None:
    """Return the run that names are for, as given or by its checkpoint, if it was never exported."""
    from ncd_serve.reference import REFERENCE, Reference

    if given is not None:
        return given if never_exported(given) else None
    if names.bundle or not names.checkpoint:
        return None
    runs = filter(never_exported, find_runs())
    return next((run for run in runs if Reference.read(run / REFERENCE).checkpoint == names.checkpoint), None)


def _bundle_for(given: Path | None, names: Names) -> Path:
    """Return the bundle that names are for: as given, as the file says, by its checkpoint, or the newest one."""
    if given is not None:
        return bundle_of(given)
    if names.bundle is not None and names.bundle.is_dir():
        return names.bundle
    same = bundle_of_checkpoint(names.checkpoint) if names.checkpoint else None
    return same or names.bundle or bundle_or_newest(None)


def _in_words(cluster: ClusterState) -> str:
    if cluster.state == "unnamed":
        return ""
    return f"merged into {cluster.merged_into}" if cluster.state == "merged" else cluster.state


def _note_same_names(naming: Naming) -> None:
    from ncd_serve.naming import same_names

    for name, (first, *others) in same_names(naming).items():
        text = (
            f"note: clusters {', '.join(map(str, (first, *others)))} share the name '{name}'; to make them one: "
            + ", ".join(f'"{number}": {{"merge_into": {first}}}' for number in others)
        )
        messages.print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)
