"""Something that answers batches of images: ONNX Runtime here, a Triton server in `client.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from ncd_serve.bundle import Bundle
    from ncd_serve.preprocess import PreprocessSpec


class Runner(Protocol):
    """A model, wherever it runs, with what is needed to ask it."""

    preprocess: PreprocessSpec
    cluster_names: list[str]
    max_batch: int

    def probabilities(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Images uint8 [N, H, W, 3] to cluster probabilities [N, C]."""
        ...


def open_session(model: Path, *, threads: int = 0) -> Session:
    """An ONNX Runtime session on the CPU; 0 threads means one for each core."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    session: Session = ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    return session


class Session(Protocol):
    """The part of onnxruntime.InferenceSession that we use."""

    def run(self, names: list[str], feeds: dict[str, NDArray[np.uint8]]) -> list[NDArray[np.generic]]:
        """Outputs by name for the given inputs."""
        ...


class OnnxRunner:
    """A bundle's model in this process."""

    max_batch = 64

    def __init__(self, bundle: Bundle) -> None:
        self.preprocess = bundle.manifest.preprocess
        self.cluster_names = bundle.manifest.cluster_names
        self._session = open_session(bundle.model_path)

    def probabilities(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Images uint8 [N, H, W, 3] to cluster probabilities [N, C]."""
        (answer,) = self._session.run(["probabilities"], {"image": images})
        return answer.astype(np.float32, copy=False)
