"""A Triton model that takes image files as they are: it decodes them and asks the ONNX model beside it.

`add_jpeg_model` copies this file into the repository together with the decoders and the preprocessing that they call,
so that the server needs numpy, pillow and pydantic, but not ncd-serve. Each version's folder also has the bundle.json
of the ONNX model's version of that number, with its preprocessing and its names.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import triton_python_backend_utils as pb_utils

HERE = str(Path(__file__).parent)
sys.path.insert(0, HERE)  # what was exported, not what is installed
try:
    from ncd_serve.triton.jpeg import decoder
except ImportError as error:
    LACKS = f"image files need pillow and pydantic in the Python of the server: {error}"
else:
    LACKS = ""

ATTEMPTS = 5  # a version may be unloaded while it is asked: its successor is ready a moment later
PAUSE_SECONDS = 0.1
BATCH_SECONDS = 10.0  # for all images of a dynamic batch: what is not decoded then is refused
TYPES = {"cluster_id": np.int64, "cluster_name": np.object_, "confidence": np.float32, "json": np.object_}


class _Facts(NamedTuple):
    """Facts about one version of the ONNX model."""

    specification: str  # of the preprocessing, in JSON
    side: int
    names: list[str]


class _Row(NamedTuple):
    """Answer for one image: outputs by name. `json` has all of them in a form for shells."""

    cluster_id: int
    cluster_name: bytes
    confidence: float
    json: bytes


class _GoneError(Exception):
    """Error for a version that is no longer served."""


class _Decoders:
    """Decoders of images (see `decoder.py`), and threads that wait for them."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind("")  # an address without a file
        self._listener.listen()
        self._pool = ThreadPoolExecutor(count)
        self._keeper = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        # The stub embeds the first python3 on PATH, and is none itself.
        python = shutil.which("python3") or sys.executable
        number = self._listener.fileno()
        command = [python, "-m", decoder.__name__, str(number), str(self._count)]
        environment = {**os.environ, "PYTHONPATH": HERE}
        return subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[number], env=environment)

    def decode(self, file: bytes, facts: _Facts) -> Future[Any]:
        """Decode an image to an array, or to the reason why it cannot be."""
        if self._keeper.poll() is not None:
            self._keeper = self._start()
        return self._pool.submit(self._ask, file, facts)

    def _ask(self, file: bytes, facts: _Facts) -> Any:
        answer = decoder.ask(self._listener.getsockname(), facts.specification, file, seconds=BATCH_SECONDS)
        if isinstance(answer, str):
            return answer
        return np.frombuffer(answer, np.uint8).reshape(facts.side, facts.side, 3)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()
        self._keeper.wait()
        self._listener.close()


class TritonPythonModel:
    """Instance of the model; several of them decode in parallel."""

    def initialize(self, args: dict[str, str]) -> None:
        """Start the decoders of images. A server without their libraries still serves the ONNX model."""
        parameters = json.loads(args["model_config"])["parameters"]
        self._asked = parameters["ncd_jpeg_of"]["string_value"]
        self._folder = Path(args["model_repository"])
        self._facts: dict[int, _Facts] = {}
        self._decoders: _Decoders | None = None
        if LACKS:
            pb_utils.Logger.log_error(LACKS)
        else:
            self._learn_versions()
            self._decoders = _Decoders(int(parameters["ncd_decoders"]["string_value"]))

    def finalize(self) -> None:
        """End the decoders."""
        if self._decoders is not None:
            self._decoders.close()

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer the requests of one dynamic batch, in their order."""
        if LACKS:
            return [_refusal(LACKS, pb_utils.TritonError.UNAVAILABLE) for _ in requests]
        try:
            return self._try_versions(requests)
        except Exception as error:  # every waiting client needs a response, for any error
            return [_refusal(str(error), pb_utils.TritonError.INTERNAL) for _ in requests]

    def _try_versions(self, requests: list[Any]) -> list[Any]:
        for _ in range(ATTEMPTS):
            version = self._served_version()
            if version is not None:
                with suppress(_GoneError):
                    return self._answer(requests, version)
            time.sleep(PAUSE_SECONDS)
        reason = f"model '{self._asked}' is not ready"
        return [_refusal(reason, pb_utils.TritonError.UNAVAILABLE) for _ in requests]

    def _served_version(self) -> int | None:
        """Return the newest version that is ready; versions that were exported but not loaded are skipped."""
        self._learn_versions()
        return next(filter(self._is_ready, sorted(self._facts, reverse=True)), None)

    def _is_ready(self, version: int) -> bool:
        return bool(pb_utils.is_model_ready(model_name=self._asked, model_version=str(version)))

    def _answer(self, requests: list[Any], version: int) -> list[Any]:
        facts = self._facts[version]
        decoded = self._decode([_files(request) for request in requests], facts)
        refused = [_refusal_of(request) for request in decoded]
        images = [image for request, no in zip(decoded, refused, strict=True) if no is None for image in request]
        rows = iter(self._ask(np.stack(images), version, facts) if images else ())
        return [
            no or _response(request, [next(rows) for _ in images])
            for request, images, no in zip(requests, decoded, refused, strict=True)
        ]

    def _decode(self, requests: list[list[bytes]], facts: _Facts) -> list[list[Any]]:
        """Return an array or a reason for each image of each request."""
        assert self._decoders is not None
        tasks: list[list[Future[Any]]] = [[] for _ in requests]
        for turn in zip_longest(*requests):  # the first image of each first: nobody waits for all of another's
            for number, file in enumerate(turn):
                if file is not None:
                    tasks[number].append(self._decoders.decode(file, facts))
        give_up = time.monotonic() + BATCH_SECONDS
        return [[_result(task, give_up) for task in request] for request in tasks]

    def _ask(self, images: Any, version: int, facts: _Facts) -> list[_Row]:
        response = pb_utils.InferenceRequest(
            model_name=self._asked,
            model_version=version,
            requested_output_names=["cluster_id", "confidence"],
            inputs=[pb_utils.Tensor("image", images)],
            preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU),
        ).exec()
        if response.has_error():
            # Triton reports an unloaded version as an internal error, like any other error.
            raise RuntimeError(response.error().message()) if self._is_ready(version) else _GoneError
        ids, confidences = (
            pb_utils.get_output_tensor_by_name(response, name).as_numpy().ravel()
            for name in ("cluster_id", "confidence")
        )
        return [
            _row(int(number), facts.names[number], float(sure)) for number, sure in zip(ids, confidences, strict=True)
        ]

    def _learn_versions(self) -> None:
        """Read new versions and keep the known ones: an export may remove the folder of a served version."""
        for entry in self._folder.iterdir():
            if entry.name.isdigit() and int(entry.name) not in self._facts:
                bundle = json.loads((entry / "bundle.json").read_bytes())
                told = bundle["preprocess"]
                self._facts[int(entry.name)] = _Facts(json.dumps(told), told["resolution"], bundle["cluster_names"])


def _files(request: Any) -> list[bytes]:
    return list(pb_utils.get_input_tensor_by_name(request, "image").as_numpy().ravel())


def _result(task: Future[Any], give_up: float) -> Any:
    try:
        return task.result(max(0.0, give_up - time.monotonic()))
    except Exception as error:  # whatever it is: of this image alone
        task.cancel()
        return f"cannot be decoded in time: {error!r}"


def _refusal_of(images: list[Any]) -> Any:
    """Return the error response to a request with an undecodable image, or None."""
    for number, image in enumerate(images):
        if isinstance(image, str):
            where = f"image {number}: " if len(images) > 1 else ""
            return _refusal(where + image, pb_utils.TritonError.INVALID_ARG)
    return None


def _refusal(reason: str, code: Any) -> Any:
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(reason, code))


def _row(number: int, name: str, confidence: float) -> _Row:
    text = json.dumps(
        {"cluster_id": number, "cluster_name": name, "confidence": round(confidence, 6)}, ensure_ascii=False
    )
    return _Row(number, name.encode(), confidence, text.encode())


def _response(request: Any, rows: list[_Row]) -> Any:
    columns = {
        name: np.array([getattr(row, name) for row in rows], TYPES[name]).reshape(-1, 1)
        for name in request.requested_output_names()
    }
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, column) for name, column in columns.items()])
