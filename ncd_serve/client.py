"""A model on a Triton server, asked over gRPC."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError
from tritonclient import grpc
from tritonclient.utils import InferenceServerException

from ncd_serve.errors import ServerError, UsageError
from ncd_serve.preprocess import PreprocessSpec

DEFAULT_MODEL = "ncd_global"
# Parameters of config.pbtxt with this prefix are facts for clients; no backend acts on them.
FACT_PREFIX = "ncd_"
PREPROCESS_FACT = f"{FACT_PREFIX}preprocess"
_START_ONE = "start one with: ncd-serve serve --repository model_repository"


def server_address(url: str) -> str:
    """`grpc://host:port` or `host:port` to `host:port`."""
    scheme, separator, address = url.rpartition("://")
    if (separator and scheme != "grpc") or ":" not in address:
        raise UsageError(f"'{url}' is not a server address", hint="use grpc://HOST:PORT, e.g. grpc://127.0.0.1:8001")
    return address


class Client:
    """Cluster probabilities of images from a Triton server that speaks our contract.

        client = Client("grpc://127.0.0.1:8001")
        client.probabilities(images)  # uint8 [N, H, W, 3]

    Reads the model's shape, batch limit, preprocessing and cluster names from the server when it is made.
    """

    def __init__(self, url: str, *, model: str = DEFAULT_MODEL, timeout: float = 30.0) -> None:
        self._address, self._model, self._timeout = server_address(url), model, timeout
        self._client = grpc.InferenceServerClient(self._address)
        config = self._call(self._client.get_model_config, model, as_json=True)["config"]
        self.preprocess = _preprocess_of(config, self._where)
        self.max_batch = int(config.get("max_batch_size", 1))
        self.cluster_names = self._read_names(config)

    def probabilities(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Images uint8 [N, H, W, 3], at most `max_batch`, to cluster probabilities [N, C]."""
        answer: NDArray[np.float32] = self._infer(images, grpc.InferRequestedOutput("probabilities"))
        return answer

    @property
    def _where(self) -> str:
        return f"model '{self._model}' on {self._address}"

    def _infer(self, images: NDArray[np.uint8], output: Any) -> NDArray[Any]:
        image = grpc.InferInput("image", list(images.shape), "UINT8")
        image.set_data_from_numpy(images)
        result = self._call(self._client.infer, self._model, [image], outputs=[output])
        array: NDArray[Any] = result.as_numpy("probabilities")
        return array

    def _read_names(self, config: dict[str, Any]) -> list[str]:
        """The label of every cluster, through the classification extension: there is no other way to ask for them."""
        (output,) = (entry for entry in config["output"] if entry["name"] == "probabilities")
        clusters = int(output["dims"][0])
        side = self.preprocess.resolution
        blank = np.zeros((1, side, side, 3), np.uint8)
        answer = self._infer(blank, grpc.InferRequestedOutput("probabilities", class_count=clusters))
        names = [str(number) for number in range(clusters)]
        for entry in answer.ravel():
            # score:index:label, where a label may hold colons itself
            _score, index, *label = entry.decode().split(":", 2)
            names[int(index)] = label[0] if label else names[int(index)]
        return names

    def _call(self, method: Any, *arguments: Any, **keywords: Any) -> Any:
        """Ask, and once more after a moment if the server was unavailable; failures become ServerError."""
        for attempt in (1, 2):
            try:
                return method(*arguments, **keywords, client_timeout=self._timeout)
            except InferenceServerException as error:
                if attempt == 2 or "UNAVAILABLE" not in str(error.status()):
                    raise self._failure(error) from None
                time.sleep(0.5)
        raise AssertionError("unreachable")

    def _failure(self, error: InferenceServerException) -> ServerError:
        status, message = str(error.status()), error.message()
        if "UNAVAILABLE" in status:
            return ServerError(f"no Triton server answers at {self._address}", hint=_START_ONE)
        if "DEADLINE" in status:
            return ServerError(
                f"{self._where} did not answer within {self._timeout:g} s", hint="try a longer --timeout"
            )
        return ServerError(f"{self._where}: {message}", hint="ncd-serve doctor --url checks a server")


def _preprocess_of(config: dict[str, Any], where: str) -> PreprocessSpec:
    """The preprocessing that the exporter wrote into the served configuration."""
    inputs = {entry["name"]: entry for entry in config.get("input", [])}
    outputs = {entry["name"] for entry in config.get("output", [])}
    facts = config.get("parameters", {})
    if "image" not in inputs or "probabilities" not in outputs or PREPROCESS_FACT not in facts:
        raise ServerError(f"{where} is not a model that ncd-serve exported", hint="name another with --model")
    try:
        return PreprocessSpec.model_validate_json(facts[PREPROCESS_FACT]["string_value"])
    except ValidationError as error:
        raise ServerError(f"{where} has unreadable preprocessing facts: {error}", hint="export it again") from None
