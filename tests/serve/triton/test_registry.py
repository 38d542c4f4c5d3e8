"""The list of running servers: it survives killed processes, reused ids and other users."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ncd_serve.errors import ServerError
from ncd_serve.triton.registry import RunningServer, birth_of, running_servers

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "ncd-serve"


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", STUBBORN.replace("SIG_IGN", "SIG_DFL")]) as process:
        yield process
        process.kill()


def record(pid: int, born: int, since: float = 0.0) -> RunningServer:
    urls = {"grpc_url": "127.0.0.1:1", "http_url": "127.0.0.1:1", "metrics_url": "http://127.0.0.1:1/metrics"}
    return RunningServer(pid=pid, born=born, since=since, repository=Path("/models"), log=None, headers={}, **urls)


def write(folder: Path, *servers: RunningServer) -> None:
    folder.mkdir(mode=0o700, exist_ok=True)
    for number, server in enumerate(servers):
        (folder / f"{number}.json").write_text(server.model_dump_json())


def test_only_what_still_runs_is_listed(folder: Path, process: subprocess.Popen[bytes]) -> None:
    born = birth_of(process.pid)
    assert born is not None
    alive = record(process.pid, born)
    write(folder, alive, record(process.pid, born + 1), record(2**22 - 1, born))
    (folder / "other.json").write_text('{"of": "another version"}')
    assert running_servers() == [alive]
    assert sorted(path.name for path in folder.iterdir()) == ["0.json", "other.json"]


def test_a_server_is_stopped(folder: Path, process: subprocess.Popen[bytes]) -> None:
    server = record(process.pid, birth_of(process.pid) or 0)
    server.stop(timeout=10)
    assert process.wait() == -15
    server.stop(timeout=10)
    assert server.trouble() is not None


def test_another_process_with_its_id_is_left_alone(process: subprocess.Popen[bytes]) -> None:
    record(process.pid, 1).stop(timeout=1)
    assert process.poll() is None


def test_one_that_does_not_end_is_told_with_what_to_do() -> None:
    with subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(ServerError, match=r"has not ended in 0\.2 s") as caught:
            record(process.pid, birth_of(process.pid) or 0).stop(timeout=0.2)
        process.kill()
    assert f"kill -KILL {process.pid}" in (caught.value.hint or "")


def test_a_folder_that_others_can_write_to_is_refused(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    folder.chmod(0o777)
    with pytest.raises(ServerError, match="may be used by others"):
        running_servers()
