"""What is looked at while a run trains and at its end. True novel classes are read here; training never calls back."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ncd_serve import progress
from ncd_training.model.predict import Outputs, run_model
from ncd_training.score.metrics import Scores, cluster_balance, cluster_scores, evaluate_splits, kmeans_ids, raw_pixels
from ncd_training.score.pair_quality import PairProbe, pair_quality, sample_rows
from ncd_training.score.reference import look_at_unlabelled
from ncd_training.summary.figures import BALANCE, PSEUDO
from ncd_training.summary.plots import Points, draw_tsne

if TYPE_CHECKING:
    from ncd_training.base.run_dir import RunDir
    from ncd_training.data.prepare import Setup
    from ncd_training.model.predict import Ids
    from ncd_training.run.state import TrainState

_LOOKS = 10  # how often a run looks at its clusters on the way
_TSNE_UNLABELLED, _TSNE_KNOWN = 1200, 300  # points of a picture


def first_look(setup: Setup, state: TrainState, run: RunDir) -> dict[str, Scores]:
    """Before any discovery: a picture of the embeddings, and what k-means makes of them where truth is known."""
    manifest, data, seed = setup.manifest, setup.config.data, setup.config.optim.seed
    drawn = 0 in setup.config.report.tsne_epochs
    if manifest.truth is None and not drawn:
        return {}
    outputs = run_model(
        state.model,
        manifest.unlabelled,
        data.preprocess,
        workers=data.workers,
        track=setup.track,
        what="initial features",
    )
    clusters = setup.novel_classes + (len(manifest.known_classes) if manifest.open_world else 0)
    ids = kmeans_ids(outputs.embedding, clusters, seed=seed)
    if drawn:
        with setup.console.status("drawing t-SNE of the initial embeddings"):
            _draw(setup, state, run, outputs, clusters=ids, name="init")
    if manifest.truth is None:
        return {}
    truth = np.array(manifest.truth)
    pixels = kmeans_ids(raw_pixels(manifest.unlabelled), clusters, seed=seed)
    features = "supervised" if setup.config.supervised.epochs else "initial"
    guesses = {"k-means on raw pixels": pixels, f"k-means on {features} features": ids}
    return {name: cluster_scores(guess, truth) for name, guess in guesses.items()}


def look(setup: Setup, state: TrainState, run: RunDir) -> dict[str, float]:
    """Balance of the clusters; where true classes are known, scores and the quality of pseudo labels.

    At about ten epochs of a run, the last among them, and those that are to be drawn; at others there is nothing.
    """
    data, manifest, epoch, epochs = setup.config.data, setup.manifest, state.epoch, setup.config.optim.epochs
    drawn = {epochs if chosen == -1 else chosen for chosen in setup.config.report.tsne_epochs}
    if epoch % max(1, epochs // _LOOKS) and epoch not in drawn | {epochs}:
        return {}
    probe, rows = _probe(setup, state)
    outputs = run_model(
        state.model, manifest.unlabelled, data.preprocess, workers=0, track=progress.silent, what="looking", see=probe
    )
    figures: dict[str, float] = {}
    if manifest.truth is not None:
        truth = np.array(manifest.truth)
        figures |= {
            name: value for name, value in cluster_scores(outputs.cluster_ids, truth).items() if name != "images"
        }
        for branch, quality in _qualities(probe, truth[rows]).items():
            figures |= {f"{PSEUDO}{branch}_{name}": quality[name] for name in ("precision", "recall")}
    figures[BALANCE] = cluster_balance(outputs.cluster_ids, outputs.clusters)
    if epoch in drawn:
        _draw(setup, state, run, outputs, clusters=outputs.cluster_ids, name=f"epoch-{epoch}")
    return figures


def last_look(setup: Setup, state: TrainState) -> tuple[dict[str, Any], Outputs]:
    """Scores of every split that has true classes and the quality of the pseudo labels; and what they are about."""
    data, manifest = setup.config.data, setup.manifest
    if not setup.config.teaches_known_classes:
        manifest = replace(manifest, known_test=())
    probe, rows = _probe(setup, state)
    outputs = look_at_unlabelled(setup, state.model, see=probe)
    splits = evaluate_splits(state.model, manifest, data.preprocess, outputs, workers=data.workers, track=setup.track)
    scores: dict[str, Any] = {"scores": splits}
    if manifest.truth is not None:
        scores["pseudo_labels"] = _qualities(probe, np.array(manifest.truth)[rows])
    return scores, outputs


def _probe(setup: Setup, state: TrainState) -> tuple[PairProbe | None, Ids]:
    """A follower of the unlabelled images; none where there is nothing to compare pseudo labels with."""
    rows = sample_rows(len(setup.manifest.unlabelled), seed=setup.config.optim.seed)
    return (PairProbe(state.objective, rows) if setup.manifest.truth and state.objective.pseudo_labels else None), rows


def _qualities(probe: PairProbe | None, truth: Ids) -> dict[str, dict[str, float]]:
    judged = probe.scores() if probe else {}
    qualities = {branch: pair_quality(scores, truth) for branch, scores in judged.items()}
    return {branch: quality for branch, quality in qualities.items() if quality}


def _draw(setup: Setup, state: TrainState, run: RunDir, outputs: Outputs, *, clusters: Ids, name: str) -> None:
    """t-SNE of the first branch's embeddings, coloured by true class, or by cluster where nobody knows better."""
    manifest, data, seed = setup.manifest, setup.config.data, setup.config.optim.seed
    if len(manifest.unlabelled) < 3:
        return
    rows = sample_rows(len(manifest.unlabelled), seed=seed, at_most=_TSNE_UNLABELLED)
    behind = sample_rows(len(manifest.labelled), seed=seed, at_most=_TSNE_KNOWN)
    known = run_model(
        state.model,
        [manifest.labelled[row][0] for row in behind],
        data.preprocess,
        workers=0,
        track=progress.silent,
        what="known images",
    )
    groups, colour = (clusters, "cluster") if manifest.truth is None else (np.array(manifest.truth), "true class")
    names = manifest.novel_names if manifest.truth is not None else ()
    when = f"after epoch {state.epoch}" if state.epoch else "before discovery"
    draw_tsne(
        Points(outputs.embedding[rows], groups[rows], names, known.embedding),
        title=f"{manifest.name} {when}: {len(rows):,} unlabelled images by {colour}",
        seed=seed,
        target=run.plots / f"tsne-{name}.png",
    )
