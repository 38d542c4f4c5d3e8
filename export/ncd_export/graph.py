"""Exported graph: trunk, first branch and cluster head, without banks, dictionary, other branch and known head.

A head over known and novel classes is exported as well, since it separates them.
"""

from __future__ import annotations

import torch
from ncd_training.model.branches import DualBranchModel
from ncd_training.model.onnx import OnnxGraph
from torch import Tensor, nn

from ncd_serve.contract import OUTPUTS
from ncd_serve.fit import FitLimits


class ExportGraph(OnnxGraph):
    """Served graph from uint8 images [N, H, W, 3] to the outputs of the table `contract.OUTPUTS`."""

    def __init__(self, model: DualBranchModel, limits: FitLimits | None = None) -> None:
        super().__init__()
        branch = model.branches[0]
        self.trunk, self.tail, self.cluster_head = model.trunk, branch.tail, branch.cluster_head
        self.known = branch.known
        self.tells_known_from_novel = model.tells_known_from_novel
        self.class_head = branch.known_head if model.tells_known_from_novel else None
        self.fit = FitGraph(limits) if limits else None

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of the outputs, in the order of `forward`."""
        has = {
            "class_id": self.tells_known_from_novel,
            "is_novel": self.tells_known_from_novel,
            "fit": self.fit is not None,
            "outside": False,  # added to the file, by `generation`, as is `known`
            "known": False,
        }
        return tuple(output.name for output in OUTPUTS if not output.optional or has[output.name])

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        """Return the outputs for decoded images: channels last, values 0 to 255."""
        embedding = self.tail(self.trunk.stages(self._normalised(image))).embedding
        probabilities = torch.softmax(self.cluster_head(embedding), dim=1)
        confidence, cluster_id = probabilities.max(dim=1)
        answer = {
            "cluster_id": cluster_id,
            "confidence": confidence,
            "probabilities": probabilities,
            "embedding": embedding,
        }
        if self.tells_known_from_novel:
            # An open world's clusters are the known classes and the novel ones, so they need no second head.
            class_id = cluster_id if self.class_head is None else self.class_head(embedding).argmax(dim=1)
            answer |= {"class_id": class_id, "is_novel": class_id >= self.known}
        if self.fit:
            answer["fit"] = self.fit(embedding, cluster_id, confidence)
        return {name: answer[name] for name in self.output_names}

    def _normalised(self, image: Tensor) -> Tensor:
        """Normalise pixels as the trunk does, but by whole rows: with channels last, three values at once are slow."""
        width = image.shape[2]
        mean, std = (moment.flatten().repeat(width) for moment in (self.trunk.mean, self.trunk.std))
        rows = (image.flatten(2).float() - mean) / std
        return rows.unflatten(2, (width, 3)).permute(0, 3, 1, 2)


class FitGraph(nn.Module):
    """Fit of an image to its cluster, `FitLimits.judge` as a part of the graph."""

    centres: Tensor
    unusual_distance: Tensor
    outlier_distance: Tensor
    unusual_odds: Tensor

    def __init__(self, limits: FitLimits) -> None:
        super().__init__()
        for name, values in vars(limits).items():
            self.register_buffer(name, torch.from_numpy(values))

    def forward(self, embedding: Tensor, cluster_id: Tensor, confidence: Tensor) -> Tensor:
        """Return the fit of each image: 0 typical, 1 unusual, 2 outlier."""
        distance = 1 - nn.functional.cosine_similarity(embedding, self.centres[cluster_id])
        odds = torch.logit(confidence, eps=1e-6)
        unusual = (distance > self.unusual_distance[cluster_id]) | (odds < self.unusual_odds[cluster_id])
        return torch.where(distance > self.outlier_distance[cluster_id], 2, unusual.long())
