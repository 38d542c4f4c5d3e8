"""As much of S3 as Triton asks for: list, head and get, for requests that are signed by a known key."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

KEY = "known-key"


@contextmanager
def object_storage(folder: Path) -> Iterator[int]:
    """Serve a folder as all buckets; yields the port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, folder))
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, folder: Path, *arguments: object) -> None:
        self._folder = folder
        super().__init__(*arguments)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        path = self._folder / unquote(url.path).strip("/").partition("/")[2]
        if f"Credential={KEY}/" not in self.headers.get("Authorization", ""):
            self._send(403, b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>")
        elif url.query:
            self._send(200, self._listing(parse_qs(url.query)))
        elif path == self._folder:
            self._send(200, b"")  # the bucket itself
        elif path.is_file():
            self._send(200, path.read_bytes())
        else:
            self._send(404, b"<Error><Code>NoSuchKey</Code></Error>")

    do_HEAD = do_GET

    def _listing(self, query: dict[str, list[str]]) -> bytes:
        prefix = query.get("prefix", [""])[0]
        keys = sorted(str(path.relative_to(self._folder)) for path in self._folder.rglob("*") if path.is_file())
        found = [key for key in keys if key.startswith(prefix)]
        entries = "".join(f"<Contents><Key>{escape(key)}</Key><Size>1</Size></Contents>" for key in found)
        text = f"<ListBucketResult><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>"
        return f'<?xml version="1.0" encoding="UTF-8"?>{text}'.encode()

    def _send(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Last-Modified", "Mon, 16 Nov 2026 12:00:00 GMT")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        pass
