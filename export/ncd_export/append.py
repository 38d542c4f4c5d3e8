"""Next generation of a bundle: clusters are appended, and nothing else changes. Needs no torch and no old image."""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx

from ncd_export.generation import ODDS, append_clusters
from ncd_export.merge import set_merges
from ncd_export.publish import seal
from ncd_export.rename import new_identity, rewrite_card, stamp
from ncd_export.repository import check_writable, disk_errors_as_data_errors
from ncd_serve.bundle import CARD, MODEL, Ancestor, Bundle, BundleManifest, Change
from ncd_serve.discovery.find import Batch, Candidate, accepted, embedded, mixture_of
from ncd_serve.errors import DataError, ExportMismatchError, UsageError
from ncd_serve.files import staged_directory, swap_in
from ncd_serve.mixture import grow
from ncd_serve.naming import WRONG, Correction
from ncd_serve.onnx_file import check_self_contained
from ncd_serve.places import exported_to, newest_generation, next_generation, remember_export
from ncd_serve.preprocess import load_array
from ncd_serve.reference import REFERENCE, Reference
from ncd_serve.runners import open_session

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ncd_serve.mixture import Mixture
    from ncd_serve.progress import Progress

    Floats = NDArray[np.floating[Any]]
    Ids = NDArray[np.integer[Any]]

_SPLIT_SHARE = 0.1  # a cluster that loses more of its images to new ones was split
_MAX_COMPARED = 64


@dataclass(frozen=True)
class _NewCluster:
    name: str | None
    paths: list[str]
    embeddings: Floats  # [n, d]


def append_generation(
    after: str | Path, add: str | Path, *, accept: str | Path | None = None, out: str | Path, progress: Progress
) -> Bundle:
    """Write the next generation of the bundle `after` to `out`, with a cluster more for each candidate.

    Without a file of candidates, those that `discover` finds in the images `add` are accepted. Classes of their own
    that corrections of single images name become clusters, too, and images that were given to another cluster count
    for that one, as do old images among those of a candidate.
    """
    bundle, out = Bundle.read(after), Path(out)
    _check_place(bundle, out)
    before, _ = mixture_of(bundle)
    batch, chosen = accepted(add, accept, bundle, progress=progress)
    begun, others = _begun(bundle, before, chosen.candidates)
    new = _new_clusters(bundle, before, [*begun.values(), *others], progress)
    taken = {path for cluster in new for path in cluster.paths}
    reference, mixture = mixture_of(bundle, without=taken)
    rest = mixture.project(batch.embeddings[[path not in taken for path in batch.paths]])
    grown = grow(mixture, [mixture.project(cluster.embeddings) for cluster in new], rest, reference.places())
    with disk_errors_as_data_errors(out), staged_directory(out) as folder:
        shutil.copytree(bundle.folder, folder, dirs_exist_ok=True)
        if place := exported_to(bundle.folder):
            remember_export(folder, place, bundle=out)  # relative to the new place
        fresh = _reference(reference.with_mixture(grown), grown, new)
        fresh.write(folder / REFERENCE)
        fresh = Reference.read(folder / REFERENCE)  # the file rounds, and all users must see the same values
        manifest = _manifest(bundle, new, _changes(before, grown, batch, new))
        _rewrite_model(folder / MODEL, manifest, fresh, added=len(new))
        _verify(bundle, folder / MODEL, batch)
        corrections = _after_growth(bundle.manifest, [*begun], manifest, new, roots=(reference.root, fresh.root))
        rewrite_card(folder / CARD, bundle.manifest, manifest, section=_section(bundle, new))
        seal(folder, manifest.model_copy(update=corrections), bundle.manifest.sha256)
        swap_in(folder, out)
    return Bundle.read(out)


def next_folder(after: Path) -> Path:
    """Return the default folder of the next generation: beside the bundle, with the number of the generation."""
    bundle = Bundle.read(after)
    return Path(os.path.relpath(next_generation(bundle.folder.absolute(), bundle.manifest.generation)))


def _check_place(bundle: Bundle, out: Path) -> None:
    if out.exists():
        newest = newest_generation(bundle.folder)
        further = "" if newest == bundle.folder else f"--after {newest} goes on from the newest generation; or "
        raise UsageError(f"{out} exists", hint=f"{further}choose another --out")
    check_writable(out.absolute().parent)


def _begun(
    bundle: Bundle, reference: Reference, candidates: list[Candidate]
) -> tuple[dict[int, Candidate], list[Candidate]]:
    """Return the clusters that exist by corrections alone, by id, if they have two images, and the other candidates.

    A candidate that has the name of such a cluster joins it.
    """
    about, files = bundle.manifest, defaultdict[int, list[str]](list)
    for path, to in about.images.items():
        if to != WRONG and to in about.new_names:
            files[to].append(str(reference.root / path))
    numbers = {name: number for number, name in about.new_names.items()}
    for candidate in candidates:
        if candidate.name in numbers:
            files[numbers[candidate.name]] += candidate.images
    begun = {
        number: Candidate(images=files[number], name=name)
        for number, name in sorted(about.new_names.items())
        if len(files[number]) > 1
    }
    return begun, [candidate for candidate in candidates if candidate.name not in numbers]


def _after_growth(
    about: BundleManifest, grown: list[int], after: BundleManifest, new: list[_NewCluster], *, roots: tuple[Path, Path]
) -> dict[str, Any]:
    """Return the corrections of the next generation: clusters in `grown` are real now, others come after all clusters.

    An image that was in none may be in a new cluster. `roots` are the folders that paths of the old and the new
    reference are relative to.
    """
    waiting = [number for number in sorted(about.new_names) if number not in grown]
    places: dict[Correction, int] = {number: place for place, number in enumerate(waiting, len(after.cluster_names))}
    homes = {path: number for number, each in enumerate(new, len(about.cluster_names)) for path in each.paths}
    images = dict[str, Correction]()
    for path, to in about.images.items():
        file = roots[0] / path
        name = str(file.relative_to(roots[1]) if file.is_relative_to(roots[1]) else file)
        images[name] = homes.get(os.path.normpath(file.absolute()), places.get(to, to))
    return {"images": images, "new_names": {places[number]: about.new_names[number] for number in waiting}}


def _new_clusters(
    bundle: Bundle, reference: Reference, candidates: list[Candidate], progress: Progress
) -> list[_NewCluster]:
    """Return the clusters of candidates; images that the reference has need not be there any more."""
    if not candidates:
        raise DataError(
            "no new category was found: there is nothing to append",
            hint=f"ncd-serve discover NEW --bundle {bundle.folder} shows what the images are like",
        )
    vectors = dict(zip(map(str, reference.every_file()), reference.every_embedding(), strict=True))
    new = []
    for candidate in candidates:
        paths = [os.path.normpath(Path(path).absolute()) for path in candidate.images]
        fresh = [Path(path) for path in paths if path not in vectors]
        if fresh:
            found = embedded(fresh, bundle, progress=progress)
            if found.unreadable:
                path, reason = found.unreadable[0]
                raise DataError(
                    f"{path}: {reason}", hint="restore the image, or remove it from the candidates or corrections"
                )
            vectors |= zip(found.paths, found.embeddings, strict=True)
        new.append(_NewCluster(candidate.name, paths, np.stack([vectors[path] for path in paths])))
    return new


def _reference(reference: Reference, grown: Mixture, new: list[_NewCluster]) -> Reference:
    """Return the reference with the images of new clusters, which are set aside no more; old ones stay as they are."""
    embeddings = np.concatenate([cluster.embeddings for cluster in new]).astype(np.float32)
    ids = reference.clusters + np.repeat(np.arange(len(new)), [len(cluster.paths) for cluster in new])
    joint = grown.log_joint(grown.project(embeddings))[:, grown.first_cluster :]
    shares = np.exp(joint - joint.max(1, keepdims=True))
    confidences = shares[np.arange(len(ids)), ids] / shares.sum(1)
    files = [*reference.files(), *(Path(path) for cluster in new for path in cluster.paths)]
    reference = _without_aside(reference, {path for cluster in new for path in cluster.paths})
    aside = reference.aside_files()
    root = Path(os.path.commonpath([file.parent for file in (*files, *aside)]))
    known = grown.log_joint(grown.project(embeddings))[:, : max(grown.first_cluster, 1)].argmax(1)
    return replace(
        reference,
        root=root,
        paths=[str(file.relative_to(root)) for file in files],
        aside_paths=[str(file.relative_to(root)) for file in aside],
        cluster_ids=np.concatenate([reference.cluster_ids, ids]),
        confidences=np.concatenate([reference.confidences, confidences.astype(np.float32)]),
        embeddings=np.concatenate([reference.embeddings, embeddings]),
        known_ids=np.concatenate([reference.known_ids, known]),
        counts=np.concatenate([reference.counts, [len(cluster.paths) for cluster in new]]),
        truth=[],
        matched=[],
    )


def _without_aside(reference: Reference, paths: set[str]) -> Reference:
    """Return the reference without these files among the images that are set aside."""
    rows = [row for row, file in enumerate(reference.aside_files()) if str(file.absolute()) not in paths]
    return replace(
        reference,
        aside_paths=[reference.aside_paths[row] for row in rows],
        **{
            f"aside_{name}": getattr(reference, f"aside_{name}")[rows]
            for name in ("ids", "confidences", "embeddings", "known_ids")
        },
    )


def _rewrite_model(path: Path, about: BundleManifest, fresh: Reference, *, added: int) -> None:
    """Append the clusters to the model of the generation before, which `about` is the manifest after."""
    check_self_contained(path)
    model, mixture, known = onnx.load(path), fresh.mixture(), len(about.known_classes)
    assert mixture is not None
    set_merges(model.graph, {}, known=known)
    append_clusters(model.graph, mixture, fresh.limits(), added=added, known=known, generation=about.generation)
    set_merges(model.graph, about.merged, known=known)
    stamp(model, about)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, path)


def _verify(bundle: Bundle, model: Path, batch: Batch) -> None:
    """Raise ExportMismatchError unless images that go to no new cluster are answered bit for bit as before."""
    files = batch.paths[:: -(-len(batch.paths) // _MAX_COMPARED)]
    images = np.stack([load_array(Path(file), bundle.manifest.preprocess) for file in files])
    sessions = [open_session(path) for path in (bundle.model_path, model)]
    names = [output.name for output in sessions[0].get_outputs() if output.name not in ODDS]
    before, after = (dict(zip(names, each.run(names, {"image": images}), strict=True)) for each in sessions)
    old = before["probabilities"].shape[1]
    after["probabilities"] = after["probabilities"][:, :old]
    stay = after["cluster_id"] < old
    changed = np.zeros(len(images), bool)
    for name in names:
        changed |= (before[name] != after[name]).reshape(len(images), -1).any(1)
    if changed[stay].any():
        raise ExportMismatchError(
            f"{changed[stay].sum()} of {stay.sum()} images are answered otherwise than before",
            hint="nothing was written; report this as a defect",
        )


def _changes(reference: Reference, grown: Mixture, batch: Batch, new: list[_NewCluster]) -> list[Change]:
    """Return the change of every cluster, by id: images that it had, was given, and lost to new clusters."""
    clusters = reference.clusters + len(new)
    given = _likeliest(grown, grown.project(batch.embeddings))
    now = _likeliest(grown, grown.project(reference.embeddings))
    left, aside = now >= reference.clusters, {*map(str, reference.every_file()[len(reference.paths) :])}
    changes = []
    for number in range(clusters):
        gain = int((given == number).sum())
        if number >= reference.clusters:
            came = int((now == number).sum()) + len(aside.intersection(new[number - reference.clusters].paths))
            changes.append(Change(cluster_id=number, kind="new", images=0, added=gain, moved=came))
            continue
        lost = int((left & (reference.cluster_ids == number)).sum())
        sampled = max(int((reference.cluster_ids == number).sum()), 1)
        kind = "split" if lost > _SPLIT_SHARE * sampled else "grown" if gain else "kept"
        images = int(reference.counts[number])
        changes.append(Change(cluster_id=number, kind=kind, images=images, added=gain, moved=lost))
    return changes


def _likeliest(mixture: Mixture, places: Floats) -> Ids:
    """Return the likeliest cluster of each image; -1 where a known class is likelier."""
    best: Ids = mixture.log_joint(places).argmax(1) - mixture.first_cluster
    return np.maximum(best, -1)


def _section(bundle: Bundle, new: list[_NewCluster]) -> str:
    """Return what the model card says about the generation."""
    about, first = bundle.manifest, len(bundle.manifest.cluster_names)
    clusters = f"clusters {first} to {first + len(new) - 1}" if len(new) > 1 else f"cluster {first}"
    images = sum(len(cluster.paths) for cluster in new)
    return (
        f"\n## Generation {about.generation + 1}\n"
        f"Appended to bundle `{about.bundle_id}`: {clusters}, from {images} images. Nothing was trained: all scores "
        "are those of the clusters before.\n"
    )


def _manifest(bundle: Bundle, new: list[_NewCluster], changes: list[Change]) -> BundleManifest:
    about = bundle.manifest
    first = len(about.cluster_names) - (len(about.known_classes) if about.open_world else 0)
    names = [cluster.name or f"cluster-{first + number}" for number, cluster in enumerate(new)]
    return about.model_copy(
        update={
            "schema_version": BundleManifest.model_fields["schema_version"].default,
            **new_identity(),
            "cluster_names": [*about.cluster_names, *names],
            "generation": about.generation + 1,
            "ancestors": [*about.ancestors, Ancestor.of(bundle)],
            "changes": changes,
        }
    )
