"""Mixed precision on CUDA. On a CPU everything is float32: bf16 there is slow, or dies under virtualisation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ncd_serve.errors import UsageError


@dataclass(frozen=True)
class Precision:
    """What the branches compute in; the terms of the objective are always float32."""

    dtype: torch.dtype = torch.float32
    scaler: torch.amp.GradScaler = field(default_factory=lambda: torch.amp.GradScaler(enabled=False))

    @classmethod
    def on(cls, device: torch.device, *, mixed: bool) -> Precision:
        """bfloat16 where a GPU has it, else float16 with scaled gradients; float32 if not `mixed` or no GPU."""
        if not mixed or device.type != "cuda":
            return cls()
        if torch.cuda.is_bf16_supported():
            return cls(torch.bfloat16)
        return cls(torch.float16, torch.amp.GradScaler("cuda"))

    def autocast(self, device: torch.device) -> torch.autocast:
        """The context in which images go through trunk and branches."""
        return torch.autocast(device.type, self.dtype, enabled=self.dtype != torch.float32)

    def step(self, loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
        """Run backward and update the weights, with scaled gradients where float16 needs them."""
        self.scaler.scale(loss).backward()
        self.scaler.step(optimizer)
        self.scaler.update()

    def check_finite(self, terms: Mapping[str, float], *, epoch: int) -> None:
        """Raise UsageError when training has diverged; where gradients are scaled, such a step is left out anyway."""
        lost = [f"{name} is {value}" for name, value in terms.items() if not math.isfinite(value)]
        if lost and not self.scaler.is_enabled():
            raise UsageError(f"diverged in epoch {epoch + 1}: {lost[0]}", hint="start anew with a lower learning rate")
