"""`ncd-serve` for torchrun: after each step all ranks are compared, and one of them fails where it is told to."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator
from hashlib import sha256
from typing import Any

import torch.distributed as dist
from ncd_training.run import step as loop
from ncd_training.run import train as training

from ncd_serve.cli import app
from ncd_serve.errors import DataError
from ncd_serve.progress import Progress

FAILS = "NCD_TEST_FAILS"  # which rank fails, in which epoch (-1 is when views are cached), and how
step, epoch, cache = loop.train_step, training.train_epoch, training.cache_views


def compared_step(state: Any, *rest: Any, **more: Any) -> dict[str, float]:
    """All ranks must have the same weights and memories after it."""
    terms = step(state, *rest, **more)
    if state.ranks.size > 1:
        digest = sha256()
        for tensor in (*state.model.state_dict().values(), *state.method.state_dict().values()):
            digest.update(tensor.numpy().tobytes())
        digests: list[Any] = [None] * state.ranks.size
        dist.all_gather_object(digests, digest.digest())
        assert len(set(digests)) == 1, f"ranks differ in epoch {state.epoch}"
    return terms


def failing_epoch(state: Any, loader: Any, *rest: Any) -> Any:
    return epoch(state, failing(loader, state.ranks.rank, state.epoch), *rest)


def failing_cache(*arguments: Any, ranks: Any, **more: Any) -> Any:
    class Failing(Progress):
        def track(self, items: Iterable[Any], *_: Any, **__: Any) -> Iterator[Any]:
            return failing(items, ranks.rank, -1)

    return cache(*arguments, **{**more, "progress": Failing(more["progress"].console)}, ranks=ranks)


def failing(batches: Iterable[Any], rank: int, epoch: int) -> Iterator[Any]:
    """All batches, or a few and then an end; not when torchrun has started the process again."""
    chosen, when, how = os.environ.get(FAILS, "-1 -1 -").split()
    fails = (rank, epoch) == (int(chosen), int(when)) and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    for number, batch in enumerate(batches):
        if fails and number == 2 and how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fails and number == 2:
            raise DataError("no images left", hint="find more")
        yield batch


loop.train_step, training.train_epoch, training.cache_views = compared_step, failing_epoch, failing_cache

if __name__ == "__main__":
    app.main()
