"""Ids that live longer than a model: clusters of a retrained one get the ids of the clusters that they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from ncd_serve.bundle import Change
from ncd_serve.discovery.carry import MIN_OVERLAP, overlap
from ncd_training.base.checkpoint import save_checkpoint
from ncd_training.data.carried import NONE
from ncd_training.data.prepare import finish_placing
from ncd_training.model.predict import run_model
from ncd_training.model.weights import initial_trunk
from ncd_training.run.step import build_state, load_state

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ncd_serve.progress import Progress
    from ncd_training.base.run_dir import RunDir
    from ncd_training.data.carried import Carried
    from ncd_training.data.prepare import Setup
    from ncd_training.run.step import TrainState

    Ids = NDArray[np.integer[Any]]

_NEVER = -1e4  # bias of a cluster that is no more: its id is not used again


class Matching(NamedTuple):
    """New id of every column after the known classes, NONE for empty ones; overlaps of old and new columns."""

    ids: list[int]
    overlaps: NDArray[np.float64]  # [columns before, columns now]
    total: int  # ids that were given so far


def keep_ids(setup: Setup, state: TrainState, run: RunDir, *, progress: Progress) -> tuple[Setup, TrainState]:
    """Give the clusters of a trained state their ids, and write it; return the setup and the state with them."""
    carried, data = setup.carried, setup.config.data
    assert carried is not None
    if carried.changes:  # they have them
        return setup, state
    what, paths = "comparing with the generation before", setup.manifest.unlabelled
    outputs = run_model(state.model, paths, data.preprocess, workers=data.workers, track=progress.track, what=what)
    matching = match_clusters(carried, outputs.cluster_ids)
    changes = changes_of(carried, outputs.cluster_ids, matching)
    ids = list(range(carried.first, matching.total))
    after = carried.model_copy(update={"ids": ids, "changes": changes})
    setup = setup.with_config(data=data.model_copy(update={"novel_classes": len(ids)}))
    save_checkpoint(_placed(setup, state, matching, first=carried.first), run.placed)
    after.write(run)
    finish_placing(run, after)
    setup = setup.with_carried(after)
    return setup, load_state(setup, run.checkpoint)


def match_clusters(carried: Carried, now: Ids) -> Matching:
    """Match clusters with those before on the images of both: the pairs with the largest overlaps together.

    Those that share at least half of the images of either keep the id; others get new ids, even where they are likely
    the same: a person decides about names.
    """
    first, width, before = carried.first, len(carried.ids), np.array(carried.columns)
    shared, columns = before != NONE, first + width  # known classes among them: images may have gone there
    overlaps = overlap(before[shared], now[shared], before=columns, after=columns)[first:, first:]
    kept = {
        int(new): carried.ids[old]
        for old, new in zip(*linear_sum_assignment(-overlaps), strict=True)
        if overlaps[old, new] >= MIN_OVERLAP
    }
    total, ids = max([carried.clusters - 1, *carried.ids]) + 1, []
    for column in range(width):
        if column not in kept and (now == first + column).any():
            kept[column], total = total, total + 1
        ids.append(kept.get(column, NONE))
    return Matching(ids, overlaps, total)


def changes_of(carried: Carried, now: Ids, matching: Matching) -> list[Change]:
    """Return what became of every id, those of known classes left out.

    A category that was to become a cluster, and did not, was split or merged as others are.
    """
    first, before, added = carried.first, np.array(carried.columns), np.array(carried.added)
    columns = {number: column for column, number in enumerate(carried.ids)}
    present = {number: column for column, number in enumerate(matching.ids) if number != NONE}
    changes = []
    for number in range(first, matching.total):
        old, column = columns.get(number), present.get(number)
        mine = now == first + column if column is not None else np.zeros(len(now), bool)
        gain = int((mine & added).sum())
        fresh = number >= carried.clusters and column is not None
        was = before == first + old if old is not None and not fresh else np.zeros(len(now), bool)
        facts: dict[str, Any] = {"cluster_id": number, "images": int(was.sum()), "added": gain}
        if fresh:
            came = int((mine & ~added & (before != NONE)).sum())
            best = float(matching.overlaps[:, column].max())
            changes.append(Change(kind="new", moved=came, overlap=best, **facts))
        elif old is None:  # it had no image before
            changes.append(Change(kind="kept", moved=0, **facts))
        else:
            changes.append(_change_of_old(matching, old, None if column is None else mine, was, now, facts))
    return changes


def _change_of_old(
    matching: Matching,
    old: int,
    mine: NDArray[np.bool_] | None,
    was: NDArray[np.bool_],
    now: Ids,
    facts: dict[str, Any],
) -> Change:
    """Return the change of a cluster that had images: it is there, its images are in several, or in a larger one."""
    best = int(matching.overlaps[old].argmax())
    if mine is not None:
        share = float(matching.overlaps[old, matching.ids.index(facts["cluster_id"])])
        kind = "grown" if facts["added"] else "kept"
        return Change.model_validate({**facts, "kind": kind, "moved": int((was & ~mine).sum()), "overlap": share})
    kind = "merged" if np.bincount(now[was]).max(initial=0) > was.sum() / 2 else "split"
    share, like = float(matching.overlaps[old, best]), matching.ids[best]
    return Change.model_validate(
        {**facts, "kind": kind, "moved": int(was.sum()), "overlap": share, "like": like if share else None}
    )


def _placed(setup: Setup, state: TrainState, matching: Matching, *, first: int) -> TrainState:
    """Return the state with a cluster head that has a column for every id."""
    parts, _ = initial_trunk(setup.config, weights=None)
    placed = build_state(setup, parts)
    placed.epoch = state.epoch
    for name, module in placed.modules.items():
        old, new = state.modules[name].state_dict(), module.state_dict()
        for key, tensor in new.items():
            if old[key].shape == tensor.shape:
                tensor.copy_(old[key])
            elif "_head." in key:  # buffers of the method, which training has no more need of, stay empty
                _place_columns(old[key], tensor, matching, first=first)
    return placed


@torch.no_grad()
def _place_columns(old: Tensor, new: Tensor, matching: Matching, *, first: int) -> None:
    """Copy the last rows of a head's weights or biases to the places of their ids; other places are never answered."""
    known = len(old) - len(matching.ids)
    new[:known] = old[:known]
    new[known:] = _NEVER if new.dim() == 1 else 0.0
    for column, number in enumerate(matching.ids):
        if number != NONE:
            new[known + number - first] = old[known + column]
