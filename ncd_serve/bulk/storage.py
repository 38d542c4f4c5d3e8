"""Files on disk, or at a URL that fsspec supports (s3, gs, http and others)."""

from __future__ import annotations

import re
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import IO, TYPE_CHECKING, Any

import fsspec

from ncd_serve.errors import DataError, MissingExtraError, NcdError
from ncd_serve.files import atomic_path
from ncd_serve.inputs.download import fetch
from ncd_serve.preprocess import MAX_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]+)://", re.IGNORECASE)
_PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "http": "aiohttp", "https": "aiohttp", "az": "adlfs"}
_GOOGLE = "set GOOGLE_APPLICATION_CREDENTIALS to a key file"
_CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; AWS_ENDPOINT_URL for other stores than AWS",
    "gs": _GOOGLE,
    "gcs": _GOOGLE,
}


def scheme(text: str) -> str | None:
    """Return the scheme of a URL in lower case; None for a path on disk."""
    found = _SCHEME.match(text)
    return found[1].lower() if found else None


@contextmanager
def reaching(text: str) -> Iterator[None]:
    """Convert the errors of storage libraries, each of which has its own classes, into errors for the user."""
    try:
        yield
    except NcdError:
        raise
    except ImportError as error:
        package = _PACKAGES.get(scheme(text) or "", "fsspec")
        raise MissingExtraError(f"{text} needs {package}: {error}", hint=f"pip install {package}") from None
    except FileNotFoundError:
        raise DataError(f"no such file or folder: {text}", hint="check the path") from None
    except Exception as error:
        hint = _CREDENTIALS.get(scheme(text) or "", "check the address and the permissions")
        raise DataError(f"{text} cannot be used: {str(error) or type(error).__name__}", hint=hint) from None


class RemoteFile:
    """File at a URL, with the methods of `Path` that readers of archives and tables need."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.name = url.rpartition("/")[2]
        self.suffix = PurePosixPath(self.name).suffix

    def __str__(self) -> str:
        """Return the URL."""
        return self._url

    def open(self, mode: str) -> IO[bytes]:
        """Open the file, which is fetched while it is read."""
        with reaching(self._url):
            stream: IO[bytes] = fsspec.open(self._url, mode).open()
            return stream


def file_at(text: str) -> Path | RemoteFile:
    """Return the file at a path or URL."""
    return RemoteFile(text) if scheme(text) else Path(text)


def read_url(url: str) -> bytes:
    """Return the bytes of an image file; reading stops soon after the size limit of an image."""
    if scheme(url) in ("http", "https"):
        return fetch(url)
    with reaching(url):
        storage, path = fsspec.url_to_fs(url)
        data: bytes = storage.cat_file(path, start=0, end=MAX_BYTES + 1)
        return data


class Folder:
    """Output folder for rows, on disk or at a URL."""

    def __init__(self, text: str) -> None:
        self.text = text.rstrip("/")
        with reaching(text):
            self.storage, self.path = fsspec.url_to_fs(self.text)
        self.is_local = scheme(self.text) in (None, "file")
        self.absolute = self.path if self.is_local else self.text  # for processes that are elsewhere

    def __str__(self) -> str:
        """Return the path or URL as the user gave it."""
        return self.text

    def names(self) -> list[str]:
        """Return the names of the files that are not hidden."""
        with reaching(self.text):
            self.storage.invalidate_cache()
            found = self.storage.ls(self.path, detail=False) if self.storage.exists(self.path) else []
            names = (PurePosixPath(path).name for path in found)
            return [name for name in names if not name.startswith(".")]

    def open(self, name: str) -> Any:
        """Open a file of the folder for reading."""
        with reaching(self.text):
            return self.storage.open(f"{self.path}/{name}", "rb")

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        """Yield a path to write to; the file appears complete when the block succeeds, otherwise not at all."""
        place = atomic_path(Path(self.path) / name) if self.is_local else self._sent(name)
        try:
            with place as path:
                yield path
        except OSError as error:
            hint = "check the folder and its space"
            raise DataError(f"cannot write {error.filename or self}: {error.strerror or error}", hint=hint) from None

    @contextmanager
    def _sent(self, name: str) -> Iterator[Path]:
        with TemporaryDirectory() as scratch:
            path = Path(scratch) / name
            yield path
            with reaching(self.text):
                self.storage.makedirs(self.path, exist_ok=True)
                self.storage.put_file(str(path), f"{self.path}/{name}")
