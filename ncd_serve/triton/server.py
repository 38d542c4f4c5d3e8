"""Triton server as a child process: started on free ports, watched until ready, always cleaned up."""

from __future__ import annotations

import os
import re
import time
import uuid
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ncd_serve.contract import TOKEN_HEADER
from ncd_serve.errors import ServerError
from ncd_serve.triton.counting import Ledger, warm_up_requests
from ncd_serve.triton.install import TritonInstall, find_triton
from ncd_serve.triton.options import TritonOptions
from ncd_serve.triton.probe import Activity, Probe, read_activity
from ncd_serve.triton.process import (
    POLL_SECONDS,
    GateProcess,
    Ports,
    Secrets,
    choose_port,
    end_process,
    has_exited,
    plain_temporary_directory,
    protect_shared_memory,
    remove_shared_memory,
    start_process,
)
from ncd_serve.triton.repository import check_model, model_folders

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Sequence
    from types import TracebackType

DRAIN_SECONDS = 20  # limit for requests in flight when the server stops
KILL_SECONDS = DRAIN_SECONDS + 5  # Triton ends by itself when the drain is over; this is for one that hangs
LOGGED_ERROR = re.compile(r'^(?:E\d{4} \S+ +\d+ \S+\] |error: )"?(.+?)"?$', re.MULTILINE)
KEY_HEADER = "ncd-serve-key"
# What strangers may not do, and what they may without a token.
ADMINISTRATION = ("shared-memory", "trace", "logging")
LOADING = "model-repository"
USE = ("inference", "metadata", "model-config", "statistics")
ANY_PORTS = Ports(0, 0, 0)
MOVES = 3  # to other ports, where somebody takes one between its choice and Triton's start
PORT_TAKEN = "already in use"
HARMLESS_ERROR = "CudaDriverHelper has not been initialized."  # on every machine without a GPU
# Not strict: an update that fails to load must not make the version that serves look unready.
UPDATE_ARGUMENTS = ("--model-control-mode=explicit", "--load-model=*", "--strict-readiness=false")


class _Run(NamedTuple):
    """One start of the server."""

    process: subprocess.Popen[bytes]
    ports: Ports
    models: Path
    shm_prefix: str
    log_path: Path
    log_start: int


class TritonServer:
    """NVIDIA Triton on one model repository, behind a gate for HTTP, alive at most as long as this process.

        with TritonServer(repository) as server:
            server.wait_ready(timeout=60)
            client = InferenceServerClient(server.grpc_url)

    Linux ends the server with the thread that called `start`, so call it from one that stays. With `live_updates`
    models can be loaded while it runs (`probe.load`), only by this process. With a `token`, only clients that send it
    get answers. `python_models` allows models that run code of their own. With a `public_key` of minisign, all models
    have to be of bundles that its owner signed.
    """

    def __init__(
        self,
        repository: str | Path,
        *,
        host: str = "127.0.0.1",
        http_port: int | None = None,
        grpc_port: int | None = None,
        metrics_port: int | None = None,
        preferred_ports: Ports = ANY_PORTS,
        log_path: Path | None = None,
        live_updates: bool = False,
        token: str = "",
        python_models: bool = False,
        public_key: str | None = None,
        extra_arguments: Sequence[str] = (),
    ) -> None:
        """Prepare a server without starting it. An omitted port is the preferred one, or free where that is taken."""
        self._repository = Path(repository)
        self._host = host
        self._wanted_ports: tuple[int | None, int | None, int | None] = (http_port, grpc_port, metrics_port)
        self._preferred = preferred_ports
        self._log_path = log_path
        self._options = TritonOptions(extra_arguments)  # tritonserver's own
        # Triton has no TLS for HTTP: what is meant to be encrypted must not be open beside it.
        self._http_host = "127.0.0.1" if self._options.has_tls else host
        self._live_updates, self.token = live_updates, token
        self._python_models, self._public_key = python_models, public_key
        self._key = uuid.uuid4().hex  # administration can run code here, so only this process has it
        self._patience: float = KILL_SECONDS
        self._ledger = Ledger()
        self._probes: Counter[str] = Counter()
        self._run: _Run | None = None
        self._gate: GateProcess | None = None
        self._undo = ExitStack()  # what halt() has to do: filled in by start(), step by step

    def start(self) -> None:
        """Start the process and return at once. A start that fails leaves nothing behind."""
        assert self._run is None, "already started"
        self._probes.clear()
        self._ledger = Ledger()
        for model in model_folders(self._repository):
            self.check(model)
        install = find_triton()
        install.check_backend(self._options.backend_directory)
        with ExitStack() as undo:
            if self._gate is None or not self._gate.is_running():
                self._close_gate()
                self._open_gate()
                undo.callback(self._close_gate)
            self._start_triton(install)
            undo.pop_all()

    def _open_gate(self) -> None:
        http, _, metrics = self._wanted_ports
        secrets = Secrets(self.token, {KEY_HEADER: self._key, **self._options.headers()})
        hosts = (self._http_host, self._host)
        self._gate = GateProcess(
            hosts,
            (http, metrics),
            preferred=(self._preferred.http, self._preferred.metrics),
            secrets=secrets,
            log_path=self._log_path,
        )

    def _start_triton(self, install: TritonInstall) -> None:
        assert self._gate is not None
        self._gate.clear()
        grpc = choose_port(self._host, self._wanted_ports[1], self._preferred.grpc)
        ports = Ports(self._gate.ports[0], grpc, self._gate.ports[1])
        with ExitStack() as undo:
            directory = Path(undo.enter_context(plain_temporary_directory()))
            models = directory / "models"
            models.symlink_to(self._repository.resolve())
            shm_prefix = f"ncd-{os.getpid()}-{uuid.uuid4().hex}-"  # identifies the owner
            undo.callback(remove_shared_memory, shm_prefix)
            backends = directory / "backends"
            command = [str(install.executable), *install.lay_out(backends), *self._arguments(ports, models, shm_prefix)]
            log_path = self._log_path or directory / "triton.log"
            log_start = log_path.stat().st_size if log_path.exists() else 0
            # Compiled files beside the models might be of anybody: Python must not read them.
            environment = {**install.environment(), "PYTHONPYCACHEPREFIX": str(directory / "compiled")}
            # The stub imports `model` from its working directory first, so there must be none.
            process = start_process(command, cwd=directory, environment=environment, log_path=log_path)
            undo.callback(lambda: end_process(process, timeout=self._patience))
            self._run = _Run(process, ports, models, shm_prefix, log_path, log_start)
            self._undo = undo.pop_all()

    def _arguments(self, ports: Ports, models: Path, shm_prefix: str) -> list[str]:
        assert self._gate is not None
        return [
            f"--model-repository={models}",
            f"--http-address={self._gate.http}",
            f"--http-port={ports.http}",
            f"--grpc-address={self._host}",
            f"--grpc-port={ports.grpc}",
            f"--metrics-address={self._gate.metrics}",
            f"--metrics-port={ports.metrics}",
            f"--exit-timeout-secs={DRAIN_SECONDS}",
            f"--backend-config=python,shm-region-prefix-name={shm_prefix}",
            "--metrics-config=summary_latencies=true",
            *self._restrictions(),
            *(UPDATE_ARGUMENTS if self._live_updates else ()),
            *self._options.as_arguments(),
        ]

    def _restrictions(self) -> list[str]:
        """Return what closes interfaces of gRPC, except those that the user closes; for HTTP, the gate does."""
        # Everybody on the machine can read command lines: this key opens nothing else, and nobody uses it.
        key = (KEY_HEADER, uuid.uuid4().hex)
        closed = {name: key for name in ADMINISTRATION}
        if self.token:
            closed |= {name: (TOKEN_HEADER, self.token) for name in (*USE, LOADING)}
        if self._live_updates:
            closed[LOADING] = key
        return [
            f"--grpc-restricted-protocol={name}:{header}={value}"
            for name, (header, value) in closed.items()
            if name not in self._options.restricted_protocols
        ]

    def wait_ready(self, timeout: float) -> None:
        """Return once every model has answered; raise as soon as the server has died, or when time is up."""
        deadline = time.monotonic() + timeout
        silent: str | None = "it loads its models"
        moves = MOVES
        while True:
            if has_exited(self._started().process):
                failure = self._failure("Triton ended while starting")
                if not moves or not self._lost_port(failure):
                    raise failure
                moves -= 1
                self.halt()
                self._start_triton(find_triton())
            if self.probe.is_ready():
                silent = self.probe.unanswered()
                if silent is None:
                    self.protect_memory()
                    self._wanted_ports = self.ports  # the next start listens where clients know it
                    return
            if time.monotonic() > deadline:
                raise self._failure(f"Triton was not ready after {timeout:g} s ({silent})")
            time.sleep(POLL_SECONDS)

    def _lost_port(self, failure: ServerError) -> bool:
        """Return whether another program took the port for gRPC before Triton did, and any other port is as good."""
        return not self._wanted_ports[1] and PORT_TAKEN in str(failure)

    def check(self, model: Path) -> None:
        """Raise DataError with the reason if a model must not be loaded; to be called before it is."""
        config = check_model(model, python_models=self._python_models, public_key=self._public_key)
        self._ledger.warm_up[model.name] = warm_up_requests(config)

    def protect_memory(self) -> None:
        """Close the shared memory of all models to others; to be called after a model was loaded."""
        protect_shared_memory(self._started().shm_prefix)

    def is_running(self) -> bool:
        """Return whether the processes that were started still run."""
        return (
            self._run is not None
            and self._gate is not None
            and not has_exited(self._run.process)
            and self._gate.is_running()
        )

    @property
    def probe(self) -> Probe:
        """Probe of the server, behind the gate."""
        assert self._gate is not None
        return Probe(self._gate.http, headers=self._options.headers(), made=self._probes)

    @property
    def headers(self) -> dict[str, str]:
        """Headers that let an HTTP request through all restrictions."""
        token = {"authorization": f"Bearer {self.token}"} if self.token else {}
        return {**self._options.headers(), KEY_HEADER: self._key, **token}

    def activity(self) -> dict[str, Activity]:
        """Return the activity of each model that clients have caused since the last start."""
        assert self._gate is not None
        return self._ledger.update(read_activity(self._gate.metrics), self._probes)

    def _failure(self, what: str) -> ServerError:
        run = self._started()
        log = run.log_path.read_bytes()[run.log_start :].decode(errors="replace")
        # Triton writes a Python error with its traceback in one line; the first part is the message.
        errors = [text.partition(r"\n\nAt:")[0] for text in LOGGED_ERROR.findall(log) if text != HARMLESS_ERROR]
        failed_models = [text for text in errors if text.startswith("failed to load '")]
        reasons = "\n".join(failed_models or errors[-5:] or log.splitlines()[-5:])
        reasons = reasons.replace(r"\n", "\n").replace(str(run.models), str(self._repository))
        hint = (
            f"see the log {self._log_path}"
            if self._log_path
            else "keep Triton's log with --log FILE; in Python log=FILE"
        )
        return ServerError(f"{what}: {reasons}", hint=hint)

    def halt(self, *, patience: float = KILL_SECONDS) -> None:
        """Let requests in flight finish and end Triton; new ones wait at the gate, for the next `start`."""
        self._run, self._patience = None, patience
        self._undo.close()

    def stop(self, *, patience: float = KILL_SECONDS) -> None:
        """Let requests in flight finish, end the server, remove all it left behind. May be called at any time."""
        try:
            self.halt(patience=patience)
        finally:
            self._close_gate()

    def _close_gate(self) -> None:
        if self._gate is not None:
            self._gate.close()
            self._gate = None

    def __enter__(self) -> TritonServer:
        """Start the server; call `wait_ready` with a timeout for the load."""
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the server."""
        self.stop()

    def _started(self) -> _Run:
        assert self._run is not None, "not started"
        return self._run

    @staticmethod
    def _url(host: str, port: int) -> str:
        return f"{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"

    @property
    def http_url(self) -> str:
        """`host:port`, as tritonclient.http takes it."""
        return self._url(self._http_host, self._started().ports.http)

    @property
    def grpc_url(self) -> str:
        """`host:port`, as tritonclient.grpc takes it."""
        return self._url(self._host, self._started().ports.grpc)

    @property
    def grpc_scheme(self) -> str:
        """`grpc`, or `grpcs` where it is encrypted."""
        return "grpcs" if self._options.has_tls else "grpc"

    @property
    def metrics_url(self) -> str:
        """The page that Prometheus reads."""
        return f"http://{self._url(self._host, self._started().ports.metrics)}/metrics"

    @property
    def ports(self) -> Ports:
        """The ports that clients use."""
        return self._started().ports

    @property
    def pid(self) -> int:
        """The process id of the server."""
        return self._started().process.pid
