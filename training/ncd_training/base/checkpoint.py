"""Checkpoints: the state of a run (weights, memories, momentum, epoch) in one safetensors file, without pickle."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from textwrap import shorten
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ncd_serve.errors import DataError
from ncd_serve.files import atomic_path
from ncd_training.base.precision import Precision

_ERROR_CHARACTERS = 300


class State(Protocol):
    """State that a checkpoint holds: of training, pretraining or a stage."""

    optimizer: torch.optim.Optimizer
    precision: Precision
    epoch: int

    @property
    def modules(self) -> dict[str, nn.Module]: ...  # noqa: D102


def save_checkpoint(state: State, path: Path) -> None:
    """Write the state atomically: a reader sees the previous file or the new one."""
    tensors: dict[str, Tensor] = {}
    for prefix, module in state.modules.items():
        tensors |= {f"{prefix}.{name}": tensor.contiguous() for name, tensor in module.state_dict().items()}
    for number, slot in state.optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{number}.{name}": value.contiguous() for name, value in slot.items()}
    tensors |= {f"scaler.{name}": torch.tensor(value) for name, value in state.precision.scaler.state_dict().items()}
    with atomic_path(path) as temporary:
        save_file(tensors, temporary, metadata={"epoch": str(state.epoch)})


def load_checkpoint(state: State, path: Path) -> None:
    """Load a checkpoint into a state that was built from the same configuration."""
    tensors, state.epoch = _read(path)
    groups: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for key, tensor in tensors.items():
        group, _, name = key.partition(".")
        groups[group][name] = tensor
    try:
        for prefix, module in state.modules.items():
            module.load_state_dict(groups[prefix])
    except RuntimeError as error:
        reason = shorten(str(error), _ERROR_CHARACTERS, placeholder=" ...")  # torch names every tensor
        raise DataError(
            f"{path} does not fit the run's configuration: {reason}", hint="undo edits of config.toml, or train again"
        ) from None
    saved = state.optimizer.state_dict()
    saved["state"] = defaultdict(dict)
    for key, tensor in groups["optimizer"].items():
        number, _, name = key.partition(".")
        saved["state"][int(number)][name] = tensor
    state.optimizer.load_state_dict(saved)
    if groups["scaler"] and state.precision.scaler.is_enabled():
        state.precision.scaler.load_state_dict({name: value.item() for name, value in groups["scaler"].items()})


def _read(path: Path) -> tuple[dict[str, Tensor], int]:
    if not path.is_file():
        raise DataError(f"no checkpoint at {path}", hint="train for at least one epoch first")
    try:
        with safe_open(path, framework="pt") as stored:
            return {key: stored.get_tensor(key) for key in stored.keys()}, int(stored.metadata()["epoch"])  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path} is damaged: {error}", hint="train again, or restore the file from a copy") from None
    except (KeyError, TypeError, ValueError):
        raise DataError(f"{path} is not a checkpoint of a run", hint="checkpoints are in RUN/checkpoints") from None
