"""Embeddings of new images, by the model in a bundle."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ncd_serve.errors import DataError
from ncd_serve.preprocess import PreprocessSpec, load_array
from ncd_serve.rows.assignment import DECODERS
from ncd_serve.runners import OnnxRunner

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from ncd_serve.bundle import Bundle
    from ncd_serve.gallery.collection import Floats
    from ncd_serve.progress import Progress

_BATCH = 32


def embed(bundle: Bundle, files: Sequence[Path], *, progress: Progress) -> list[Floats | str]:
    """Return the embedding [d] of each image, or the reason why there is none."""
    runner = OnnxRunner(bundle)
    load = partial(_try_load, spec=bundle.manifest.preprocess)
    answers: list[Floats | str] = []
    starts = range(0, len(files), _BATCH)
    with ThreadPoolExecutor(DECODERS) as decoders:
        for start in progress.track(starts, "embedding images", len(starts)):
            loaded = list(decoders.map(load, files[start : start + _BATCH]))
            images = [image for image in loaded if not isinstance(image, str)]
            found = iter(runner.embed(np.stack(images)) if images else ())
            answers += [image if isinstance(image, str) else next(found) for image in loaded]
    return answers


def _try_load(file: Path, spec: PreprocessSpec) -> NDArray[np.uint8] | str:
    try:
        return load_array(file, spec)
    except DataError as error:
        return str(error)
