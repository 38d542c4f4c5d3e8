"""How good pairwise pseudo labels are, measured against true classes. For reports alone: training never reads this."""

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
_MOST_IMAGES = 1000  # pairs grow with the square: half a million of them tell enough
_GLOBAL_TOP_K, _LOCAL_TOP_K = (5, 20, 50, 100), 30


def sample_rows(images: int, *, seed: int, at_most: int = _MOST_IMAGES) -> Ids:
    """Image numbers, ascending: all of them, or a sample that the seed alone decides."""
    if images <= at_most:
        return np.arange(images)
    return np.sort(np.random.default_rng(seed).choice(images, at_most, replace=False))


def pair_quality(scores: Tensor, truth: Ids) -> dict[str, float]:
    """Soft pseudo labels s_ij [M, M] against true classes [M], over all pairs of different images.

    Precision is the share of the scores' mass that lies on pairs of one class, recall the mean score of such pairs.
    AUC and the precision of the best pairs, as many as there are true ones, do not depend on the scores' scale.
    Empty where no two images, or all of them, are of one class.
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
    """Precision of as many of the highest scores as there are true pairs; of a tie at the edge, a fair share counts."""
    wanted = int(same.sum())
    edge = np.partition(values, len(values) - wanted)[len(values) - wanted]
    above, tied = values > edge, values == edge
    return float((same[above].sum() + same[tied].mean() * (wanted - above.sum())) / wanted)


class PairProbe:
    """Follows a pass over images, and then judges pairs of them as each branch of the objective would.

    It works on a copy in eval mode, so neither dictionaries nor their running spread move.
    """

    def __init__(self, objective: Method, rows: Ids) -> None:
        self._judges = deepcopy(objective.pseudo_labels).eval()
        self._names = [objective.branch_name(number) for number in range(len(self._judges))]
        self._rows, self._seen = rows, 0
        self._features: list[list[Tensor]] = [[] for _ in self._judges]

    def __call__(self, outputs: list[BranchOutput]) -> None:
        """See the next images, as every branch does; those that were not asked for are passed over."""
        batch = len(outputs[0].embedding)
        wanted = torch.from_numpy(self._rows[(self._rows >= self._seen) & (self._rows < self._seen + batch)])
        self._seen += batch
        if not len(wanted):
            return
        wanted = (wanted - (self._seen - batch)).to(outputs[0].embedding.device, non_blocking=True)
        for judge, output, features in zip(self._judges, outputs, self._features, strict=True):
            chosen = type(output)(*(tensor[wanted] for tensor in output))
            features.append(judge.compared(judge.positive_source, chosen, 0))

    def scores(self) -> dict[str, Tensor]:
        """The positive pseudo labels [M, M] of the images asked for, by the branch's name."""
        pairs = zip(self._names, self._judges, self._features, strict=True)
        return {name: judge.scores(judge.positive_source, torch.cat(features)) for name, judge, features in pairs}


def score_variants(embedding: Tensor, description: Tensor) -> Iterator[tuple[str, str, Tensor]]:
    """Ways to score pairs: `(what, how features are prepared, scores [M, M])`, for a table of their quality.

    Takes embeddings [M, d] of the global branch and descriptions [M, e] (spread of parts) of the local one.
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
    # An entry that never varies says nothing about an image: it stays 0.
    spread = centred.std(dim=0)
    standardised = torch.where(spread > 0, centred / spread, 0.0)
    return {"raw": features, "centred": centred, "standardised": standardised}
