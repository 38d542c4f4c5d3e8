"""From image files to rows, through any runner: decode ahead in threads, ask in batches, keep the order."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from ncd_serve.errors import DataError
from ncd_serve.prediction import Prediction
from ncd_serve.preprocess import PreprocessSpec, load_array

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from ncd_serve.runners import Runner

DEFAULT_BATCH = 32
_DECODERS = 4


def assign_images(
    paths: Iterable[Path], runner: Runner, *, top_k: int = 3, batch: int = DEFAULT_BATCH
) -> Iterator[Prediction]:
    """Exactly one row for each path, in order; an unreadable image is a row with the reason."""
    remaining = iter(paths)
    size = min(batch, runner.max_batch)
    with ThreadPoolExecutor(_DECODERS) as pool:
        upcoming = list(islice(remaining, size))
        decoding = [pool.submit(_try_load, path, runner.preprocess) for path in upcoming]
        while upcoming:
            current, loaded = upcoming, [task.result() for task in decoding]
            upcoming = list(islice(remaining, size))
            decoding = [pool.submit(_try_load, path, runner.preprocess) for path in upcoming]
            yield from _rows(current, loaded, runner, top_k)


def _try_load(path: Path, spec: PreprocessSpec) -> NDArray[np.uint8] | str:
    try:
        return load_array(path, spec)
    except DataError as error:
        return str(error)


def _rows(paths: list[Path], loaded: list[NDArray[np.uint8] | str], runner: Runner, top_k: int) -> Iterator[Prediction]:
    images = [image for image in loaded if not isinstance(image, str)]
    answers = iter(runner.probabilities(np.stack(images)) if images else ())
    for path, image in zip(paths, loaded, strict=True):
        if isinstance(image, str):
            yield Prediction.failed(str(path), image)
        else:
            yield Prediction.from_probabilities(str(path), next(answers), names=runner.cluster_names, top_k=top_k)
