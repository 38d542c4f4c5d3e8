"""What tests ask of folders that a command may have written to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def unchanged(folder: Path) -> Iterator[None]:
    """Fail when a file or folder below has come, gone or changed in the block."""

    def content() -> dict[Path, bytes]:
        return {path: path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}

    before = content()
    yield
    assert content() == before
