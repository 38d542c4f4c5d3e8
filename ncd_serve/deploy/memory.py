"""Measured memory of a model: the working memory of a batch cannot be derived from the file."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import numpy as np

from ncd_serve.bundle import Bundle
from ncd_serve.errors import DataError
from ncd_serve.memory import peak_memory
from ncd_serve.runners import OnnxRunner
from ncd_serve.triton.jpeg import DECODERS, INSTANCES
from ncd_serve.triton.jpeg.decoder import MEMORY_BYTES

STEP_MIB = 32
SHARED_MEMORY_MIB = 1024
DECODING_MIB = INSTANCES * DECODERS * ((MEMORY_BYTES >> 20) + 64)  # of the model that takes image files
OVERHEAD_MIB = SHARED_MEMORY_MIB + 512 + DECODING_MIB  # Triton, its Python processes, shared memory, decoding


def peak_mib(bundle: Bundle, batch: int) -> int:
    """Return the peak memory in MiB of a process that answers one batch of this size.

    Rounded up in steps, so that measuring again does not change the files.
    """
    command = [sys.executable, "-m", __name__, str(bundle.folder), str(batch)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.splitlines() or ["it exited without a message"])[-1]
        raise DataError(
            f"the model of {bundle.folder} cannot answer {batch} images here: {last}", hint="ncd-serve doctor"
        )
    return math.ceil(int(done.stdout) / STEP_MIB) * STEP_MIB


def pod_mib(peak: int) -> int:
    """Return the memory limit of a pod whose model needs `peak` MiB, in steps of 256."""
    return math.ceil((1.5 * peak + OVERHEAD_MIB) / 256) * 256


def _answer_once(folder: Path, batch: int) -> int:
    bundle = Bundle.read(folder)
    side = bundle.manifest.preprocess.resolution
    OnnxRunner(bundle).answer(np.zeros((batch, side, side, 3), np.uint8))
    return peak_memory() // 2**20


if __name__ == "__main__":
    print(_answer_once(Path(sys.argv[1]), int(sys.argv[2])))
