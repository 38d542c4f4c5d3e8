"""Connection to one model on one Triton server, over gRPC or HTTP: deadlines, retries, and errors with hints."""

from __future__ import annotations

import asyncio
import errno
import logging
import random
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from functools import cache
from itertools import count
from threading import Thread
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException

from ncd_serve.contract import TOKEN_HEADER, TOKEN_VARIABLE
from ncd_serve.errors import ServerError, UsageError
from ncd_serve.text import printable

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
_PROTOCOLS = {"grpc": "grpc", "grpcs": "grpc", "http": "http", "https": "http"}
_SECURE = ("grpcs", "https")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
_FIRST_CONTACT_PATIENCE = 1.0
_START_ONE = "start one with: ncd-serve serve (gRPC is on port 8001, HTTP on 8000 by default)"
_TRUST = "trust your own certificate with GRPC_DEFAULT_SSL_ROOTS_FILE_PATH (grpcs) or SSL_CERT_FILE (https)"
CHECK_SERVER = "ncd-serve doctor --url checks a server"
_NO_ENTRY = ("asks for a token", "This protocol is restricted")
_GIVE_TOKEN = f"give the server's token with --token, or in {TOKEN_VARIABLE}"
_UNAVAILABLE = ("StatusCode.UNAVAILABLE", "502", "503", "504")
_DEAD_WORKER = "is not healthy"  # a model's process has died; `ncd-serve serve` restarts the server then
_GRPC_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", 256 << 20),
    # By default, a channel waits up to two minutes before it tries to reach a dead server again.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # A name with several addresses is several servers: without this the first would get all the work.
    ("grpc.lb_policy_name", "round_robin"),
]


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """Return the event loop for servers. There is one per process: gRPC logs errors when several loops are used."""
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(_report)
    Thread(target=loop.run_forever, name="ncd-serve", daemon=True).start()
    return loop


def _report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Report errors outside of requests, except gRPC's read of a queue that it has just closed."""
    error = context.get("exception")
    if not (isinstance(error, OSError) and error.errno == errno.EBADF):
        loop.default_exception_handler(context)


def in_background(work: Coroutine[Any, Any, _T]) -> Future[_T]:
    """Run a coroutine in the background; the caller may wait for it in a thread or in another loop."""
    return asyncio.run_coroutine_threadsafe(work, _loop())


def split_url(url: str) -> tuple[str, str]:
    """Split `grpc://host:port` into scheme and address; the default scheme is gRPC."""
    scheme, _, address = url.rstrip("/").rpartition("://")
    scheme = scheme or "grpc"
    if scheme not in _PROTOCOLS or not address.rpartition(":")[2].isdigit():
        raise UsageError(
            f"'{url}' is not a server address", hint="use grpc://HOST:PORT or http://HOST:PORT, e.g. 127.0.0.1:8001"
        )
    return scheme, address


class Connection:
    """A client of Triton's own library, to be made and used on the background loop."""

    def __init__(self, url: str, model: str, *, timeout: float, patience: float, token: str = "") -> None:
        scheme, self._address = split_url(url)
        self.where = f"model '{model}' on {self._address}"
        self._model, self._timeout, self._patience = model, timeout, patience
        self._secure, self._away = scheme in _SECURE, False
        self.versions: dict[str, None] = {}  # of the model, that have answered so far
        self._request_ids = map(f"{uuid.uuid4().hex[:8]}-{{}}".format, count(1))
        options: dict[str, Any] = {"channel_args": _GRPC_OPTIONS}
        self._lost: tuple[type[Exception], ...] = ()
        if _PROTOCOLS[scheme] == "http":
            from aiohttp import ClientError
            from tritonclient.http import aio as library

            options = {"conn_limit": 0, "conn_timeout": timeout}
            self._lost = (OSError, ClientError)
        else:
            from tritonclient.grpc import aio as library
        self._library = library
        self._headers = {"authorization": f"Bearer {token}"} if token else {}
        if token and not self._lost:
            self._headers[f"triton-grpc-protocol-{TOKEN_HEADER}"] = token
        self._client = self._library.InferenceServerClient(self._address, ssl=self._secure, **options)

    async def config(self) -> dict[str, Any]:
        """Return the model's configuration as served."""
        answer = await self._ask("get_model_config", self._model)
        config = answer.get("config", answer) if isinstance(answer, dict) else {}  # another HTTP server
        return config if isinstance(config, dict) else {}

    async def server_version(self) -> str:
        """Return the version of the server; raise an error unless it is ready."""
        if not await self._call(lambda: self._client.is_server_ready(self._headers), _FIRST_CONTACT_PATIENCE):
            raise ServerError(f"the server at {self._address} is not ready", hint="see its log for the reason")
        answer = await self._ask("get_server_metadata")
        return str(answer.get("version", "of no version")) if isinstance(answer, dict) else "of no version"

    async def models(self) -> list[str]:
        """Return name, version and state of every model, as the server reports them."""
        answer = await self._ask("get_model_repository_index")
        try:
            entries = answer.get("models", []) if isinstance(answer, dict) else answer
            return [" ".join(entry[key] for key in ("name", "version", "state") if key in entry) for entry in entries]
        except (TypeError, AttributeError) as error:
            raise self._nonsense(error) from None

    async def _ask(self, question: str, *about: str) -> Any:
        """Request facts from the server, with few retries, so that a mistyped address fails fast."""
        options = {"headers": self._headers, **({} if self._lost else {"as_json": True})}
        return await self._call(lambda: getattr(self._client, question)(*about, **options), _FIRST_CONTACT_PATIENCE)

    async def infer(
        self, images: NDArray[np.uint8], outputs: Sequence[str], *, class_count: int = 0
    ) -> list[NDArray[Any]]:
        """Return outputs by name for images, or texts `score:index:label` of the best `class_count` values of each."""
        image = self._library.InferInput("image", list(images.shape), "UINT8")
        image.set_data_from_numpy(images)
        wanted = [self._library.InferRequestedOutput(name, class_count=class_count) for name in outputs]
        # The server's log names the request by its id.
        request = {"outputs": wanted, "request_id": next(self._request_ids), "headers": self._headers}
        result = await self._call(lambda: self._client.infer(self._model, [image], **request), self._patience)
        self._note(away=False)
        try:
            arrays = [result.as_numpy(name) for name in outputs]
            self.versions.setdefault(_version(result.get_response()))
        except Exception as error:  # the library trusts what servers say about sizes
            raise self._nonsense(error) from None
        if lacking := [name for name, array in zip(outputs, arrays, strict=True) if array is None]:
            raise self._nonsense(f"it lacks {', '.join(lacking)}")
        return arrays

    async def close(self) -> None:
        """Close the connection."""
        await self._client.close()

    async def _call(self, ask: Callable[[], Awaitable[Any]], patience: float) -> Any:
        """Ask; an unavailable server again and again, while patience lasts. Nothing else gets a second chance."""
        give_up, pause = time.monotonic() + patience, _FIRST_PAUSE
        while True:
            try:
                return await asyncio.wait_for(ask(), self._timeout)
            except asyncio.TimeoutError:
                raise ServerError(
                    f"{self.where} did not answer within {self._timeout:g} s",
                    hint="check that it is running; if it is slow, use a longer --timeout or a smaller --concurrency",
                ) from None
            except (InferenceServerException, ValueError, *self._lost) as error:
                if not self._will_pass(error) or time.monotonic() + pause > give_up:
                    raise self._failure(error) from None
            except Exception as error:  # the library's own, when an answer is none of Triton's
                raise self._nonsense(error) from None
            if pause == _LONGEST_PAUSE:
                self._note(away=True)
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # many clients must not come back as one
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _note(self, *, away: bool) -> None:
        """Print that the server has been unreachable for a while, or is back; once for all requests in flight."""
        if away != self._away:
            _log.warning("%s %s", self._address, "does not answer: trying again" if away else "answers again")
            self._away = away

    def _will_pass(self, error: Exception) -> bool:
        if any(word in str(error) for word in _NO_ENTRY):  # gRPC calls that unavailable, too
            return False
        if isinstance(error, InferenceServerException):
            return error.status() in _UNAVAILABLE or _DEAD_WORKER in str(error)
        return isinstance(error, self._lost)

    def _nonsense(self, what: Exception | str) -> ServerError:
        said = what if isinstance(what, str) else f"{type(what).__name__}: {what}"
        return ServerError(f"{self.where} gave an answer that is none of Triton's: {said[:200]}", hint=CHECK_SERVER)

    def _failure(self, error: Exception) -> ServerError:
        if self._will_pass(error) and _DEAD_WORKER not in str(error):
            return ServerError(
                f"no Triton server answers at {self._address}", hint=_TRUST if self._secure else _START_ONE
            )
        said = error.message() if isinstance(error, InferenceServerException) else error
        refused = any(word in str(error) for word in _NO_ENTRY)
        return ServerError(f"{self.where}: {said}", hint=_GIVE_TOKEN if refused else CHECK_SERVER)


def _version(response: Any) -> str:
    """Return the version of the model that an answer is from; gRPC has it in a message, HTTP in JSON."""
    found = response.get("model_version") if isinstance(response, dict) else response.model_version
    return printable(found or "of no number")[:20]
