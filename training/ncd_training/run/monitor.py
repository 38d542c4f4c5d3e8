"""Scores and pictures of the clusters, during training and at the end. Reads true novel classes; training does not."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ncd_serve.files import write_json
from ncd_serve.places import FORMING
from ncd_serve.progress import Progress, Track, silent
from ncd_serve.text import printable
from ncd_training.base.run_dir import Score, Summary
from ncd_training.model.predict import Outputs, run_model
from ncd_training.objective.clustering import kmeans_ids
from ncd_training.objective.method import method_named
from ncd_training.score.metrics import cluster_balance, cluster_scores, evaluate_splits, raw_pixels
from ncd_training.score.pair_quality import PairProbe, pair_quality, sample_rows
from ncd_training.summary.figures import BALANCE, PSEUDO
from ncd_training.summary.plots import Points, draw_tsne

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ncd_training.data.prepare import Setup
    from ncd_training.model.predict import Ids, See
    from ncd_training.run.step import TrainState

_EVALUATIONS_PER_RUN = 10
_EXAMPLES = 10  # images that a forming cluster is shown by
_TSNE_UNLABELLED_POINTS, _TSNE_KNOWN_POINTS = 1200, 300


@dataclass(frozen=True)
class Monitor:
    """Evaluation of a run's model while it trains and at the end; pictures go to the folder `plots`."""

    setup: Setup
    plots: Path
    progress: Progress

    def before_discovery(self, state: TrainState) -> dict[str, Score]:
        """Draw the initial embeddings, and score k-means on them where true classes are known."""
        manifest, config = self.setup.manifest, self.setup.config
        drawn = 0 in config.report.tsne_epochs
        if manifest.truth is None and not drawn:
            return {}
        outputs = self._outputs(state, manifest.unlabelled, "initial features", track=self.progress.track)
        if config.self_labels.weight:  # heads that start from a clustering show it before training
            self._write_forming(outputs, 0)
        clusters = self.setup.novel_classes + (len(manifest.known_classes) if manifest.open_world else 0)
        ids = kmeans_ids(outputs.embedding, clusters, seed=config.optim.seed)
        if drawn:
            with self.progress.status("drawing t-SNE of the initial embeddings"):
                self._draw(state, outputs, clusters=ids, name="init")
        if manifest.truth is None:
            return {}
        truth = np.array(manifest.truth)
        pixels = kmeans_ids(raw_pixels(manifest.unlabelled), clusters, seed=config.optim.seed)
        features = "supervised" if config.supervised.epochs else "initial"
        guesses = {"k-means on raw pixels": pixels, f"k-means on {features} features": ids}
        return {name: cluster_scores(guess, truth) for name, guess in guesses.items()}

    def after_epoch(self, state: TrainState) -> dict[str, float]:
        """Return cluster balance and, where true classes are known, scores and quality of pseudo labels.

        Evaluates about ten epochs of a run, the last one, and those with a t-SNE picture; empty for other epochs.
        """
        config, manifest, epoch, epochs = self.setup.config, self.setup.manifest, state.epoch, self._epochs
        drawn = {epochs if chosen == -1 else chosen for chosen in config.report.tsne_epochs}
        if epoch % max(1, epochs // _EVALUATIONS_PER_RUN) and epoch not in drawn | {epochs}:
            return {}
        probe, rows = self._probe(state)
        outputs = self._outputs(state, manifest.unlabelled, "evaluating", see=probe)
        figures: dict[str, float] = {}
        if manifest.truth is not None:
            truth = np.array(manifest.truth)
            score = cluster_scores(outputs.cluster_ids, truth)
            figures |= {"acc": score.acc, "nmi": score.nmi or 0.0, "ari": score.ari or 0.0}
            for branch, quality in _qualities(probe, truth[rows]).items():
                figures |= {f"{PSEUDO}{branch}_{name}": quality[name] for name in ("precision", "recall")}
        figures[BALANCE] = cluster_balance(outputs.cluster_ids, outputs.clusters)
        self._write_forming(outputs, epoch)
        if epoch in drawn:
            self._draw(state, outputs, clusters=outputs.cluster_ids, name=f"epoch-{epoch}")
        return figures

    def at_the_end(self, state: TrainState, summary: Summary) -> tuple[Summary, Outputs]:
        """Score every split that has true classes and the pseudo labels; also return the unlabelled images' outputs."""
        config, manifest, track = self.setup.config, self.setup.manifest, self.progress.track
        if not (method_named(config.method.name).teaches_known_in(config) or config.supervised.epochs):
            manifest = replace(manifest, known_test=())
        probe, rows = self._probe(state)
        outputs = self._outputs(state, manifest.unlabelled, "evaluating unlabelled images", see=probe, track=track)
        data = config.data
        splits = evaluate_splits(state.model, manifest, data.preprocess, outputs, workers=data.workers, track=track)
        pairs = _qualities(probe, np.array(manifest.truth)[rows]) if manifest.truth is not None else {}
        found = {"method": config.method.name, "scores": splits, "pseudo_labels": pairs}
        return summary.model_copy(update=found), outputs

    def _write_forming(self, outputs: Outputs, epoch: int) -> None:
        """Write the size of each cluster so far, and its most confident images, for those who watch the run."""
        manifest, ids, sure = self.setup.manifest, outputs.cluster_ids, outputs.confidences
        paths, clusters = manifest.unlabelled, []
        for number in np.unique(ids).tolist():
            rows = np.flatnonzero(ids == number)
            best = rows[np.argsort(-sure[rows], kind="stable")[:_EXAMPLES]]
            facts = {"id": number, "name": printable(self._name_of(number)), "count": len(rows)}
            examples = [printable(paths[row].absolute()) for row in best]
            clusters.append({**facts, "confidence": float(sure[rows].mean()), "examples": examples})
        write_json(self.plots.parent / FORMING, {"epoch": epoch, "clusters": clusters})

    def _name_of(self, column: int) -> str:
        """Return the name of a column of the cluster head; it may carry on a cluster of the generation before."""
        manifest, carried = self.setup.manifest, self.setup.carried
        known = manifest.known_classes if manifest.open_world else []
        if column < len(known):
            return known[column]
        number = carried.ids[column - carried.first] if carried else column
        given = carried.names.clusters.get(number) if carried else None
        return given.name if given and given.name else f"cluster-{number - len(known)}"

    @property
    def _epochs(self) -> int:
        return self.setup.config.optim.epochs

    def _outputs(
        self, state: TrainState, paths: Sequence[Path], what: str, *, see: See | None = None, track: Track = silent
    ) -> Outputs:
        data = self.setup.config.data
        workers = 0 if track is silent else data.workers
        return run_model(state.model, paths, data.preprocess, workers=workers, track=track, what=what, see=see)

    def _probe(self, state: TrainState) -> tuple[PairProbe | None, Ids]:
        """Return a probe of the pseudo labels, None without true classes, and the image numbers that it samples."""
        manifest, method = self.setup.manifest, state.method
        rows = sample_rows(len(manifest.unlabelled), seed=self.setup.config.optim.seed)
        return (PairProbe(method, rows) if manifest.truth and method.pseudo_labels else None), rows

    def _draw(self, state: TrainState, outputs: Outputs, *, clusters: Ids, name: str) -> None:
        """Draw t-SNE of the first branch's embeddings, coloured by true class or, where unknown, by cluster."""
        manifest, seed = self.setup.manifest, self.setup.config.optim.seed
        if len(manifest.unlabelled) < 3:
            return
        rows = sample_rows(len(manifest.unlabelled), seed=seed, at_most=_TSNE_UNLABELLED_POINTS)
        behind = sample_rows(len(manifest.labelled), seed=seed, at_most=_TSNE_KNOWN_POINTS)
        paths = [manifest.labelled[row][0] for row in behind]
        known = self._outputs(state, paths, "known images").embedding if paths else outputs.embedding[:0]
        groups, colour = (clusters, "cluster") if manifest.truth is None else (np.array(manifest.truth), "true class")
        names = manifest.novel_names if manifest.truth is not None else ()
        when = f"after epoch {state.epoch}" if state.epoch else "before discovery"
        draw_tsne(
            Points(outputs.embedding[rows], groups[rows], names, known),
            title=f"{manifest.name} {when}: {len(rows):,} unlabelled images by {colour}",
            seed=seed,
            target=self.plots / f"tsne-{name}.png",
        )


def _qualities(probe: PairProbe | None, truth: Ids) -> dict[str, dict[str, float]]:
    judged = probe.scores() if probe else {}
    qualities = {branch: pair_quality(scores, truth) for branch, scores in judged.items()}
    return {branch: quality for branch, quality in qualities.items() if quality}
