"""`doctor --self-test`: train, export and serve a small model on all devices of this machine, and compare with the CPU.

Torch works in one child process (`ncd_export.self_test`), so that a crash of a driver is a line of the report. ONNX
Runtime and Triton are asked from here. All files are in a temporary folder; nothing needs the network.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from threading import Timer
from typing import TYPE_CHECKING, Any

import numpy as np

from ncd_serve.bundle import MODEL
from ncd_serve.client.client import Client
from ncd_serve.doctor.checks import Check, take_steps
from ncd_serve.errors import NcdError
from ncd_serve.runners import Device, open_session
from ncd_serve.triton import TritonServer

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ncd_serve.doctor.installation import Step

    Images = NDArray[np.uint8]
    Answers = Mapping[str, NDArray[Any]]

GROUP = "self-test"
BUNDLE, REPOSITORY, IMAGES, ANSWERS = "bundle", "repository", "images.npy", "answers.npz"  # in the temporary folder
MODEL_NAME = "ncd_global"
_TRAINING = ("float32", "tf32", "mixed precision", "compiled")
_FLOATS = ("confidence", "probabilities", "embedding")
_BATCH_SIZES = (1, 7, 64)
# Largest differences from torch on the CPU. GPUs round float32 to TF32 (10 bits) in convolutions.
_LIMITS = {Device.CPU: 1e-4, Device.CUDA: 0.01, Device.TENSORRT: 0.01}
_TRITON_LIMIT = 1e-4  # its model computes on the CPU
_CHILD_SECONDS = 600
_READY_SECONDS = 120


def run_self_test() -> Iterator[Check]:
    """Yield a check for each precision, the export, each ONNX Runtime provider and Triton; the last is the verdict."""
    checks: list[Check] = []
    with tempfile.TemporaryDirectory(prefix="ncd-self-test-") as name:
        folder = Path(name)
        for check in _train_and_serve(folder):
            checks.append(check)
            yield check
    yield verdict(checks)


def _train_and_serve(folder: Path) -> Iterator[Check]:
    yield from _child_checks(folder)
    if (folder / REPOSITORY).is_dir():
        yield from take_steps(GROUP, _serving_steps(folder))


def _child_checks(folder: Path) -> Iterator[Check]:
    """Yield the checks of the process that trains and exports, one by one."""
    command = [sys.executable, "-m", "ncd_export.self_test", str(folder)]
    # Compiled code goes to the temporary folder, which is removed.
    environment = {**os.environ, "TMPDIR": str(folder), "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled")}
    log = folder / "log.txt"
    with (
        log.open("wb") as errors,
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True) as child,
    ):
        clock = Timer(_CHILD_SECONDS, child.kill)
        clock.start()
        try:
            assert child.stdout is not None
            for line in child.stdout:
                yield Check(**json.loads(line))
            code = child.wait()
        except BaseException:  # interrupted: it must not outlive this
            child.kill()
            raise
        finally:
            clock.cancel()
    if code:
        last_words = log.read_text(errors="replace").strip().splitlines() or ["no message"]
        text = f"the process that trains and exports ended with code {code}: {last_words[-1]}"
        yield Check(GROUP, "process", "problem", text, "update the GPU's driver and torch", NcdError.exit_code)


def _serving_steps(folder: Path) -> Iterator[Step]:
    images, expected = np.load(folder / IMAGES), dict(np.load(folder / ANSWERS))
    for device, limit in _LIMITS.items():
        compared = partial(_compare_provider, folder / BUNDLE / MODEL, images, expected, device=device, limit=limit)
        yield f"onnxruntime {device.value}", compared
    yield "triton", partial(_compare_triton, folder, images)


def _compare_provider(model: Path, images: Images, expected: Answers, *, device: Device, limit: float) -> str:
    hint = "use --device cpu" if device is not Device.CPU else "pip install --force-reinstall onnxruntime-gpu"
    found = _ask_onnx(model, images, device=device, hint=hint)
    return f"torch's {compare_answers(found, expected, limit=limit, hint=hint)}"


def _ask_onnx(model: Path, images: Images, *, device: Device, hint: str) -> dict[str, NDArray[Any]]:
    """Return the outputs for all images at each batch size; raise MissingExtraError if the device cannot be used."""
    session = open_session(model, device=device)
    names = [output.name for output in session.get_outputs()]
    try:
        outputs = [
            session.run(names, {"image": images[start : start + size]})
            for size in _BATCH_SIZES
            for start in range(0, len(images), size)
        ]
    except Exception as error:  # its errors have no class in common
        raise NcdError(f"ONNX Runtime fails: {str(error).partition(chr(10))[0]}", hint=hint) from None
    columns = (np.concatenate(column) for column in zip(*outputs, strict=True))
    return dict(zip(names, columns, strict=True))


def _compare_triton(folder: Path, images: Images) -> str:
    """Start a server on the exported repository, and compare its outputs with those of ONNX Runtime."""
    with TritonServer(folder / REPOSITORY) as server:
        server.wait_ready(_READY_SECONDS)
        with Client(server.grpc_url, model=MODEL_NAME) as client:
            found = {"probabilities": client.answer(images).probabilities}
    hint = "compare with `ncd-serve assign --bundle`, which needs no server"
    model = folder / BUNDLE / MODEL
    expected = open_session(model).run(["probabilities"], {"image": images})
    return f"ONNX Runtime's {compare_answers(found, {'probabilities': expected[0]}, limit=_TRITON_LIMIT, hint=hint)}"


def compare_answers(found: Answers, expected: Answers, *, limit: float, hint: str) -> str:
    """Return `answers for 40 images, which differ by 1e-07 (limit 0.0001)`; raise NcdError beyond the limit.

    `found` may hold the answers several times over. Ids are compared with the probabilities that they come with: where
    two clusters are almost equal, rounding may choose either. `fit` has such limits, too, and follows from the rest.
    """
    images = len(expected["probabilities"])
    differences = [_difference(found[name], expected[name]) for name in _FLOATS if name in found]
    text = f"answers for {images} images, which differ by {max(differences):.1e} (limit {limit:g})"
    if max(differences) > limit:
        raise NcdError(f"not the same {text}", hint=hint)
    if "cluster_id" in found and (found["cluster_id"] != found["probabilities"].argmax(axis=1)).any():
        raise NcdError("a cluster id is not that of the highest probability", hint=hint)
    return text


def _difference(found: NDArray[Any], expected: NDArray[Any]) -> float:
    """Return the largest difference, relative if values exceed 1: embeddings have no fixed scale."""
    expected = np.concatenate([expected] * (len(found) // len(expected)))
    largest = float(np.abs(found - expected).max() / max(1.0, np.abs(expected).max()))
    return largest if math.isfinite(largest) else math.inf  # nothing compares with NaN


def verdict(checks: Sequence[Check]) -> Check:
    """Return the final check: devices that agree with the CPU, those that do not, and those that were not tested."""
    passed = {check.what for check in checks if check.verdict == "ok"}
    wrong = [check.what for check in checks if check.verdict == "problem"]
    untested = [check.what for check in checks if check.verdict == "missing"]
    works = {
        "trains": bool(passed & set(_TRAINING)),
        "exports": "onnxruntime cpu" in passed,
        "serves": "triton" in passed,
    }
    if wrong:
        code = next(check.code for check in checks if check.verdict == "problem")
        text = f"this machine does not compute as the CPU does: {', '.join(wrong)}"
        return Check(GROUP, "verdict", "problem", text, "see the lines above", code)
    verbs = [verb for verb, works_here in works.items() if works_here]
    also = f"; not tested: {', '.join(untested)}" if untested else ""
    if not verbs:
        return Check(GROUP, "verdict", "missing", f"nothing could be tested{also}", "see the lines above")
    return Check(GROUP, "verdict", "ok", f"this machine {_listed(verbs)} as the CPU does{also}")


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
