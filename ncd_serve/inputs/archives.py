"""Images inside tar and zip archives, read in memory and within limits: an archive is as untrusted as an image."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path, PureWindowsPath
from typing import IO, Any, Literal, Protocol

from ncd_serve.errors import DataError
from ncd_serve.inputs.images import SUFFIXES, Source, no_images
from ncd_serve.preprocess import MAX_BYTES
from ncd_serve.text import printable

# Images hardly shrink in an archive: one that unpacks to much more than this was made to hurt.
MAX_GROWTH = 200
_TARS: dict[str, Callable[[IO[bytes]], Any]] = {
    ".tar": nullcontext,
    ".tar.gz": gzip.open,
    ".tgz": gzip.open,
    ".tar.bz2": bz2.open,
    ".tar.xz": lzma.open,
}
# The other methods of zip are unpacked by Python without a limit.
_ZIP_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_DAMAGE = (tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError, ValueError)


class Archive(Protocol):
    """Protocol of an archive file: the methods of `Path` that are needed, so that remote files can have them."""

    @property
    def name(self) -> str:
        """Its last part, by whose end we know its kind."""
        ...

    def open(self, mode: Literal["rb"]) -> IO[bytes]:
        """Open the archive as a seekable stream of bytes."""
        ...


def is_archive(path: Archive) -> bool:
    """Return whether a file is an archive, by its name."""
    return path.name.lower().endswith((".zip", *_TARS))


def count_images(archive: Archive) -> int | None:
    """Return the number of images in an archive, None if counting is slow; raise DataError for none or no archive.

    Closes the archive.
    """
    with _damage_as_error(archive):
        if not _is_zip(archive):
            with _open_tar(archive):
                return None
        with _open_zip(archive) as opened:
            return len(_members(archive, opened))


def images_in_archive(archive: Archive) -> Iterator[Source]:
    """Yield the images of an archive in its order; it is open until the last one. Raise DataError if it is no archive.

    A tar that turns out to be damaged or without images yields one broken image with the reason.
    """
    with _damage_as_error(archive):
        if not _is_zip(archive):
            with _open_tar(archive):
                return _tarred(archive)
        # Images are read by threads in any order, or not at all: the last one to be dropped closes the file.
        opened = _open_zip(archive)
        found = _members(archive, opened)
    return (Source(_row_path(archive, info.filename), partial(_unzip, opened, info)) for info in found)


def images_when_due(archive: Archive) -> Iterator[Source]:
    """Yield the images of an archive that is opened at the first one; later damage becomes a row with the reason."""
    try:
        yield from images_in_archive(archive)
    except DataError as error:
        yield Source.broken(printable(archive), f"nothing more can be read: {error}")


@contextmanager
def _damage_as_error(archive: Archive) -> Iterator[None]:
    try:
        yield
    except _DAMAGE as error:
        raise DataError(f"{archive} is not a readable archive: {error}", hint="check the file") from None


def _is_zip(archive: Archive) -> bool:
    return archive.name.lower().endswith(".zip")


def _open_zip(archive: Archive) -> zipfile.ZipFile:
    # A path, where there is one: then what is opened is closed with the archive.
    return zipfile.ZipFile(archive if isinstance(archive, Path) else archive.open("rb"))


def _members(archive: Archive, opened: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    # One without a name is no image; Python's own look at it would end in an IndexError.
    found = [info for info in opened.infolist() if _is_image(info.filename) and not info.is_dir()]
    if not found:
        raise no_images(archive)
    return found


def _unzip(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    try:
        _check(info.filename, info.file_size)
        if info.compress_type not in _ZIP_METHODS:
            raise DataError(f"compression method {info.compress_type} is not supported")
        with archive.open(info) as stream:
            return stream.read(info.file_size)  # without a number it would unpack more than was declared
    except (DataError, *_DAMAGE, RuntimeError) as error:  # a RuntimeError asks for a password
        raise DataError(f"cannot be read: {error}") from None


def _tarred(archive: Archive) -> Iterator[Source]:
    """Yield members while reading: those of a compressed tar can only be read in order."""
    empty = True
    try:
        with _open_tar(archive) as opened:
            while (info := opened.next()) is not None:
                opened.members.clear()  # or all of them would be remembered
                if not info.isdir() and _is_image(info.name):
                    empty = False
                    yield _untar(archive, opened, info)
            _check_end(opened)
        if empty:
            raise no_images(archive)
    except (DataError, *_DAMAGE) as error:
        yield Source.broken(printable(archive), f"nothing more can be read: {error}")


def _untar(archive: Archive, opened: Any, info: tarfile.TarInfo) -> Source:
    path = _row_path(archive, info.name)
    try:
        _check(info.name, info.size)
        stream = opened.extractfile(info) if info.isreg() else None
        if stream is None:
            raise DataError("a link or a device, not a file")
        data = stream.read()
    except (DataError, *_DAMAGE) as error:
        return Source.broken(path, f"cannot be read: {error}")
    return Source(path, lambda: data)


@contextmanager
def _open_tar(archive: Archive) -> Iterator[Any]:
    opener = next(opener for suffix, opener in _TARS.items() if archive.name.lower().endswith(suffix))
    with archive.open("rb") as packed, opener(packed) as stream:
        size = packed.seek(0, io.SEEK_END)
        packed.seek(0)
        limited: Any = _Limited(stream, MAX_GROWTH * size + MAX_BYTES)
        with tarfile.TarFile(fileobj=limited) as opened:
            yield opened


class _Limited:
    """The file that a tar unpacks to, which ends in an error when it is too long."""

    def __init__(self, stream: IO[bytes], limit: int) -> None:
        self._stream, self._limit = stream, limit
        self.tell, self.seekable = stream.tell, stream.seekable

    def read(self, size: int) -> bytes:
        if size > MAX_BYTES or self.tell() + size > self._limit:
            raise tarfile.ReadError(f"it unpacks to more than {MAX_GROWTH} times its size")
        return self._stream.read(size)

    def seek(self, position: int) -> int:
        if position > self._limit:
            raise tarfile.ReadError(f"it unpacks to more than {MAX_GROWTH} times its size")
        return self._stream.seek(position)


def _check_end(opened: Any) -> None:
    """Raise an error if the archive is damaged: `tarfile` takes anything that is no member for the end."""
    opened.fileobj.seek(opened.offset)
    if opened.fileobj.read(tarfile.BLOCKSIZE) != tarfile.NUL * tarfile.BLOCKSIZE:
        raise DataError("the archive is cut off or damaged")


def _check(name: str, size: int) -> None:
    path = PureWindowsPath(name)  # knows both separators
    if path.root or ".." in path.parts:
        raise DataError("its path leaves the archive")
    if size > MAX_BYTES:
        raise DataError(f"{size:,} bytes are more than {MAX_BYTES:,}")


def _is_image(name: str) -> bool:
    path = PureWindowsPath(name)
    hidden = any((part.startswith(".") and part != "..") or part == "__MACOSX" for part in path.parts)
    return path.suffix.lower() in SUFFIXES and not hidden


def _row_path(archive: Archive, member: str) -> str:
    return printable(f"{archive}/{member.removeprefix('./')}")
