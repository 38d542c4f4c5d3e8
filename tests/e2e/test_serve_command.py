"""`serve`, `status` and `stop` as a user types them."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
import tritonclient.grpc as grpc

from ncd_serve.inputs.images import images_in
from ncd_serve.triton import TritonServer
from ncd_serve.triton.registry import birth_of
from tests.serve.small_models import make_lookup, make_slow, needs_triton, regions, tensor, wait_until

pytestmark = [pytest.mark.triton, needs_triton]
FREE_PORTS = ("--grpc-port", "0", "--http-port", "0", "--metrics-port", "0")
SERVE = [sys.executable, "-m", "ncd_serve", "serve", *FREE_PORTS]


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Servers of this test and no others are listed; they leave their files here."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_requests_under_way_finish_when_the_server_is_told_to_stop(alone: Path) -> None:
    make_slow(alone / "models" / "slow")
    answers: list[Any] = []
    with subprocess.Popen(
        [*SERVE, "--repository", str(alone / "models"), "--quiet"], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        grpc_url, metrics_url = re.search(rb"gRPC (\S+),.*metrics (\S+)", process.stdout.readline()).groups()  # type: ignore[union-attr]

        def ask() -> None:
            with grpc.InferenceServerClient(grpc_url.decode()) as client:
                answers.append(client.infer("slow", [tensor("steps", np.array([1000]))]).as_numpy("total")[0])

        def one_waits() -> bool:
            with urlopen(metrics_url.decode(), timeout=10) as page:
                return re.search(rb'pending_request_count\{model="slow".*\} 1', page.read()) is not None

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        assert wait_until(one_waits, 60), "while the other one is being answered"
        process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join()
        assert process.wait(60) == 128 + signal.SIGTERM
    assert answers == [400.0, 400.0]
    assert not regions(process.pid)
    assert not list(alone.glob("ncd-triton-*")) and not list((alone / "ncd-serve").iterdir())


def test_a_detached_server_is_listed_asked_and_stopped(
    alone: Path, bundle: Path, repository: Path, glyphs: Path, ncd: Any
) -> None:
    started = ncd("serve", "--repository", repository, *FREE_PORTS, "--watch", "--detach")
    assert started.returncode == 0, started.stderr
    listed = ncd("status", "--json")
    (running,) = json.loads(listed.stdout)
    assert listed.returncode == 0 and running["trouble"] is None
    assert running["repository"] == str(repository) and running["grpc_url"] in started.stdout
    picture = images_in(glyphs / "test")[0]
    _try_the_curl_line(started.stdout, picture)
    _try_the_python_line(started.stdout, picture)
    stopped = ncd("stop")
    assert stopped.returncode == 0 and str(running["pid"]) in stopped.stdout
    assert birth_of(running["pid"]) is None
    assert not regions(running["pid"])
    for command in ("status", "stop"):
        refused = ncd(command)
        assert refused.returncode == 5 and "no server runs on this machine" in refused.stderr


def _try_the_curl_line(greeting: str, picture: Path) -> None:
    (line,) = re.findall(r"^curl: +(.*)$", greeting, re.MULTILINE)
    if shutil.which("curl"):
        shown = subprocess.run(line.replace("bird.jpg", str(picture)), shell=True, capture_output=True, check=True)
        answer = json.loads(shown.stdout)
        assert answer["cluster_name"] == f"cluster-{answer['cluster_id']}" and 0 < answer["confidence"] <= 1


def _try_the_python_line(greeting: str, picture: Path) -> None:
    (line,) = re.findall(r"^Python: +(.*)$", greeting, re.MULTILINE)
    command = [sys.executable, "-c", line.replace("bird.jpg", str(picture))]
    assert "status='ok'" in subprocess.run(command, capture_output=True, check=True, text=True).stdout


def test_a_start_that_fails_says_so_also_when_detached(alone: Path, ncd: Any) -> None:
    make_lookup(alone / "models" / "lookup")
    inside = ncd("serve", "--repository", alone / "models" / "lookup")
    assert inside.returncode == 3 and f"use --repository {alone / 'models'}" in inside.stderr
    ours = ncd("serve", "--repository", alone / "models", "--", "--grpc-port=1")
    assert ours.returncode == 2 and "--grpc-port is set by ncd-serve itself" in ours.stderr
    (alone / "models" / "lookup" / "1" / "model.onnx").write_bytes(b"no model")
    detached = ncd("serve", "--repository", alone / "models", *FREE_PORTS, "--detach")
    assert detached.returncode == 5 and "failed to load 'lookup'" in detached.stderr
    assert not list(alone.glob("ncd-triton-*"))


def test_temporary_folders_with_spaces_are_not_used(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spaced = alone / "a b"
    spaced.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(spaced))
    make_lookup(alone / "models" / "lookup")
    with TritonServer(alone / "models") as server:
        server.wait_ready(60)
        assert str(Path(f"/proc/{server.pid}/cwd").readlink()).startswith("/tmp/ncd-triton-")
    assert not list(spaced.iterdir())
