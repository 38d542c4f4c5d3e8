"""Facts for the templates of a deployment: the bundle, its model in the repository, and the repository's place."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ncd_serve import __version__
from ncd_serve.contract import DIGEST_FACT, FACT_PREFIX, THREADS
from ncd_serve.deploy.memory import OVERHEAD_MIB, SHARED_MEMORY_MIB, peak_mib, pod_mib
from ncd_serve.errors import DataError, UsageError
from ncd_serve.triton.probe import ANSWER_SECONDS
from ncd_serve.triton.process import USUAL_PORTS, Ports
from ncd_serve.triton.repository import CONFIG, check_repository, model_versions, read_config
from ncd_serve.triton.server import DRAIN_SECONDS
from ncd_serve.triton.signed import check_files

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ncd_serve.bundle import Bundle

# Before 25.07 one request ends Triton (CVE-2025-23310, CVE-2025-23311), and later releases mended more. Our tests run
# the newest server that a wheel has, 24.10, with the same options.
TRITON_IMAGE = "nvcr.io/nvidia/tritonserver:26.08-py3"
GPU_CPUS = 4  # the model is elsewhere: these decode images

_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")  # syntax of Kubernetes labels
_PATH = re.compile(r"(/[A-Za-z0-9_][A-Za-z0-9_.-]*)+")
_IMAGE = re.compile(
    r"([a-z0-9.-]+(:\d+)?/)?[a-z0-9]+([._/-]+[a-z0-9]+)*(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(@sha256:[0-9a-f]{64})?"
)
_URI = re.compile(
    r"(?P<storage>s3|gs|pvc)://((?P<scheme>https?)://[A-Za-z0-9.-]+(:(?P<port>\d{1,5}))?/)?"
    r"[a-z0-9][a-z0-9_.-]*(/[A-Za-z0-9_.=-]+)*/?"
)


@dataclass(frozen=True)
class Deployment:
    """Values of the templates."""

    name: str
    image: str
    model: str
    version: str
    bundle_id: str
    digest: str
    max_batch: int
    side: int
    repository: Path
    repository_uri: str  # empty: the repository is baked into the image, or mounted
    storage: str
    storage_port: int
    gpu: bool
    engine_cache: str  # where TensorRT keeps what it built, if it serves the model
    cpus: int
    peak_mib: int
    ports: Ports = USUAL_PORTS
    uid: int = 1000  # the user `triton-server` of NVIDIA's image
    model_path: str = "/models"
    probe: str = "/opt/ncd-serve/probe.py"
    inner_http_port: int = 18000  # of Triton itself, behind the gate
    live_seconds: int = 2 * ANSWER_SECONDS  # for a probe that waits for an inference
    triton_image: str = TRITON_IMAGE
    shm_mib: int = SHARED_MEMORY_MIB
    drain_seconds: int = DRAIN_SECONDS
    endpoint_seconds: int = 10
    ncd_version: str = __version__

    @property
    def memory_mib(self) -> int:
        """Memory limit of a pod."""
        return pod_mib(self.peak_mib)

    @property
    def startup_minutes(self) -> int:
        """Time limit of a start."""
        return 30 if self.engine_cache else 10

    @property
    def made(self) -> str:
        """Origin of the files, for their first line."""
        size = f"batches of up to {self.max_batch} images of {self.side}x{self.side}"
        bundle = f"bundle {self.bundle_id} ({self.digest})"
        return f"Made by ncd-serve {self.ncd_version} for {bundle}: {self.model} {self.version}, {size}."

    @property
    def sizing(self) -> str:
        """Reason for the memory limit."""
        rest = (
            f"half as much again, and {OVERHEAD_MIB} MiB for Triton, its Python processes, shared memory and decoding"
        )
        return f"Measured: {self.peak_mib} MiB for a batch of {self.max_batch} on a CPU; {rest}."


def collect_facts(
    bundle: Bundle,
    repository: Path,
    *,
    model: str,
    image: str | None = None,
    repository_uri: str = "",
    python_models: bool = False,
    public_key: str | None = None,
) -> Deployment:
    """Collect the facts about a bundle that `repository` serves as `model`; raise an error if it cannot be deployed.

    Repositories with models that run code of their own are refused unless `python_models` allows them; with a public
    key, those with models that its owner did not sign.
    """
    if not _LABEL.fullmatch(model):
        raise UsageError(f"'{model}' cannot be a label in Kubernetes", hint="export it with a shorter --model-name")
    name = f"ncd-{re.sub('[^a-z0-9]+', '-', model.lower()).removeprefix('ncd-')}"[:40].rstrip("-")
    bundle_id = bundle.manifest.bundle_id
    if not _LABEL.fullmatch(bundle_id):
        raise DataError(f"the bundle's id cannot be a label in Kubernetes: {bundle_id[:80]!r}", hint="export again")
    image = image or f"{name}:{bundle_id}"
    if not _IMAGE.fullmatch(image):
        raise UsageError(f"'{image}' is not the name of an image", hint="e.g. registry.example.com/team/birds:1")
    storage, port = _storage(repository_uri)
    known = check_repository(repository, python_models=python_models, public_key=public_key)
    config = _served_config(repository, model, known, bundle)
    max_batch = config.max_batch_size
    return Deployment(
        name=name,
        image=image,
        model=model,
        version=model_versions(repository / model, config)[-1].name,
        bundle_id=bundle_id,
        digest=bundle.digest,
        max_batch=max_batch,
        side=bundle.manifest.preprocess.resolution,
        repository=repository,
        repository_uri=repository_uri,
        storage=storage,
        storage_port=port,
        peak_mib=peak_mib(bundle, max_batch),
        **_device(config),
    )


def _storage(uri: str) -> tuple[str, int]:
    """Return the kind of storage, and its port."""
    if not uri:
        return "", 443
    found = _URI.fullmatch(uri)
    if found is None or (found["scheme"] and found["storage"] != "s3"):
        raise UsageError(
            f"'{uri}' is not the address of a model repository",
            hint="s3://BUCKET/PATH, s3://https://HOST:PORT/BUCKET/PATH, gs://BUCKET/PATH or pvc://CLAIM/PATH",
        )
    return found["storage"], int(found["port"] or (80 if found["scheme"] == "http" else 443))


def _served_config(repository: Path, model: str, known: Sequence[str], bundle: Bundle) -> Any:
    """Return the configuration of one of the known models; raise an error unless it serves the bundle."""
    if model not in known:
        raise DataError(
            f"{repository} has no model '{model}'", hint="name another with --model-name, or another --repository"
        )
    config = read_config(repository / model / CONFIG)
    served, bundle_id = config.parameters[f"{FACT_PREFIX}bundle"].string_value, bundle.manifest.bundle_id
    digest = config.parameters[DIGEST_FACT].string_value
    if served != bundle_id or digest not in ("", bundle.digest):  # older versions wrote none
        found = f"bundle {served} {digest}".strip() if served else "no exported bundle"
        raise DataError(
            f"{repository / model} serves {found}, not {bundle_id} {bundle.digest}",
            hint="export the run again, or give the --bundle that was exported last",
        )
    check_files(repository / model, model_versions(repository / model, config)[-1], bundle.manifest)
    return config


def _device(config: Any) -> dict[str, Any]:
    """Return whether the model is served on a GPU, and the number of cores that it needs."""
    from tritonclient.grpc.model_config_pb2 import ModelInstanceGroup

    gpu = any(group.kind == ModelInstanceGroup.KIND_GPU for group in config.instance_group)
    accelerators = config.optimization.execution_accelerators.gpu_execution_accelerator
    caches = [entry.parameters["trt_engine_cache_path"] for entry in accelerators if entry.name == "tensorrt"]
    engine_cache = next(iter(caches), "")
    if engine_cache and not _PATH.fullmatch(engine_cache):  # it comes to stand in a Dockerfile and in YAML
        raise DataError(f"trt_engine_cache_path is not a plain path: {engine_cache[:80]!r}", hint="export again")
    threads = config.parameters[THREADS].string_value or "1"
    if not threads.isdecimal():
        raise DataError(f"{THREADS} is not a number: {threads[:80]!r}", hint="export again")
    return {"gpu": gpu, "engine_cache": engine_cache, "cpus": GPU_CPUS if gpu else int(threads)}
