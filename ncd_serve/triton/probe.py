"""Probes of a running Triton over HTTP: readiness of its models, lost processes, activity.

The images that `ncd-serve deploy` describes carry this file for their probes: `probe.py ready` and `probe.py live`.
"""

from __future__ import annotations

import json
import math
import re
import socket
import sys
from collections import Counter
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

ANSWER_SECONDS = 30  # for an inference on a busy machine
FACT_SECONDS = 5  # for what Triton answers without a model
LOAD_SECONDS = 600
ITEM_BYTES = {"BOOL": 1, "UINT8": 1, "INT8": 1, "UINT16": 2, "INT16": 2, "FP16": 2, "BF16": 2, "FP64": 8, "INT64": 8,
              "UINT64": 8}  # fmt: skip
BLANK_FILE = b"P5 8 8 255\n" + bytes(64)  # a grey image in PGM
DEAD_WORKER = "is not healthy"  # Triton about the process of a model
STOPPED = ("T", "t")  # states of a process
ASKS = "ncd_jpeg_of"  # the parameter of a model for image files that names the one it asks
METRIC = re.compile(r'^(\w+)\{.*?\bmodel="([^"]*)".*?\bversion="([^"]*)".*\} (\S+)$', re.MULTILINE)
QUANTILE = re.compile(r'quantile="([^"]*)"')


class ModelVersion(NamedTuple):
    """State of one version of a model, as the server reports it."""

    name: str
    version: str
    state: str
    reason: str

    @property
    def path(self) -> str:
        """Path in the server's HTTP interface."""
        return f"/v2/models/{self.name}/versions/{self.version}"


class Activity(NamedTuple):
    """Requests of a model, or of one version of it; the latency is that of the last minute, in ms."""

    answered: int
    failed: int
    images: int
    p50: float
    p99: float


class _UnixConnection(HTTPConnection):
    """HTTP over a socket in the file system."""

    def connect(self) -> None:
        """Connect."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)

    def __init__(self, path: str, seconds: float) -> None:
        super().__init__("localhost", timeout=seconds)
        self._path = path


def _connection(address: str, seconds: float) -> HTTPConnection:
    if address.startswith("unix:"):
        return _UnixConnection(address[5:], seconds)
    return HTTPConnection(address, timeout=seconds)


class Probe:
    """Probe of the server at the HTTP `address`, `HOST:PORT` or `unix:PATH`; `headers` open restricted interfaces."""

    def __init__(
        self, address: str, *, headers: Mapping[str, str] | None = None, made: Counter[str] | None = None
    ) -> None:
        """Prepare a probe; `made` counts the inferences that it asks each model for."""
        self._address, self._headers = address, dict(headers or {})
        self._made: Counter[str] = Counter() if made is None else made

    def is_alive(self) -> bool:
        """Return whether the server runs, ready or not."""
        return self._ask("GET", "/v2/health/live")[0] == 200

    def is_ready(self) -> bool:
        """Return whether the server reports that it is ready. It does so even when the process of a model has died."""
        return self._ask("GET", "/v2/health/ready")[0] == 200

    def versions(self) -> list[ModelVersion]:
        """Return every version of every model that the server has tried to load."""
        status, body = self._ask("POST", "/v2/repository/index")
        entries = json.loads(body) if status == 200 else []
        keys = ModelVersion._fields
        return [ModelVersion(*(entry.get(key, "") for key in keys)) for entry in entries if "state" in entry]

    def unanswered(self) -> str | None:
        """Return the reason why a model does not answer a blank input, or None; an error response is an answer."""
        ready = [entry for entry in self.versions() if entry.state == "READY"]
        for entry in ready:
            status, body = self._infer_blank(entry)
            if status not in (200, 400):
                return f"model '{entry.name}' does not answer: {_error(body) or status}"
        return None if ready else "no model is ready"

    def hanging(self, pid: int) -> str | None:
        """Return the reason why the server hangs, or None: no answer to a blank input, nor to any other request.

        One that has much to do takes long for one answer, but gives others meanwhile. `pid` is the server's.
        """
        if _state(str(pid)) in STOPPED:
            return "Triton has been stopped"
        if self._ask("GET", "/v2/health/live", seconds=FACT_SECONDS)[0] == 0:
            return "Triton does not answer"
        for entry in self.versions():
            if entry.state == "READY":
                before = self._finished(entry)
                status, body = self._infer_blank(entry)
                if status == 0 and self._finished(entry) == before:
                    return f"model '{entry.name}' has not answered for {ANSWER_SECONDS} s"
                if DEAD_WORKER in _error(body):
                    return f"model '{entry.name}': {_error(body)}"
        return None

    def _finished(self, entry: ModelVersion) -> int:
        """Return the number of requests that a model has answered or refused."""
        status, body = self._ask("GET", f"{entry.path}/stats", seconds=FACT_SECONDS)
        if status != 200:
            return -1
        counts = json.loads(body)["model_stats"][0]["inference_stats"]
        return sum(int(counts[key]["count"]) for key in ("success", "fail"))

    def load(self, model: str, config: str | None = None) -> str | None:
        """Load the model's folder as it is now, while the old version serves; return the reason of a failure."""
        wish = {"parameters": {"config": config}} if config else {}
        status, body = self._ask(
            "POST", f"/v2/repository/models/{model}/load", json.dumps(wish).encode(), seconds=LOAD_SECONDS
        )
        return None if status == 200 else _error(body) or f"status {status}"

    def lost_process(self, pid: int) -> str | None:
        """Return the description of a model with fewer running processes than instances, or None.

        One that was stopped does not run: Triton would wait for it for ever. `pid` is the server's.
        """
        running = list(_stub_models(pid))
        for entry in self.versions():
            if entry.state != "READY":
                continue
            status, body = self._ask("GET", f"{entry.path}/config")
            wanted = _processes(json.loads(body)) if status == 200 else 0
            found = running.count((entry.name, entry.version))
            if found < wanted:
                return f"model '{entry.name}' has lost {wanted - found} of {wanted} processes"
        return None

    def _infer_blank(self, entry: ModelVersion) -> tuple[int, bytes]:
        status, body = self._ask("GET", entry.path)
        if status != 200:
            return status, body
        described = json.loads(body)
        inputs, blanks = zip(*(_blank(tensor) for tensor in described["inputs"]), strict=True)
        # One output is enough to know that the model runs.
        head = json.dumps({"inputs": inputs, "outputs": [{"name": described["outputs"][0]["name"]}]}).encode()
        headers = {"Inference-Header-Content-Length": str(len(head))}
        asked = [entry.name, *self._asked_by(entry, inputs)]
        self._made.update(asked)  # before: nobody is to count it meanwhile
        status, body = self._ask("POST", f"{entry.path}/infer", head + b"".join(blanks), headers=headers)
        if status != 200:
            self._made.subtract(asked)
        return status, body

    def _asked_by(self, entry: ModelVersion, inputs: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return the models that a model for image files asks."""
        if not any(tensor["datatype"] == "BYTES" for tensor in inputs):
            return []
        status, body = self._ask("GET", f"{entry.path}/config", seconds=FACT_SECONDS)
        facts = json.loads(body).get("parameters", {}) if status == 200 else {}
        return [facts[ASKS]["string_value"]] if ASKS in facts else []

    def _ask(
        self, method: str, path: str, body: bytes = b"", *, headers: Mapping[str, str] | None = None, seconds: float = 0
    ) -> tuple[int, bytes]:
        """Return status and body of a request; status 0 if the server does not answer."""
        connection = _connection(self._address, seconds or ANSWER_SECONDS)
        try:
            connection.request(method, path, body, {**self._headers, **(headers or {})})
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (OSError, HTTPException):
            return 0, b""
        finally:
            connection.close()


def read_activity(metrics_address: str) -> dict[tuple[str, str], Activity]:
    """Read the activity of each version of each model from the page for Prometheus; empty when there is none."""
    status, body = Probe(metrics_address)._ask("GET", "/metrics", seconds=FACT_SECONDS)
    figures: dict[tuple[str, str], dict[str, float]] = {}
    for line in METRIC.finditer(body.decode() if status == 200 else ""):
        quantile = QUANTILE.search(line[0])
        key = line[1] + (quantile[1] if quantile else "")
        found = figures.setdefault((line[2], line[3]), {})
        found[key] = found.get(key, 0) + float(line[4])  # reasons of failure add up
    return {version: _activity(found) for version, found in sorted(figures.items())}


def _activity(figures: dict[str, float]) -> Activity:
    counts = [int(figures.get(f"nv_inference_{key}", 0)) for key in ("request_success", "request_failure", "count")]
    latency = [
        figures.get(f"nv_inference_request_summary_us{quantile}", math.nan) / 1000 for quantile in ("0.5", "0.99")
    ]
    return Activity(*counts, *latency)


def _error(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return ""


def _blank(tensor: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    """Return description and bytes of a blank input: zeros, or a blank image file."""
    shape = [max(1, int(size)) for size in tensor["shape"]]
    if tensor["datatype"] == "BYTES":
        content = (len(BLANK_FILE).to_bytes(4, "little") + BLANK_FILE) * math.prod(shape)
    else:
        content = bytes(math.prod(shape) * ITEM_BYTES.get(tensor["datatype"], 4))
    described = {"name": tensor["name"], "datatype": tensor["datatype"], "shape": shape}
    return {**described, "parameters": {"binary_data_size": len(content)}}, content


def _processes(config: dict[str, Any]) -> int:
    """Return the number of processes that serve a model: one per instance of a Python backend, none for a C++ one."""
    if config.get("backend") != "python" and not config.get("runtime", "").endswith(".py"):
        return 0
    return sum(group["count"] * max(1, len(group["gpus"])) for group in config["instance_group"])


def _stub_models(pid: int) -> Iterator[tuple[str, str]]:
    """Yield model and version of every running child process of the server that has one."""
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in _read(children).split():
            # A process that has died has no command line.
            arguments = _read(Path("/proc") / child / "cmdline").split("\0")
            if "triton_python_backend_stub" in arguments[0] and _state(child) not in STOPPED:
                version = Path(arguments[1]).parent
                yield version.parent.name, version.name


def _state(pid: str) -> str:
    """Return the state of a process, a letter; the name before it, in brackets, may hold anything."""
    return _read(Path("/proc") / pid / "stat").rpartition(")")[2].strip()[:1]


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def trouble(
    question: str, address: str = "127.0.0.1:18000", pid: str = "1", gate: str = "127.0.0.1:8000"
) -> str | None:
    """Return the reason why the server of a container is not `ready` or `live`, or None."""
    probe = Probe(address)
    if Probe(gate)._ask("GET", "/v2/health/live", seconds=FACT_SECONDS)[0] == 0:
        return "the gate does not answer"
    if question == "ready":
        return probe.unanswered() if probe.is_ready() else "Triton is not ready"
    return probe.lost_process(int(pid)) or probe.hanging(int(pid))


if __name__ == "__main__":
    sys.exit(trouble(*sys.argv[1:]))
