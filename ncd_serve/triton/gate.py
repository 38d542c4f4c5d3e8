"""Gate before Triton's HTTP server: reads each request whole, within limits, checks it, and passes it on.

Triton 2.51 ends at a JSON shape beyond memory and at a body in very many chunks (CVE-2025-23310, CVE-2025-23311), and
takes bodies of any size. Behind the gate it sees only bodies of a known length, whose tensors they can hold. While
Triton restarts, requests wait here.

Standard library only: the images that `ncd-serve deploy` describes carry this file.
`gate.py LISTEN=BACKEND...`, e.g. `0.0.0.0:8000=127.0.0.1:18000` or `fd:3=unix:/tmp/x/http.sock`.
"""

from __future__ import annotations

import asyncio
import ctypes
import hmac
import json
import math
import os
import re
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterable, Mapping
    from typing import TypeVar

    _T = TypeVar("_T")

CONNECTIONS = 512
HEAD_BYTES = 16 << 10
HEAD_SECONDS = 10  # for the rest of a head
IDLE_SECONDS = 120  # for the next head of a connection
BODY_BYTES = 128 << 20
ALL_BODIES_BYTES = 512 << 20
BODY_SECONDS = 60
CHUNKS = 1 << 15
JSON_BYTES = 16 << 20  # parsing takes many times as much memory
DIMENSIONS = 16
WAITING = 256  # requests at a time, while Triton restarts
WAIT_SECONDS = 60
RETRY_SECONDS = 0.1
ANSWER_SECONDS = 300
LINGER_SECONDS = 2

TOKEN_VARIABLE = "NCD_SERVE_TOKEN"
KEYS_VARIABLE = "NCD_SERVE_KEYS"  # JSON: headers, each of which opens the paths of administration
HEALTH = re.compile(r"/v2/health/(live|ready)|/metrics")
OPEN = re.compile(
    r"/v2(/models/stats|/repository/index|/models/[\w.-]+(/versions/\d+)?(/(ready|config|stats|infer))?)?", re.ASCII
)
INFER = re.compile(r".*/infer")
JSON_LENGTH = "inference-header-content-length"
ONCE = {"content-length", "transfer-encoding", "content-encoding", "authorization", "host", JSON_LENGTH}
NOT_PASSED_ON = {"connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "expect",
                 "content-length", "authorization", "proxy-connection", "proxy-authorization"}  # fmt: skip
HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*)")
REASONS = {400: "Bad Request", 401: "Unauthorized", 403: "Forbidden", 408: "Request Timeout", 411: "Length Required",
           413: "Content Too Large", 415: "Unsupported Media Type", 431: "Request Header Fields Too Large",
           502: "Bad Gateway", 503: "Service Unavailable", 504: "Gateway Timeout"}  # fmt: skip


class RefusalError(Exception):
    """Answer of the gate itself, with an HTTP status."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Head(NamedTuple):
    """Method, path and headers of a request."""

    method: str
    path: str
    headers: dict[str, str]

    @property
    def stays(self) -> bool:
        """True if the client keeps the connection for another request."""
        return self.headers.get("connection", "").lower() != "close"


class Gate:
    """Gate before the server at `backend`; `token` is asked of everybody, one of `keys` for administration."""

    def __init__(self, backend: str, *, token: str = "", keys: Mapping[str, str] | None = None) -> None:
        self._backend, self._token, self._keys = backend, token, dict(keys or {})
        self._connections = self._waiting = self._held = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection, one after the other."""
        self._connections += 1
        link = _Link()
        try:
            with suppress(OSError, asyncio.IncompleteReadError):
                if self._connections > CONNECTIONS:
                    await _refuse(RefusalError(503, "too many connections"), reader, writer)
                while not writer.is_closing() and await self._answer(reader, writer, link):
                    pass
        finally:
            self._connections -= 1
            link.close()
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, link: _Link) -> bool:
        """Answer one request; return whether there may be another one."""
        body = bytearray()
        try:
            head = await read_head(reader)
            if head is None:
                return False
            self._check_access(head)
            await self._read_body(head, body, reader, writer)
            if INFER.fullmatch(head.path):
                check_claims(head, body)
            await self._connect(link, patient=not HEALTH.fullmatch(head.path))
            await link.exchange(head, body, writer)
            return head.stays
        except RefusalError as refusal:
            await _refuse(refusal, reader, writer)
            return False
        finally:
            self._held -= len(body)

    def _check_access(self, head: Head) -> None:
        if head.method not in ("GET", "POST"):
            raise RefusalError(403, f"{head.method} is not allowed")
        if HEALTH.fullmatch(head.path):
            return
        given = head.headers.get("authorization", "")
        if self._token and not hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
            raise RefusalError(401, "this server asks for a token")
        if not OPEN.fullmatch(head.path) and not any(
            hmac.compare_digest(head.headers.get(name.lower(), "").encode(), value.encode())
            for name, value in self._keys.items()
        ):
            raise RefusalError(403, f"{head.path[:80]} is restricted")

    async def _read_body(
        self, head: Head, body: bytearray, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Read the body part by part, so that what all bodies take together is known at any time."""
        parts = _parts(head, reader)
        if head.headers.get("expect", "").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        late = RefusalError(408, f"the body took more than {BODY_SECONDS} s")
        deadline = time.monotonic() + BODY_SECONDS
        async for part in parts:
            if len(body) + len(part) > BODY_BYTES:
                raise RefusalError(413, f"the body has more than {BODY_BYTES:,} bytes")
            if self._held + len(part) > ALL_BODIES_BYTES:
                raise RefusalError(503, "too many large requests at once")
            self._held += len(part)
            body += part
            if time.monotonic() > deadline:
                raise late

    async def _connect(self, link: _Link, *, patient: bool) -> None:
        """Connect to Triton; while it restarts, wait."""
        give_up = time.monotonic() + WAIT_SECONDS * patient
        self._waiting += 1
        try:
            while not link.is_open:
                try:
                    await link.open(self._backend)
                except OSError:
                    if time.monotonic() > give_up or self._waiting > WAITING:
                        raise RefusalError(503, "Triton does not run: try again") from None
                    await asyncio.sleep(RETRY_SECONDS)
        finally:
            self._waiting -= 1


class _Link:
    """Connection to Triton on behalf of one client."""

    def __init__(self) -> None:
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    @property
    def is_open(self) -> bool:
        return self._streams is not None and not self._streams[0].at_eof()

    async def open(self, backend: str) -> None:
        self.close()
        if backend.startswith("unix:"):
            self._streams = await asyncio.open_unix_connection(backend[5:], limit=HEAD_BYTES)
        else:
            host, _, port = backend.rpartition(":")
            self._streams = await asyncio.open_connection(host, int(port), limit=HEAD_BYTES)

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    async def exchange(self, head: Head, body: bytearray, client: asyncio.StreamWriter) -> None:
        """Send a request, and copy the response to the client."""
        assert self._streams is not None
        reader, writer = self._streams
        passed = {name: value for name, value in head.headers.items() if name not in NOT_PASSED_ON}
        lines = [f"{head.method} {head.path} HTTP/1.1", *(f"{name}: {value}" for name, value in passed.items())]
        started = False
        try:
            writer.write("\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode("latin-1"))
            writer.write(body)
            await writer.drain()
            late = RefusalError(504, f"no answer within {ANSWER_SECONDS} s")
            answer = await _within(ANSWER_SECONDS, reader.readuntil(b"\r\n\r\n"), late)
            length = re.search(rb"\r\ncontent-length:[ \t]*(\d+)[ \t]*\r\n", answer, re.IGNORECASE)
            started = True
            client.write(answer)
            await asyncio.wait_for(_copy(reader, client, int(length[1]) if length else 0), ANSWER_SECONDS)
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, asyncio.TimeoutError, RefusalError):
            self.close()
            if started:  # the client sees that the answer is not whole
                client.close()
                raise
            raise RefusalError(503, "Triton ended before it answered: try again") from None


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, size: int) -> None:
    while size:
        part = await reader.read(min(size, 1 << 18))
        if not part:
            raise asyncio.IncompleteReadError(part, size)
        size -= len(part)
        writer.write(part)
        await writer.drain()


async def read_head(reader: asyncio.StreamReader) -> Head | None:
    """Read the head of a request; None if the client has no more."""
    try:
        first = await asyncio.wait_for(reader.read(1), IDLE_SECONDS)
    except asyncio.TimeoutError:
        return None
    if not first:
        return None
    late = RefusalError(408, f"the head took more than {HEAD_SECONDS} s")
    try:
        text = first + await _within(HEAD_SECONDS, reader.readuntil(b"\r\n\r\n"), late)
    except asyncio.LimitOverrunError:
        raise RefusalError(431, f"the head has more than {HEAD_BYTES:,} bytes") from None
    request, *lines = text[:-4].decode("latin-1").split("\r\n")
    words = request.split(" ")
    if len(words) != 3 or words[2] not in ("HTTP/1.1", "HTTP/1.0"):
        raise RefusalError(400, "not a request of HTTP/1.1")
    headers = _headers(lines)
    if words[2] == "HTTP/1.0":
        headers["connection"] = "close"
    return Head(words[0], words[1].partition("?")[0], headers)


def _headers(lines: Iterable[str]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for line in lines:
        found = HEADER.fullmatch(line)
        if found is None:
            raise RefusalError(400, "a header is malformed")
        name, value = found[1].lower(), found[2].strip()
        if name in headers and name in ONCE:
            raise RefusalError(400, f"the header {name} came twice")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers


def _parts(head: Head, reader: asyncio.StreamReader) -> Any:
    """Return an iterator over the parts of the body."""
    if head.headers.get("content-encoding", "identity").lower() != "identity":
        raise RefusalError(415, "compressed bodies are not accepted")
    length, coding = head.headers.get("content-length"), head.headers.get("transfer-encoding")
    if coding is not None:
        if coding.lower() != "chunked" or length is not None:
            raise RefusalError(400, "the length of the body is ambiguous")
        return _chunks(reader)
    if not re.fullmatch(r"[0-9]{1,18}", length or "0"):
        raise RefusalError(400, "content-length is not a number")
    if int(length or 0) > BODY_BYTES:
        raise RefusalError(413, f"the body has more than {BODY_BYTES:,} bytes")
    return _exactly(reader, int(length or 0))


async def _exactly(reader: asyncio.StreamReader, size: int) -> Any:
    late = RefusalError(408, f"the body took more than {BODY_SECONDS} s")
    while size:
        part = await _within(BODY_SECONDS, reader.read(min(size, 1 << 18)), late)
        if not part:
            raise asyncio.IncompleteReadError(part, size)
        size -= len(part)
        yield part


async def _chunks(reader: asyncio.StreamReader) -> Any:
    late = RefusalError(408, f"the body took more than {BODY_SECONDS} s")
    for _ in range(CHUNKS):
        line = await _within(BODY_SECONDS, _line(reader), late)
        size = re.fullmatch(rb"([0-9A-Fa-f]{1,8})[ \t]*(;[^\r\n]*)?\r\n", line)
        if size is None:
            raise RefusalError(400, "a chunk is malformed")
        if not int(size[1], 16):
            if await _within(BODY_SECONDS, _line(reader), late) != b"\r\n":
                raise RefusalError(400, "trailers are not accepted")
            return
        async for part in _exactly(reader, int(size[1], 16)):
            yield part
        if await _within(BODY_SECONDS, reader.readexactly(2), late) != b"\r\n":
            raise RefusalError(400, "a chunk is malformed")
    raise RefusalError(413, f"the body has more than {CHUNKS:,} chunks")


async def _line(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\r\n")
    except asyncio.LimitOverrunError:
        raise RefusalError(400, "a chunk is malformed") from None


def check_claims(head: Head, body: bytes | bytearray) -> None:
    """Refuse an inference whose tensors claim more elements than its body has bytes: Triton takes memory by claims."""
    text = head.headers.get(JSON_LENGTH, str(len(body)))
    if not re.fullmatch(r"[0-9]{1,18}", text) or int(text) > len(body):
        raise RefusalError(400, f"{JSON_LENGTH} does not fit the body")
    if int(text) == 0:
        return
    if int(text) > JSON_BYTES:
        raise RefusalError(413, f"more than {JSON_BYTES:,} bytes of JSON; send tensors as binary data")
    try:
        request = json.loads(body[: int(text)].decode(), object_pairs_hook=_unique)
        claimed = sum(_elements(tensor) for tensor in request["inputs"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RefusalError(400, f"not an inference request: {str(error)[:200]}") from None
    if claimed > len(body):
        raise RefusalError(400, f"the shapes claim {claimed} elements, the body has {len(body)} bytes")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object; of two values for one key, Triton might take the other one."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice in an object")
    return found


def _elements(tensor: dict[str, Any]) -> int:
    shape = tensor["shape"]
    if not isinstance(shape, list) or len(shape) > DIMENSIONS:
        raise ValueError("a shape is not a list of sizes")
    if any(type(size) is not int or not 0 <= size < 2**31 for size in shape):
        raise ValueError("a size in a shape is out of range")
    return math.prod(shape)


async def _refuse(refusal: RefusalError, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer with an error as Triton writes them, and end the connection."""
    text = json.dumps({"error": str(refusal)}).encode()
    retry = "retry-after: 1\r\n" if refusal.status == 503 else ""
    writer.write(
        f"HTTP/1.1 {refusal.status} {REASONS[refusal.status]}\r\ncontent-type: application/json\r\n{retry}"
        f"content-length: {len(text)}\r\nconnection: close\r\n\r\n".encode()
        + text
    )
    await writer.drain()
    with suppress(OSError, RuntimeError):
        writer.write_eof()
    # A socket that is closed with unread data takes the answer with it.
    with suppress(asyncio.TimeoutError):
        await asyncio.wait_for(_drop(reader), LINGER_SECONDS)


async def _drop(reader: asyncio.StreamReader) -> None:
    while await reader.read(1 << 18):
        pass


async def _within(seconds: float, work: Awaitable[_T], late: RefusalError) -> _T:
    try:
        return await asyncio.wait_for(work, seconds)
    except asyncio.TimeoutError:
        raise late from None


def _listener(place: str) -> socket.socket:
    """Return the socket that an inherited `fd:N` is, or a new one on `host:port`."""
    if place.startswith("fd:"):
        return socket.socket(fileno=int(place[3:]))
    host, _, port = place.rpartition(":")
    return socket.create_server((host, int(port)), backlog=CONNECTIONS)


async def main(doors: Iterable[str]) -> None:
    """Run a gate for each `LISTEN=BACKEND`, until the parent process ends."""
    token, keys = os.environ.get(TOKEN_VARIABLE, ""), json.loads(os.environ.get(KEYS_VARIABLE) or "{}")
    servers = []
    for door in doors:
        place, _, backend = door.partition("=")
        gate = Gate(backend, token=token, keys=keys)
        servers.append(await asyncio.start_server(gate.handle, sock=_listener(place), limit=HEAD_BYTES))
    await asyncio.gather(*(server.serve_forever() for server in servers))


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: it ends with the process that started it
    with suppress(KeyboardInterrupt):
        asyncio.run(main(sys.argv[1:]))
