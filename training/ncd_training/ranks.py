"""Data-parallel training under `torchrun`.

Every rank sends its share of a batch through the branches, then all of them exchange the outputs and compute the terms
of the whole batch: pairs across ranks count, and the memories of all ranks hold the same vectors without being sent.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ncd_serve.errors import UsageError
from ncd_training.dual_branch import BranchOutput

_PATIENCE = timedelta(days=1)  # ranks wait for the first one while it caches views or evaluates


@dataclass(frozen=True)
class Ranks:
    """The processes that train together, and which of them this is."""

    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """Whether this one writes files and reports."""
        return self.rank == 0

    def check(self, batch: int) -> None:
        """Raise UsageError when a batch cannot be dealt out evenly."""
        if batch % self.size:
            raise UsageError(
                f"a batch of {batch} images cannot be split over {self.size} processes",
                hint="change optim.labelled_batch or optim.unlabelled_batch",
            )

    def share(self, batch: list[Any]) -> list[Any]:
        """This rank's images of a batch."""
        return batch[self.rank :: self.size]

    def gather(self, outputs: list[BranchOutput]) -> list[BranchOutput]:
        """The whole batch's outputs in its own order. Gradient flows into this rank's images."""
        if self.size == 1:
            return outputs
        # Parts only make pseudo labels, so theirs is not needed.
        return [BranchOutput(self._gather(output.parts.detach()), *map(self._gather, output[1:])) for output in outputs]

    def _gather(self, own: Tensor) -> Tensor:
        own = own.contiguous()
        everyone = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(everyone, own.detach())
        everyone[self.rank] = own
        return torch.stack(everyone, dim=1).flatten(0, 1)

    def add_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum what each rank's images have contributed: together, the gradient of the whole batch."""
        if self.size == 1:
            return
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        together = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(together)
        for gradient, total in zip(gradients, together.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(total.view_as(gradient))

    @contextmanager
    def leader_first(self) -> Iterator[None]:
        """Run a block on the first rank, then on the others, which find its files."""
        if self.size > 1 and not self.leads:
            dist.barrier()
        yield
        if self.size > 1 and self.leads:
            dist.barrier()


@contextmanager
def joined_ranks() -> Iterator[Ranks]:
    """The processes that `torchrun` started, or just this one."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield Ranks()
        return
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo", timeout=_PATIENCE)
    try:
        yield Ranks(dist.get_rank(), size)
    finally:
        dist.destroy_process_group()


class GlobalBatchNorm(nn.BatchNorm2d):
    """Batch norm with the statistics of all ranks' images, on any device (torch's own needs CUDA)."""

    def __init__(self, norm: nn.BatchNorm2d) -> None:
        super().__init__(norm.num_features, norm.eps, norm.momentum)
        self.load_state_dict(norm.state_dict(), strict=False)
        # timm's layers drop and activate by themselves; neither has weights.
        self.after = nn.Sequential(*(getattr(norm, name) for name in ("drop", "act") if hasattr(norm, name)))

    def forward(self, maps: Tensor) -> Tensor:
        """Maps [B, c, h, w] of this rank, normalised over all ranks."""
        if not self.training:
            return self.after(super().forward(maps))
        over = (0, 2, 3)
        size = _sum_over_ranks(maps.new_tensor([maps.numel() / maps.shape[1]]))
        mean = _sum_over_ranks(maps.sum(over)) / size
        centred = maps - mean.view(1, -1, 1, 1)
        variance = _sum_over_ranks(centred.square().sum(over)) / size
        self._follow(mean.detach(), variance.detach() * size / (size - 1))
        scale = self.weight * (variance + self.eps).rsqrt()
        return self.after(centred * scale.view(1, -1, 1, 1) + self.bias.view(1, -1, 1, 1))

    def _follow(self, mean: Tensor, variance: Tensor) -> None:
        assert self.running_mean is not None and self.running_var is not None and self.momentum is not None
        assert self.num_batches_tracked is not None
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(variance, self.momentum)
        self.num_batches_tracked += 1


def with_global_batch_norm(module: nn.Module) -> None:
    """Replace every batch norm below `module`; names and weights stay."""
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            setattr(module, name, GlobalBatchNorm(child))
        else:
            with_global_batch_norm(child)


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(_context: Any, values: Tensor) -> Tensor:
        total = values.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(_context: Any, gradient: Tensor) -> Tensor:
        # Every rank's outputs depend on the sum, so every rank's gradient reaches every summand.
        return _SumOverRanks.forward(None, gradient)


def _sum_over_ranks(values: Tensor) -> Tensor:
    total: Tensor = _SumOverRanks.apply(values)
    return total
