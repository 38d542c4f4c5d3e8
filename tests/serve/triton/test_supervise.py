"""A server that is kept answering: restarted when a process dies, given new versions while requests run."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc
from PIL import Image

from ncd_serve.triton import Supervisor, TritonServer, Updates, probe, supervise
from tests.serve.small_models import (
    CONFIG,
    LABELS,
    READY_SECONDS,
    directly,
    make_classifier,
    make_export,
    make_slow,
    needs_triton,
    needs_wheel,
    random_images,
    regions,
    stubs,
    tensor,
    wait_until,
)

pytestmark = [pytest.mark.triton, needs_triton]
NEW_LABELS = [f"new {label}" for label in LABELS]
NO_DELAY = CONFIG.replace("preferred_batch_size: [ 8 ] max_queue_delay_microseconds: 100000", "")


class DoneError(Exception):
    """A test has seen enough."""


def answers(server: TritonServer) -> bool:
    with grpc.InferenceServerClient(server.grpc_url) as client:
        return client.infer("birds", [tensor("image", random_images(1))]).as_numpy("cluster_id").shape == (1, 1)


def supervised(
    server: TritonServer, told: list[str], steps: Iterator[Callable[[], Any]], updates: Updates | None = None
) -> None:
    """Watch the server, and do one step every second until all are done."""

    def show() -> None:
        step = next(steps, None)
        if step is None:
            raise DoneError
        step()

    with pytest.raises(DoneError):
        Supervisor(server, start_seconds=READY_SECONDS, tell=told.append).run(updates=updates, show=show)


@pytest.mark.slow
@needs_wheel
def test_one_of_two_dead_processes_is_noticed_and_the_server_comes_back_where_it_was(tmp_path: Path) -> None:
    make_classifier(tmp_path / "birds", CONFIG.replace("count: 1", "count: 2"))
    before, told = regions(), list[str]()
    with TritonServer(tmp_path) as server:
        server.wait_ready(READY_SECONDS)
        url, first = server.grpc_url, server.pid
        assert len(stubs(server, "birds")) == 2, "as many as instances are asked for"
        steps = [lambda: os.kill(stubs(server, "birds")[0], signal.SIGKILL), lambda: None, lambda: None]
        supervised(server, told, iter(steps))
        assert server.pid != first and server.grpc_url == url
        assert answers(server)
    assert told == [
        "model 'birds' has lost 1 of 2 processes: restarting Triton",
        "Triton is ready again",
    ]
    assert regions() <= before


@pytest.mark.slow
@needs_wheel
def test_a_stopped_process_is_replaced_soon(tmp_path: Path) -> None:
    """Within fifteen seconds, or a few starts of the server where the machine is busy."""
    make_export(tmp_path / "models", config=NO_DELAY)
    told, moments = list[str](), list[float]()
    began = time.monotonic()
    with TritonServer(tmp_path / "models") as server:
        server.wait_ready(READY_SECONDS)
        start = time.monotonic() - began

        def stop_stub() -> None:
            os.kill(stubs(server, "birds_jpeg")[0], signal.SIGSTOP)
            moments.append(time.monotonic())

        supervised(server, told, iter([stop_stub, lambda: None, lambda: moments.append(time.monotonic())]))
        assert moments[1] - moments[0] < max(15, 4 * start)
        assert answers(server)
    assert told == [
        "model 'birds_jpeg' has lost 1 of 2 processes: restarting Triton",
        "Triton is ready again",
    ]


@needs_wheel
def test_a_model_that_computes_for_ever_is_noticed_and_one_that_is_busy_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_slow(tmp_path / "slow")
    with TritonServer(tmp_path) as server, grpc.InferenceServerClient(server.grpc_url) as client:
        server.wait_ready(READY_SECONDS)
        monkeypatch.setattr(probe, "ANSWER_SECONDS", 1)
        assert server.probe.hanging(server.pid) is None
        client.async_infer("slow", [tensor("steps", np.array([10**9]))], lambda result, error: None)
        time.sleep(0.5)
        assert server.probe.lost_process(server.pid) is None
        assert server.probe.hanging(server.pid) == "model 'slow' has not answered for 1 s"
        finished = count()
        monkeypatch.setattr(probe.Probe, "_finished", lambda *_: next(finished))
        assert server.probe.hanging(server.pid) is None, "others get answers meanwhile"
        os.kill(server.pid, signal.SIGSTOP)
        assert wait_until(lambda: server.probe.hanging(server.pid) == "Triton has been stopped", 10)
        server.stop(patience=0)


def test_restarts_wait_longer_and_longer_but_are_never_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = Supervisor(TritonServer(tmp_path), start_seconds=1, tell=lambda text: None)
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    assert [supervisor._next_pause() for _ in range(8)] == [0, 1, 2, 4, 8, 16, 32, 60]
    now = supervise.RECENT_SECONDS + 1
    assert supervisor._next_pause() == 0


def test_a_server_that_dies_comes_back(tmp_path: Path) -> None:
    make_classifier(tmp_path / "birds")
    told = list[str]()
    with TritonServer(tmp_path) as server:
        server.wait_ready(READY_SECONDS)
        supervised(server, told, iter([lambda: os.kill(server.pid, signal.SIGKILL)]))
        assert answers(server)
    assert told == ["Triton has ended by itself: restarting Triton", "Triton is ready again"]


class Asking:
    """Requests without a pause to both models, from several threads; every answer and every failure is kept."""

    def __init__(self, server: TritonServer, file: bytes) -> None:
        self.answers: set[tuple[str, str]] = set()
        self.failures: list[Exception] = []
        self._url, self._file, self._over = server.grpc_url, file, threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(ask,)) for ask in (self._pixels, self._png) * 2]

    def __enter__(self) -> Asking:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _run(self, ask: Callable[[grpc.InferenceServerClient], tuple[str, str]]) -> None:
        with grpc.InferenceServerClient(self._url) as client:
            while not self._over.is_set():
                try:
                    self.answers.add(ask(client))
                except Exception as error:
                    self.failures.append(error)

    def _pixels(self, client: grpc.InferenceServerClient) -> tuple[str, str]:
        best = grpc.InferRequestedOutput("probabilities", class_count=1)
        answer = client.infer("birds", [tensor("image", random_images(1))], outputs=[best])
        _score, number, name = answer.as_numpy("probabilities")[0, 0].decode().split(":", 2)
        return number, name

    def _png(self, client: grpc.InferenceServerClient) -> tuple[str, str]:
        image = grpc.InferInput("image", [1, 1], "BYTES")
        image.set_data_from_numpy(np.array([[self._file]], dtype=np.object_))
        answer = client.infer("birds_jpeg", [image])
        return str(answer.as_numpy("cluster_id")[0, 0]), answer.as_numpy("cluster_name")[0, 0].decode()


def best_of(repository: Path, version: int, labels: list[str]) -> tuple[str, str]:
    number = directly(repository / "birds" / str(version) / "model.onnx")(random_images(1))["cluster_id"][0]
    return str(number), labels[number]


@pytest.mark.slow
def test_versions_change_under_load_without_a_lost_or_mixed_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "OVERLAP_SECONDS", 1)
    repository, picture = tmp_path / "models", tmp_path / "picture.png"
    make_export(repository, config=_config(1))
    Image.fromarray(random_images(1)[0]).save(picture)
    told: list[str] = []
    with TritonServer(repository, live_updates=True) as server:
        updates = Updates(repository)
        server.wait_ready(READY_SECONDS)
        steps = iter(
            [
                lambda: make_export(repository, version=2, labels=NEW_LABELS, config=_config(2)),
                *[lambda: None] * 3,
                lambda: _spoil(repository),
                *[lambda: None] * 2,
            ]
        )
        with Asking(server, picture.read_bytes()) as asking:
            supervised(server, told, steps, updates)
        assert server.probe.is_ready(), "a broken update does not take the server out of service"
    assert [str(error) for error in asking.failures] == []
    assert asking.answers == {best_of(repository, 1, LABELS), best_of(repository, 2, NEW_LABELS)}
    assert told[:2] == ["model 'birds': serving version 2", "model 'birds_jpeg': serving version 2"]
    assert told[2].startswith("model 'birds' could not be loaded") and told[2].endswith("serving version 2")
    assert told[3].startswith("model 'owls' could not be loaded") and told[3].endswith("not served")


def _config(version: int) -> str:
    """As of an export, which writes its id into the configuration."""
    return NO_DELAY + f'parameters {{ key: "ncd_bundle" value {{ string_value: "{version}" }} }}'


def _spoil(repository: Path) -> None:
    """A version and a model that cannot be loaded."""
    (repository / "owls").mkdir()
    (repository / "owls" / "config.pbtxt").write_text("no configuration")
    (repository / "birds" / "3").mkdir()
    (repository / "birds" / "3" / "model.onnx").write_bytes(b"not a model")


def test_nobody_else_may_load_models(tmp_path: Path) -> None:
    make_classifier(tmp_path / "birds")
    with TritonServer(tmp_path, live_updates=True) as server:
        server.wait_ready(READY_SECONDS)
        with grpc.InferenceServerClient(server.grpc_url) as client, pytest.raises(Exception, match="restricted"):
            client.unload_model("birds")
        assert answers(server)


def test_a_model_is_due_once_and_only_when_its_files_rest(tmp_path: Path) -> None:
    make_classifier(tmp_path / "birds")
    updates = Updates(tmp_path)
    assert updates.due() == []
    make_classifier(tmp_path / "birds", version=2)
    assert updates.due() == [], "it may still be written"
    assert updates.due() == [tmp_path / "birds"]
    assert updates.due() == []
    (tmp_path / "birds" / "2" / "__pycache__").mkdir()
    assert (updates.due(), updates.due()) == ([], [])
    make_classifier(tmp_path / "owls")
    assert (updates.due(), updates.due()) == ([], [tmp_path / "owls"])
