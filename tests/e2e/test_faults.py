"""Servers that die, restart or hang, and clients that are killed: no row is lost, doubled or wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ncd_serve.bundle import Bundle
from ncd_serve.preprocess import load_array
from ncd_serve.rows.tables import partial_path
from ncd_serve.runners import open_session
from ncd_serve.triton import TritonServer
from ncd_serve.triton.process import Ports, choose_port

pytestmark = pytest.mark.triton
IMAGES = 5000
FEWER, FEWER_PATTERN = 2000, "[01]*.bmp"  # where fewer will do
READY_SECONDS = 120


@pytest.fixture(scope="module")
def pictures(glyphs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Many images, no two alike, and their number is what the issue asks for."""
    folder = tmp_path_factory.mktemp("many")
    shapes = [np.asarray(Image.open(path).convert("RGB")) for path in sorted((glyphs / "test").rglob("*.png"))]
    random = np.random.default_rng(0)
    for number in range(IMAGES):
        noise = random.integers(0, 100, shapes[0].shape, dtype=np.uint8)
        Image.fromarray(shapes[number % len(shapes)] // 2 + noise).save(folder / f"{number:04}.bmp")
    return folder


@pytest.fixture(scope="module")
def expected(pictures: Path, bundle: Path) -> list[tuple[str, Any]]:
    """What ONNX Runtime itself says to each of them."""
    loaded = Bundle.read(bundle)
    paths = sorted(pictures.iterdir())
    images = np.stack([load_array(path, loaded.manifest.preprocess) for path in paths])
    (answers,) = open_session(loaded.model_path).run(["probabilities"], {"image": images})
    return list(zip(map(str, paths), answers, strict=True))


@pytest.fixture(scope="module")
def victim(triton: None, bundle: Path, repository: Path) -> Iterator[TritonServer]:
    """A Triton of these tests' own, to be ill-treated; it comes back on the same ports."""
    ports = Ports(*(choose_port("127.0.0.1", None) for _ in Ports._fields))
    with TritonServer(repository, grpc_port=ports.grpc, http_port=ports.http) as running:
        yield running


@pytest.fixture
def server(victim: TritonServer) -> TritonServer:
    if not victim.is_running():
        victim.stop()
        victim.start()
    victim.wait_ready(READY_SECONDS)
    return victim


def assert_complete(target: Path, expected: list[tuple[str, Any]]) -> None:
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    assert [row["path"] for row in rows] == [path for path, _ in expected]
    assert {row["status"] for row in rows} == {"ok"}
    served = [[entry["probability"] for entry in sorted(row["top_k"], key=lambda e: e["cluster_id"])] for row in rows]
    answers = np.stack([answer for _, answer in expected])
    np.testing.assert_allclose(served, answers, atol=1e-5)
    assert [row["cluster_id"] for row in rows] == answers.argmax(axis=1).tolist()
    assert not partial_path(target).exists()


def start_query(pictures: Path, url: str, target: Path, *options: object) -> subprocess.Popen[str]:
    command = ["query", pictures, "--url", url, "--out", target, "--top-k", 5, "--concurrency", 32, *options]
    return subprocess.Popen([sys.executable, "-m", "ncd_serve", *map(str, command)], stderr=subprocess.PIPE, text=True)


def wait_for_rows(process: subprocess.Popen[str], target: Path, count: int) -> None:
    deadline = time.monotonic() + 120
    while not partial_path(target).exists() or partial_path(target).read_bytes().count(b"\n") < count:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def kill(server: TritonServer) -> None:
    os.kill(server.pid, signal.SIGKILL)


def kill_workers(server: TritonServer) -> None:
    """The server lives and says that it is ready, but every request fails."""
    for worker in Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split():
        os.kill(int(worker), signal.SIGKILL)
    time.sleep(2)


def restart(server: TritonServer, *, after: Callable[[TritonServer], None]) -> None:
    after(server)
    server.stop(patience=0)
    server.start()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_server_killed_and_restarted_twice_costs_no_row(
    protocol: str, server: TritonServer, pictures: Path, expected: list[tuple[str, Any]], tmp_path: Path
) -> None:
    target = tmp_path / "rows.jsonl"
    url = f"{protocol}://{server.grpc_url if protocol == 'grpc' else server.http_url}"
    with start_query(pictures, url, target) as process:
        wait_for_rows(process, target, IMAGES // 5)
        restart(server, after=kill)
        wait_for_rows(process, target, IMAGES * 3 // 5)
        restart(server, after=kill if protocol == "grpc" else kill_workers)
        _, messages = process.communicate(timeout=200)
    assert process.returncode == 0, messages
    assert f"{IMAGES} rows in" in messages and f"({IMAGES} ok)" in messages
    assert_complete(target, expected)


def test_a_killed_client_goes_on_where_it_was(
    server: TritonServer, pictures: Path, expected: list[tuple[str, Any]], ncd: Any, tmp_path: Path
) -> None:
    target, url = tmp_path / "rows.jsonl", f"grpc://{server.grpc_url}"
    with start_query(pictures / FEWER_PATTERN, url, target) as process:
        wait_for_rows(process, target, 500)
        process.kill()
    with partial_path(target).open("a") as stream:
        stream.write('{"path": "half a ro')
    kept = partial_path(target).read_bytes().count(b"\n")
    options = ("--url", url, "--out", target, "--top-k", 5)
    refused = ncd("query", pictures / FEWER_PATTERN, *options)
    assert refused.returncode == 2 and "with --resume" in refused.stderr
    other = ncd("query", pictures / "0007.bmp", *options, "--resume")
    assert other.returncode == 3 and "but the images named now have" in other.stderr
    done = ncd("query", pictures / FEWER_PATTERN, *options, "--resume")
    assert done.returncode == 0 and f"{kept} from before, {FEWER - kept} ok" in done.stderr
    assert_complete(target, expected[:FEWER])
    again = ncd("query", pictures / FEWER_PATTERN, *options, "--resume")
    assert again.returncode == 0 and "is already complete" in again.stderr


def test_a_server_that_hangs_ends_in_a_clear_error_and_keeps_what_it_said(
    server: TritonServer, pictures: Path, expected: list[tuple[str, Any]], ncd: Any, tmp_path: Path
) -> None:
    target, url = tmp_path / "rows.jsonl", f"grpc://{server.grpc_url}"
    with start_query(pictures / FEWER_PATTERN, url, target, "--timeout", 3) as process:
        wait_for_rows(process, target, 500)
        os.kill(server.pid, signal.SIGSTOP)
        try:
            _, messages = process.communicate(timeout=60)
        finally:
            os.kill(server.pid, signal.SIGCONT)
    assert process.returncode == 5 and "Traceback" not in messages
    assert "did not answer within 3 s" in messages and "with --resume" in messages
    done = ncd("query", pictures / FEWER_PATTERN, "--url", url, "--out", target, "--top-k", 5, "--resume")
    assert done.returncode == 0, done.stderr
    assert_complete(target, expected[:FEWER])


def test_a_server_that_stays_away_ends_the_query_when_patience_does(
    server: TritonServer, pictures: Path, tmp_path: Path
) -> None:
    target = tmp_path / "rows.jsonl"
    with start_query(pictures / FEWER_PATTERN, f"grpc://{server.grpc_url}", target, "--patience", 2) as process:
        wait_for_rows(process, target, 500)
        kill(server)
        _, messages = process.communicate(timeout=60)
    assert process.returncode == 5 and "no Triton server answers" in messages and "Traceback" not in messages
    assert partial_path(target).read_bytes().count(b"\n") >= 500


def test_an_interrupted_query_ends_at_once_while_its_server_hangs(
    server: TritonServer, pictures: Path, tmp_path: Path
) -> None:
    target = tmp_path / "rows.jsonl"
    with start_query(pictures / FEWER_PATTERN, f"grpc://{server.grpc_url}", target) as process:
        wait_for_rows(process, target, 500)
        os.kill(server.pid, signal.SIGSTOP)
        try:
            process.send_signal(signal.SIGINT)
            _, messages = process.communicate(timeout=20)
        finally:
            os.kill(server.pid, signal.SIGCONT)
    assert process.returncode == 130 and "Traceback" not in messages
    assert "with --resume" in messages
