"""A list of modules that knows what its modules are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator

M = TypeVar("M", bound=nn.Module)


class Modules(nn.ModuleList, Generic[M]):
    """nn.ModuleList, typed: torch's own forgets the class of its members."""

    if TYPE_CHECKING:

        def __iter__(self) -> Iterator[M]: ...  # noqa: D105

        def __getitem__(self, index: int) -> M: ...  # type: ignore[override]  # noqa: D105
