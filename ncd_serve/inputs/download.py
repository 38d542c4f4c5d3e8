"""An image from an http(s) URL, within limits of bytes and time."""

from __future__ import annotations

import time
import urllib.request as request
from http.client import HTTPException
from urllib.error import URLError

from ncd_serve.errors import DataError
from ncd_serve.preprocess import MAX_BYTES

DOWNLOAD_SECONDS = 30.0
_PIECE = 1 << 16


def fetch(url: str) -> bytes:
    """Return the bytes at a URL; raise DataError with the reason of a failure."""
    deadline = time.monotonic() + DOWNLOAD_SECONDS
    pieces, size = [], 0
    try:
        with _opener().open(url, timeout=DOWNLOAD_SECONDS) as answer:
            while piece := answer.read1(_PIECE):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_BYTES:
                    raise DataError(f"more than {MAX_BYTES:,} bytes")
                if time.monotonic() > deadline:
                    raise DataError(f"not complete after {DOWNLOAD_SECONDS:g} s")
    except URLError as error:
        raise DataError(f"cannot be fetched: {error.reason}") from None
    except (OSError, HTTPException, ValueError) as error:
        raise DataError(f"cannot be fetched: {error}") from None
    return b"".join(pieces)


def _opener() -> request.OpenerDirector:
    """Return an opener for HTTP only: the default one would follow redirects to ftp."""
    opener = request.OpenerDirector()
    for handler in (
        request.ProxyHandler,
        request.HTTPHandler,
        request.HTTPSHandler,
        request.HTTPRedirectHandler,
        request.HTTPDefaultErrorHandler,
        request.HTTPErrorProcessor,
        request.UnknownHandler,
    ):
        opener.add_handler(handler())
    return opener
