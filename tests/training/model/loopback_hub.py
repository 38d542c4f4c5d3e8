"""A small hub of models on loopback, with what the hub's client asks for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Repository:
    """Files by name, and what is wrong with them."""

    files: dict[str, bytes]
    gated: bool = False
    truncated: bool = False
    licence: str | None = None


@dataclass
class Hub:
    """Repositories by name, and what was asked for."""

    repositories: dict[str, Repository]
    asked: list[str] = field(default_factory=list)
    url: str = ""


@contextmanager
def serving(repositories: dict[str, Repository]) -> Iterator[Hub]:
    hub = Hub(repositories)

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, *, body: bool) -> None:
            hub.asked.append(f"{self.command} {self.path}")
            if file := re.fullmatch(r"/(.+?/.+?)/resolve/([^/]+)/(.+)", self.path):
                self.file(*file.groups(), body=body)
            elif info := re.fullmatch(r"/api/models/([^/]+/[^/?]+)(/revision/[^/?]+)?(\?.*)?", self.path):
                self.info(info[1])
            else:
                self.problem(404, "RepoNotFound")

        def file(self, repository: str, revision: str, name: str, *, body: bool) -> None:
            found = hub.repositories.get(repository)
            if found is None:
                return self.problem(404, "RepoNotFound")
            if found.gated:
                return self.problem(403, "GatedRepo")
            if revision not in ("main", COMMIT, "v1"):
                return self.problem(404, "RevisionNotFound")
            if name not in found.files:
                return self.problem(404, "EntryNotFound")
            content = found.files[name]
            self.send_response(200)
            self.send_header("ETag", f'"{sha256(content).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if body:
                self.wfile.write(content[: len(content) // 2] if found.truncated else content)

        def info(self, repository: str) -> None:
            found = hub.repositories.get(repository)
            if found is None:
                return self.problem(404, "RepoNotFound")
            card = {"license": found.licence} if found.licence else {}
            content = json.dumps(
                {"id": repository, "sha": COMMIT, "cardData": card, "siblings": [], "tags": []}
            ).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def problem(self, status: int, code: str) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("X-Error-Message", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
