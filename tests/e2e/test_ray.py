"""Bulk assignment on a real Ray with two workers: the plain engine's rows, whatever dies on the way."""

from __future__ import annotations

import json
import os
import pickle
import secrets
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ncd_serve.errors import DataError

if not find_spec("ray") and "CI" not in os.environ:
    pytest.skip("Ray is not installed: pip install 'ncd-serve[ray]'", allow_module_level=True)

from ncd_serve.bulk.parts import Order

START = """
import sys, ray
ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""
WITHOUT_RAY = """
import sys
sys.modules["ray"] = None
from ncd_serve.cli.app import main
main()
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[int]:
    """A Ray that the commands of this module find by RAY_ADDRESS; the process that it hangs on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        command = [sys.executable, "-c", START]
        quiet = {"stderr": subprocess.DEVNULL, "text": True}
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **quiet) as head:  # type: ignore[call-overload]
            patch.setenv("RAY_ADDRESS", head.stdout.readline().strip())
            yield head.pid
            head.stdin.close()


@pytest.fixture(scope="module")
def photos(glyphs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten images, and a folder beside them for shards."""
    folder = tmp_path_factory.mktemp("bulk") / "photos"
    folder.mkdir()
    for image in sorted((glyphs / "test").rglob("*.png"))[:10]:
        shutil.copy(image, folder)
    return folder


def tar(path: Path, images: list[Path]) -> Path:
    with tarfile.open(path, "w") as archive:
        for image in images:
            archive.add(image, image.name)
    return path


@pytest.fixture(scope="module")
def words(photos: Path) -> list[Path]:
    """The images as a folder, by name in a table, as bytes in a table, and in a tar; then what is wrong or damaged."""
    images, beside = sorted(photos.iterdir()), photos.parent
    names = list(map(str, images))
    pq.write_table(pa.table({"path": [*names, "/dead/link.png"]}), beside / "names.parquet")
    held = pa.table({"path": names, "bytes": [image.read_bytes() for image in images]})
    pq.write_table(held, beside / "held.parquet", row_group_size=6)
    whole = tar(beside / "whole.tar", images)
    (beside / "cut.tar").write_bytes(whole.read_bytes()[:5000])
    (beside / "cut.parquet").write_bytes((beside / "held.parquet").read_bytes()[:-100])
    return [
        photos,
        *(beside / name for name in ("names.parquet", "held.parquet", "whole.tar", "cut.tar", "cut.parquet")),
    ]


def rows_in(source: Path) -> list[dict[str, Any]]:
    return pq.read_table(source).to_pylist()


def assert_same(rows: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Equal but for the last digits of numbers: the same images came in other batches."""
    for row, wanted in zip(rows, expected, strict=True):
        for name, value in wanted.items():
            if name == "top_k":
                assert_same(row[name], value)
            else:
                assert row[name] == (pytest.approx(value, abs=1e-5) if isinstance(value, float) else value), row["path"]


@pytest.fixture(scope="module")
def plain(ncd: Any, bundle: Path, words: list[Path]) -> list[dict[str, Any]]:
    """The plain engine's rows of the folder and of the whole tar."""
    target = words[0].parent / "plain.parquet"
    done = ncd("assign", words[0], words[3], "--bundle", bundle, "--out", target)
    assert done.returncode == 0, done.stderr
    return rows_in(target)


@pytest.fixture(scope="module")
def out(cluster: int, ncd: Any, bundle: Path, words: list[Path]) -> Path:
    """What one command made of all the words."""
    folder = words[0].parent / "out"
    done = ncd("assign", *words, "--bundle", bundle, "--engine", "ray", "--block", 4, "--out", folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert lines == ["blocks: 11, workers: 2 (cpu)", f"11 parts in {folder} (41 ok, 3 error)"]
    return folder


def test_rows_are_those_of_the_plain_engine(out: Path, words: list[Path], plain: list[dict[str, Any]]) -> None:
    rows, (files, members) = rows_in(out), (plain[:10], plain[10:])
    assert_same(rows[:10], files)
    assert_same(rows[10:20], files)
    assert_same(rows[21:31], files)
    assert_same(rows[31:41], members)
    assert pq.read_schema(out / "part-0000000.parquet").equals(pq.read_schema(words[0].parent / "plain.parquet"))


def test_what_is_damaged_costs_its_own_rows_alone(out: Path, words: list[Path]) -> None:
    bad = {row["path"]: row["error"] for row in rows_in(out) if row["status"] == "error"}
    assert list(bad) == ["/dead/link.png", str(words[4]), str(words[5])]
    assert bad["/dead/link.png"] == "cannot be read: No such file or directory"
    assert all("nothing more can be read" in bad[str(path)] for path in words[4:])


def test_only_what_is_missing_is_done_again(
    out: Path, ncd: Any, bundle: Path, words: list[Path], tmp_path: Path
) -> None:
    rows = rows_in(out)
    folder = shutil.copytree(out, tmp_path / "out")
    for number in (2, 6):
        (folder / f"part-{number:07}.parquet").unlink()
    written = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    again = ("assign", *words, "--engine", "ray", "--block", 4, "--out", folder)
    renamed = shutil.copytree(bundle, tmp_path / "bundle")
    manifest = json.loads((renamed / "bundle.json").read_text())
    (renamed / "bundle.json").write_text(json.dumps({**manifest, "bundle_id": "of another run"}))
    for extra, code, text in (
        (("--bundle", bundle), 2, "holds rows of an earlier run"),
        (("--bundle", renamed, "--resume"), 3, "not of another run"),
    ):
        refused = ncd(*again, *extra)
        assert refused.returncode == code and text in refused.stderr and "Traceback" not in refused.stderr
    done = ncd(*again, "--bundle", bundle, "--resume")
    assert done.returncode == 0 and "blocks: 2, workers: 2" in done.stderr, done.stderr
    assert "11 parts" in done.stderr and "9 parts from before" in done.stderr
    assert rows_in(folder) == rows
    assert {name: (folder / name).stat().st_mtime_ns for name in written} == written
    assert "is already complete" in ncd(*again, "--bundle", bundle, "--resume").stderr


def workers_below(pid: int) -> list[int]:
    """The processes that hold a model, of the Ray that hangs on a process."""
    names = {
        entry: (entry / "cmdline").read_bytes()
        for entry in Path("/proc").glob("[0-9]*")
        if (entry / "cmdline").exists()
    }
    return [
        int(entry.name) for entry, name in names.items() if b"MapWorker" in name and pid in ancestors(int(entry.name))
    ]


def ancestors(pid: int) -> Iterator[int]:
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        yield pid


class Stuck(BaseHTTPRequestHandler):
    """Serves a tar, but who asks first waits for ever."""

    content = b""
    asked = threading.Event()
    killed = threading.Event()

    def do_GET(self) -> None:
        self.asked.set()
        self.killed.wait(120)
        start, end = 0, len(self.content)
        if wanted := self.headers.get("Range"):
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, end = int(first), min(int(last) + 1, end) if last else end
        self.send_response(206 if wanted else 200)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(end - start))
        self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(self.content)}")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(self.content[start:end])

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def stuck(words: list[Path]) -> Iterator[str]:
    Stuck.content = words[3].read_bytes()
    with ThreadingHTTPServer(("127.0.0.1", 0), Stuck) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,)).start()
        yield f"http://127.0.0.1:{server.server_port}/whole.tar"
        Stuck.killed.set()
        server.shutdown()


def test_a_killed_worker_loses_no_row(
    cluster: int, stuck: str, bundle: Path, words: list[Path], plain: list[dict[str, Any]], tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    command = [sys.executable, "-m", "ncd_serve", "assign", words[0], stuck, "--bundle", bundle, "--out", folder]
    options = ["--engine", "ray", "--block", "4", "--workers", "1", "--allow-urls"]
    with subprocess.Popen(
        [*map(str, command), *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        assert Stuck.asked.wait(120), "the last block is never begun"
        (worker,) = workers_below(cluster)
        before = {path.name: path.stat().st_mtime_ns for path in folder.glob("part-*")}
        os.kill(worker, signal.SIGKILL)
        time.sleep(0.1)  # or the dead one's request would be answered
        Stuck.killed.set()
        printed, said = running.communicate(timeout=120)
    assert running.returncode == 0, said
    assert printed == "", "what Ray has to say of its dead"
    assert "4 parts" in said and "20 ok" in said
    rows, shard = rows_in(folder), str(words[3])
    assert_same(rows[:10], plain[:10])
    assert_same(rows[10:], [{**row, "path": row["path"].replace(shard, stuck)} for row in plain[10:]])
    assert len(before) == 3, "the parts of the blocks before are there when the worker dies"
    assert before.items() <= {path.name: path.stat().st_mtime_ns for path in folder.glob("part-*")}.items()
    assert len(list(folder.iterdir())) == 5, "four parts and the plan, nothing that the dead one had begun"


def test_a_worker_that_cannot_begin_says_why(tmp_path: Path) -> None:
    from ncd_serve.bulk.ray_engine import Worker
    from ncd_serve.runners import Device

    order = Order("b", "c", ["x"], top_k=3, min_confidence=0.0, block=2, allow_urls=False)
    worker = Worker({"bundle.json": b"{"}, order, str(Path.cwd()), str(tmp_path), Device.CPU, None)
    (answer,) = worker(pa.table({"number": [0]})).to_pylist()
    with pytest.raises(DataError, match=r"a worker on .*bundle") as told:
        raise pickle.loads(answer["failure"])
    assert told.value.hint and list(tmp_path.iterdir()) == []


def test_mistakes_end_before_any_ray_starts(ncd: Any, bundle: Path, photos: Path, tmp_path: Path) -> None:
    ray = ("assign", photos, "--bundle", bundle, "--engine", "ray")
    for arguments, code, text in (
        (ray, 2, "--engine ray needs an --out"),
        (("assign", photos, "--bundle", bundle, "--workers", 2), 2, "hint: add --engine ray"),
        (("assign", "none", *ray[2:], "--out", tmp_path / "out"), 3, "no such file or folder: none"),
        ((*ray, "--out", photos.parent / "unused", "--ray-address", "127.0.0.1:1"), 5, "no Ray cluster can be used at"),
    ):
        done = ncd(*arguments)
        assert done.returncode == code and text in done.stderr and "Traceback" not in done.stderr
    command = [sys.executable, "-c", WITHOUT_RAY, *map(str, ray), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 6 and "hint: pip install 'ncd-serve[ray]'" in done.stderr
    assert list(tmp_path.iterdir()) == []
