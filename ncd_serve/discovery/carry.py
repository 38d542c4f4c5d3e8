"""Names that go from one model to another that was trained apart, by images that both have seen."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ncd_serve.bundle import Bundle
from ncd_serve.discovery.corrections import corrected, corrections_of
from ncd_serve.errors import DataError, UsageError
from ncd_serve.inputs.images import find_images
from ncd_serve.naming import WRONG, ClusterEntry, ClusterState, Correction, Names, cluster_states, known_clusters
from ncd_serve.progress import SILENT, Progress
from ncd_serve.rows.assignment import assign_images
from ncd_serve.runners import OnnxRunner

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ids = NDArray[np.integer[Any]]

MIN_OVERLAP = 0.5  # above it, a cluster can have one partner only
_MIN_IMAGES = 20


class Match(NamedTuple):
    """Cluster of the old model, with the cluster of the new one that shares most images with it.

    What a person merged may be several clusters in the new model, too: those that most of their images are from it.
    """

    old: int
    name: str
    new: list[int]  # the one with most of its images first
    overlap: float  # images that both have, of those that either has (intersection over union)
    images: int  # of the old cluster, among the shared ones

    @property
    def carried(self) -> bool:
        """Return whether the two are the same cluster."""
        return self.overlap > MIN_OVERLAP


def carry_names(
    old: str | Path, new: str | Path, *, images: str | Path | None = None, progress: Progress = SILENT
) -> tuple[Names, list[Match]]:
    """Return names for the new bundle, and how every named cluster of the old one was matched.

    Clusters are compared on the images that both were trained on, or by asking both about the images in a folder.
    """
    before, after = Bundle.read(old), Bundle.read(new)
    if before.manifest.checkpoint == after.manifest.checkpoint:
        raise UsageError("both bundles are of the same model, whose ids stay", hint="ncd-serve name export, name apply")
    merged = set(before.manifest.merged.values())
    states = [
        state
        for state in cluster_states(before.manifest)
        if state.state in ("named", "junk") or (state.state == "unnamed" and state.cluster_id in merged)
    ]
    if not states and not before.manifest.images:
        raise DataError(
            f"{before.folder} has no names", hint="the bundle that has them comes first: ncd-serve name carry OLD NEW"
        )
    pairs = _asked(before, after, Path(images), progress) if images else _shared(before, after)
    matches = [_match(state, *pairs, after, several=state.cluster_id in merged) for state in states]
    return _names(before, after, [match for match in matches if match.carried]), matches


def overlap(old: Ids, new: Ids, *, before: int, after: int) -> NDArray[np.float64]:
    """Return the intersection over union of every old and every new cluster, from ids of the same images."""
    both = np.zeros((before, after))
    np.add.at(both, (old, new), 1)
    union = both.sum(1)[:, None] + both.sum(0) - both
    return both / np.maximum(union, 1)


def _match(state: ClusterState, old: Ids, new: Ids, after: Bundle, *, several: bool) -> Match:
    """Return the match of a cluster, from ids of the same images; known classes of the new model keep their names."""
    mine, number, known = old == state.cluster_id, len(after.manifest.cluster_names), known_clusters(after.manifest)
    overlaps = overlap(mine.astype(int), new, before=2, after=number)[1]
    best = [known + int(overlaps[known:].argmax())]
    shared, sizes = np.bincount(new[mine], minlength=number), np.bincount(new, minlength=number)
    if several and (parts := known + np.flatnonzero(2 * shared[known:] > sizes[known:])).size:
        best = parts[np.argsort(-shared[parts], kind="stable")].tolist()
    share = overlap(mine.astype(int), np.isin(new, best).astype(int), before=2, after=2)[1, 1]
    return Match(state.cluster_id, state.cluster_name, best, float(share), int(mine.sum()))


def _names(before: Bundle, after: Bundle, matches: list[Match]) -> Names:
    clusters, said = dict[int, ClusterEntry](), Names.of(before).clusters
    for match in matches:
        first, *rest = match.new
        clusters |= dict.fromkeys(rest, ClusterEntry(merge_into=first))
        if said[match.old] != ClusterEntry():  # which would take a name away
            clusters[first] = said[match.old]
    # Clusters that exist by corrections alone come after those of the new model.
    fresh = {old: len(after.manifest.cluster_names) + place for place, old in enumerate(before.manifest.new_names)}
    clusters |= {fresh[old]: ClusterEntry(name=name) for old, name in before.manifest.new_names.items()}
    partner = {match.old: match.new[0] for match in matches}
    partner |= {old: partner[to] for old, to in before.manifest.merged.items() if to in partner}
    images = _carried_corrections(before, after, partner | fresh)
    checkpoint = after.manifest.checkpoint or None
    return Names(checkpoint=checkpoint, bundle=after.folder.absolute(), clusters=clusters, images=images)


def _carried_corrections(before: Bundle, after: Bundle, partner: dict[int, int]) -> dict[str, Correction | None]:
    """Return corrections of images that the new model was trained on, too, with the numbers of its clusters."""
    old, new = before.reference(), after.reference()
    paths = [*new.paths, *new.aside_paths]
    known = {str(file): path for file, path in zip((*new.files(), *new.aside_files()), paths, strict=True)}
    files = {path: str(old.root / path) for path in before.manifest.images}
    return {
        known[files[path]]: to if to == WRONG else partner[to]
        for path, to in before.manifest.images.items()
        if files[path] in known and (to == WRONG or to in partner)
    }


def _shared(before: Bundle, after: Bundle) -> tuple[Ids, Ids]:
    """Return the clusters that both models have for the images that both were trained on."""
    one, other = _clusters(before), _clusters(after)
    paths = [path for path in one if path in other]
    if len(paths) < _MIN_IMAGES:
        raise DataError(
            f"the two models were trained on {len(paths)} images in common, which is too few to compare",
            hint="--images DIR asks both about the images of a folder",
        )
    return np.array([one[path] for path in paths]), np.array([other[path] for path in paths])


def _clusters(bundle: Bundle) -> dict[str, int]:
    """Return the cluster of each image of training, after merges and corrections."""
    reference, merged = bundle.reference(), bundle.manifest.merged
    reference = corrected(reference, corrections_of(bundle, reference))
    return {
        str(file): merged.get(number, number)
        for file, number in zip(reference.files(), reference.cluster_ids.tolist(), strict=True)
    }


def _asked(before: Bundle, after: Bundle, images: Path, progress: Progress) -> tuple[Ids, Ids]:
    """Return the clusters that both models put the images of a folder into."""
    files = find_images([images])
    answers = []
    for bundle in (before, after):
        rows = progress.track(assign_images(files, OnnxRunner(bundle)), f"asking {bundle.folder}", len(files))
        answers.append([row.cluster_id for row in rows])
    both = [pair for pair in zip(*answers, strict=True) if None not in pair]
    if len(both) < _MIN_IMAGES:
        raise DataError(f"{len(both)} readable images are too few to compare", hint=f"give at least {_MIN_IMAGES}")
    old, new = np.array(both, np.int64).T
    return old, new
