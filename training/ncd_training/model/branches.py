"""Model: a frozen trunk, and branches with a copy of the backbone's last stage and two heads each."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ncd_training.config.schema import CompatConfig, HeadForm, HeadKind, ModelConfig, PseudoLabelConfig
from ncd_training.model.trunk import Tail, TrunkParts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ncd_training.model.onnx import OnnxTrunk


# Maps of convolutions have four dimensions, tokens of transformers three.
_FORMATS = {3: torch.contiguous_format, 4: torch.channels_last}
_IMAGES_AT_ONCE = 4  # on a CPU: their maps stay in its cache


class BranchOutput(NamedTuple):
    """Output of one branch for a batch."""

    parts: Tensor  # [B, d, h, w]
    embedding: Tensor  # [B, d]
    known_logits: Tensor  # [B, C_known], with a joint or open-world head [B, C_known + C_novel]
    cluster_logits: Tensor  # [B, C_novel], with a single head the same as known_logits


class Branch(nn.Module):
    """Branch: projection and pooling (the tail), known head and cluster head.

    It has a single head in an open world, and where no class is known.
    """

    def __init__(
        self,
        tail: Tail,
        dim: int,
        *,
        known: int,
        novel: int,
        heads: HeadKind = "separate",
        form: HeadForm = "linear",
        gain: float = 1.0,
    ) -> None:
        super().__init__()
        self.tail, self.known = tail, known
        build = CosineHead if form == "cosine" else nn.Linear
        known_width = known + novel if heads == "joint" else known
        self.known_head = None if heads == "open_world" or not known else build(dim, known_width)
        clusters = known + novel if heads == "open_world" else novel
        self.cluster_head = CentreHead(dim, clusters) if form == "centres" else build(dim, clusters)
        if form == "linear":
            with torch.no_grad():
                self.linear_cluster_head.weight.mul_(gain)
        self.lower_novel_biases()

    @property
    def labelled_head(self) -> nn.Linear:
        """Head that learns the known classes."""
        return self.known_head or self.linear_cluster_head

    @property
    def linear_cluster_head(self) -> nn.Linear:
        """Cluster head, if it is linear; a head of centres is not."""
        assert isinstance(self.cluster_head, nn.Linear)
        return self.cluster_head

    def forward(self, maps: Tensor, head_input: Tensor | None = None) -> BranchOutput:
        """Return parts, embedding and logits of trunk maps; `head_input` [B, d] replaces the embedding in the heads."""
        parts, embedding = self.tail(maps)
        features = embedding if head_input is None else head_input
        cluster_logits = self.cluster_head(features)
        known_logits = cluster_logits if self.known_head is None else self.known_head(features)
        return BranchOutput(parts, embedding, known_logits, cluster_logits)

    def class_weights(self, output: BranchOutput, labels: Tensor) -> Tensor:
        """Return head weights [B, d] of each image's class; for an unlabelled image, of its likeliest cluster."""
        clusters = output.cluster_logits[len(labels) :].argmax(dim=1)
        return torch.cat([self.labelled_head.weight[labels], self.linear_cluster_head.weight[clusters]])

    @torch.no_grad()
    def lower_novel_biases(self) -> None:
        """Set a joint head's biases of novel classes to the lowest known bias less 1, so it does not favour them."""
        bias = None if self.known_head is None else self.known_head.bias
        if bias is not None:
            bias[self.known :] = bias[: self.known].min() - 1.0


class Trunk(nn.Module):
    """Trunk: normalisation and frozen stages, always in eval mode, so that the output for an image never changes."""

    mean: Tensor
    std: Tensor

    def __init__(self, parts: TrunkParts, *, batch_norm_drifts: bool = False) -> None:
        super().__init__()
        self._batch_norm_drifts = batch_norm_drifts
        self.in_onnx: OnnxTrunk | None = None  # computes the maps on a CPU instead of torch
        self.stages = parts.frozen.requires_grad_(False)
        self.register_buffer("mean", torch.tensor(parts.mean).view(1, 3, 1, 1) * 255.0)
        self.register_buffer("std", torch.tensor(parts.std).view(1, 3, 1, 1) * 255.0)
        self.eval()

    def train(self, mode: bool = True) -> Trunk:
        """Ignore `mode`, or the statistics of batch norm would change; they do so in the released code (see compat)."""
        return super().train(mode and self._batch_norm_drifts)

    def forward(self, images: Tensor) -> Tensor:
        """Return the maps of uint8 images [B, 3, H, W]."""
        return self.stages((images.float() - self.mean) / self.std)

    @torch.no_grad()
    def maps(self, images: Tensor) -> Tensor:
        """Return the maps of uint8 images without gradient; on a CPU, compute a few images at a time."""
        if images.device.type != "cpu" or self.training:
            return self(images)
        if self.in_onnx is not None:
            return self.in_onnx.maps(self, images, at_once=_IMAGES_AT_ONCE)
        return torch.cat([self(few) for few in images.split(_IMAGES_AT_ONCE)])


class DualBranchModel(nn.Module):
    """Trunk and branches. The first branch is exported and served."""

    def __init__(
        self,
        parts: TrunkParts,
        *,
        known: int,
        novel: int,
        model: ModelConfig | None = None,
        labels: PseudoLabelConfig | None = None,
        compat: CompatConfig | None = None,
    ) -> None:
        super().__init__()
        model, labels, compat = model or ModelConfig(), labels or PseudoLabelConfig(), compat or CompatConfig()
        self.dim = parts.dim
        self.tells_known_from_novel = model.heads != "separate"
        self.first_feeds_heads = compat.local_head_input == "global"
        self.trunk = Trunk(parts, batch_norm_drifts=compat.trunk_batch_norm == "train")
        self.branches: Modules[Branch] = Modules(
            Branch(
                deepcopy(parts.tail),
                parts.dim,
                known=known,
                novel=novel,
                heads=model.heads,
                form=model.head_form,
                gain=model.head_gain,
            )
            for _ in model.branch_kinds
        )
        for branch, kind in zip(self.branches, model.branch_kinds, strict=True):
            branch.tail.with_parts = "local" in labels.sources(kind)

    @property
    def device(self) -> torch.device:
        """Device that the model is on."""
        return self.trunk.mean.device

    def placed(self, inputs: Tensor) -> Tensor:
        """Return inputs on the model's device, in the memory format that is fastest for convolutions."""
        return inputs.to(self.device, non_blocking=True).contiguous(memory_format=_FORMATS[inputs.dim()])

    def to_maps(self, inputs: Tensor) -> Tensor:
        """Return the trunk maps of images (uint8); cached trunk maps are returned unchanged."""
        return self.placed(self.trunk.maps(inputs)) if inputs.dtype == torch.uint8 else inputs

    def forward(self, maps: Tensor) -> list[BranchOutput]:
        """Return the output of each branch for trunk maps."""
        first = self.branches[0](maps)
        head_input = first.embedding if self.first_feeds_heads else None
        return [first, *(branch(maps, head_input) for branch in list(self.branches)[1:])]


class CosineHead(nn.Linear):
    """Head whose logits are 10 times the cosine of embedding and class weights (ORCA's regulariser)."""

    SCALE = 10.0

    def __init__(self, dim: int, classes: int) -> None:
        super().__init__(dim, classes, bias=False)

    def forward(self, embedding: Tensor) -> Tensor:
        """Return logits [B, classes] of embeddings [B, d]."""
        return self.SCALE * F.linear(F.normalize(embedding, dim=1), F.normalize(self.weight, dim=1))


class CentreHead(nn.Module):
    """Head with a centre for each cluster, in a space of as many dimensions as there are clusters (DTC).

    The softmax of the logits is Student's t with one degree of freedom: q_k is in proportion to 1 / (1 + |z - mu_k|^2).
    """

    def __init__(self, dim: int, clusters: int) -> None:
        super().__init__()
        self.project = nn.Linear(dim, clusters)
        self.centres = nn.Parameter(torch.randn(clusters, clusters))

    def forward(self, embedding: Tensor) -> Tensor:
        """Return logits [B, clusters] of embeddings [B, d]."""
        offsets = self.project(embedding).unsqueeze(1) - self.centres
        return -torch.log1p(offsets.square().sum(dim=2))


M = TypeVar("M", bound=nn.Module)


class Modules(nn.ModuleList, Generic[M]):
    """nn.ModuleList with typed members."""

    if TYPE_CHECKING:

        def __iter__(self) -> Iterator[M]: ...  # noqa: D105

        def __getitem__(self, index: int) -> M: ...  # type: ignore[override]  # noqa: D105
