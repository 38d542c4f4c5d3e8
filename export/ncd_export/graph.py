"""What is exported: trunk, first branch and cluster head; banks, dictionary, other branch and known head stay out.

A head over known and novel classes comes along: it is what tells them apart.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from ncd_training.dual_branch import DualBranchModel
from torch import Tensor, nn


class GraphOutput(NamedTuple):
    """The outputs of the served graph; their names are the contract."""

    cluster_id: Tensor  # INT64 [N]
    confidence: Tensor  # FP32 [N]
    probabilities: Tensor  # FP32 [N, C]
    embedding: Tensor  # FP32 [N, d]


class JointOutput(NamedTuple):
    """The outputs of a graph that can tell known from novel classes."""

    cluster_id: Tensor
    confidence: Tensor
    probabilities: Tensor
    embedding: Tensor
    class_id: Tensor  # INT64 [N], known classes first, then clusters
    is_novel: Tensor  # BOOL [N]


class ExportGraph(nn.Module):
    """uint8 images [N, H, W, 3] to cluster ids, confidence, probabilities and embedding."""

    def __init__(self, model: DualBranchModel) -> None:
        super().__init__()
        branch = model.branches[0]
        self.trunk, self.tail, self.cluster_head = model.trunk, branch.tail, branch.cluster_head
        self.known = branch.known
        self.tells_known_from_novel = model.tells_known_from_novel
        self.class_head = branch.known_head if model.tells_known_from_novel else None

    @property
    def output_names(self) -> tuple[str, ...]:
        """What it answers with."""
        return JointOutput._fields if self.tells_known_from_novel else GraphOutput._fields

    def forward(self, image: Tensor) -> GraphOutput | JointOutput:
        """Images as they come from a file: channels last, values 0 to 255."""
        embedding = self.tail(self.trunk.stages(self._normalised(image))).embedding
        probabilities = torch.softmax(self.cluster_head(embedding), dim=1)
        confidence, cluster_id = probabilities.max(dim=1)
        answer = GraphOutput(cluster_id, confidence, probabilities, embedding)
        if not self.tells_known_from_novel:
            return answer
        # An open world's clusters are the known classes and the novel ones, so they need no second head.
        class_id = cluster_id if self.class_head is None else self.class_head(embedding).argmax(dim=1)
        return JointOutput(*answer, class_id, class_id >= self.known)

    def _normalised(self, image: Tensor) -> Tensor:
        """What the trunk does with pixels, on whole rows: sums with three numbers at a time are slow channels last."""
        width = image.shape[2]
        mean, std = (moment.flatten().repeat(width) for moment in (self.trunk.mean, self.trunk.std))
        rows = (image.flatten(2).float() - mean) / std
        return rows.unflatten(2, (width, 3)).permute(0, 3, 1, 2)
