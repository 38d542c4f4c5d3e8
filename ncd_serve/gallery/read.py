"""The three kinds of source of a gallery: a run directory, a bundle, rows of a new batch."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ncd_serve.bundle import MANIFEST, Bundle
from ncd_serve.errors import DataError, UsageError
from ncd_serve.fit import FITS
from ncd_serve.gallery.collection import Collection, GivenNames, Ids
from ncd_serve.gallery.embed import embed
from ncd_serve.naming import cluster_states, default_names, known_clusters
from ncd_serve.progress import SILENT, Progress
from ncd_serve.reference import MAX_IMAGES, REFERENCE, Reference
from ncd_serve.rows.tables import read_rows
from ncd_serve.verdict import read_verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ncd_serve.prediction import Prediction

_MAX_BACKGROUND_IMAGES = 2000  # enough to see where training images lie


def read_source(
    source: str | Path,
    *,
    bundle: str | Path | None = None,
    images: str | Path | None = None,
    progress: Progress = SILENT,
) -> Collection:
    """Read a run, a bundle or rows; `images` is the present folder of the images, `bundle` the model of the rows."""
    source, images = Path(source), Path(images) if images else None
    if not source.exists():
        raise DataError(f"no such file or folder: {source}", hint="give a run, a bundle, or rows of query or assign")
    if source.is_file():
        shown = _read_rows(source, Bundle.read(bundle) if bundle else None, images, progress)
    elif bundle:
        raise UsageError("--bundle is only for rows", hint=f"ncd-serve gallery {source}")
    elif (source / MANIFEST).is_file():
        found = Bundle.read(source)
        shown = _of_reference(found.reference(), naming_of(found), source, images)
        shown = replace(shown, kind="bundle", verdict=_verdict_of(found))
    else:
        shown = read_run(source, images)
    if not any(file.is_file() for file in shown.files):
        raise DataError(f"none of the images is below {shown.root}", hint="give their present folder with --images DIR")
    return shown


def read_run(run: Path, images: Path | None = None) -> Collection:
    """Read a finished run; its images need not be there."""
    reference = Reference.read(run / REFERENCE)
    known = reference.known_clusters
    defaults = [*reference.known_classes[:known], *_numbered(reference.clusters - known)]
    naming = GivenNames(defaults, checkpoint=reference.checkpoint, fixed=known)
    if (run / "bundle" / MANIFEST).is_file():
        exported = Bundle.read(run / "bundle")
        if exported.manifest.checkpoint == reference.checkpoint:
            naming = naming_of(exported)
    return _with_verdict(_of_reference(reference, naming, run, images), run)


def _with_verdict(shown: Collection, run: Path) -> Collection:
    """Add the verdict on a run, with the names of its clusters."""
    verdict, names = read_verdict(run), dict(enumerate(shown.naming.labels))
    if verdict is None:
        return shown
    sentences = verdict.sentences(lambda number: names.get(number, f"cluster {number}"))
    return replace(shown, verdict=sentences, tight=verdict.tight, alike=verdict.alike)


def _verdict_of(bundle: Bundle) -> list[str]:
    """Return the verdict on the run that a bundle is of, as it keeps it."""
    about = bundle.manifest
    if not about.verdict:
        return []
    appended = any(change.kind == "new" and change.overlap is None for change in about.changes)
    words = f"without clusters that were added later, {about.verdict}" if appended else about.verdict
    return words.split("; ")


def naming_of(bundle: Bundle) -> GivenNames:
    """Return what people have said about the clusters of a bundle."""
    about = bundle.manifest
    return GivenNames(
        defaults=default_names(about),
        names={state.cluster_id: state.cluster_name for state in cluster_states(about) if state.state == "named"},
        merged=about.merged,
        junk=about.junk,
        images=about.images,
        new_names=about.new_names,
        checkpoint=about.checkpoint or None,
        bundle=bundle.folder.resolve(),
        fixed=known_clusters(about),
    )


def _numbered(clusters: int) -> list[str]:
    return [f"cluster-{number}" for number in range(clusters)]


def _of_reference(reference: Reference, naming: GivenNames, source: Path, images: Path | None) -> Collection:
    limits = reference.limits()
    return Collection(
        kind="run",
        source=source.resolve(),
        naming=naming,
        root=images.resolve() if images else reference.root,
        paths=reference.paths,
        files=reference.files(images),
        cluster_ids=reference.cluster_ids,
        confidences=reference.confidences,
        counts=reference.counts,
        fits=limits.judge(reference.embeddings, reference.cluster_ids, reference.confidences),
        embeddings=reference.embeddings,
        known_ids=_by_cluster(reference),
        known_classes=reference.known_classes,
        truth=reference.truth,
        matched=reference.matched,
    )


def _by_cluster(reference: Reference) -> dict[int, Ids]:
    ids = reference.cluster_ids
    return {int(number): reference.known_ids[ids == number] for number in np.unique(ids)}


def _read_rows(source: Path, bundle: Bundle | None, images: Path | None, progress: Progress) -> Collection:
    rows = read_rows(source)
    failures = [(row.path, row.error or "") for row in rows if row.status == "error"]
    rows = [row for row in rows if row.status != "error"]
    if not rows:
        raise DataError(f"{source} has no image with a cluster", hint="its column `error` says why")
    naming = naming_of(bundle) if bundle else _names_in(rows)
    ids = np.array([row.cluster_id for row in rows])
    if ids.min() < 0 or ids.max() >= len(naming.defaults):
        raise DataError(f"{source} has clusters that the bundle does not have", hint="give the bundle that made it")
    counts = np.bincount(ids, minlength=len(naming.defaults))
    rows = rows[:: -(-len(rows) // MAX_IMAGES)]
    root = _common_folder([row.path for row in rows])
    files = [_place(row.path, root, images) for row in rows]
    shown = Collection(
        kind="rows",
        source=source.resolve(),
        naming=naming,
        root=images or root,
        paths=[_below(row.path, root) for row in rows],
        files=files,
        cluster_ids=np.array([row.cluster_id for row in rows]),
        confidences=np.array([row.confidence for row in rows], np.float32),
        counts=counts,
        fits=_fits(rows),
        rivals=np.array([row.top_k[1].cluster_id if len(row.top_k) > 1 else -1 for row in rows]),
        failures=failures,
    )
    return _with_model(shown, bundle, progress) if bundle else shown


def _names_in(rows: Sequence[Prediction]) -> GivenNames:
    """Return the names in the rows; without a bundle, new names cannot be stored."""
    answers = [candidate for row in rows for candidate in row.top_k]
    labels = {answer.cluster_id: answer.cluster_name for answer in answers}
    labels |= {row.cluster_id: row.cluster_name for row in rows if row.cluster_id is not None and row.cluster_name}
    defaults = _numbered(max(labels, default=-1) + 1)
    return GivenNames(defaults, {number: name for number, name in labels.items() if name not in defaults})


def _fits(rows: Sequence[Prediction]) -> Ids | None:
    fits = [row.fit for row in rows]
    return np.array([FITS.index(fit) for fit in fits if fit]) if all(fits) else None


def _common_folder(paths: Sequence[str]) -> Path:
    try:
        return Path(os.path.commonpath([Path(path).parent for path in paths]))
    except ValueError:  # some begin at the root and some do not
        return Path()


def _below(path: str, root: Path) -> str:
    return str(Path(path).relative_to(root)) if root.parts and Path(path).is_relative_to(root) else path


def _place(path: str, root: Path, images: Path | None) -> Path:
    """Return the file of an image in the rows: at its path, or below the folder that now holds the images."""
    if images is None:
        return Path(path)
    as_named = images / Path(path).relative_to(Path(path).anchor)
    return as_named if as_named.is_file() else images / _below(path, root)


def _with_model(shown: Collection, bundle: Bundle, progress: Progress) -> Collection:
    """Add embeddings; images that cannot be read any more become failures."""
    answers = embed(bundle, shown.files, progress=progress)
    kept = [row for row, answer in enumerate(answers) if not isinstance(answer, str)]
    gone = [(shown.paths[row], answer) for row, answer in enumerate(answers) if isinstance(answer, str)]
    if not kept:
        raise DataError(
            f"none of the images can be read: {gone[0][1]}", hint="give their present folder with --images DIR"
        )
    embeddings, reference = np.stack([answers[row] for row in kept]), bundle.reference()
    if embeddings.shape[1:] != reference.embeddings.shape[1:]:
        raise DataError(
            f"{bundle.model_path} is not the model of {REFERENCE}: {embeddings.shape[1]} numbers an image, "
            f"not {reference.embeddings.shape[1]}",
            hint="export the run again: ncd-serve export RUN",
        )
    ids, confidences, limits = shown.cluster_ids[kept], shown.confidences[kept], reference.limits()
    return replace(
        shown,
        paths=[shown.paths[row] for row in kept],
        files=[shown.files[row] for row in kept],
        cluster_ids=ids,
        confidences=confidences,
        fits=limits.judge(embeddings, ids, confidences) if shown.fits is None else shown.fits[kept],
        embeddings=embeddings,
        centres=limits.centres,
        background=reference.embeddings[:: -(-len(reference.embeddings) // _MAX_BACKGROUND_IMAGES)],
        rivals=None,
        known_ids=_by_cluster(reference),
        known_classes=reference.known_classes,
        failures=shown.failures + gone,
    )
