"""Next generation of a bundle by training: old images, their clusters and what a person said are taken along."""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ncd_serve.bundle import Ancestor, Bundle
from ncd_serve.discovery.corrections import corrections_of
from ncd_serve.discovery.find import accepted
from ncd_serve.errors import DataError, UsageError
from ncd_serve.naming import WRONG, ClusterEntry, Names, cluster_states, known_clusters
from ncd_training.base.run_dir import RunDir
from ncd_training.data.carried import NONE, Carried
from ncd_training.data.prepare import Setup, reopen
from ncd_training.objective.method import method_named
from ncd_training.run.train import set_up
from ncd_training.score.reference import checkpoint_id

if TYPE_CHECKING:
    from ncd_serve.discovery.find import Candidate
    from ncd_serve.progress import Progress
    from ncd_training.config.schema import TrainConfig
    from ncd_training.data.manifest import Manifest

_SELF_LABELS = 1.0  # weight, where the run before had none: they carry the clusters over


class _Before(NamedTuple):
    """Generation before: clusters of its images by path, as a person corrected them, and what was said."""

    ids: dict[str, int]
    wrong: dict[str, int]  # clusters that a person took images out of
    said: set[str]  # images whose cluster a person named
    new: dict[int, str | None]  # ids of new clusters, with names


def retrain_setup(
    after: str | Path, add: str | Path | None, *, accept: str | Path | None, promote: bool, progress: Progress
) -> Setup:
    """Return the setup of a run that makes the next generation of a bundle; DataError if it cannot be made.

    Candidates are accepted as in an append. Without new images it learns what a person said about the old ones.
    `promote`: all images of named clusters count as labelled.
    """
    bundle = Bundle.read(after)
    run = run_of(bundle)
    old = _reopened(run, bundle, progress)
    batch, chosen = accepted(add, accept, bundle, progress=progress) if add else (None, None)
    fresh = batch.paths if batch else []
    before = _before(bundle, chosen.candidates if chosen else [], promote=promote)
    if not add and not before.said and not before.wrong:
        raise DataError("nobody has corrected an image: there is nothing to learn", hint="give new images: --add NEW")
    manifest = _manifest(old.manifest, [*before.ids, *before.wrong, *fresh])
    live = {number for number in before.ids.values() if number >= known_clusters(bundle.manifest)}
    ids = sorted(live | before.new.keys())
    setup = set_up(Setup(_config(old.config, run, clusters=len(ids)), manifest), progress=progress)
    return setup.with_carried(_carried(bundle, setup.manifest, before, ids, fresh={*map(os.path.normpath, fresh)}))


def run_of(bundle: Bundle) -> RunDir:
    """Return the run that a bundle was exported from, which it is in; DataError if it is not there any more."""
    run = RunDir(bundle.folder.absolute().parent)
    if not (run.begun and run.checkpoint.is_file()):
        raise _only_append(f"{bundle.folder} is in no run directory: training again needs the run that it is of")
    if checkpoint_id(run.checkpoint) != bundle.manifest.checkpoint:
        raise _only_append(f"{run.path} holds another model than {bundle.folder} was exported from")
    return run


def _only_append(text: str) -> DataError:
    return DataError(text, hint="without --retrain, new categories can still be appended: that needs no old image")


def _reopened(run: RunDir, bundle: Bundle, progress: Progress) -> Setup:
    """Return settings and images of the run; DataError if old images were moved, changed or deleted."""
    try:
        old = reopen(run, progress=progress)
    except DataError as error:
        raise _only_append(str(error)) from None
    gone = [file for file in bundle.reference().every_file() if not file.is_file()]
    if gone:
        raise _only_append(f"{len(gone):,} images of {bundle.folder} are not there any more, e.g. {gone[0]}")
    return old


def _before(bundle: Bundle, candidates: list[Candidate], *, promote: bool) -> _Before:
    about, reference = bundle.manifest, bundle.reference()
    said = corrections_of(bundle, reference)
    homes = [*reference.cluster_ids.tolist(), *reference.aside_ids.tolist()]
    answers = dict(zip(map(str, reference.every_file()), homes, strict=True))
    ids = {file: about.merged.get(number, number) for file, number in answers.items()}
    new, places = dict[int, str | None](), dict[int, int]()
    for number in sorted(about.new_names):
        places[number] = len(about.cluster_names) + len(new)
        new[places[number]] = about.new_names[number]
    wrong = {file: ids.pop(file, NONE) for file, to in said.items() if to == WRONG}
    ids |= {file: places.get(to, about.merged.get(to, to)) for file, to in said.items() if to != WRONG}
    labelled = {file for file, to in said.items() if to != WRONG}
    if promote:
        named = {state.cluster_id for state in cluster_states(about) if state.state == "named"}
        labelled |= {file for file, number in ids.items() if number in named}
    waiting = {name: number for number, name in new.items()}
    for candidate in candidates:
        number = waiting.get(candidate.name, len(about.cluster_names) + len(new))
        new[number] = candidate.name
        ids |= dict.fromkeys(map(os.path.normpath, candidate.images), number)
    labelled |= {file for file, number in ids.items() if number in new}
    return _Before(ids, {file: number for file, number in wrong.items() if number != NONE}, labelled, new)


def _manifest(old: Manifest, more: list[str]) -> Manifest:
    """Return labelled images, all that generations so far have seen, and new ones, without true classes."""
    labelled = {os.path.normpath(path.absolute()) for path, _ in old.labelled}
    known = [os.path.normpath(path.absolute()) for path in old.unlabelled]
    paths = [path for path in dict.fromkeys([*known, *map(os.path.normpath, more)]) if path not in labelled]
    return replace(
        old, unlabelled=[Path(path) for path in paths], truth=None, novel_names=(), novel_test=(), published=False
    )


def _config(old: TrainConfig, run: RunDir, *, clusters: int) -> TrainConfig:
    """Return the settings of the run before; trunk and tail start from its weights."""
    if not method_named(old.method.name).takes_self_labels or old.model.head_form != "linear":
        raise UsageError(
            f"a run of the method {old.method.name} cannot be trained on with the ids of its clusters",
            hint="without --retrain, new categories can be appended",
        )
    none = {"epochs": 0}
    return old.model_copy(
        update={
            "data": old.data.model_copy(update={"novel_classes": clusters}),
            "model": old.model.model_copy(update={"weights": str(run.path.absolute())}),
            "self_labels": old.self_labels.model_copy(update={"weight": old.self_labels.weight or _SELF_LABELS}),
            "rotations": old.rotations.model_copy(update=none),
            "from_labels": old.from_labels.model_copy(update=none),
        }
    )


def _carried(bundle: Bundle, manifest: Manifest, before: _Before, ids: list[int], *, fresh: set[str]) -> Carried:
    """Return what the run takes over, by the images that can be used."""
    about, first = bundle.manifest, known_clusters(bundle.manifest)
    paths = [os.path.normpath(path.absolute()) for path in manifest.unlabelled]
    known = {str(file) for file in bundle.reference().every_file()}
    added = [path in fresh and path not in known for path in paths]
    if fresh and not any(added):
        raise DataError("all new images are copies of old ones", hint="there is nothing to learn from them")
    columns = defaultdict(lambda: NONE, {number: first + column for column, number in enumerate(ids)})
    columns |= {number: number for number in range(first)}
    names, clusters = Names.of(bundle), {number: ClusterEntry(name=name) for number, name in before.new.items()}
    old = {number: entry for number, entry in names.clusters.items() if number < len(about.cluster_names)}
    files = {path: os.path.normpath(bundle.reference().root.absolute() / path) for path in names.images}
    images = {files[path]: before.ids.get(files[path], to) for path, to in names.images.items()}
    return Carried(
        bundle=bundle.folder.absolute(),
        ancestors=[*about.ancestors, Ancestor.of(bundle)],
        clusters=len(about.cluster_names),
        first=first,
        ids=ids,
        names=Names(clusters=old | clusters, images=images),
        columns=[columns[before.ids.get(path, NONE)] for path in paths],
        said=[path in before.said for path in paths],
        wrong=[columns[before.wrong.get(path, NONE)] for path in paths],
        added=added,
    )


class Undecided(NamedTuple):
    """Name that a person gave to a cluster which no cluster of the next generation clearly is."""

    cluster_id: int
    name: str
    kind: str  # split or merged
    overlap: float
    like: int | None  # id of the cluster that is most like it


def undecided_names(run: RunDir) -> list[Undecided]:
    """Return the names of the generation before that a person has to decide about."""
    carried = Carried.read(run)
    if carried is None:
        return []
    names = {number: entry.name for number, entry in carried.names.clusters.items() if entry.name}
    return [
        Undecided(change.cluster_id, names[change.cluster_id], change.kind, change.overlap or 0.0, change.like)
        for change in carried.changes
        if change.kind in ("split", "merged") and change.cluster_id in names
    ]
