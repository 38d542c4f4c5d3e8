"""The gate before Triton's HTTP server: attacks that end a Triton do not reach it, everything else does."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as grpc

from ncd_serve import Client
from ncd_serve.contract import TOKEN_VARIABLE, checked_token
from ncd_serve.errors import ServerError, UsageError
from ncd_serve.triton import TritonServer, gate
from ncd_serve.triton.gate import CHUNKS, DIMENSIONS, HEAD_BYTES, Head, RefusalError, check_claims, read_head
from ncd_serve.triton.probe import _UnixConnection
from ncd_serve.triton.serve import exposure
from tests.serve.small_models import (
    CONFIG,
    READY_SECONDS,
    SPEC,
    make_classifier,
    needs_triton,
    random_images,
    tensor,
    wait_until,
)

INFER = "/v2/models/birds/infer"
TOKEN = "a-token.of_20~chars+"


def claim(*shapes: Any, **more: Any) -> bytes:
    inputs = [{"name": "image", "datatype": "UINT8", "shape": shape, "data": [1] * 48} for shape in shapes]
    return json.dumps({"inputs": inputs, **more}).encode()


GOOD = claim([1, 4, 4, 3])


@pytest.mark.parametrize(
    "body",
    [
        claim([9223372036854775807]),
        claim([2**30]),
        claim([2**16, 2**16]),
        claim([1, -1]),
        claim([1.0]),
        claim([True]),
        claim(["1"]),
        claim([1e30]),
        claim(7),
        claim([1] * (DIMENSIONS + 1)),
        claim([200], [200], [200], [200], [500]),
        b'{"inputs": [{"shape": [1099511627776]}], "inputs": []}',
        b'{"inputs": [{"sh\\u0061pe": [1099511627776]}]}',
        b'{"inputs": [' + b"[" * 100_000,
        GOOD.decode().encode("utf-16"),
        b"\xff",
        b"[]",
        b"{}",
        b'{"inputs": 1}',
        b'{"inputs": [[]]}',
    ],
)
def test_claims_that_the_body_cannot_hold_are_refused(body: bytes) -> None:
    with pytest.raises(RefusalError) as caught:
        check_claims(Head("POST", INFER, {}), body)
    assert caught.value.status == 400


def test_good_claims_pass() -> None:
    check_claims(Head("POST", INFER, {}), GOOD)
    check_claims(Head("POST", INFER, {}), claim([0, 4, 4, 3], []))
    header = b'{"inputs": [{"shape": [1, 4, 4, 3]}]}'
    check_claims(Head("POST", INFER, {"inference-header-content-length": str(len(header))}), header + bytes(48))
    check_claims(Head("POST", INFER, {"inference-header-content-length": "0"}), b"\xff\xd8 a JPEG")


@pytest.mark.parametrize("length", ["-1", "1e3", "9" * 30, "", "1000", "0x1"])
def test_a_json_length_that_does_not_fit_is_refused(length: str) -> None:
    with pytest.raises(RefusalError):
        check_claims(Head("POST", INFER, {"inference-header-content-length": length}), GOOD)


def parse(text: bytes) -> Head | None:
    async def read() -> Head | None:
        reader = asyncio.StreamReader(limit=HEAD_BYTES)
        reader.feed_data(text)
        reader.feed_eof()
        return await read_head(reader)

    return asyncio.run(read())


def test_a_head_is_read() -> None:
    assert parse(b"") is None
    head = parse(b"POST /v2/x?a=b HTTP/1.1\r\nHost: h\r\nX-Y:  1\t\r\nx-y: 2\r\n\r\n")
    assert head == ("POST", "/v2/x", {"host": "h", "x-y": "1, 2"}) and head.stays
    old = parse(b"GET / HTTP/1.0\r\n\r\n")
    assert old is not None and not old.stays


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (b"GET /\r\n\r\n", 400),
        (b"GET / HTTP/2\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nno colon\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nA: b\r\n folded\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nA: b\nC: d\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nA: \x00\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nContent-Length : 3\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nContent-Length: 3\r\ncontent-length: 4\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nA: " + b"x" * 3 * HEAD_BYTES + b"\r\n\r\n", 431),
    ],
)
def test_a_malformed_head_is_refused(text: bytes, status: int) -> None:
    with pytest.raises(RefusalError) as caught:
        parse(text)
    assert caught.value.status == status


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    folder = tmp_path_factory.mktemp("models")
    make_classifier(folder / "birds")
    with TritonServer(folder) as server:
        server.wait_ready(READY_SECONDS)
        yield server


def ask(address: str, body: bytes = b"", *, path: str = INFER, method: str = "POST", **headers: str) -> tuple[int, Any]:
    with closing(HTTPConnection(address, timeout=60)) as connection:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, named)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read() or b"{}")


def send(address: str, *parts: bytes) -> int:
    """The status of the answer to bytes that no library would send."""
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), timeout=60) as stream:
        for part in parts:
            stream.sendall(part)
        return int(stream.makefile("rb").readline().split()[1])


def chunked(body: bytes, size: int) -> bytes:
    parts = [body[start : start + size] for start in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


CHUNKED = f"POST {INFER} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
LENGTH = f"POST {INFER} HTTP/1.1\r\nHost: x\r\nContent-Length: ".encode()


@pytest.mark.triton
@needs_triton
def test_what_ends_a_triton_does_not_reach_it(server: TritonServer) -> None:
    pid = server.pid
    assert ask(server.http_url, claim([9223372036854775807]))[0] == 400
    assert send(server.http_url, CHUNKED, b"1\r\n1\r\n" * 700_000, b"0\r\n\r\n") == 413
    header = claim([9223372036854775807])
    length = {"Inference_Header_Content_Length": str(len(header))}
    assert ask(server.http_url, header + bytes(48), **length)[0] == 400
    assert send(server.http_url, CHUNKED, chunked(b"x" * (CHUNKS + 1), 1)) == 413
    assert ask(server.http_url, GOOD)[0] == 200
    assert server.is_running() and server.pid == pid and server.probe.unanswered() is None


@pytest.mark.triton
@needs_triton
@pytest.mark.parametrize(
    ("status", "text"),
    [
        (200, CHUNKED + chunked(GOOD, 7)),
        (200, CHUNKED.replace(b"chunked", b"Chunked") + chunked(GOOD, 1 << 20)),
        (200, LENGTH + str(len(GOOD)).encode() + b"\r\nExpect: 100-continue\r\n\r\n" + GOOD),
        (413, LENGTH + b"9999999999999\r\n\r\n"),
        (400, LENGTH + b"-1\r\n\r\n"),
        (400, LENGTH + b"+5\r\n\r\n"),
        (400, LENGTH + b"5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
        (400, CHUNKED.replace(b"chunked", b"gzip, chunked") + b"0\r\n\r\n"),
        (415, LENGTH + b"5\r\nContent-Encoding: gzip\r\n\r\nxxxxx"),
        (400, CHUNKED + b"-1\r\n"),
        (400, CHUNKED + b"5;" + b"x" * 3 * HEAD_BYTES),
        (400, CHUNKED + b"1\r\nxyz"),
        (400, CHUNKED + b"0\r\nTrailer: 1\r\n\r\n"),
        (403, b"DELETE /v2 HTTP/1.1\r\n\r\n"),
        (403, b"GET /v2/logging HTTP/1.1\r\n\r\n"),
        (403, b"GET /v2/%6cogging HTTP/1.1\r\n\r\n"),
        (403, b"GET /v2/models/../logging HTTP/1.1\r\n\r\n"),
        (403, b"GET //v2/logging HTTP/1.1\r\n\r\n"),
        (403, b"GET http://x/v2/logging HTTP/1.1\r\n\r\n"),
    ],
)
def test_only_plain_requests_pass(server: TritonServer, status: int, text: bytes) -> None:
    found = send(server.http_url, text)
    assert found == (100 if b"100-continue" in text else status)


@pytest.mark.triton
@needs_triton
def test_administration_is_closed_on_both_protocols(server: TritonServer) -> None:
    paths = [
        "/v2/logging",
        "/v2/trace/setting",
        "/v2/models/birds/trace/setting",
        "/v2/systemsharedmemory/status",
        "/v2/cudasharedmemory/region/x/register",
        "/v2/repository/models/birds/unload",
        "/v2/repository/models/birds/load",
    ]
    for path in paths:
        assert ask(server.http_url, path=path)[0] == 403, path
        assert ask(server.http_url, path=path, ncd_serve_key="guessed")[0] == 403, path
    assert ask(server.http_url, path="/v2/logging", method="GET", **server.headers)[0] == 200
    with grpc.InferenceServerClient(server.grpc_url) as client:
        for closed in (
            client.get_log_settings,
            client.get_trace_settings,
            client.get_system_shared_memory_status,
            lambda: client.register_system_shared_memory("a", "/a", 1),
            lambda: client.unload_model("birds"),
            lambda: client.load_model("birds"),
        ):
            with pytest.raises(Exception, match=r"restricted|not allowed"):
                closed()
        assert client.infer("birds", [tensor("image", random_images(1))])


@pytest.mark.triton
@needs_triton
def test_shared_memory_and_sockets_are_of_this_user_alone(server: TritonServer) -> None:
    regions = list(Path("/dev/shm").glob(f"ncd-{os.getpid()}-*"))
    assert regions and not any(region.stat().st_mode & 0o077 for region in regions)
    assert not server._gate.folder.stat().st_mode & 0o077  # type: ignore[union-attr]


@pytest.mark.triton
@needs_triton
def test_requests_wait_while_triton_restarts(tmp_path: Path) -> None:
    make_classifier(tmp_path / "birds")
    with TritonServer(tmp_path) as server:
        server.wait_ready(READY_SECONDS)
        address, answers = server.http_url, list[int]()
        with closing(HTTPConnection(address, timeout=60)) as kept:
            kept.request("POST", INFER, GOOD)
            assert kept.getresponse().read()
            assert server._gate is not None
            with closing(_UnixConnection(server._gate.http[5:], 10)) as direct, pytest.raises(OSError):
                direct.request("POST", INFER, claim([9223372036854775807]))
                direct.getresponse()
            assert wait_until(lambda: not server.is_running(), 10), "behind the gate, the request does what it does"
            waiting = [threading.Thread(target=lambda: answers.append(ask(address, GOOD)[0])) for _ in range(8)]
            for thread in waiting:
                thread.start()
            assert ask(address, path="/v2/health/ready", method="GET")[0] == 503
            server.halt()
            server.start()
            server.wait_ready(READY_SECONDS)
            for thread in waiting:
                thread.join()
            kept.request("POST", INFER, GOOD)
            answers.append(kept.getresponse().status)
        assert server.http_url == address and answers == [200] * 9


@pytest.mark.triton
@needs_triton
def test_a_token_is_asked_for_on_both_protocols(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_classifier(tmp_path / "ncd_global", CONFIG + SPEC)
    with TritonServer(tmp_path, token=TOKEN) as server:
        server.wait_ready(READY_SECONDS)
        assert ask(server.http_url, path="/v2/health/ready", method="GET")[0] == 200
        path = "/v2/models/ncd_global/infer"
        refused = [ask(server.http_url, GOOD, path=path, **given)[0] for given in ({}, {"Authorization": "Bearer x"})]
        assert refused == [401, 401]
        assert ask(server.http_url, GOOD, path=path, Authorization=f"Bearer {TOKEN}")[0] == 200
        for url in (f"grpc://{server.grpc_url}", f"http://{server.http_url}"):
            for wrong in (None, "a-wrong-token"):
                with pytest.raises(ServerError) as caught:
                    Client(url, token=wrong, patience=0)
                assert "--token" in (caught.value.hint or "")
            with Client(url, token=TOKEN) as client:
                assert len(client.answer(random_images(3)).probabilities) == 3
        assert TOKEN_VARIABLE == gate.TOKEN_VARIABLE
        monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
        with Client(server.grpc_url) as client:
            assert len(client.answer(random_images(1)).probabilities) == 1


@pytest.mark.parametrize("token", ["short", "with space", "new\nline", "a=b:c,d;efgh", "é" * 9, "x" * 300])
def test_an_unfit_token_is_refused(token: str) -> None:
    with pytest.raises(UsageError, match="a token has"):
        checked_token(token)


@pytest.mark.parametrize(
    ("host", "token", "tls", "said"),
    [
        ("127.0.0.1", False, False, ()),
        ("localhost", False, False, ()),
        ("0.0.0.0", False, False, ("--token", "TLS")),
        ("10.0.0.1", True, False, ("TLS",)),
        ("gpu-box", False, True, ("--token",)),
        ("0.0.0.0", True, True, ()),
    ],
)
def test_a_server_that_others_reach_is_warned_about(host: str, token: bool, tls: bool, said: tuple[str, ...]) -> None:
    warning = exposure(host, token=token, tls=tls)
    assert bool(warning) == bool(said) and all(word in warning for word in said)
    assert ("--token" in warning) == ("--token" in said) and ("TLS" in warning) == ("TLS" in said)
