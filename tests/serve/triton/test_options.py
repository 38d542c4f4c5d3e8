"""Options of tritonserver that a user passes through: checked first, then obeyed by a real server."""

from __future__ import annotations

import shutil
import subprocess
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as grpc

from ncd_serve.errors import DataError, NcdError, UsageError
from ncd_serve.triton import TritonServer
from ncd_serve.triton.options import TritonOptions
from tests.serve.small_models import CONFIG, READY_SECONDS, make_classifier, needs_triton, random_images, tensor


@pytest.mark.parametrize(
    ("words", "kind", "reason", "hint"),
    [
        (["log-verbose=1"], UsageError, "'log-verbose=1' is not an option", "--NAME=VALUE"),
        (["--grpc-port=1"], UsageError, "--grpc-port is set by ncd-serve", "use --grpc-port before"),
        (["--model-repository", "x"], UsageError, "--model-repository is set by ncd-serve", "use --repository"),
        (["--allow-http=false"], UsageError, "needs HTTP", "--host"),
        (["--grpc-server-cert=no.pem"], DataError, "no such file: no.pem", "check the path"),
    ],
)
def test_what_cannot_work_is_refused(words: list[str], kind: type[NcdError], reason: str, hint: str) -> None:
    with pytest.raises(kind, match=reason) as caught:
        TritonOptions(words)
    assert hint in (caught.value.hint or "")


def test_both_ways_to_write_a_value_and_paths_that_hold_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = TritonOptions(["--log-verbose", "1", "--log-file=t.log", "--disable-auto-complete-config"])
    assert options.as_arguments() == [
        "--log-verbose=1",
        f"--log-file={tmp_path}/t.log",
        "--disable-auto-complete-config",
    ]
    assert not options.has_tls


def test_headers_of_restricted_interfaces() -> None:
    options = TritonOptions(
        ["--http-restricted-api=statistics,model-repository:admin=a=b", "--grpc-restricted-protocol=trace,logging:k=v"]
    )
    assert options.headers() == {"admin": "a=b"}
    assert options.restricted_protocols == {"trace", "logging"}


@pytest.mark.triton
@needs_triton
@pytest.mark.skipif(not shutil.which("openssl"), reason="makes a certificate with openssl")
def test_tls_restrictions_cache_and_log_reach_the_server(tmp_path: Path) -> None:
    make_classifier(tmp_path / "models" / "birds", CONFIG + "response_cache { enable: true }")
    key, certificate, log = tmp_path / "key.pem", tmp_path / "cert.pem", tmp_path / "own.log"
    _make_certificate(key, certificate)
    options = [
        "--grpc-use-ssl=true",
        f"--grpc-server-key={key}",
        f"--grpc-server-cert={certificate}",
        "--http-restricted-api=health,model-repository:admin=secret",
        "--grpc-restricted-protocol=trace:admin=secret",
        "--cache-config=local,size=1048576",
        f"--log-file={log}",
    ]
    with TritonServer(tmp_path / "models", host="0.0.0.0", extra_arguments=options) as server:
        server.wait_ready(READY_SECONDS)
        asked = {"ssl": True, "root_certificates": str(certificate)}
        with grpc.InferenceServerClient(server.grpc_url.replace("127.0.0.1", "localhost"), **asked) as client:
            for _ in range(2):
                client.infer("birds", [tensor("image", random_images(1))])
            statistics = client.get_inference_statistics("birds", as_json=True)["model_stats"][0]["inference_stats"]
        assert int(statistics["cache_hit"]["count"]) > 0
        assert _status(server.http_url, "/v2/health/ready") == 403
        assert _status(server.http_url, "/v2/health/ready", {"admin": "secret"}) == 200
        assert _listens_on(server.http_url) == "0100007F", "what is meant to be encrypted is not open beside it"
    assert "Started" in log.read_text()


def _make_certificate(key: Path, certificate: Path) -> None:
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", *names, *files]
    subprocess.run(command, check=True, capture_output=True)


def _status(address: str, path: str, headers: dict[str, str] | None = None) -> int:
    connection = HTTPConnection(address, timeout=10)
    connection.request("GET", path, headers=headers or {})
    status = connection.getresponse().status
    connection.close()
    return status


def _listens_on(address: str) -> Any:
    """The address behind a port as the kernel writes it."""
    port = f"{int(address.rpartition(':')[2]):04X}"
    sockets = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    (found,) = (words[1].split(":")[0] for words in sockets if words[1].endswith(f":{port}") and words[3] == "0A")
    return found
