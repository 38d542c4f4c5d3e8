"""Write files so that a reader sees the old content or the new, never half of either."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
import secrets
import shutil
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

try:
    import fcntl
except ImportError:  # Windows, where folders cannot be locked: two processes must not publish to one place at once
    fcntl = None  # type: ignore[assignment]

_RETIRED = ".old"


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
    with staged_directory(target) as fresh:
        mode = fresh.stat().st_mode
        yield fresh
        fresh.chmod(mode)
        swap_in(fresh, target)


@contextmanager
def staged_directory(target: Path) -> Iterator[Path]:
    """Yield an empty directory with a hidden name beside `target`, which is removed at the end unless it was moved.

    Those that killed processes left behind are removed first. One that is in use is locked by its process.
    """
    _sweep(target)
    fresh, handle = _locked_directory(target)
    try:
        yield fresh
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        if handle is not None:
            os.close(handle)


def swap_in(fresh: Path, target: Path) -> None:
    """Put a directory in the place of another one, which takes its name; a reader always finds one of them.

    Where the file system cannot exchange two directories, the target is missing for a moment.
    """
    if not target.exists():
        fresh.rename(target)
    elif not _exchange(fresh, target):
        retired = fresh.with_name(fresh.name + _RETIRED)
        target.rename(retired)
        fresh.rename(target)
        retired.rename(fresh)


@contextmanager
def no_empty_folders(*folders: Path) -> Iterator[None]:
    """Remove folders that a failed block made and left empty: Triton would treat them as models."""
    made = [folder for folder in folders if not folder.exists()]
    try:
        yield
    except BaseException:
        for folder in made:
            with suppress(OSError):
                folder.rmdir()
        raise


@contextmanager
def locked(*folders: Path, shared: bool = False) -> Iterator[None]:
    """Hold a lock on existing folders, together, which one process has at a time, or many if it is `shared`."""
    if fcntl is None:
        yield
        return
    places = {(facts.st_dev, facts.st_ino): folder for folder in folders for facts in (folder.stat(),)}
    with ExitStack() as stack:
        for _, folder in sorted(places.items()):  # in one order everywhere, or two processes would wait for each other
            stack.callback(os.close, _lock(folder, fcntl.LOCK_SH if shared else fcntl.LOCK_EX))
        yield


@contextmanager
def held(folder: Path) -> Iterator[bool]:
    """Lock a folder for the block, without waiting; yield False if another process has it locked.

    Where folders cannot be locked, nobody is known to have it.
    """
    if fcntl is None:
        yield True
        return
    handle, free = os.open(folder, os.O_RDONLY), True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        free = False
    except OSError:
        pass
    try:
        yield free
    finally:
        os.close(handle)


def _lock(folder: Path, kind: int) -> int:
    """Return a handle that locks a folder until it is closed. NFS locks no folders: there, a file in it is locked."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, kind)
    except OSError:
        os.close(handle)
        handle = os.open(folder / ".ncd-serve.lock", os.O_RDWR | os.O_CREAT, 0o666)
        fcntl.flock(handle, kind)
    return handle


def is_unfinished(folder: Path) -> bool:
    """Return whether a folder has nothing but what is being written, or what a killed process has left."""
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    return bool(names) and all(name.startswith(".") for name in names)


def _sweep(target: Path) -> None:
    """Remove what killed processes left beside a target; the target itself, if it was being moved, is restored."""
    leftover = re.compile(re.escape(f".{target.name}.") + rf"[0-9a-f]{{8}}({re.escape(_RETIRED)})?")
    for entry in target.parent.iterdir() if target.parent.is_dir() else ():
        if not leftover.fullmatch(entry.name) or not entry.is_dir():
            continue
        with _claimed(entry) as abandoned:
            if abandoned and entry.name.endswith(_RETIRED) and not target.exists():
                entry.rename(target)
            elif abandoned:
                shutil.rmtree(entry, ignore_errors=True)


def _locked_directory(target: Path) -> tuple[Path, int | None]:
    while True:
        fresh = _beside(target)
        fresh.mkdir(0o777)
        if fcntl is None:
            return fresh, None
        try:
            handle = os.open(fresh, os.O_RDONLY)
            with suppress(OSError):  # where folders cannot be locked, nobody sweeps
                fcntl.flock(handle, fcntl.LOCK_EX)
            fresh.stat()
        except FileNotFoundError:  # swept by another process, before it was locked
            continue
        return fresh, handle


@contextmanager
def _claimed(folder: Path) -> Iterator[bool]:
    """Lock a staged directory for the block; yield False if its process still has it, or it is gone."""
    if fcntl is None:
        yield False
        return
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        yield False
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        yield False
    else:
        yield True
    finally:
        os.close(handle)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two directories in one step; return False where the system or file system cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, TypeError):  # another libc; Windows
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return bool(rename(here, os.fsencode(one.absolute()), here, os.fsencode(other.absolute()), exchange) == 0)


def write_text(target: Path, text: str) -> None:
    """Write a text file atomically. Parts of paths that are no UTF-8 become escapes."""
    with atomic_path(target) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")


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
    with path.open("r+b") as stream:  # Windows syncs what can be written
        os.fsync(stream.fileno())
