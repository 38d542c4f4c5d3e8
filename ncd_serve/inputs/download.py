"""An image from an http(s) URL, within limits of bytes and time.

Limits hold for all that is received: headers, lines between chunks and redirects count as well. A redirect leads from
http to http or https, from https to https, and never from a public address to a private one. Who names a private
address asks for it.
"""

from __future__ import annotations

import io
import socket
import time
import urllib.request as request
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPMessage, HTTPSConnection
from ipaddress import ip_address
from typing import IO, TYPE_CHECKING, Any
from urllib.error import URLError

from ncd_serve.errors import DataError
from ncd_serve.preprocess import MAX_BYTES

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

DOWNLOAD_SECONDS = 30.0
_EXTRA_BYTES = 1 << 20  # of headers and the like
_PIECE = 1 << 16


def fetch(url: str) -> bytes:
    """Return the bytes at a URL; raise DataError with the reason of a failure."""
    pieces, size = [], 0
    try:
        with _opener(_Limits(time.monotonic() + DOWNLOAD_SECONDS)).open(url, timeout=DOWNLOAD_SECONDS) as answer:
            while piece := answer.read1(_PIECE):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_BYTES:
                    raise DataError(f"more than {MAX_BYTES:,} bytes")
            if answer.length:
                raise DataError(f"cut off: {answer.length:,} bytes are missing")
    except URLError as error:
        raise DataError(f"cannot be fetched: {error.reason}") from None
    except (OSError, HTTPException, ValueError) as error:
        raise DataError(f"cannot be fetched: {error}") from None
    return b"".join(pieces)


@dataclass
class _Limits:
    """Limits of one download, over all its connections."""

    deadline: float
    received: int = 0
    private: bool | None = None  # whether the address that the user named is

    def left(self) -> float:
        """Return the seconds that are left."""
        if (left := self.deadline - time.monotonic()) <= 0:
            raise DataError(f"not complete after {DOWNLOAD_SECONDS:g} s")
        return left

    def receive(self, size: int) -> None:
        """Count bytes."""
        self.received += size
        if self.received > MAX_BYTES + _EXTRA_BYTES:
            raise DataError(f"more than {MAX_BYTES:,} bytes")

    def check_peer(self, address: str) -> None:
        """Raise DataError if a public address has led to a private one."""
        private = not ip_address(address.partition("%")[0]).is_global
        if self.private is None:
            self.private = private
        if private and not self.private:
            raise DataError(f"it redirects to the private address {address}")


class _LimitedStream(io.RawIOBase):
    """Data that a socket receives, within the limits."""

    def __init__(self, connected: socket.socket, limits: _Limits) -> None:
        self._socket, self._limits = connected, limits

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        self._socket.settimeout(self._limits.left())
        try:
            size = self._socket.recv_into(buffer)
        except TimeoutError:
            self._limits.left()
            raise
        self._limits.receive(size)
        return size

    def close(self) -> None:
        if not self.closed:
            self._socket.close()
        super().close()


class _LimitedSocket:
    """The part of a socket that HTTP uses."""

    def __init__(self, connected: socket.socket, limits: _Limits) -> None:
        limits.check_peer(connected.getpeername()[0])
        self._socket, self._limits = connected, limits
        self.sendall = connected.sendall

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(_LimitedStream(self._socket, self._limits))

    def close(self) -> None:
        """Leave it to the stream, which is read after the connection was closed."""


class _LimitedHttp(HTTPConnection):
    """Connection whose answer is limited."""

    def __init__(self, *arguments: Any, limits: _Limits, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._limits = limits

    def connect(self) -> None:
        """Connect like any connection."""
        super().connect()
        self.sock = _LimitedSocket(self.sock, self._limits)


class _LimitedHttps(_LimitedHttp, HTTPSConnection):
    """The same over TLS."""


class _HttpHandler(request.HTTPHandler):
    def __init__(self, limits: _Limits) -> None:
        super().__init__()
        self._limits = limits

    def http_open(self, wanted: request.Request) -> Any:
        return self.do_open(partial(_LimitedHttp, limits=self._limits), wanted)


class _HttpsHandler(request.HTTPSHandler):
    def __init__(self, limits: _Limits) -> None:
        super().__init__()
        self._limits = limits

    def https_open(self, wanted: request.Request) -> Any:
        return self.do_open(partial(_LimitedHttps, limits=self._limits), wanted)


class _RedirectHandler(request.HTTPRedirectHandler):
    def redirect_request(
        self, req: request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> request.Request | None:
        schemes = ("https",) if req.type == "https" else ("http", "https")
        if newurl.partition("://")[0].lower() not in schemes:
            raise DataError(f"it redirects from {req.type} to {newurl}")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _opener(limits: _Limits) -> request.OpenerDirector:
    """Return an opener for HTTP only: the default one would follow redirects to ftp."""
    opener = request.OpenerDirector()
    for handler in (
        request.ProxyHandler(),
        _HttpHandler(limits),
        _HttpsHandler(limits),
        _RedirectHandler(),
        request.HTTPDefaultErrorHandler(),
        request.HTTPErrorProcessor(),
        request.UnknownHandler(),
    ):
        opener.add_handler(handler)
    return opener
