"""Renamed bundles: written again with new names, and added to a repository as the next version. Needs no torch."""

from __future__ import annotations

import re
import shutil
import uuid
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import onnx

from ncd_export.merge import set_merges
from ncd_export.publish import Destination, publish, publishing, seal
from ncd_export.repository import (
    check_clusters,
    check_place,
    check_writable,
    disk_errors_as_data_errors,
    hardware_of,
)
from ncd_serve.bundle import CARD, MODEL, Bundle, BundleManifest
from ncd_serve.errors import DataError
from ncd_serve.files import staged_directory, write_text
from ncd_serve.naming import (
    WRONG,
    ClusterState,
    Correction,
    Names,
    Naming,
    apply_names,
    cluster_states,
    known_clusters,
)
from ncd_serve.runners import OnnxRunner
from ncd_serve.text import printable

if TYPE_CHECKING:
    from ncd_training.data.carried import Carried

_NAMES_SECTION = re.compile(r"\n## Names\n.*?(?=\n## |\Z)", re.DOTALL)
_MARKDOWN = re.compile(r"([\\`*_\[\]<>|#~&])")


def rename_bundle(
    bundle: Path, names: Names, *, repository: Path, name: str, keep: int | None = None
) -> tuple[Bundle, Path]:
    """Rewrite the bundle and add it to the repository, or change neither; return it with the folder of the version."""
    opened = Bundle.read(bundle)
    apply_names(opened.manifest, names)  # whatever is wrong is said before anything is written
    OnnxRunner(opened)
    check_place(repository, name)
    check_clusters(repository, name, opened.manifest.lineage)
    out = bundle.resolve()
    check_writable(out.parent)
    with disk_errors_as_data_errors(out), publishing(out, repository), staged_directory(out) as folder:
        manifest = Bundle.read(out).manifest  # once more: another process may have named clusters meanwhile
        shutil.copytree(out, folder, dirs_exist_ok=True)  # including files that the user added
        _rewrite(folder, manifest, apply_names(manifest, names))
        hardware = hardware_of(repository, name)
        version = publish(folder, out, Destination(repository=repository, name=name, hardware=hardware, keep=keep))
    return Bundle.read(bundle), version


def keep_names(old: Path, fresh: Bundle) -> bool:
    """Apply the names of the bundle that an export replaces; return False if it has none for the same checkpoint."""
    try:
        names = Names.of(Bundle.read(old))
    except DataError:  # no bundle, or a damaged one
        return False
    if names.checkpoint != fresh.manifest.checkpoint:
        return False
    naming = apply_names(fresh.manifest, names)
    if named := naming != Naming.of(fresh.manifest):
        _rewrite(fresh.folder, fresh.manifest, naming)
    return named


def carry_names(fresh: Bundle, carried: Carried | None) -> bool:
    """Apply the names of the generation before to clusters that kept their ids; return False if there are none.

    Where a person gave images to a named cluster that is gone, they wait under its name for a cluster of their own.
    """
    if carried is None:
        return False
    there = {change.cluster_id for change in carried.changes if change.kind in ("kept", "grown", "new")}
    there |= set(range(carried.first))
    entries, said = carried.names.clusters, set(carried.names.images.values())
    gone = [number for number, entry in sorted(entries.items()) if entry.name and number in said - there]
    places: dict[Correction | None, int] = {
        number: place for place, number in enumerate(gone, len(fresh.manifest.cluster_names))
    }
    given = {
        places.get(number, number): entry
        for number, entry in entries.items()
        if number in places or (number in there and (entry.merge_into is None or entry.merge_into in there))
    }
    root = fresh.reference().root
    images = {
        str(Path(path).relative_to(root) if Path(path).is_relative_to(root) else path): places.get(to, to)
        for path, to in carried.names.images.items()
        if to == WRONG or to in there or to in places
    }
    naming = apply_names(fresh.manifest, Names(clusters=given, images=images))
    if named := naming != Naming.of(fresh.manifest):
        _rewrite(fresh.folder, fresh.manifest, naming)
    return named


def new_identity() -> dict[str, str]:
    """Return the fields of a manifest that tell a bundle from the one that it was made of."""
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {"bundle_id": uuid.uuid4().hex[:12], "created": created}


def rewrite_card(card: Path, old: BundleManifest, new: BundleManifest, *, section: str = "") -> None:
    """Bring the model card of `old` up to date with `new`; another section stands before that of the names."""
    text = card.read_text(encoding="utf-8", errors="replace")
    for one, other in ((old.bundle_id, new.bundle_id), (old.created, new.created), (_heading(old), _heading(new))):
        text = text.replace(one, other)
    write_text(card, _NAMES_SECTION.sub("", text) + section + _names_section(new))


def stamp(model: onnx.ModelProto, manifest: BundleManifest) -> None:
    """Write the id of its bundle into a model."""
    facts = {entry.key: entry.value for entry in model.metadata_props}
    onnx.helper.set_model_props(model, {**facts, "bundle_id": manifest.bundle_id})


def _rewrite(folder: Path, old: BundleManifest, naming: Naming) -> None:
    new = old.model_copy(update={**new_identity(), **naming._asdict()})
    _rewrite_model(folder / MODEL, new)
    rewrite_card(folder / CARD, old, new)
    seal(folder, new, old.sha256)


def _heading(manifest: BundleManifest) -> str:
    return f"{len(manifest.cluster_names) - known_clusters(manifest)} discovered categories"


def _rewrite_model(path: Path, manifest: BundleManifest) -> None:
    model = onnx.load(path)
    set_merges(model.graph, manifest.merged, known=len(manifest.known_classes))
    stamp(model, manifest)
    try:
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise DataError(f"{path.name} is not a valid ONNX model: {printable(error)}", hint="export again") from None
    onnx.save(model, path)


def _names_section(manifest: BundleManifest) -> str:
    named = [cluster for cluster in cluster_states(manifest) if cluster.state in ("named", "merged", "junk")]
    rows = "".join(f"| {cluster.cluster_id} | {_in_words(cluster)} |\n" for cluster in named)
    intro = (
        "\n## Names\nGiven by a person who inspected the clusters, not by the model.\n\n| cluster | name |\n|---|---|\n"
    )
    return intro + rows if named else ""


def _in_words(cluster: ClusterState) -> str:
    name = _MARKDOWN.sub(r"\\\1", cluster.cluster_name)
    return f"{name} (merged into {cluster.merged_into})" if cluster.state == "merged" else name
