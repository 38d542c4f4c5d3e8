"""`ncd-serve` for torchrun, with steps after which all ranks are compared, and one in which a rank fails if told to."""

from __future__ import annotations

import os
import signal
from hashlib import sha256
from typing import Any

import torch.distributed as dist
from ncd_training import loop
from ncd_training import train as training

from ncd_serve.cli import app
from ncd_serve.errors import DataError

FAILS = "NCD_TEST_FAILS"  # rank, epoch, how
step, epoch = loop.train_step, training.train_epoch


def compared_step(state: Any, *rest: Any, **more: Any) -> dict[str, float]:
    """All ranks must have the same weights and memories after it."""
    terms = step(state, *rest, **more)
    digest = sha256()
    for module in (state.model, state.objective):
        for tensor in module.state_dict().values():
            digest.update(tensor.numpy().tobytes())
    digests: list[Any] = [None] * state.ranks.size
    dist.all_gather_object(digests, digest.digest())
    assert len(set(digests)) == 1, f"ranks differ in epoch {state.epoch}"
    return terms


def failing_epoch(state: Any, loader: Any, *rest: Any) -> Any:
    """The chosen rank fails in the middle of the chosen epoch, but not when torchrun has started it again."""
    rank, number, how = os.environ.get(FAILS, "-1 -1 -").split()
    chosen = (state.ranks.rank, state.epoch) == (int(rank), int(number))
    if chosen and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
        loader = failing(loader, how)
    return epoch(state, loader, *rest)


def failing(loader: Any, how: str) -> Any:
    """Some batches, then an end."""
    for number, batch in enumerate(loader):
        if number == 2 and how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if number == 2:
            raise DataError("no images left", hint="find more")
        yield batch


def watch() -> None:
    """Look at every step from now on."""
    loop.train_step, training.train_epoch = compared_step, failing_epoch


if __name__ == "__main__":
    watch()
    app.main()
