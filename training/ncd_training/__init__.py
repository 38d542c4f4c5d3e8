"""Training: discover the classes of unlabelled images with the help of labelled ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ncd_training.api import Run, compare, discover, dry_run, estimate_classes, open_run, pretrain

__all__ = ["Run", "compare", "discover", "dry_run", "estimate_classes", "open_run", "pretrain"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'ncd_training' has no attribute '{name}'")
    from ncd_training import api  # not before it is asked for: the command line imports modules of this package

    return getattr(api, name)


def __dir__() -> list[str]:
    return __all__
