"""The whole road: a trained and exported run, served by a real Triton, asked through the command line."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ncd_serve.bundle import Bundle
from ncd_serve.client.client import Client
from ncd_serve.errors import ServerError
from ncd_serve.inputs.images import find_images
from ncd_serve.preprocess import load_array
from ncd_serve.runners import open_session
from ncd_serve.triton import TritonServer

pytestmark = pytest.mark.triton


@pytest.fixture(scope="module")
def pictures(glyphs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The held-out images, and a file that is not one."""
    folder = tmp_path_factory.mktemp("pictures")
    for path in (glyphs / "test").rglob("*.png"):
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "broken.jpg").write_bytes(b"no")
    return folder


def test_every_row_from_triton_is_onnx_runtime_s_own_answer(
    server: TritonServer, bundle: Path, pictures: Path, ncd: Any, tmp_path: Path
) -> None:
    target = tmp_path / "rows.jsonl"
    done = ncd("query", pictures, "--url", f"grpc://{server.grpc_url}", "--out", target, "--top-k", 5)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    paths = find_images([pictures])
    assert [row["path"] for row in rows] == [str(path) for path in paths]
    loaded = Bundle.read(bundle)
    session = open_session(loaded.model_path)
    for path, row in zip(paths, rows, strict=True):
        if path.name == "broken.jpg":
            assert (row["status"], row["error"]) == ("error", "not an image of a known format")
            continue
        image = load_array(path, loaded.manifest.preprocess)[None]
        (probabilities,), (cluster_id,) = session.run(["probabilities", "cluster_id"], {"image": image})
        assert row["cluster_id"] == cluster_id
        assert row["cluster_name"] == f"cluster-{cluster_id}"
        served = {candidate["cluster_id"]: candidate["probability"] for candidate in row["top_k"]}
        np.testing.assert_allclose([served[i] for i in range(5)], probabilities, atol=1e-6)


def test_one_batch_is_answered_bit_for_bit(server: TritonServer, bundle: Path, glyphs: Path) -> None:
    loaded = Bundle.read(bundle)
    spec = loaded.manifest.preprocess
    images = np.stack([load_array(path, spec) for path in find_images([glyphs / "test"])[:32]])
    (direct,) = open_session(loaded.model_path, threads=os.cpu_count() or 1).run(["probabilities"], {"image": images})
    assert np.array_equal(Client(server.grpc_url).answer(images).probabilities, direct)


def test_assign_gives_the_same_rows(
    server: TritonServer, bundle: Path, pictures: Path, ncd: Any, tmp_path: Path
) -> None:
    queried = ncd("query", pictures, "--url", f"grpc://{server.grpc_url}")
    assigned = ncd("assign", pictures, "--bundle", bundle)
    rows = [list(csv.DictReader(done.stdout.splitlines())) for done in (queried, assigned)]
    assert [(row["path"], row["cluster_id"], row["status"]) for row in rows[0]] == [
        (row["path"], row["cluster_id"], row["status"]) for row in rows[1]
    ]


def test_a_model_that_is_not_there(server: TritonServer) -> None:
    with pytest.raises(ServerError, match="nothing"):
        Client(server.grpc_url, model="nothing")


def test_doctor_sees_all_of_it(server: TritonServer, bundle: Path, repository: Path, ncd: Any) -> None:
    done = ncd("doctor", "--json", "--bundle", bundle, "--repository", repository, "--url", f"grpc://{server.grpc_url}")
    assert done.returncode == 0, done.stdout
    checks = {(check["group"].split()[0], check["what"]): check for check in json.loads(done.stdout)}
    for place in (("bundle", "test image"), ("repository", "ncd_global"), ("server", "test image")):
        assert checks[place]["verdict"] == "ok" and "5 probabilities out, which sum to 1" in checks[place]["found"]
    assert checks["bundle", "reference"]["verdict"] == "ok"


def test_an_interrupted_demo_ends_at_once(server: TritonServer, tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    command = [sys.executable, "-m", "ncd_serve", "demo", "--out", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 120
        while not (folder / "run" / "config.toml").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        output, messages = process.communicate(timeout=60)
    assert process.returncode == 130, messages
    assert "evaluate" not in output and "Traceback" not in messages
    assert not list(folder.rglob(".*")), "no half-written file"


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_serve_stops_when_told_and_leaves_nothing(server: TritonServer, repository: Path, sent: signal.Signals) -> None:
    command = [sys.executable, "-m", "ncd_serve", "serve", "--repository", str(repository)]
    ports = ["--grpc-port", "0", "--http-port", "0", "--metrics-port", "0"]
    with subprocess.Popen([*command, *ports], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "Triton is ready" in process.stdout.readline()
        children = _descendants(process.pid)
        process.send_signal(sent)
        _, messages = process.communicate(timeout=60)
    assert process.returncode == 128 + sent, messages
    assert "Traceback" not in messages
    assert children
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in children) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]


def _descendants(pid: int) -> list[int]:
    children = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return children + [deeper for child in children for deeper in _descendants(child)]


def test_a_demo_on_own_images_looks_for_them_before_it_starts(server: TritonServer, ncd: Any, tmp_path: Path) -> None:
    done = ncd("demo", "--images", tmp_path / "known", tmp_path / "pile", "--out", tmp_path / "demo")
    assert done.returncode == 3 and "no such file or folder" in done.stderr, done.stderr
    assert list(tmp_path.iterdir()) == []
