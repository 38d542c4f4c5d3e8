"""Turn images into rows with any runner: decode ahead in threads, keep requests in flight, keep the order."""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import count, islice, repeat
from pathlib import Path
from threading import Semaphore
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from PIL import Image

from ncd_serve.errors import DataError
from ncd_serve.fit import FITS
from ncd_serve.inputs.images import InMemory, Source
from ncd_serve.inputs.sources import one_or_many
from ncd_serve.prediction import Prediction
from ncd_serve.preprocess import PreprocessSpec, load_array

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator

    from numpy.typing import NDArray

    from ncd_serve.fit import Fit
    from ncd_serve.runners import Answer, Runner

DEFAULT_BATCH = 8  # the cost of a request is spread by then, and no request waits long for its answer
DECODERS = min(max(4, os.cpu_count() or 1), 16)  # each may hold an image of many megapixels
_BATCHES_AHEAD = 2  # decoded while all requests are in flight


class _Loading(NamedTuple):
    path: str
    image: Future[NDArray[np.uint8] | str]  # or the reason why there is none


def assign_images(
    images: Iterable[str | Path | Source | InMemory],
    runner: Runner,
    *,
    top_k: int = 3,
    min_confidence: float = 0.0,
    batch: int = DEFAULT_BATCH,
) -> Generator[Prediction, None, None]:
    """Yield exactly one row for each image, in order; an unreadable image becomes a row with the reason.

    Images are files, PIL images or arrays uint8 [H, W, 3]; `find_sources` finds those in folders and archives.
    Memory does not grow with the number of images: each is read when a decoder is free for it, and decoded when the
    requests in flight leave room for it. A runner that fails ends the rows after those that come before.
    """
    decoders, askers = ThreadPoolExecutor(DECODERS), ThreadPoolExecutor(runner.in_flight)
    waiting: deque[Future[list[Prediction]]] = deque()
    to_rows = partial(_rows, runner=runner, top_k=top_k, min_confidence=min_confidence)
    loading = _load(_sources(images), runner.preprocess, decoders)
    try:
        while part := list(islice(loading, min(batch, runner.max_batch))):
            waiting.append(askers.submit(to_rows, part))
            while waiting and (waiting[0].done() or len(waiting) == runner.in_flight + _BATCHES_AHEAD):
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    finally:
        # A caller that stops early must not wait for unread answers.
        for pool in (decoders, askers):
            pool.shutdown(wait=False, cancel_futures=True)


def _sources(images: Iterable[str | Path | Source | InMemory]) -> Iterator[Source]:
    numbers = count()
    for image in one_or_many(images):
        if isinstance(image, Source):
            yield image
        elif isinstance(image, (Image.Image, np.ndarray)):
            yield Source.in_memory(image, next(numbers))
        else:
            yield Source.of(image)


def _load(sources: Iterable[Source], spec: PreprocessSpec, decoders: ThreadPoolExecutor) -> Iterator[_Loading]:
    """Start to decode, one image after the other. Undecoded ones may hold many bytes, so there are never many."""
    undecoded = Semaphore(2 * DECODERS)
    for source in sources:
        undecoded.acquire()
        future = decoders.submit(_try_load, source, spec)
        future.add_done_callback(lambda _: undecoded.release())
        yield _Loading(source.path, future)


def _try_load(source: Source, spec: PreprocessSpec) -> NDArray[np.uint8] | str:
    try:
        return load_array(source.read(), spec)
    except DataError as error:
        return str(error)


def _rows(part: list[_Loading], *, runner: Runner, top_k: int, min_confidence: float) -> list[Prediction]:
    loaded = [loading.image.result() for loading in part]
    images = [image for image in loaded if not isinstance(image, str)]
    answers = iter(_each(runner.answer(np.stack(images))) if images else ())
    to_row = partial(
        Prediction.from_probabilities, names=runner.cluster_names, top_k=top_k, min_confidence=min_confidence
    )
    return [
        Prediction.failed(loading.path, image) if isinstance(image, str) else to_row(loading.path, *next(answers))
        for loading, image in zip(part, loaded, strict=True)
    ]


def _each(answer: Answer) -> Iterator[tuple[NDArray[np.float32], Fit | None, float | None, float | None, bool | None]]:
    fits = repeat(None) if answer.fit is None else map(FITS.__getitem__, answer.fit)
    outside = repeat(None) if answer.outside is None else map(float, answer.outside)
    known = repeat(None) if answer.known is None else map(float, answer.known)
    novel = repeat(None) if answer.is_novel is None else map(bool, answer.is_novel)
    return zip(answer.probabilities, fits, outside, known, novel, strict=False)
