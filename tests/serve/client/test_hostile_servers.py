"""Servers that lie: whatever they answer, a client raises ServerError, and `query` prints two lines."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from PIL import Image
from tritonclient.grpc import model_config_pb2, service_pb2

from ncd_serve import Client
from ncd_serve.errors import NcdError, ServerError
from tests.conftest import Ncd

SIDE, CLUSTERS = 4, 3
CONFIG: dict[str, Any] = {
    "name": "ncd_global",
    "max_batch_size": 8,
    "input": [{"name": "image", "data_type": "TYPE_UINT8", "dims": [SIDE, SIDE, 3]}],
    "output": [{"name": "probabilities", "data_type": "TYPE_FP32", "dims": [CLUSTERS]}],
    "parameters": {"ncd_preprocess": {"string_value": json.dumps({"resolution": SIDE, "resize": SIDE})}},
}
NAMES = [f"0.3:{number}:name {number}" for number in range(CLUSTERS)]


def output(data: Any, datatype: str = "BYTES", shape: Any = None, name: str = "probabilities") -> bytes:
    entry = {"name": name, "datatype": datatype, "shape": shape or [1, len(data)], "data": data}
    return json.dumps({"outputs": [entry]}).encode()


def changed(**more: Any) -> bytes:
    return json.dumps({**CONFIG, **more}).encode()


def preprocessing(value: str) -> bytes:
    return changed(parameters={"ncd_preprocess": {"string_value": value}})


GOOD_CONFIG, GOOD_NAMES = changed(), output(NAMES)
CONFIGS = {
    "no JSON": b"hello",
    "a list": b"[]",
    "a number": b"1",
    "a string inside": b'{"config": "x"}',
    "deep": b"[" * 100_000,
    "no objects": changed(input=[1], output="x"),
    "no names": changed(input=[{}]),
    "no sizes": changed(output=[{"name": "probabilities", "data_type": "TYPE_FP32"}]),
    "sizes of text": changed(output=[{"name": "probabilities", "data_type": "TYPE_FP32", "dims": ["x"]}]),
    "huge": changed(output=[{"name": "probabilities", "data_type": "TYPE_FP32", "dims": [10**12]}]),
    "huge batch": changed(max_batch_size=10**15),
    "batch of text": changed(max_batch_size="many"),
    "batch of nothing": changed(max_batch_size=None),
    "parameters": changed(parameters=[1, 2]),
    "parameter": changed(parameters={"ncd_preprocess": "x"}),
    "preprocessing": preprocessing("x"),
    "no preprocessing": preprocessing("null"),
    "huge images": changed(
        parameters={"ncd_preprocess": {"string_value": json.dumps({"resolution": 10**6, "resize": 10**6})}},
        input=[{"name": "image", "data_type": "TYPE_UINT8", "dims": [10**6, 10**6, 3]}],
    ),
    "infinite": changed(max_batch_size=float("inf")),
}
LABELS = {
    "no JSON": b"hello",
    "nothing": b"{}",
    "no outputs": b'{"outputs": 3}',
    "another output": output(NAMES, name="other"),
    "no index": output(["a", "b", "c"]),
    "index of text": output(["0.1:x:name"]),
    "index beyond": output(["0.1:7000:name"]),
    "numbers": output([0.1, 0.2, 0.3], "FP32"),
    "wrong shape": output(NAMES, shape=[7, 7]),
    "unknown type": output(NAMES, "FP99"),
    "huge shape": output(NAMES, shape=[2**62]),
}
ANSWERS = {
    "NaN": output([float("nan")] * CLUSTERS, "FP32"),
    "too large": output([5.0] * CLUSTERS, "FP32"),
    "negative": output([-1.0, 1.0, 1.0], "FP32"),
    "too many": output([0.1] * 4, "FP32"),
    "whole numbers": output([0, 1, 0], "INT64"),
    "texts": output(["a", "b", "c"]),
    "another one": output([0.1] * CLUSTERS, "FP32", name="other"),
}


@contextmanager
def http_server(config: bytes, *answers: bytes) -> Iterator[str]:
    """A server with these answers to inferences, the last of them for ever."""
    rest = list(answers)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._send(config)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self._send(rest.pop(0) if len(rest) > 1 else rest[0])

        def _send(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()


def use(url: str) -> None:
    with Client(url, timeout=10, patience=0) as client:
        assert client.cluster_names == ["name 0", "name 1", "name 2"]
        client.answer(np.zeros((1, SIDE, SIDE, 3), np.uint8))


def test_an_honest_server_of_this_kind_is_used() -> None:
    with http_server(GOOD_CONFIG, GOOD_NAMES, output([0.2, 0.3, 0.5], "FP32")) as url:
        use(url)


@pytest.mark.parametrize("lie", CONFIGS)
def test_a_configuration_that_is_none_is_an_error(lie: str) -> None:
    with http_server(CONFIGS[lie], GOOD_NAMES) as url, pytest.raises(ServerError) as caught:
        use(url)
    assert caught.value.hint


@pytest.mark.parametrize("lie", LABELS)
def test_labels_that_are_none_are_an_error(lie: str) -> None:
    with http_server(GOOD_CONFIG, LABELS[lie]) as url, pytest.raises(ServerError) as caught:
        use(url)
    assert caught.value.hint


@pytest.mark.parametrize("lie", ANSWERS)
def test_answers_that_are_none_are_an_error(lie: str) -> None:
    with http_server(GOOD_CONFIG, GOOD_NAMES, ANSWERS[lie]) as url, pytest.raises(ServerError) as caught:
        use(url)
    assert caught.value.hint


def test_binary_sizes_that_lie_are_an_error() -> None:
    entry = {"name": "probabilities", "datatype": "FP32", "shape": [1, CLUSTERS], "parameters": {}}
    for size in (7, 10**9, -5):
        entry["parameters"] = {"binary_data_size": size}
        body = json.dumps({"outputs": [entry]}).encode()
        with http_server(GOOD_CONFIG, GOOD_NAMES, body) as url, pytest.raises(NcdError):
            use(url)


@contextmanager
def grpc_server(config: Callable[[], bytes], infer: Callable[[], bytes]) -> Iterator[str]:
    class Handler(grpc.GenericRpcHandler):
        def service(self, call: Any) -> Any:
            answer = config if call.method.endswith("ModelConfig") else infer
            return grpc.unary_unary_rpc_method_handler(lambda *_: answer())

    server = grpc.server(futures.ThreadPoolExecutor(2), handlers=[Handler()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"grpc://127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def served_config() -> bytes:
    config = model_config_pb2.ModelConfig(name="ncd_global", max_batch_size=8)
    config.input.add(name="image", data_type=model_config_pb2.TYPE_UINT8, dims=[SIDE, SIDE, 3])
    config.output.add(name="probabilities", data_type=model_config_pb2.TYPE_FP32, dims=[CLUSTERS])
    text = json.dumps({"resolution": SIDE, "resize": SIDE})
    config.parameters["ncd_preprocess"].string_value = text
    return service_pb2.ModelConfigResponse(config=config).SerializeToString()


def answer(raw: bytes, datatype: str, shape: list[int]) -> bytes:
    response = service_pb2.ModelInferResponse(raw_output_contents=[raw])
    response.outputs.add(name="probabilities", datatype=datatype, shape=shape)
    return response.SerializeToString()


@pytest.mark.parametrize(
    ("config", "infer"),
    [
        (lambda: b"\xff" * 50, bytes),
        (bytes, bytes),
        (served_config, lambda: b"\xff" * 50),
        (served_config, bytes),
        (served_config, lambda: answer(b"\xff\xff\xff\xff", "BYTES", [1, 3])),
        (served_config, lambda: answer(bytes(5), "FP32", [1, 3])),
        (served_config, lambda: answer(bytes(12), "FP32", [2**62])),
        (served_config, lambda: answer(bytes(12), "FP99", [1, 3])),
    ],
)
def test_grpc_servers_that_lie_are_an_error(config: Callable[[], bytes], infer: Callable[[], bytes]) -> None:
    with grpc_server(config, infer) as url, pytest.raises(ServerError) as caught:
        use(url)
    assert caught.value.hint


def test_query_prints_two_lines(ncd: Ncd, tmp_path: Path) -> None:
    image = tmp_path / "x.png"
    Image.new("RGB", (8, 8)).save(image)
    with http_server(CONFIGS["no names"], GOOD_NAMES) as url:
        done = ncd("query", image, "--url", url)
        assert done.returncode == 5 and "Traceback" not in done.stderr
        assert "error: " in done.stderr and "hint: " in done.stderr
        checked = ncd("doctor", "--url", url)
        assert checked.returncode == 5 and "Traceback" not in checked.stderr
