"""Data-parallel training under `torchrun`.

Every rank sends its share of a batch through the branches, then all of them exchange the outputs and compute the terms
of the whole batch: pairs across ranks count, and the memories of all ranks hold the same vectors without being sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous

from ncd_serve.errors import NcdError, UsageError
from ncd_serve.files import atomic_path
from ncd_serve.progress import Track
from ncd_training.base.launch import Launch
from ncd_training.base.parallel import in_threads

T = TypeVar("T")
R = TypeVar("R")
Tensors = TypeVar("Tensors", bound="tuple[Tensor, ...]")  # a NamedTuple of tensors [B, ...]
_STEP = timedelta(minutes=30)  # between the steps of two ranks; after that a machine is dead or cut off
_PATIENCE = timedelta(days=30)  # while the first rank trains alone, looks at clusters or evaluates
_UNTIL_ENDED = 30  # s, for torchrun to end the ranks that are left when one has failed


@dataclass(frozen=True)
class Ranks:
    """The processes that train together, and which of them this is."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # among those of the same machine
    local_size: int = 1
    machine: int = 0
    patient: Any = None  # a group of them all that waits for as long as it takes

    @property
    def is_leader(self) -> bool:
        """True for the one process that writes files and reports."""
        return self.rank == 0

    def share(self, items: list[T]) -> list[T]:
        """This rank's part, e.g. of a batch."""
        return items[self.rank :: self.size]

    def map(self, function: Callable[[T], R], items: list[T], *, track: Track, what: str) -> list[R]:
        """Apply a function to each item, in order; each rank does its share for all."""
        mine = self.share(items)
        return self.all_shares(list(track(in_threads(function, mine), what, len(mine))))

    def all_shares(self, own: list[T]) -> list[T]:
        """What all ranks made of their shares, in the order of the whole."""
        parts = self._everyones(own)
        whole: list[Any] = [None] * sum(map(len, parts))
        for rank, part in enumerate(parts):
            whole[rank :: self.size] = part
        return whole

    def gather(self, outputs: list[Tensors]) -> list[Tensors]:
        """The outputs of the whole batch, in its order. Gradient flows into this rank's images."""
        if self.size == 1:
            return outputs
        return [type(output)(*map(self._gather, output)) for output in outputs]

    def _gather(self, own: Tensor) -> Tensor:
        own = own.contiguous()
        everyone = [torch.empty_like(own) for _ in range(self.size)]
        _exchange(dist.all_gather, everyone, own.detach())
        everyone[self.rank] = own
        return torch.stack(everyone, dim=1).flatten(0, 1)

    def add_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum what each rank's images have contributed: together, the gradient of the whole batch."""
        if self.size == 1:
            return
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        together = torch.cat([gradient.flatten() for gradient in gradients])
        _exchange(dist.all_reduce, together)
        for gradient, total in zip(gradients, together.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(total.view_as(gradient))

    def wait(self) -> None:
        """Until all ranks have come here, for as long as it takes."""
        self._everyones(None)

    def leaders(self, answer: T) -> T:
        """The first rank's answer to a question about files, which others may see a little later."""
        return self._everyones(answer)[0]

    def agree(self, facts: str) -> None:
        """Raise UsageError unless all ranks are about to do the same."""
        if len(set(self._everyones(sha256(facts.encode()).digest()))) > 1:
            raise UsageError(
                "the processes have different settings or see different images",
                hint="start the same command on every machine, on data in a shared folder",
            )

    def follow_leader(self, *modules: nn.Module) -> None:
        """Wait for the first rank, then hold the same weights and memories as it does, to the last bit."""
        self.wait()
        for module in modules if self.size > 1 else ():
            state = module.state_dict()
            for tensor in state.values():
                leaders = tensor.contiguous()
                _exchange(dist.broadcast, leaders, 0)
                tensor.copy_(leaders)
            module.load_state_dict(state)  # numbers that are kept on the host follow the tensors

    def own_folder(self, folder: Path) -> Path:
        """A folder that no other machine writes to, even where they share disks."""
        return folder / f"machine-{self.machine}" if self.machine else folder

    def local_part(self, items: Sequence[T]) -> tuple[int, Sequence[T]]:
        """What this rank does of a machine's work, which is one piece, and where it starts."""
        start, end = (len(items) * rank // self.local_size for rank in (self.local_rank, self.local_rank + 1))
        return start, items[start:end]

    @contextmanager
    def one_file(self, target: Path) -> Iterator[Path | None]:
        """A file for the ranks of this machine to write together, None if there is one: whole or absent at any time."""
        new = self.local_rank == 0 and not target.exists()
        with atomic_path(target) if new else nullcontext() as unfinished:
            yield self._everyones(unfinished)[self.rank - self.local_rank]
            self.wait()
        self.wait()

    def _everyones(self, value: T) -> list[T]:
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        _exchange(dist.all_gather_object, values, value, group=self.patient)
        return values


def join(launch: Launch) -> Ranks:
    """Connect the processes that torchrun started; one process is alone."""
    return _join(launch) if launch.size > 1 else Ranks()


@cache
def _join(launch: Launch) -> Ranks:
    local_rank, local_size = launch.local_rank, launch.local_size
    cuda = torch.cuda.is_available()
    if cuda:
        if local_size > (gpus := torch.cuda.device_count()):
            raise UsageError(f"{local_size} processes, but {gpus} GPUs", hint=f"torchrun --nproc-per-node {gpus} ...")
        torch.cuda.set_device(local_rank)
    store, rank, size = next(rendezvous("env://", timeout=_STEP))
    fresh = dist.PrefixStore(_start_prefix(store, rank, size), store)  # type: ignore[attr-defined]  # not in torch's types
    dist.init_process_group("nccl" if cuda else "gloo", store=fresh, rank=rank, world_size=size, timeout=_STEP)
    return Ranks(rank, size, local_rank, local_size, launch.machine, dist.new_group(backend="gloo", timeout=_PATIENCE))


def _start_prefix(store: Any, rank: int, size: int) -> str:
    """Agree on a fresh key prefix for this start; torchrun's store survives restarts."""
    own = uuid4().hex
    if rank:
        store.set(f"rank {rank}", own)
        prefix: str = store.get(own).decode()
        store.add(prefix, 1)
        return prefix
    while store.add(own, 0) < size - 1:
        for other in range(1, size):
            store.set(store.get(f"rank {other}").decode(), own)
        time.sleep(0.1)
    return own


def leave() -> None:
    """The work is done. Ranks that fail just end: taking leave of one that is gone might never return."""
    if dist.is_initialized():
        dist.destroy_process_group()
        _join.cache_clear()


def _exchange(operation: Callable[..., object], *arguments: Any, **more: Any) -> None:
    """Something that all ranks do together. When one of them ends, it has said why, so the others are quiet."""
    try:
        operation(*arguments, **more)
    except RuntimeError as error:
        time.sleep(_UNTIL_ENDED)
        cause = str(error).partition("\n")[0]
        raise NcdError(f"lost the other processes: {cause}", hint="the one that ended first says why") from None


class _NormOverRanks(nn.modules.batchnorm._BatchNorm):
    """Batch norm in place of another one, with its weights and statistics."""

    def __init__(self, norm: nn.BatchNorm2d) -> None:
        super().__init__(norm.num_features, norm.eps, norm.momentum)
        self.load_state_dict(norm.state_dict(), strict=False)
        # timm's layers drop and activate by themselves; neither has weights.
        self.after = nn.Sequential(*(getattr(norm, name) for name in ("drop", "act") if hasattr(norm, name)))
        self.train(norm.training)


class SyncBatchNorm(_NormOverRanks, nn.SyncBatchNorm):
    """Batch norm with the statistics of all ranks' images, on CUDA."""

    def forward(self, maps: Tensor) -> Tensor:
        """Maps [B, c, h, w] of this rank, normalised over all ranks."""
        return self.after(super().forward(maps))


class GlobalBatchNorm(_NormOverRanks, nn.BatchNorm2d):
    """Batch norm with the statistics of all ranks' images, on a CPU. Computes in float32, like torch's own."""

    def forward(self, maps: Tensor) -> Tensor:
        """Maps [B, c, h, w] of this rank, normalised over all ranks."""
        if not self.training:
            return self.after(super().forward(maps))
        over, values = (0, 2, 3), maps.float()
        size = _sum_over_ranks(values.new_tensor([values.numel() / values.shape[1]]))
        mean = _sum_over_ranks(values.sum(over)) / size
        centred = values - mean.view(1, -1, 1, 1)
        variance = _sum_over_ranks(centred.square().sum(over)) / size
        self._follow(mean.detach(), variance.detach() * size / (size - 1))
        scale = self.weight * (variance + self.eps).rsqrt()
        return self.after((centred * scale.view(1, -1, 1, 1) + self.bias.view(1, -1, 1, 1)).to(maps.dtype))

    def _follow(self, mean: Tensor, variance: Tensor) -> None:
        assert self.running_mean is not None and self.running_var is not None and self.momentum is not None
        assert self.num_batches_tracked is not None
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(variance, self.momentum)
        self.num_batches_tracked += 1


def with_global_batch_norm(module: nn.Module, device: torch.device) -> None:
    """Replace every batch norm below `module`, which is to train on `device`; names and weights stay."""
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            setattr(module, name, SyncBatchNorm(child) if device.type == "cuda" else GlobalBatchNorm(child))
        else:
            with_global_batch_norm(child, device)


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(_context: Any, values: Tensor) -> Tensor:
        total = values.clone()
        _exchange(dist.all_reduce, total)
        return total

    @staticmethod
    def backward(_context: Any, gradient: Tensor) -> Tensor:
        # Every rank's outputs depend on the sum, so every rank's gradient reaches every summand.
        return _SumOverRanks.forward(None, gradient)


def _sum_over_ranks(values: Tensor) -> Tensor:
    total: Tensor = _SumOverRanks.apply(values)
    return total
