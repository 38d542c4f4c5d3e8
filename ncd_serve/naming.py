"""Names of clusters given by a person: the file `names.json`, and its effect on the labels of a bundle.

Ids never change. A merged cluster hands its images to another one; those of a junk cluster are labelled `junk`.
Single images may be given to another cluster, to a new one (whose id comes after those of the model), or to none.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, model_validator

from ncd_serve.bundle import MAX_CLUSTERS
from ncd_serve.errors import DataError, did_you_mean
from ncd_serve.text import check_name, first_problem, printable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ncd_serve.bundle import Bundle, BundleManifest

    Entries = dict[int, "ClusterEntry"]

State = Literal["known", "named", "merged", "junk", "unnamed"]
JUNK = "junk"
WRONG: Literal["wrong"] = "wrong"  # of an image that belongs to no cluster
Correction = int | Literal["wrong"]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ClusterEntry(_Strict):
    """Entry of names.json for one cluster: one of these fields, or none, which restores its default name."""

    name: Annotated[str, AfterValidator(lambda name: check_name(name.strip()))] | None = None
    merge_into: int | None = None
    junk: bool = False

    @model_validator(mode="after")
    def _says_one_thing(self) -> ClusterEntry:
        if len(said := self.model_dump(exclude_defaults=True)) > 1:
            raise ValueError(f"{' and '.join(said)} exclude each other")
        return self


class Names(_Strict):
    """Content of `names.json`. Clusters without an entry stay as they are."""

    checkpoint: str | None = None  # of the model whose clusters are named, if known
    bundle: Path | None = None
    clusters: dict[int, ClusterEntry]
    images: dict[str, Correction | None] = {}  # by path; None takes an earlier correction back

    @classmethod
    def read(cls, path: str | Path) -> Names:
        """Read the file; raise DataError with the reason if it is invalid."""
        path = Path(path)
        try:
            content = path.read_bytes()
            found = cls.model_validate_json(content)
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}", hint="check the path") from None
        except ValidationError as error:
            raise _unusable(path, error) from None
        json.loads(content, object_pairs_hook=lambda pairs: _said_once(path, pairs))
        return found

    @classmethod
    def of(cls, bundle: Bundle) -> Names:
        """Return names, merges and junk marks of a bundle's clusters."""
        checkpoint = bundle.manifest.checkpoint or None
        about = bundle.manifest
        clusters = _entries(about) | {number: ClusterEntry(name=name) for number, name in about.new_names.items()}
        images: dict[str, Correction | None] = {**about.images}
        return cls(checkpoint=checkpoint, bundle=bundle.folder.absolute(), clusters=clusters, images=images)

    def as_json(self) -> dict[str, Any]:
        """Return the content of the file."""
        clusters = {str(number): entry.model_dump(exclude_defaults=True) for number, entry in self.clusters.items()}
        content = {**self.model_dump(mode="json"), "clusters": clusters}
        if not self.images:
            del content["images"]
        return content


class Naming(NamedTuple):
    """The fields of a bundle's manifest that names decide."""

    cluster_names: list[str]
    merged: dict[int, int]
    junk: list[int]
    images: dict[str, Correction]
    new_names: dict[int, str]

    @classmethod
    def of(cls, manifest: BundleManifest) -> Naming:
        """Return what a manifest says now."""
        return cls(*(getattr(manifest, name) for name in cls._fields))


class ClusterState(NamedTuple):
    """State of one cluster."""

    cluster_id: int
    cluster_name: str
    state: State
    merged_into: int | None


def apply_names(manifest: BundleManifest, names: Names) -> Naming:
    """Return labels, merges and junk marks of a bundle after these names; raise DataError if they do not fit."""
    _check_model(manifest, names)
    defaults = default_names(manifest)
    images = {path: to for path, to in {**manifest.images, **names.images}.items() if to is not None}
    new_names = _new_names(manifest, names, images)
    given = {number: entry for number, entry in names.clusters.items() if number not in new_names}
    entries = _entries(manifest) | _suitable(manifest, given)
    merged = {
        number: _last_target(number, entries, clusters=len(defaults))
        for number, entry in sorted(entries.items())
        if entry.merge_into is not None
    }
    junk = sorted(number for number, entry in entries.items() if entry.junk)
    own = dict(enumerate(defaults)) | {number: entry.name for number, entry in entries.items() if entry.name}
    labels = [JUNK if number in junk else own[merged.get(number, number)] for number in own]
    return Naming(labels, merged, junk, images, new_names)


def corrections_in_words(manifest: BundleManifest) -> str:
    """Return how many images were corrected by hand, in words; empty if none was."""
    targets = list(manifest.images.values())
    wrong, new = targets.count(WRONG), sum(to in manifest.new_names for to in targets)
    parts = {
        "moved": len(targets) - wrong - new,
        f"in {len(manifest.new_names)} new {'category' if len(manifest.new_names) == 1 else 'categories'}": new,
        "in none": wrong,
    }
    return ", ".join(f"{count} {what}" for what, count in parts.items() if count)


def same_names(naming: Naming) -> dict[str, list[int]]:
    """Return the names that several clusters have, except merged and junk ones."""
    owners: dict[str, list[int]] = defaultdict(list)
    for number, name in enumerate(naming.cluster_names):
        if number not in naming.merged and number not in naming.junk:
            owners[name].append(number)
    return {name: numbers for name, numbers in owners.items() if len(numbers) > 1}


def known_clusters(manifest: BundleManifest) -> int:
    """Return the number of known classes among the first clusters, which keep their names."""
    return len(manifest.known_classes) if manifest.open_world else 0


def default_names(manifest: BundleManifest) -> list[str]:
    """Return the default names of the clusters."""
    known = known_clusters(manifest)
    return manifest.known_classes[:known] + [f"cluster-{n}" for n in range(len(manifest.cluster_names) - known)]


def cluster_states(manifest: BundleManifest) -> list[ClusterState]:
    """Return the state of every cluster, by id."""
    known = known_clusters(manifest)
    states: list[ClusterState] = []
    for number, (name, default) in enumerate(zip(manifest.cluster_names, default_names(manifest), strict=True)):
        state: State = "known" if number < known else "unnamed" if name == default else "named"
        if number in manifest.junk:
            state = "junk"
        if number in manifest.merged:
            state = "merged"
        states.append(ClusterState(number, name, state, manifest.merged.get(number)))
    return states


def _entries(manifest: BundleManifest) -> Entries:
    """Return the current entries of all clusters that may be named."""
    return {
        number: ClusterEntry(name=name if state == "named" else None, merge_into=merged_into, junk=state == "junk")
        for number, name, state, merged_into in cluster_states(manifest)[known_clusters(manifest) :]
    }


def _new_names(manifest: BundleManifest, names: Names, images: Mapping[str, Correction]) -> dict[int, str]:
    """Return the clusters that exist by corrections alone, with their names; raise DataError if one cannot be."""
    clusters = len(manifest.cluster_names)
    wanted = sorted({to for to in images.values() if to != WRONG})
    if wanted and not 0 <= wanted[0] <= wanted[-1] < MAX_CLUSTERS:
        impossible = wanted[0] if wanted[0] < 0 else wanted[-1]
        raise DataError(f"an image is given to cluster {impossible}", hint=f"new clusters begin at {clusters}")
    new = {}
    for number in (number for number in wanted if number >= clusters):
        entry = names.clusters.get(number, ClusterEntry())
        if entry.merge_into is not None or entry.junk:
            raise DataError(f"cluster {number} is not in the model yet", hint="give its images to another one instead")
        new[number] = entry.name or manifest.new_names.get(number, f"cluster-{number}")
    return new


def _check_model(manifest: BundleManifest, names: Names) -> None:
    if names.checkpoint not in (None, manifest.checkpoint):
        raise DataError(
            f"these names are for the clusters of model {names.checkpoint}, "
            f"the bundle is of model {manifest.checkpoint or '(unknown: an older version made it)'}",
            hint="give --bundle the export of the run whose clusters you looked at",
        )


def _suitable(manifest: BundleManifest, entries: Entries) -> Entries:
    """Return the entries; raise DataError if one is about a cluster that does not exist or may not be named."""
    known = manifest.known_classes[: known_clusters(manifest)]
    for number, entry in entries.items():
        _check_id(number, f"cluster {number}", clusters=len(manifest.cluster_names))
        if number < len(known) and entry not in (ClusterEntry(), ClusterEntry(name=known[number])):
            raise DataError(
                f"cluster {number} is the known class '{known[number]}', which keeps its name",
                hint="other clusters may be merged into it",
            )
    return {number: entry for number, entry in entries.items() if number >= len(known)}


def _last_target(start: int, entries: Entries, *, clusters: int) -> int:
    """Follow merges to the last cluster."""
    way = [start]
    while (entry := entries.get(way[-1])) and entry.merge_into is not None:
        _check_id(entry.merge_into, f"cluster {way[-1]} is merged into {entry.merge_into}, which", clusters=clusters)
        way.append(entry.merge_into)
        if len(set(way)) < len(way):
            raise DataError(
                "merges form a circle: " + " into ".join(map(str, way)),
                hint=f'leave one of them out; {{"{start}": {{}}}} undoes an earlier one',
            )
    if entry and entry.junk:
        raise DataError(
            f"cluster {start} is merged into {way[-1]}, which is junk", hint="mark both as junk, or merge into another"
        )
    return way[-1]


def _check_id(number: int, what: str, *, clusters: int) -> None:
    if not 0 <= number < clusters:
        raise DataError(
            f"{what} is not in the model", hint=f"its clusters are 0 to {clusters - 1}: ncd-serve name list"
        )


def _said_once(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object; raise DataError if two of its entries are about the same thing: JSON keeps the last one."""
    said: dict[str, Any] = {}
    for key, value in pairs:
        if said.setdefault(os.path.normpath(key), value) != value:
            raise DataError(
                f"{path}: contradicting entries for '{printable(key)}': {said[os.path.normpath(key)]} and {value}",
                hint="leave one of them out",
            )
    return said


def _unusable(path: Path, error: ValidationError) -> DataError:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    hint = (
        'it looks like {"clusters": {"3": {"name": "gull"}, "7": {"merge_into": 3}, "9": {"junk": true}}, '
        '"images": {"a.jpg": 3, "b.jpg": "wrong"}}'
    )
    if first["type"] == "extra_forbidden":
        known = Names.model_fields if len(first["loc"]) == 1 else ClusterEntry.model_fields
        return DataError(f"{path}: unknown key {where}", hint=did_you_mean(str(first["loc"][-1]), known))
    return DataError(f"{path}: {first_problem(error)}", hint=hint)
