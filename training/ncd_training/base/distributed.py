"""Data-parallel training under `torchrun`.

Each rank runs its share of a batch through the branches. Then all ranks exchange the outputs and compute the loss terms
of the whole batch: pairs across ranks count, and the memories stay equal on all ranks without being sent.
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
from ncd_training.base.processes import Launch, in_threads

T = TypeVar("T")
R = TypeVar("R")
Tensors = TypeVar("Tensors", bound="tuple[Tensor, ...]")  # a NamedTuple of tensors [B, ...]
_STEP_TIMEOUT = timedelta(minutes=30)  # of exchanges within a step: a slower machine is dead or disconnected
_LEADER_TIMEOUT = timedelta(days=30)  # while the leader trains a stage, clusters or evaluates alone
_SHUTDOWN_SECONDS = 30  # for torchrun to end the remaining ranks after one has failed


@dataclass(frozen=True)
class Ranks:
    """Processes that train together, and the rank of this one."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # among the processes of this machine
    local_size: int = 1
    machine: int = 0
    slow_group: Any = None  # group of all ranks, with the timeout of the leader

    @property
    def is_leader(self) -> bool:
        """True for the one process that writes files and reports."""
        return self.rank == 0

    def share(self, items: list[T]) -> list[T]:
        """Return this rank's part of the items, e.g. of a batch."""
        return items[self.rank :: self.size]

    def map(self, function: Callable[[T], R], items: list[T], *, track: Track, what: str) -> list[R]:
        """Apply a function to each item and return all results in order; each rank computes its share."""
        own = self.share(items)
        return self.all_shares(list(track(in_threads(function, own), what, len(own))))

    def all_shares(self, own: list[T]) -> list[T]:
        """Return the shares of all ranks as one list, in the order of the undivided items."""
        parts = self._gather_objects(own)
        whole: list[Any] = [None] * sum(map(len, parts))
        for rank, part in enumerate(parts):
            whole[rank :: self.size] = part
        return whole

    def gather(self, outputs: list[Tensors]) -> list[Tensors]:
        """Return the outputs of the whole batch, in its order. Gradient flows into this rank's images."""
        if self.size == 1:
            return outputs
        return [type(output)(*map(self._gather, output)) for output in outputs]

    def _gather(self, own: Tensor) -> Tensor:
        own = own.contiguous()
        parts = [torch.empty_like(own) for _ in range(self.size)]
        _exchange(dist.all_gather, parts, own.detach())
        parts[self.rank] = own
        return torch.stack(parts, dim=1).flatten(0, 1)

    def add_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum the gradients of all ranks; the sum is the gradient of the whole batch."""
        if self.size == 1:
            return
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        together = torch.cat([gradient.flatten() for gradient in gradients])
        _exchange(dist.all_reduce, together)
        for gradient, total in zip(gradients, together.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(total.view_as(gradient))

    def wait(self) -> None:
        """Wait until all ranks have arrived here, however long that takes."""
        self._gather_objects(None)

    def leaders(self, answer: T) -> T:
        """Return the leader's answer to a question about files: other machines may see a new file a little later."""
        return self._gather_objects(answer)[0]

    def agree(self, facts: str) -> None:
        """Raise UsageError unless `facts` are equal on all ranks."""
        if len(set(self._gather_objects(sha256(facts.encode()).digest()))) > 1:
            raise UsageError(
                "the processes have different settings or see different images",
                hint="start the same command on every machine, on data in a shared folder",
            )

    def follow_leader(self, *modules: nn.Module) -> None:
        """Wait for the leader, then copy its weights and memories to this rank, bit for bit."""
        self.wait()
        for module in modules if self.size > 1 else ():
            state = module.state_dict()
            for tensor in state.values():
                leaders = tensor.contiguous()
                _exchange(dist.broadcast, leaders, 0)
                tensor.copy_(leaders)
            module.load_state_dict(state)  # also sets the numbers that are kept on the host

    def own_folder(self, folder: Path) -> Path:
        """Return a folder that no other machine writes to, even on a shared disk."""
        return folder / f"machine-{self.machine}" if self.machine else folder

    def local_part(self, items: Sequence[T]) -> tuple[int, Sequence[T]]:
        """Return the start and the items of this rank's part of its machine's work; a part is contiguous."""
        start, end = (len(items) * rank // self.local_size for rank in (self.local_rank, self.local_rank + 1))
        return start, items[start:end]

    @contextmanager
    def one_file(self, target: Path) -> Iterator[Path | None]:
        """Yield a file for this machine's ranks to write together, or None if it exists; it appears only when whole."""
        new = self.local_rank == 0 and not target.exists()
        with atomic_path(target) if new else nullcontext() as unfinished:
            yield self._gather_objects(unfinished)[self.rank - self.local_rank]
            self.wait()
        self.wait()

    def _gather_objects(self, value: T) -> list[T]:
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        _exchange(dist.all_gather_object, values, value, group=self.slow_group)
        return values


def join(launch: Launch) -> Ranks:
    """Connect the processes that torchrun started; without torchrun, return a single rank."""
    return _join(launch) if launch.size > 1 else Ranks()


@cache
def _join(launch: Launch) -> Ranks:
    local_rank, local_size = launch.local_rank, launch.local_size
    cuda = torch.cuda.is_available()
    if cuda:
        if local_size > (gpus := torch.cuda.device_count()):
            raise UsageError(
                f"torchrun started {local_size} processes, but this machine has {gpus} GPUs",
                hint=f"start one process per GPU: torchrun --nproc-per-node {gpus} ...",
            )
        torch.cuda.set_device(local_rank)
    store, rank, size = next(rendezvous("env://", timeout=_STEP_TIMEOUT))
    fresh = dist.PrefixStore(_start_prefix(store, rank, size), store)  # type: ignore[attr-defined]  # not in torch's types
    dist.init_process_group("nccl" if cuda else "gloo", store=fresh, rank=rank, world_size=size, timeout=_STEP_TIMEOUT)
    return Ranks(
        rank, size, local_rank, local_size, launch.machine, dist.new_group(backend="gloo", timeout=_LEADER_TIMEOUT)
    )


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
    """Disconnect after the work is done. A rank that fails just exits: to disconnect from a dead rank might block."""
    if dist.is_initialized():
        dist.destroy_process_group()
        _join.cache_clear()


def _exchange(operation: Callable[..., object], *arguments: Any, **more: Any) -> None:
    """Run a collective operation. If it fails, another rank has failed and printed why: wait for torchrun to end us."""
    try:
        operation(*arguments, **more)
    except RuntimeError as error:
        time.sleep(_SHUTDOWN_SECONDS)
        cause = str(error).partition("\n")[0]
        raise NcdError(
            f"lost the connection to the other processes: {cause}",
            hint="see the error of the process that ended first",
        ) from None


class ReplacedNorm(nn.modules.batchnorm._BatchNorm):
    """Base class of batch norms that are computed otherwise; takes weights and statistics of the one it replaces."""

    def __init__(self, norm: nn.BatchNorm2d) -> None:
        super().__init__(norm.num_features, norm.eps, norm.momentum)
        self.load_state_dict(norm.state_dict(), strict=False)
        # timm's batch norm layers include dropout and activation; neither has weights.
        self.after = nn.Sequential(*(getattr(norm, name) for name in ("drop", "act") if hasattr(norm, name)))
        self.train(norm.training)

    def update_statistics(self, mean: Tensor, variance: Tensor, size: Tensor | int) -> None:
        """Move the running statistics towards those of a batch with `size` values."""
        assert self.running_mean is not None and self.running_var is not None and self.momentum is not None
        assert self.num_batches_tracked is not None
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(variance * size / (size - 1), self.momentum)
        self.num_batches_tracked += 1


class SyncBatchNorm(ReplacedNorm, nn.SyncBatchNorm):
    """Batch norm with the statistics of all ranks' images, on CUDA."""

    def forward(self, maps: Tensor) -> Tensor:
        """Normalise this rank's maps [B, c, h, w] with the statistics of all ranks."""
        return self.after(super().forward(maps))


class GlobalBatchNorm(ReplacedNorm, nn.BatchNorm2d):
    """Batch norm with the statistics of all ranks' images, on a CPU. Computes in float32, like torch's own."""

    def forward(self, maps: Tensor) -> Tensor:
        """Normalise this rank's maps [B, c, h, w] with the statistics of all ranks."""
        if not self.training:
            return self.after(super().forward(maps))
        over, values = (0, 2, 3), maps.float()
        size = _sum_over_ranks(values.new_tensor([values.numel() / values.shape[1]]))
        mean = _sum_over_ranks(values.sum(over)) / size
        centred = values - mean.view(1, -1, 1, 1)
        variance = _sum_over_ranks(centred.square().sum(over)) / size
        self.update_statistics(mean.detach(), variance.detach(), size)
        scale = self.weight * (variance + self.eps).rsqrt()
        return self.after((centred * scale.view(1, -1, 1, 1) + self.bias.view(1, -1, 1, 1)).to(maps.dtype))


def with_global_batch_norm(module: nn.Module, device: torch.device) -> None:
    """Replace every batch norm below `module` by one over all ranks, for `device`; names and weights stay."""
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
