"""A real Triton, started as the image starts it: as user 1000, without rights, on a root that cannot be written to.

Two of them stand for two pods: one has its models mounted, the other reads them from object storage.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import NamedTuple

import pytest

from ncd_serve.client.client import Client
from ncd_serve.deploy import Target
from ncd_serve.deploy.render import SOURCES
from ncd_serve.errors import NcdError
from ncd_serve.triton import find_triton
from ncd_serve.triton.install import TritonInstall
from ncd_serve.triton.process import Ports, choose_port
from ncd_serve.triton.server import KILL_SECONDS
from tests.deploy.object_storage import KEY, object_storage
from tests.deploy.test_manifests import autoscaler_query

pytestmark = pytest.mark.triton
INSIDE, ASIDE = "/mnt", "/media"  # every Linux has them
# An environment below /tmp has to be seen in the box as well.
KEPT = sys.prefix if Path(sys.prefix).is_relative_to("/tmp") else ""
# What a container with `readOnlyRootFilesystem` and emptyDirs for /tmp and /dev/shm sees. The second namespace makes it
# user 1000, and the exec as such takes all capabilities.
INTO_THE_BOX = f"""set -e
mount --bind "$0" {INSIDE}
mount -o remount,ro,bind {INSIDE}
if [ "$KEPT" ]; then mount --bind "$KEPT" {ASIDE}; fi
mount -t tmpfs tmpfs /tmp
if [ "$KEPT" ]; then mkdir -p "$KEPT" && mount --bind {ASIDE} "$KEPT"; fi
mount -t tmpfs tmpfs /dev/shm
mount -o remount,ro,bind /
exec setpriv --no-new-privs unshare --user --map-user=1000 --map-group=1000 "$@"
"""
ONLY_WITH_GPU = {"nv_gpu_utilization", "nv_gpu_memory_used_bytes"}


class Pod(NamedTuple):
    process: subprocess.Popen[bytes]
    ports: Ports
    inner: int
    probe: Path
    log: Path

    def asks(self, question: str, pid: int | None = None) -> subprocess.CompletedProcess[str]:
        """The probe, as kubelet runs it, with another address."""
        inner, gate = (f"127.0.0.1:{port}" for port in (self.inner, self.ports.http))
        command = [sys.executable, self.probe, question, inner, str(pid or self.process.pid), gate]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    def get(self, path: str, *, method: str = "GET", port: int | None = None) -> tuple[int, str]:
        connection = HTTPConnection("127.0.0.1", port or self.ports.http, timeout=30)
        connection.request(method, path)
        answer = connection.getresponse()
        status, text = answer.status, answer.read().decode()
        connection.close()
        return status, text

    def answered(self) -> int:
        page = self.get("/metrics", port=self.ports.metrics)[1]
        found = re.search(r'^nv_inference_request_success\{model="ncd_global",.*\} (\d+)$', page, re.MULTILINE)
        assert found is not None
        return int(found[1])


class Box(NamedTuple):
    """What an image holds, and what is mounted."""

    install: TritonInstall
    folder: Path
    arguments: list[str]

    def start(self, models: str, **credentials: str) -> Pod:
        ports = Ports(*(choose_port("127.0.0.1", None) for _ in Ports._fields))
        inner = choose_port("127.0.0.1", None)
        here = [f"--{name}-address=127.0.0.1" for name in ports._fields]
        free = [f"--{name}-port={port}" for name, port in ports._replace(http=inner)._asdict().items()]
        server = [f"{INSIDE}/image/start.sh", f"--model-repository={models}", *here, *free, *self.arguments]
        path = os.pathsep.join([str(self.install.executable.parent), self.install.environment()["PATH"]])
        secrets = {"AWS_SECRET_ACCESS_KEY": "secret", "AWS_EC2_METADATA_DISABLED": "true", **credentials}
        gate = {"NCD_SERVE_HTTP": f"127.0.0.1:{ports.http}", "NCD_SERVE_INNER": f"127.0.0.1:{inner}"}
        log = self.folder / f"{ports.http}.log"
        with log.open("wb") as stream:
            process = subprocess.Popen(
                ["unshare", "--mount", "sh", "-c", INTO_THE_BOX, self.folder, "sh", *server],
                cwd="/",
                env={**self.install.environment(), "PATH": path, "KEPT": KEPT, **gate, **secrets},
                stdout=stream,
                stderr=subprocess.STDOUT,
            )
        return Pod(process, ports, inner, self.folder / "image" / "probe.py", log)


@pytest.fixture(scope="module")
def box(rendered: dict[Target, Path], repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Box:
    try:
        install = find_triton()
    except NcdError as error:
        pytest.skip(f"no Triton here: {error}")
    allowed = subprocess.run(["unshare", "--mount", "unshare", "--user", "true"], capture_output=True, check=False)
    if allowed.returncode and "CI" not in os.environ:
        pytest.skip("this user may not make namespaces")
    folder = tmp_path_factory.mktemp("box")
    shutil.copytree(repository, folder / "models")
    shutil.copytree(rendered[Target.HELM] / "image", folder / "image")
    lacking = install.lay_out(folder / "backends")
    return Box(install, folder, [argument.replace(str(folder), INSIDE) for argument in lacking])


@pytest.fixture(scope="module")
def bucket(box: Box) -> Iterator[str]:
    with object_storage(box.folder) as port:
        yield f"s3://http://127.0.0.1:{port}/bucket/models"


@pytest.fixture(scope="module")
def pods(box: Box, bucket: str) -> Iterator[list[Pod]]:
    started = [box.start(f"{INSIDE}/models"), box.start(bucket, AWS_ACCESS_KEY_ID=KEY)]
    try:
        deadline = time.monotonic() + 120
        for pod in started:
            while (asked := pod.asks("ready")).returncode:
                assert pod.process.poll() is None and time.monotonic() < deadline, asked.stderr + pod.log.read_text()
                time.sleep(0.2)
        yield started
    finally:
        for pod in started:
            pod.process.terminate()
        ends = [pod.process.wait(KILL_SECONDS) for pod in started]
    assert ends == [0, 0]


def test_it_runs_without_rights(pods: list[Pod]) -> None:
    status = Path(f"/proc/{pods[0].process.pid}/status").read_text()
    assert re.search(r"^CapEff:\s+0+$", status, re.MULTILINE) and re.search(r"^NoNewPrivs:\s+1$", status, re.MULTILINE)
    mapped = Path(f"/proc/{pods[0].process.pid}/uid_map").read_text().split()
    assert mapped[0] == "1000"
    roots = [line.split() for line in Path(f"/proc/{pods[0].process.pid}/mountinfo").read_text().splitlines()]
    assert all("ro" in entry[5].split(",") for entry in roots if entry[4] in ("/", INSIDE))


def test_probes_tell_a_server_that_answers_from_one_that_does_not(pods: list[Pod]) -> None:
    pod = pods[0]
    before = pod.answered()
    assert pod.asks("ready").returncode == pod.asks("live").returncode == 0
    assert pod.answered() >= before + 2  # real inferences
    # A process without children stands for a Triton whose models have lost theirs.
    lost = pod.asks("live", pid=os.getpid())
    assert lost.returncode == 1 and re.search("has lost . of . processes", lost.stderr)
    gone = pod._replace(ports=Ports(*(choose_port("127.0.0.1", None) for _ in Ports._fields)))
    assert gone.asks("ready").returncode == gone.asks("live").returncode == 1


def test_missing_credentials_are_named_in_the_log(box: Box, bucket: str) -> None:
    pod = box.start(bucket)
    assert pod.process.wait(60) == 1
    assert "Check account credentials" in pod.log.read_text()


def test_administration_is_closed(pods: list[Pod]) -> None:
    for path in ("/v2/systemsharedmemory/status", "/v2/logging", "/v2/trace/setting"):
        assert pods[0].get(path)[0] == 403, path
    for step in ("load", "unload"):
        status, text = pods[0].get(f"/v2/repository/models/ncd_global/{step}", method="POST")
        assert status == 403 and "restricted" in text


def test_what_ends_a_triton_does_not_reach_it(pods: list[Pod]) -> None:
    claim = b'{"inputs": [{"name": "image", "datatype": "UINT8", "shape": [9223372036854775807], "data": [1]}]}'
    connection = HTTPConnection("127.0.0.1", pods[0].ports.http, timeout=30)
    connection.request("POST", "/v2/models/ncd_global/infer", claim)
    assert connection.getresponse().status == 400
    connection.close()
    connection.request("POST", "/v2/models/ncd_global/infer", (b"1" for _ in range(40_000)), encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()
    assert pods[0].asks("live").returncode == 0


def test_triton_prints_every_metric_that_is_asked_for(pods: list[Pod]) -> None:
    page = pods[0].get("/metrics", port=pods[0].ports.metrics)[1]
    printed = set(re.findall(r"^# TYPE (\w+) ", page, re.MULTILINE))
    asked = {
        name: set(re.findall(r"\bnv_\w+", text))
        for name, text in {
            "dashboard": (SOURCES / "monitoring" / "dashboard.json").read_text(),
            "alerts": (SOURCES / "monitoring" / "rules.yaml").read_text(),
            "autoscaler": autoscaler_query(),
        }.items()
    }
    assert all(asked.values())
    assert {key: names - printed - ONLY_WITH_GPU for key, names in asked.items()} == {key: set() for key in asked}
    reasons = set(re.findall(r'nv_inference_request_failure\{.*?reason="(\w+)"', page))
    assert reasons == {"REJECTED", "CANCELED", "BACKEND", "OTHER"}  # which the alerts tell apart
    assert 'nv_inference_request_summary_us{model="ncd_global",version="1",quantile="0.99"}' in page


def test_requests_of_one_client_reach_all_pods(pods: list[Pod], glyphs: Path) -> None:
    before = [pod.answered() for pod in pods]
    addresses = ",".join(f"127.0.0.1:{pod.ports.grpc}" for pod in pods)
    images = sorted((glyphs / "test").rglob("*.png"))[:8]
    # As a headless service resolves: several addresses of one name.
    with Client(f"grpc://ipv4:{addresses}") as client:
        for image in images:
            assert [row.status for row in client.assign([image])] == ["ok"]
    share = [pod.answered() - count for pod, count in zip(pods, before, strict=True)]
    assert min(share) >= 3, share
