"""Clients of a model on a Triton server, for threads and for asyncio."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncd_serve.client.connection import CHECK_SERVER, Connection, in_background
from ncd_serve.contract import DEFAULT_MODEL, DEFAULT_URL, Contract, checked_token, read_contract
from ncd_serve.errors import ServerError, UsageError
from ncd_serve.inputs.sources import Images, find_sources
from ncd_serve.prediction import Prediction
from ncd_serve.rows.assignment import assign_images
from ncd_serve.runners import Answer

DEFAULT_TIMEOUT = 60.0
DEFAULT_PATIENCE = 60.0
DEFAULT_CONCURRENCY = 16


class Client:
    """Client of a Triton server with an exported model, over grpc:// or http://.

        with Client() as client:  # Client("grpc://HOST:PORT") for another server than this machine's
            for row in client.assign(["photos/", "more.zip"]):
                print(row.path, row.cluster_name, row.confidence)

    Reads the model's shape, batch limit, preprocessing and cluster names from the server when it is created, and
    raises an error for a model that does not fit the contract. `timeout` is the limit for one request in seconds.
    Requests to an unreachable server are retried for `patience` seconds, so a restart loses no row. `token` is sent to
    servers that ask for one; by default it is taken from the environment, NCD_SERVE_TOKEN. Thread-safe.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        model: str = DEFAULT_MODEL,
        timeout: float = DEFAULT_TIMEOUT,
        patience: float = DEFAULT_PATIENCE,
        concurrency: int = DEFAULT_CONCURRENCY,
        token: str | None = None,
    ) -> None:
        self.in_flight = concurrency
        self._pending: set[Future[Any]] = set()
        connect = partial(Connection, url, model, timeout=timeout, patience=patience, token=checked_token(token))
        opening = _ServedModel.open(connect, concurrency=concurrency)
        self._model = in_background(opening).result()
        self._closing = weakref.finalize(self, _close, self._model)
        self.preprocess, self.max_batch, *_ = self._model.contract
        self.cluster_names = self._model.cluster_names

    @property
    def answered_by(self) -> str:
        """Model, its version and the server that have answered, in words; several versions if it was updated."""
        return self._model.answered_by

    def answer(self, images: NDArray[np.uint8]) -> Answer:
        """Ask the model about images uint8 [N, H, W, 3], in as many requests as the server's batch limit needs."""
        return self.submit(images).result()

    def submit(self, images: NDArray[np.uint8]) -> Future[Answer]:
        """Ask as `answer` does, without waiting."""
        if not self._closing.alive:
            raise UsageError(
                "the connection to the server is closed",
                hint="rows come one by one: read them inside the `with` block, e.g. rows = list(client.assign(images))",
            )
        future = in_background(self._model.answer(images))
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        return future

    def assign(
        self, images: Images, *, allow_urls: bool = False, top_k: int = 3, min_confidence: float = 0.0
    ) -> Iterator[Prediction]:
        """Yield one row for each image, in order; `images` as `find_sources` takes them."""
        sources = find_sources(images, allow_urls=allow_urls).images
        return assign_images(sources, self, top_k=top_k, min_confidence=min_confidence)

    def close(self) -> None:
        """Cancel requests in flight and close the connection."""
        for future in list(self._pending):
            future.cancel()
        if closed := self._closing():
            closed.result()

    def __enter__(self) -> Client:
        """Return the client; `with` closes it."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()


class AsyncClient:
    """Client for asyncio; nothing blocks the caller's loop.

        async with await AsyncClient.connect() as client:
            async for row in client.assign(["photos/"]):
                print(row.path, row.cluster_name, row.confidence)

    `connect` takes the options of `Client`.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self.preprocess, self.max_batch = client.preprocess, client.max_batch
        self.cluster_names = client.cluster_names

    @classmethod
    async def connect(cls, url: str = DEFAULT_URL, **options: Any) -> AsyncClient:
        """Reach a server; the options are those of `Client`."""
        return cls(await asyncio.to_thread(Client, url, **options))

    async def answer(self, images: NDArray[np.uint8]) -> Answer:
        """Ask as `Client.answer` does."""
        return await asyncio.wrap_future(self._client.submit(images))

    async def assign(self, images: Images, **options: Any) -> AsyncIterator[Prediction]:
        """Yield rows as `Client.assign` does."""
        rows = await asyncio.to_thread(self._client.assign, images, **options)
        while (row := await asyncio.to_thread(next, rows, None)) is not None:
            yield row

    async def close(self) -> None:
        """Close as `Client.close` does."""
        await asyncio.to_thread(self._client.close)

    async def __aenter__(self) -> AsyncClient:
        """Return the client; `async with` closes it."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        await self.close()


def _close(model: _ServedModel) -> Future[None]:
    return in_background(model.close())


class _ServedModel:
    """Model on a server; both clients send their requests through it, on the background loop."""

    def __init__(self, connection: Connection, contract: Contract, concurrency: int) -> None:
        self.contract, self._connection = contract, connection
        side = contract.preprocess.resolution
        self._shape = (side, side, 3)
        self._room = asyncio.Semaphore(concurrency)
        self.cluster_names = [str(number) for number in range(contract.clusters)]
        self._widths = {contract.clusters}  # numbers of clusters of the generations that were served so far
        self._named = set[str]()  # versions of the model that names were read for
        self._reading = asyncio.Lock()
        self.close = connection.close

    @property
    def answered_by(self) -> str:
        versions = ", ".join(self._connection.versions)
        return f"{self._connection.where}, version {versions}"

    @classmethod
    async def open(cls, connect: Callable[[], Connection], *, concurrency: int) -> _ServedModel:
        connection = connect()
        try:
            served = cls(connection, read_contract(await connection.config(), connection.where), concurrency)
            await served._read_names()
            served._named.update(connection.versions)
            return served
        except BaseException:
            await connection.close()
            raise

    async def _read_names(self) -> None:
        """Read the label of every cluster, through the classification extension: the only request for labels."""
        blank = np.zeros((1, *self._shape), np.uint8)
        (answer,) = await self._connection.infer(blank, ["probabilities"], class_count=self.contract.clusters)
        try:
            for entry in answer.ravel():
                # score:index:label, where a label may hold colons itself
                text = entry.decode(errors="replace") if isinstance(entry, bytes) else str(entry)
                _score, index, *label = text.split(":", 2)
                if label:
                    self.cluster_names[range(self.contract.clusters)[int(index)]] = label[0]
        except (ValueError, IndexError):
            raise ServerError(f"{self._connection.where} answered with invalid labels", hint=CHECK_SERVER) from None

    async def _reopen(self, clusters: int) -> None:
        """Read contract and names again if another version answers now: another generation, or one with other names."""
        async with self._reading:
            if self._named >= set(self._connection.versions) and clusters in self._widths:
                return
            self.contract = read_contract(await self._connection.config(), self._connection.where)
            self._widths.add(self.contract.clusters)
            self.cluster_names += [str(number) for number in range(len(self.cluster_names), self.contract.clusters)]
            await self._read_names()
            self._named.update(self._connection.versions)

    async def answer(self, images: NDArray[np.uint8]) -> Answer:
        if images.dtype != np.uint8 or images.shape[1:] != self._shape or not len(images):
            raise UsageError(
                f"{self._connection.where} takes images uint8 [N, {', '.join(map(str, self._shape))}], "
                f"not {images.dtype} {list(images.shape)}",
                hint="ncd_serve.assign_images prepares image files",
            )
        step = self.contract.max_batch
        parts = [images[start : start + step] for start in range(0, len(images), step)]
        answers = await asyncio.gather(*map(self._ask, parts))
        names = [name for name in Answer._fields if all(getattr(answer, name) is not None for answer in answers)]
        width = max(self._widths)  # another generation may have been published between two parts
        shown = [answer._replace(probabilities=_widened(answer.probabilities, width)) for answer in answers]
        return Answer(**{name: np.concatenate([getattr(answer, name) for answer in shown]) for name in names})

    async def _ask(self, images: NDArray[np.uint8]) -> Answer:
        outputs = self.contract.outputs
        async with self._room:
            arrays = await self._connection.infer(images, [output.name for output in outputs])
        # One value for each image, as Triton declares it, is a column.
        pairs = list(zip(outputs, arrays, strict=True))
        shaped = {output.name: array if output.shape else array.reshape(-1) for output, array in pairs}
        answer = Answer(**shaped)
        await self._reopen(answer.probabilities.shape[-1] if answer.probabilities.ndim == 2 else 0)
        wrong = next((output.name for output, array in pairs if array.dtype != output.numpy_dtype), None)
        if wrong := wrong or answer.invalid(images=len(images), widths=self._widths):
            raise ServerError(f"{self._connection.where} answered with an invalid {wrong}", hint=CHECK_SERVER)
        return answer


def _widened(probabilities: NDArray[np.float32], clusters: int) -> NDArray[np.float32]:
    """Return probabilities with columns of zeros up to the number of clusters."""
    return np.pad(probabilities, ((0, 0), (0, clusters - probabilities.shape[1])))
