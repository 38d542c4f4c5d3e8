"""Quality of pairwise pseudo labels, measured against true classes. Only for reports: training never reads it."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score
from torch import Tensor

from ncd_training.objective.pseudo_labels import cosine_scores, ranking_scores

if TYPE_CHECKING:
    from ncd_training.model.branches import BranchOutput
    from ncd_training.objective.method import Method

Ids = NDArray[np.int64]
_MAX_IMAGES = 1000  # they have half a million pairs, which is enough
_GLOBAL_TOP_K, _LOCAL_TOP_K = (5, 20, 50, 100), 30


def sample_rows(images: int, *, seed: int, at_most: int = _MAX_IMAGES) -> Ids:
    """Return image numbers in ascending order: all of them, or a sample that depends on the seed only."""
    if images <= at_most:
        return np.arange(images)
    return np.sort(np.random.default_rng(seed).choice(images, at_most, replace=False))


def pair_quality(scores: Tensor, truth: Ids) -> dict[str, float]:
    """Compare soft pseudo labels s_ij [M, M] with true classes [M], over all pairs of different images.

    Precision is the share of the total score on pairs of one class, recall the mean score of such pairs. AUC and
    `precision_at_positives` (precision of the best pairs, as many as there are true ones) do not depend on the scale.
    Empty if no two images, or all of them, are of one class.
    """
    upper = np.triu_indices(len(truth), k=1)
    values = scores.cpu().double().numpy()[upper]
    same = (truth[:, None] == truth[None, :])[upper]
    if same.all() or not same.any():
        return {}
    mass = float(values.sum())
    return {
        "precision": float(values[same].sum() / mass) if mass else 0.0,
        "recall": float(values[same].mean()),
        "auc": float(roc_auc_score(same, values)),
        "precision_at_positives": _precision_of_best(values, same),
        "mean_same": float(values[same].mean()),
        "mean_different": float(values[~same].mean()),
    }


def _precision_of_best(values: NDArray[np.float64], same: NDArray[np.bool_]) -> float:
    """Return the precision of the best pairs, as many as there are true ones; ties at the edge count in proportion."""
    wanted = int(same.sum())
    edge = np.partition(values, len(values) - wanted)[len(values) - wanted]
    above, tied = values > edge, values == edge
    return float((same[above].sum() + same[tied].mean() * (wanted - above.sum())) / wanted)


class PairProbe:
    """Collector of features during a pass over images, which then scores pairs as each branch of the objective does.

    Uses a copy in eval mode, so that neither dictionaries nor their running spread change.
    """

    def __init__(self, objective: Method, rows: Ids) -> None:
        self._judges = deepcopy(objective.pseudo_labels).eval()
        self._names = [objective.branch_name(number) for number in range(len(self._judges))]
        self._rows, self._seen = rows, 0
        self._features: list[list[Tensor]] = [[] for _ in self._judges]
        self._share = 0.5

    def __call__(self, outputs: list[BranchOutput]) -> None:
        """Store the features of the next images in every branch; images that are not among `rows` are skipped."""
        batch = len(outputs[0].embedding)
        wanted = torch.from_numpy(self._rows[(self._rows >= self._seen) & (self._rows < self._seen + batch)])
        self._seen += batch
        if not len(wanted):
            return
        wanted = (wanted - (self._seen - batch)).to(outputs[0].embedding.device, non_blocking=True)
        self._share = 1 / outputs[0].cluster_logits.shape[1]
        for judge, output, features in zip(self._judges, outputs, self._features, strict=True):
            chosen = type(output)(*(tensor[wanted] for tensor in output))
            features.append(judge.compared(judge.positive_source, chosen, 0))

    def scores(self) -> dict[str, Tensor]:
        """Return the positive pseudo labels [M, M] of the stored images, by branch name."""
        pairs = zip(self._names, self._judges, self._features, strict=True)
        return {
            name: judge.scores(judge.positive_source, torch.cat(features), share=self._share)
            for name, judge, features in pairs
        }


def score_variants(embedding: Tensor, description: Tensor) -> Iterator[tuple[str, str, Tensor]]:
    """Yield variants of pair scores as `(score, preparation of features, scores [M, M])`, for a table of their quality.

    Takes embeddings [M, d] of the global branch and descriptions [M, e] (spread of parts) of the local branch.
    """
    prepared = _prepared(embedding)
    for top_k in _GLOBAL_TOP_K:
        for form, features in prepared.items():
            yield f"global ranking, k={top_k}", form, ranking_scores(features, top_k=top_k)
    for form in ("raw", "centred"):
        yield "cosine", form, cosine_scores(prepared[form])
    prepared = _prepared(description)
    for form in ("raw", "centred"):
        yield f"local ranking, k={_LOCAL_TOP_K}", form, ranking_scores(prepared[form], top_k=_LOCAL_TOP_K)


def _prepared(features: Tensor) -> dict[str, Tensor]:
    centred = features - features.mean(dim=0)
    # A constant entry carries no information: it stays 0.
    spread = centred.std(dim=0)
    standardised = torch.where(spread > 0, centred / spread, 0.0)
    return {"raw": features, "centred": centred, "standardised": standardised}
