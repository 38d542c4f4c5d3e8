"""A Triton server as a child process: started on free ports, watched until ready, always cleaned up."""

from __future__ import annotations

import re
import time
import uuid
from contextlib import ExitStack
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

from ncd_serve.errors import ServerError
from ncd_serve.triton.install import find_triton
from ncd_serve.triton.process import (
    POLL_SECONDS,
    Ports,
    choose_ports,
    end_process,
    has_exited,
    remove_shared_memory,
    start_process,
)
from ncd_serve.triton.repository import check_repository

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Sequence
    from types import TracebackType

DRAIN_SECONDS = 20  # how long requests in flight may take to finish once the server is told to stop
KILL_SECONDS = DRAIN_SECONDS + 5  # Triton ends by itself when the drain is over; this is for one that hangs
LOGGED_ERROR = re.compile(r'^(?:E\d{4} \S+ +\d+ \S+\] |error: )"?(.+?)"?$', re.MULTILINE)
HARMLESS_ERROR = "CudaDriverHelper has not been initialized."  # on every machine without a GPU


class _Run(NamedTuple):
    """One start of the server."""

    process: subprocess.Popen[bytes]
    ports: Ports
    models: Path
    log_path: Path
    log_start: int


class TritonServer:
    """NVIDIA Triton on one model repository, alive at most as long as this process.

        with TritonServer(repository) as server:
            server.wait_ready(timeout=60)
            client = InferenceServerClient(server.grpc_url)

    Linux ends the server with the thread that called `start`, so call it from one that stays.
    Paths in `extra_arguments` have to be absolute.
    """

    def __init__(
        self,
        repository: Path,
        *,
        host: str = "127.0.0.1",
        http_port: int | None = None,
        grpc_port: int | None = None,
        metrics_port: int | None = None,
        log_path: Path | None = None,
        extra_arguments: Sequence[str] = (),
    ) -> None:
        """Only notes what to start. Ports left out become free ones."""
        self._repository = repository
        self._host = host
        self._wanted_ports = (http_port, grpc_port, metrics_port)
        self._log_path = log_path
        self._extra_arguments = tuple(extra_arguments)
        self._run: _Run | None = None
        self._undo = ExitStack()  # what stop() has to do: filled in by start(), step by step

    def start(self) -> None:
        """Start the process and return at once. A start that fails leaves nothing behind."""
        assert self._run is None, "already started"
        check_repository(self._repository)
        install = find_triton()
        ports = choose_ports(self._host, *self._wanted_ports)
        with ExitStack() as undo:
            directory = Path(undo.enter_context(TemporaryDirectory(prefix="ncd-triton-")))
            # Triton passes the path of a model to its stub through a shell, unquoted. This one has no spaces.
            models = directory / "models"
            models.symlink_to(self._repository.resolve())
            shm_prefix = f"ncd-{uuid.uuid4().hex}-"
            undo.callback(remove_shared_memory, shm_prefix)
            backends = directory / "backends"
            command = [str(install.executable), *install.lay_out(backends), *self._arguments(ports, models, shm_prefix)]
            log_path = self._log_path or directory / "triton.log"
            log_start = log_path.stat().st_size if log_path.exists() else 0
            # The stub imports `model` from its working directory first, so that has to be ours.
            cwd = backends / "onnxruntime" if install.source == "wheel" else Path.cwd()
            process = start_process(command, cwd=cwd, environment=install.environment(), log_path=log_path)
            undo.callback(end_process, process, timeout=KILL_SECONDS)
            self._run = _Run(process, ports, models, log_path, log_start)
            self._undo = undo.pop_all()

    def _arguments(self, ports: Ports, models: Path, shm_prefix: str) -> list[str]:
        return [
            f"--model-repository={models}",
            f"--http-address={self._host}",
            f"--http-port={ports.http}",
            f"--grpc-address={self._host}",
            f"--grpc-port={ports.grpc}",
            f"--metrics-address={self._host}",
            f"--metrics-port={ports.metrics}",
            f"--exit-timeout-secs={DRAIN_SECONDS}",
            f"--backend-config=python,shm-region-prefix-name={shm_prefix}",
            *self._extra_arguments,
        ]

    def wait_ready(self, timeout: float) -> None:
        """Return once every model can be asked; raise as soon as the server has died, or when time is up."""
        run = self._started()
        deadline = time.monotonic() + timeout
        while True:
            if has_exited(run.process):
                raise self._failure("Triton ended while starting")
            if self._is_ready():
                return
            if time.monotonic() > deadline:
                raise self._failure(f"Triton was not ready after {timeout:g} s")
            time.sleep(POLL_SECONDS)

    def is_running(self) -> bool:
        """Whether the process that was started is still there."""
        return self._run is not None and not has_exited(self._run.process)

    def _is_ready(self) -> bool:
        connection = HTTPConnection(self.http_url, timeout=1)
        try:
            connection.request("GET", "/v2/health/ready")
            return connection.getresponse().status == 200
        except (OSError, HTTPException):
            return False
        finally:
            connection.close()

    def _failure(self, what: str) -> ServerError:
        run = self._started()
        log = run.log_path.read_bytes()[run.log_start :].decode(errors="replace")
        # Triton writes a Python error with its traceback in one line; the first part says what is wrong.
        errors = [text.partition(r"\n\nAt:")[0] for text in LOGGED_ERROR.findall(log) if text != HARMLESS_ERROR]
        failed_models = [text for text in errors if text.startswith("failed to load '")]
        reasons = "\n".join(failed_models or errors[-5:] or log.splitlines()[-5:])
        reasons = reasons.replace(r"\n", "\n").replace(str(run.models), str(self._repository))
        return ServerError(f"{what}: {reasons}", hint=f"see the log {self._log_path}" if self._log_path else None)

    def stop(self) -> None:
        """Let requests in flight finish, end the server, remove all it left behind. May be called at any time."""
        self._run = None
        self._undo.close()

    def __enter__(self) -> TritonServer:
        """Start; `wait_ready` is the caller's, who knows how long a load may take."""
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop, whatever happened."""
        self.stop()

    def _started(self) -> _Run:
        assert self._run is not None, "not started"
        return self._run

    def _url(self, port: int) -> str:
        return f"{'127.0.0.1' if self._host == '0.0.0.0' else self._host}:{port}"

    @property
    def http_url(self) -> str:
        """`host:port`, as tritonclient.http takes it."""
        return self._url(self._started().ports.http)

    @property
    def grpc_url(self) -> str:
        """`host:port`, as tritonclient.grpc takes it."""
        return self._url(self._started().ports.grpc)

    @property
    def metrics_url(self) -> str:
        """The page that Prometheus reads."""
        return f"http://{self._url(self._started().ports.metrics)}/metrics"

    @property
    def pid(self) -> int:
        """The process id of the server."""
        return self._started().process.pid
