"""Mixed precision on CUDA. On a CPU everything is float32: bf16 is slow there, or crashes under virtualisation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ncd_serve.errors import UsageError

Statistics = list[tuple[Tensor, Tensor]]  # buffers, each with a copy of its values


def compute_device() -> torch.device:
    """Return the device that networks are trained on: a GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class Precision:
    """Number format of trunk and branches; the terms of the objective are always float32."""

    dtype: torch.dtype = torch.float32
    scaler: torch.amp.GradScaler = field(default_factory=lambda: torch.amp.GradScaler(enabled=False))

    @classmethod
    def on(cls, device: torch.device, *, mixed: bool) -> Precision:
        """Return bfloat16 if a GPU supports it, else float16 with scaled gradients; float32 if not `mixed` or on a CPU.

        GPUs before Ampere emulate bfloat16, more slowly than they compute in float16.
        """
        if not mixed or device.type != "cuda":
            return cls()
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return cls(torch.bfloat16)
        return cls(torch.float16, torch.amp.GradScaler("cuda"))

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """Return the context in which images run through trunk and branches."""
        return nullcontext() if self.dtype == torch.float32 else torch.autocast(device.type, self.dtype)

    def statistics(self, module: nn.Module) -> Statistics:
        """Copy the running statistics of batch norm before a forward pass; an empty list if no step is ever skipped."""
        if not self.scaler.is_enabled():
            return []
        norms = [norm for norm in module.modules() if isinstance(norm, nn.modules.batchnorm._BatchNorm)]
        return [(buffer, buffer.clone()) for norm in norms if norm.training for buffer in norm.buffers(recurse=False)]

    def step(self, loss: Tensor, optimizer: torch.optim.Optimizer, statistics: Statistics) -> bool:
        """Run `backward` and `update`."""
        self.backward(loss)
        return self.update(optimizer, statistics)

    def backward(self, loss: Tensor) -> None:
        """Compute gradients, scaled where float16 needs it."""
        self.scaler.scale(loss).backward()

    def update(self, optimizer: torch.optim.Optimizer, statistics: Statistics) -> bool:
        """Update the weights and return True. If scaled gradients are not finite, restore `statistics`, return False.

        In float16 activations may be infinite as well: a skipped step must not change the statistics.
        """
        updates: list[bool] = []
        # GradScaler has no public flag for a skipped update, and comparing its scales would wait for the GPU.
        hook = optimizer.register_step_post_hook(lambda *_: updates.append(True))
        self.scaler.step(optimizer)
        self.scaler.update()
        hook.remove()
        if not updates:
            for buffer, before in statistics:
                buffer.copy_(before)
        return bool(updates)

    def check_finite(self, terms: Mapping[str, float], *, epoch: int) -> None:
        """Raise UsageError when training has diverged, unless gradients are scaled: then such a step is skipped."""
        lost = [f"{name} is {value}" for name, value in terms.items() if not math.isfinite(value)]
        if lost and not self.scaler.is_enabled():
            raise UsageError(
                f"training diverged in epoch {epoch + 1}: {lost[0]}", hint="start a new run with a lower learning rate"
            )
