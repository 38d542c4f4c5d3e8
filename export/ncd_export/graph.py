"""What is exported: trunk, first branch and cluster head; banks, dictionary, other branch and known head stay out."""

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


class ExportGraph(nn.Module):
    """uint8 images [N, H, W, 3] to cluster ids, confidence, probabilities and embedding."""

    def __init__(self, model: DualBranchModel) -> None:
        super().__init__()
        branch = model.branches[0]
        self.trunk, self.tail, self.cluster_head = model.trunk, branch.tail, branch.cluster_head

    def forward(self, image: Tensor) -> GraphOutput:
        """Images as they come from a file: channels last, values 0 to 255."""
        embedding = self.tail(self.trunk(image.permute(0, 3, 1, 2))).embedding
        probabilities = torch.softmax(self.cluster_head(embedding), dim=1)
        confidence, cluster_id = probabilities.max(dim=1)
        return GraphOutput(cluster_id, confidence, probabilities, embedding)
