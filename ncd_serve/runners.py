"""Runners answer batches of images: ONNX Runtime here, a Triton server in `client`."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from ncd_serve.bundle import Bundle
from ncd_serve.contract import OUTPUTS, Output, outputs_in_rows
from ncd_serve.errors import DataError, MissingExtraError, UsageError, did_you_mean
from ncd_serve.fit import FITS
from ncd_serve.onnx_file import check_self_contained
from ncd_serve.text import printable

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ncd_serve.preprocess import PreprocessSpec
    from ncd_serve.progress import Progress


class Device(str, Enum):
    """Device of ONNX Runtime; `auto` is CUDA where it works and the CPU elsewhere."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"
    TENSORRT = "tensorrt"


_CPU, _CUDA, _TENSORRT = "CPUExecutionProvider", "CUDAExecutionProvider", "TensorrtExecutionProvider"
# TensorRT is never chosen unasked: it builds an engine first, which takes minutes.
_PROVIDERS = {
    Device.AUTO: [_CUDA, _CPU],
    Device.CPU: [_CPU],
    Device.CUDA: [_CUDA, _CPU],
    Device.TENSORRT: [_TENSORRT, _CUDA, _CPU],
}
_LOG_WARNINGS, _LOG_FATAL = 2, 4
_EXPORT_AGAIN = "export the run again: ncd-serve export RUN"


class Answer(NamedTuple):
    """Outputs of a model for a batch of images: those of `contract.OUTPUTS` that rows contain, by name."""

    probabilities: NDArray[np.float32]  # of the clusters, [N, C]
    is_novel: NDArray[np.bool_] | None = None  # False for known classes, [N]; models that do not tell have none
    fit: NDArray[np.int64] | None = None  # numbers into `fit.FITS`, [N]; models of older versions have none
    outside: NDArray[np.float32] | None = None  # probability that an image is in none of the clusters, [N]; or none
    known: NDArray[np.float32] | None = None  # probability that an image is of a known class, [N]; or none

    def invalid(self, *, images: int, widths: Iterable[int]) -> str | None:
        """Return the name of an output that cannot be the answer to so many images, or None.

        `widths` are the numbers of clusters that the model may have.
        """
        given = self.probabilities
        if given.shape not in {(images, width) for width in widths} or not _are_probabilities(given):
            return "array of probabilities"
        for name in ("outside", "known"):
            values = getattr(self, name)
            if values is not None and (values.shape != (images,) or not _are_probabilities(values)):
                return name
        if self.fit is not None and (self.fit.shape != (images,) or not np.isin(self.fit, range(len(FITS))).all()):
            return "fit"
        if self.is_novel is not None and self.is_novel.shape != (images,):
            return "is_novel"
        return None


def _are_probabilities(values: NDArray[np.float32]) -> bool:
    return bool(((values >= 0) & (values <= 1 + 1e-3)).all())  # nor NaN


class Runner(Protocol):
    """Interface of a model, local or served, with the facts for requests; `in_flight` threads may call it at once."""

    preprocess: PreprocessSpec
    cluster_names: list[str]
    max_batch: int
    in_flight: int

    def answer(self, images: NDArray[np.uint8]) -> Answer:
        """Ask the model about images uint8 [N, H, W, 3]."""
        ...


class Session(Protocol):
    """The part of onnxruntime.InferenceSession that we use."""

    def run(self, names: list[str], feeds: dict[str, NDArray[np.uint8]]) -> list[NDArray[np.generic]]:
        """Return outputs by name for the given inputs."""
        ...

    def get_inputs(self) -> list[Any]:
        """Return the inputs of the model; each has a `name`, a `type` and a `shape`."""
        ...

    def get_outputs(self) -> list[Any]:
        """Return the outputs of the model; each has a `name` and a `shape`."""
        ...

    def get_providers(self) -> list[str]:
        """Return the execution providers, the main one first."""
        ...


def open_session(model: Path, *, threads: int = 0, device: Device = Device.CPU) -> Session:
    """Open an ONNX Runtime session on a device; raise MissingExtraError if it cannot. 0 threads is one per core.

    Raises DataError for a file that is damaged, or that refers to other files.
    """
    import onnxruntime as ort

    check_self_contained(model)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    if device is Device.CPU:
        return _open(ort, model, options, device)
    with redirect_stdout(io.StringIO()):  # it prints what is missing, where our rows go
        ort.preload_dlls()  # CUDA and cuDNN may be in wheels, where the linker does not look
    ort.set_default_logger_severity(_LOG_FATAL)  # what is missing is said below
    try:
        session = _open(ort, model, options, device)
    except RuntimeError:
        raise _missing(device) from None
    finally:
        ort.set_default_logger_severity(_LOG_WARNINGS)
    if device is not Device.AUTO and session.get_providers()[0] != _PROVIDERS[device][0]:
        raise _missing(device)
    return session


def _open(ort: Any, model: Path, options: Any, device: Device) -> Session:
    providers = [name for name in _PROVIDERS[device] if name in ort.get_available_providers()]
    # Its own fallback prints to standard output.
    try:
        session: Session = ort.InferenceSession(str(model), options, providers=providers, enable_fallback=0)
    except Exception as error:  # its errors have no other base
        if isinstance(error, RuntimeError) and device is not Device.CPU:
            raise  # of the device, not of the file
        raise DataError(f"{model} cannot be loaded: {printable(error)}", hint=_EXPORT_AGAIN) from None
    return session


def _missing(device: Device) -> MissingExtraError:
    libraries = "CUDA, cuDNN and TensorRT" if device is Device.TENSORRT else "CUDA and cuDNN"
    return MissingExtraError(
        f"ONNX Runtime cannot use {device.value} here",
        hint=f"it needs an NVIDIA GPU, onnxruntime-gpu and its {libraries}; --device cpu runs everywhere",
    )


class OnnxRunner:
    """A bundle's model in this process.

        runner = OnnxRunner("run/bundle")
        rows = list(assign_images(["a.png", "b.png"], runner))

    `device` is `cpu`, `cuda`, `tensorrt` or `auto`; 0 `threads` is one for each core.
    """

    max_batch = 64
    in_flight = 1  # one call uses all cores

    def __init__(self, bundle: Bundle | str | Path, *, device: Device | str = Device.CPU, threads: int = 0) -> None:
        if not isinstance(bundle, Bundle):
            bundle = Bundle.read(bundle)
        self._session = open_session(bundle.model_path, threads=threads, device=_device(device))
        if not bundle.is_current():  # another one was published meanwhile: names and model belong together
            bundle = Bundle.read(bundle.folder)
            self._session = open_session(bundle.model_path, threads=threads, device=_device(device))
        self.preprocess = bundle.manifest.preprocess
        self.cluster_names = bundle.manifest.cluster_names
        self.digest = bundle.digest
        self.provider = self._session.get_providers()[0]
        self._outputs = outputs_in_rows(output.name for output in self._session.get_outputs())
        self._check(bundle)

    def answer(self, images: NDArray[np.uint8]) -> Answer:
        """Ask the model about images uint8 [N, H, W, 3]."""
        answer = Answer(**self._run(self._outputs, images))
        if wrong := answer.invalid(images=len(images), widths=(len(self.cluster_names),)):
            raise DataError(f"the model answered with an invalid {wrong}", hint=_EXPORT_AGAIN)
        return answer

    def embed(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return the embeddings [N, d] of images uint8 [N, H, W, 3]."""
        found = self._run([output for output in OUTPUTS if output.name == "embedding"], images)["embedding"]
        if found.ndim != 2 or len(found) != len(images) or not np.isfinite(found).all():
            raise DataError("the model answered with an invalid embedding", hint=_EXPORT_AGAIN)
        return found

    def _run(self, outputs: Sequence[Output], images: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
        try:
            arrays = self._session.run([output.name for output in outputs], {"image": images})
            pairs = zip(outputs, arrays, strict=True)
            return {output.name: array.astype(output.numpy_dtype, copy=False) for output, array in pairs}
        except Exception as error:  # its errors have no other base
            raise DataError(f"the model cannot answer: {printable(error)}", hint=_EXPORT_AGAIN) from None

    def _check(self, bundle: Bundle) -> None:
        """Raise DataError unless the model takes images and answers with as many clusters as the bundle has names."""
        side, clusters = self.preprocess.resolution, len(self.cluster_names)
        inputs = [(entry.name, entry.type, list(entry.shape[1:])) for entry in self._session.get_inputs()]
        outputs = {entry.name: list(entry.shape[1:]) for entry in self._session.get_outputs()}
        if inputs != [("image", "tensor(uint8)", [side, side, 3])] or outputs.get("probabilities") != [clusters]:
            raise DataError(
                f"{bundle.model_path} is not the model of its bundle: it takes {inputs} and answers with {outputs}",
                hint=_EXPORT_AGAIN,
            )


def _device(name: Device | str) -> Device:
    try:
        return Device(name)
    except ValueError:
        raise UsageError(
            f"'{name}' is not a device", hint=did_you_mean(str(name), [each.value for each in Device])
        ) from None


@contextmanager
def open_bundle(
    bundle: str | Path,
    *,
    device: Device,
    digest: str | None = None,
    public_key: str | None = None,
    progress: Progress,
) -> Iterator[OnnxRunner]:
    """Yield a bundle's model in this process, and print its device. With `digest` or key, other bundles are refused."""
    opened = Bundle.read(bundle, digest=digest, public_key=public_key)
    runner = OnnxRunner(opened, device=device)
    if (digest or public_key) and runner.digest != opened.digest:
        raise DataError(f"{bundle} was replaced while it was opened", hint="try again")
    where = runner.provider.removesuffix("ExecutionProvider")
    why = " (CUDA cannot be used here)" if device is Device.AUTO and where == "CPU" else ""
    progress.say(f"ONNX Runtime runs on {where}{why}")
    yield runner
