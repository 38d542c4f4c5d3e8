"""Write files so that a reader sees the old content or the new, never half of either."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def atomic_path(target: Path) -> Iterator[Path]:
    """Yield a path beside `target` to write to; it takes the target's place when the block ends well."""
    temporary = _beside(target)
    # The kernel takes the process's mask from the mode. To ask for the mask is to change it, for all threads.
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    try:
        mode = temporary.stat().st_mode
        yield temporary
        temporary.chmod(mode)
        _sync(temporary)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_directory(target: Path) -> Iterator[Path]:
    """Yield an empty directory beside `target`; it replaces the target when the block ends well."""
    fresh = _beside(target)
    fresh.mkdir(0o777)
    retired = fresh.with_name(fresh.name + ".old")
    try:
        mode = fresh.stat().st_mode
        yield fresh
        fresh.chmod(mode)
        if target.exists():
            target.rename(retired)
        fresh.rename(target)
    finally:
        if retired.exists() and not target.exists():
            retired.rename(target)
        for leftover in (fresh, retired):
            shutil.rmtree(leftover, ignore_errors=True)


def write_text(target: Path, text: str) -> None:
    """Write a text file atomically."""
    with atomic_path(target) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(target: Path, content: Any) -> None:
    """Write a JSON file atomically, readable by people."""
    write_text(target, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def sha256(path: Path) -> str:
    """Return the SHA-256 hex digest of a file."""
    with path.open("rb") as stream:
        digest = hashlib.sha256()
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
        return digest.hexdigest()


def _beside(target: Path) -> Path:
    """Return a hidden path in the folder of `target`, which is created if missing."""
    target.parent.mkdir(parents=True, exist_ok=True)
    return target.with_name(f".{target.name}.{secrets.token_hex(4)}")


def _sync(path: Path) -> None:
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
