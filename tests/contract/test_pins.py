"""The script that looks for pins that were yanked, against an index of our own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "check_pins.py"
HTML = """<a href="../f/good-1.0-py3-none-any.whl#sha256=0">x</a>
<a href="../f/taken_back-2.0.tar.gz" data-yanked="breaks">x</a><a href="../f/taken_back-3.0.tar.gz">x</a>"""
FILES = [
    {"filename": "half-1.0.tar.gz", "yanked": "reason"},
    {"filename": "half-1.0-py3-none-any.whl", "yanked": False},
    {"filename": "gone-1.0.tar.gz", "yanked": True},
]


class Index(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        in_json = self.path in ("/simple/half/", "/simple/gone/")
        self.send_response(200)
        self.send_header("Content-Type", "application/vnd.pypi.simple.v1+json" if in_json else "text/html")
        self.end_headers()
        files = [file for file in FILES if str(file["filename"]).startswith(self.path.split("/")[2])]
        self.wfile.write((json.dumps({"files": files}) if in_json else HTML).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def index() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Index) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,)).start()
        yield f"http://127.0.0.1:{server.server_port}/simple"
        server.shutdown()


def check(pins: str, index: str, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "pins.txt").write_text(pins)
    environment = {**os.environ, "PIP_INDEX_URL": index, "no_proxy": "127.0.0.1"}
    command = [sys.executable, str(SCRIPT), str(folder / "pins.txt")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_yanked_pins_are_named(index: str, tmp_path: Path) -> None:
    pins = '# ours\ngood==1.0; python_version >= "3.11"\nhalf==1.0\ntaken-back==2.0 # why\ngone==1.0\ngood==9.9\n'
    done = check(pins, index, tmp_path)
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines() == [
        "taken-back 2.0 was yanked: breaks",
        "gone 1.0 was yanked: True",
        "good 9.9 is not on the index",
        "5 pins, 3 of them with a problem",
    ]


def test_good_pins_pass(index: str, tmp_path: Path) -> None:
    done = check("good==1.0\ntaken-back==3.0\nhalf==1.0\n", index, tmp_path)
    assert (done.returncode, done.stdout) == (0, "3 pins, 0 of them with a problem\n"), done.stderr
