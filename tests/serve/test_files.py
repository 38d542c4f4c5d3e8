import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from ncd_serve.files import atomic_directory, atomic_path, sha256, write_text


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "file.txt"
    write_text(target, "old")
    with pytest.raises(RuntimeError), atomic_path(target) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert target.read_text() == "old"
    assert names(tmp_path) == ["file.txt"]


def test_a_directory_is_replaced_as_a_whole(tmp_path: Path) -> None:
    target = tmp_path / "bundle"
    for text in ("old", "new"):
        with atomic_directory(target) as fresh:
            (fresh / text).write_text(text)
    assert names(target) == ["new"]
    assert names(tmp_path) == ["bundle"]


@pytest.mark.parametrize("interruption", [RuntimeError, KeyboardInterrupt, OSError("No space left on device")])
def test_a_failed_directory_leaves_the_old_one(tmp_path: Path, interruption: type[BaseException]) -> None:
    target = tmp_path / "bundle"
    with atomic_directory(target) as fresh:
        (fresh / "old").touch()
    with pytest.raises((RuntimeError, KeyboardInterrupt, OSError)), atomic_directory(target) as fresh:
        (fresh / "half").touch()
        raise interruption
    assert names(target) == ["old"]
    assert names(tmp_path) == ["bundle"]


def test_written_files_can_be_read_by_others(tmp_path: Path) -> None:
    write_text(tmp_path / "file", "x")
    assert (tmp_path / "file").stat().st_mode & 0o044


def test_sha256_is_the_known_one(tmp_path: Path) -> None:
    write_text(tmp_path / "file", "abc")
    assert sha256(tmp_path / "file").startswith("ba7816bf8f01cfea")


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_modes_follow_the_mask_of_the_process(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        write_text(tmp_path / "file", "x")
        with atomic_directory(tmp_path / "folder") as fresh:
            fresh.chmod(0o500)  # as a copy of another folder would leave it
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("file", "folder")]
    assert modes == [0o666 & ~mask, 0o777 & ~mask]


def test_threads_that_write_never_change_the_mask_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between a thread's two calls of umask another thread would make files that everybody may write."""
    changed: list[int] = []
    original = os.umask
    monkeypatch.setattr(os, "umask", lambda mask: changed.append(mask) or original(mask))
    write_text(tmp_path / "file", "x")
    with atomic_directory(tmp_path / "folder"):
        pass
    assert changed == []


def test_without_locks_files_are_written_all_the_same(tmp_path: Path) -> None:
    """Windows has no `fcntl`: the package and its commands are imported, folders are replaced, nothing is swept."""
    program = f"""
import sys
sys.modules["fcntl"] = sys.modules["resource"] = None
import ncd_serve.cli.app
from pathlib import Path
from ncd_serve.files import atomic_directory, locked
folder = Path({str(tmp_path)!r})
for text in ("old", "new"):
    with locked(folder), atomic_directory(folder / "bundle") as fresh:
        (fresh / text).touch()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    assert names(tmp_path) == ["bundle"] and names(tmp_path / "bundle") == ["new"]
