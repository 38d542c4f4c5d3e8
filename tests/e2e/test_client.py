"""The client on a real server: both protocols, threads and asyncio, and arrays that it must not send."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from inspect import signature
from pathlib import Path

import numpy as np
import pytest

from ncd_serve import AsyncClient, Bundle, Client, OnnxRunner, Prediction, assign_images
from ncd_serve.contract import DEFAULT_URL
from ncd_serve.errors import ServerError, UsageError
from ncd_serve.inputs.images import find_images
from ncd_serve.preprocess import load_array
from ncd_serve.runners import Answer
from ncd_serve.triton import TritonServer
from ncd_serve.triton.serve import server_and_model

pytestmark = pytest.mark.triton


@pytest.fixture(params=["grpc", "http"])
def url(request: pytest.FixtureRequest, server: TritonServer) -> str:
    return f"{request.param}://{server.grpc_url if request.param == 'grpc' else server.http_url}"


@pytest.fixture(scope="module")
def folder(glyphs: Path) -> Path:
    return glyphs / "test"


@pytest.fixture(scope="module")
def expected(bundle: Path, folder: Path) -> list[Prediction]:
    return list(assign_images(find_images([folder]), OnnxRunner(Bundle.read(bundle))))


def assert_same(rows: list[Prediction], expected: list[Prediction]) -> None:
    assert [(row.path, row.status, row.cluster_id, row.cluster_name) for row in rows] == [
        (row.path, row.status, row.cluster_id, row.cluster_name) for row in expected
    ]
    np.testing.assert_allclose([row.confidence for row in rows], [row.confidence for row in expected], atol=1e-5)


def test_rows_are_those_of_onnx_runtime(url: str, folder: Path, expected: list[Prediction]) -> None:
    with Client(url) as client:
        assert_same(list(client.assign([folder])), expected)
        rows = client.assign([folder], min_confidence=1.0)
        assert {row.status for row in rows} == {"unsure"}


def test_the_default_server_is_that_of_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where no run was exported, and no server runs
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert signature(Client).parameters["url"].default == DEFAULT_URL == "grpc://127.0.0.1:8001"
    assert server_and_model(None, None)[0] == DEFAULT_URL


def test_asyncio_gives_the_same_rows_and_leaves_the_loop_free(
    url: str, folder: Path, expected: list[Prediction]
) -> None:
    async def run() -> tuple[list[Prediction], int]:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0)
                ticks += 1

        async with await AsyncClient.connect(url) as client:
            ticking = asyncio.create_task(tick())
            rows = [row async for row in client.assign([folder])]
            ticking.cancel()
        return rows, ticks

    rows, ticks = asyncio.run(run())
    assert_same(rows, expected)
    assert ticks > len(rows)


def test_many_images_at_once_are_split_for_the_server(url: str, bundle: Path, folder: Path) -> None:
    runner = OnnxRunner(Bundle.read(bundle))
    images = np.stack([load_array(path, runner.preprocess) for path in find_images([folder])] * 4)

    async def ask_all() -> list[Answer]:
        async with await AsyncClient.connect(url, concurrency=3) as client:
            return await asyncio.gather(*[client.answer(images) for _ in range(5)])

    with Client(url, concurrency=3) as client:
        assert len(images) > client.max_batch
        answers = [client.answer(images), *asyncio.run(ask_all())]
    direct = runner.answer(images)
    for answer in answers:
        np.testing.assert_allclose(answer.probabilities, direct.probabilities, atol=1e-5)
        assert answer.fit is not None and answer.fit.tolist() == direct.fit.tolist()  # type: ignore[union-attr]


def test_arrays_that_break_the_contract_are_never_sent(server: TritonServer) -> None:
    with Client(server.grpc_url) as client:
        side = client.preprocess.resolution
        for wrong in (
            np.zeros((1, side, side, 3), np.float32),
            np.zeros((1, 3, side, side), np.uint8),
            np.zeros((side, side, 3), np.uint8),
            np.zeros((0, side, side, 3), np.uint8),
        ):
            with pytest.raises(UsageError, match=r"takes images uint8 \[N, 32, 32, 3\], not"):
                client.answer(wrong)  # type: ignore[arg-type]


def test_a_model_that_is_not_ours_is_refused(url: str) -> None:
    with pytest.raises(ServerError, match="nothing"):
        Client(url, model="nothing")


def test_a_server_without_tls_is_not_taken_for_one_with_it(server: TritonServer) -> None:
    for url in (f"grpcs://{server.grpc_url}", f"https://{server.http_url}"):
        with pytest.raises(ServerError, match="no Triton server answers") as refused:
            Client(url)
        assert "certificate" in str(refused.value.hint)


@pytest.mark.parametrize("url", ["ftp://h:1", "h", "grpc://h", "grpc://h:port", ""])
def test_addresses_that_cannot_be_one(url: str) -> None:
    with pytest.raises(UsageError, match="is not a server address"):
        Client(url)


@pytest.fixture
def deaf() -> Iterator[str]:
    """Takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_server_that_never_answers_is_given_up(deaf: str, protocol: str) -> None:
    with pytest.raises(ServerError, match=r"did not answer within 0\.3 s|no Triton server answers"):
        Client(f"{protocol}://{deaf}", timeout=0.3)


def test_something_else_answers(tmp_path: Path) -> None:
    """A web server that is no Triton."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello")

        speaking = threading.Thread(target=answer)
        speaking.start()
        with pytest.raises(ServerError, match="model 'ncd_global' on"):
            Client(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=5)
        speaking.join()


def test_closing_gives_up_what_is_asked(server: TritonServer) -> None:
    client = Client(server.grpc_url, patience=600)
    side = client.preprocess.resolution
    asked = [client.submit(np.zeros((64, side, side, 3), np.uint8)) for _ in range(50)]
    client.close()
    deadline = time.monotonic() + 20
    while not all(future.done() for future in asked):
        assert time.monotonic() < deadline
        time.sleep(0.01)
