"""Checks of the installation, a bundle, a repository and a server, each with its result and a fix."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ncd_serve.bundle import Bundle
from ncd_serve.client.client import Client
from ncd_serve.client.connection import Connection, in_background
from ncd_serve.contract import FACT_PREFIX, PREPROCESS_FACT, checked_token, read_contract
from ncd_serve.doctor.installation import BrokenInstallationError, Step, installation_steps, machine_steps
from ncd_serve.errors import DataError, MissingExtraError, NcdError, ServerError
from ncd_serve.reference import REFERENCE
from ncd_serve.runners import open_session
from ncd_serve.triton.repository import check_model, model_folders, model_versions

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Images = NDArray[np.uint8]
    Answers = NDArray[Any]

ANSWER_SECONDS = 30.0
_MAX_NAMES_PRINTED = 100
EXPORT_AGAIN = "export the run again: ncd-serve export RUN"


@dataclass(frozen=True)
class Check:
    """Result of a check. `missing` parts are only needed for some commands; a `problem` must be solved."""

    group: str
    what: str
    verdict: Literal["ok", "missing", "problem"]
    found: str
    fix: str = ""
    code: int = 0  # of a problem: what a command that meets it ends with


def examine(
    *, bundle: Path | None = None, repository: Path | None = None, url: str | None = None, model: str = "ncd_global"
) -> Iterator[Check]:
    """Yield the checks of this machine, and of a bundle, repository or server if given; `model` is the one at `url`."""
    yield from take_steps("installation", installation_steps())
    yield from take_steps("machine", machine_steps())
    if bundle is not None:
        yield from take_steps(f"bundle {bundle}", _BundleSteps(bundle).steps(), in_a_row=True)
    if repository is not None:
        yield from take_steps(f"repository {repository}", _repository_steps(repository))
    if url is not None:
        yield from take_steps(f"server {url}", _ServerSteps(url, model).steps(), in_a_row=True)


def take_steps(group: str, steps: Iterator[Step], *, in_a_row: bool = False) -> Iterator[Check]:
    """Yield a check for each step; in a sequence, where each step needs the one before, a problem ends it."""
    for what, look in steps:
        try:
            yield Check(group, what, "ok", look())
        except NcdError as error:
            if isinstance(error, MissingExtraError) and not isinstance(error, BrokenInstallationError):
                yield Check(group, what, "missing", str(error), error.hint or "")
                continue
            yield Check(group, what, "problem", str(error), error.hint or "", error.exit_code)
            if in_a_row:
                return


class _BundleSteps:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def steps(self) -> Iterator[Step]:
        yield "files", self._files
        yield "clusters", self._clusters
        yield "test image", self._test_image
        yield "reference", self._reference

    def _files(self) -> str:
        self._bundle = Bundle.read(self._folder)
        manifest = self._bundle.manifest
        return f"schema {manifest.schema_version}, id {manifest.bundle_id}; {len(manifest.sha256)} files are unchanged"

    def _clusters(self) -> str:
        manifest = self._bundle.manifest
        facts = [_described(manifest.cluster_names), manifest.precision, f"method {manifest.method}"]
        facts += [f"{len(ids)} {what}" for what, ids in (("merged", manifest.merged), ("junk", manifest.junk)) if ids]
        return "; ".join(facts)

    def _test_image(self) -> str:
        manifest = self._bundle.manifest
        ask = partial(_ask_onnx, self._bundle.model_path)
        return _answered(ask, side=manifest.preprocess.resolution, clusters=len(manifest.cluster_names))

    def _reference(self) -> str:
        if not (self._folder / REFERENCE).exists():
            raise MissingExtraError(f"no {REFERENCE}: an older version exported it", hint=EXPORT_AGAIN)
        return f"{len(self._bundle.reference().paths):,} training images to compare new ones with"


def _repository_steps(repository: Path) -> Iterator[Step]:
    try:
        models = model_folders(repository)
    except DataError as error:
        yield "models", partial(_raise, error)
        return
    for model in models:
        yield model.name, partial(_served_model, model)


def _raise(error: NcdError) -> str:
    raise error


def _served_model(model: Path) -> str:
    from google.protobuf.json_format import MessageToDict  # type: ignore[import-untyped]

    parsed = check_model(model)
    config = MessageToDict(parsed, preserving_proto_field_name=True)
    facts = {key: value.get("string_value", "") for key, value in config.get("parameters", {}).items()}
    versions = f"versions {', '.join(version.name for version in model_versions(model, parsed))}"
    if asks := facts.get(f"{FACT_PREFIX}jpeg_of"):
        if not (model.parent / asks).is_dir():
            raise DataError(f"it takes image files for the model '{asks}', which does not exist", hint=EXPORT_AGAIN)
        return f"{versions}; takes image files for '{asks}'"
    if PREPROCESS_FACT not in facts:
        return f"{versions}; not exported by ncd-serve: Triton serves it, `query` cannot ask it"
    return f"{versions}; {_exported_model(model, config, parsed)}"


def _exported_model(model: Path, config: dict[str, Any], parsed: Any) -> str:
    """Check that the newest version answers as configured, and that every cluster has a label."""
    try:
        contract = read_contract(config, str(model))
    except ServerError as error:
        raise DataError(str(error), hint=error.hint) from None
    labels = (model / "labels.txt").read_text().splitlines() if (model / "labels.txt").is_file() else []
    if len(labels) != contract.clusters:
        raise DataError(f"{len(labels)} labels for {contract.clusters} clusters", hint=EXPORT_AGAIN)
    newest = model_versions(model, parsed)[-1]
    ask = partial(_ask_onnx, newest / "model.onnx")
    answer = _answered(ask, side=contract.preprocess.resolution, clusters=contract.clusters)
    return f"{_described(labels)}; {newest.name}: {answer}"


def _described(cluster_names: list[str]) -> str:
    given = [name for name in cluster_names if not re.fullmatch(r"cluster-\d+", name)]
    shown = [*given[:_MAX_NAMES_PRINTED], *(["..."] if len(given) > _MAX_NAMES_PRINTED else [])]
    return (
        f"{len(cluster_names)} clusters, {len(given) or 'none'} of them named{': ' if given else ''}{', '.join(shown)}"
    )


def _ask_onnx(model: Path, images: Images) -> Answers:
    try:
        return np.asarray(open_session(model).run(["probabilities"], {"image": images})[0], np.float32)
    except Exception as error:  # its errors have no class in common
        raise DataError(f"ONNX Runtime cannot run {model}: {error}", hint=EXPORT_AGAIN) from None


def _answered(ask: Callable[[Images], Answers], *, side: int, clusters: int) -> str:
    """Send two images of noise, and check that the outputs are probabilities."""
    answers = ask(np.random.default_rng(0).integers(0, 256, (2, side, side, 3), dtype=np.uint8))
    if answers.shape != (2, clusters):
        raise DataError(f"answers of shape {answers.shape}, not {(2, clusters)}", hint=EXPORT_AGAIN)
    if not np.allclose(answers.sum(axis=1), 1, atol=1e-2) or answers.min() < 0:
        raise DataError(f"answers sum to {answers.sum(axis=1)}, not to 1: no probabilities", hint=EXPORT_AGAIN)
    return f"{side} x {side} pixels in, {clusters} probabilities out, which sum to 1"


class _ServerSteps:
    def __init__(self, url: str, model: str) -> None:
        self._url, self._model = url, model

    def steps(self) -> Iterator[Step]:
        yield "server", self._server
        yield f"model {self._model}", self._contract
        yield "test image", self._test_image

    def _server(self) -> str:
        return in_background(self._ask()).result()

    async def _ask(self) -> str:
        token = checked_token(None)
        connection = Connection(self._url, self._model, timeout=ANSWER_SECONDS, patience=0, token=token)
        try:
            version = await connection.server_version()
            try:
                models = ", ".join(await connection.models())
            except ServerError:  # an interface that may be restricted
                models = "it does not list its models"
            return f"Triton {version} is ready: {models}"
        finally:
            await connection.close()

    def _contract(self) -> str:
        with self._open() as client:
            return f"{_described(client.cluster_names)}; batches of at most {client.max_batch}"

    def _test_image(self) -> str:
        with self._open() as client:
            side, clusters = client.preprocess.resolution, len(client.cluster_names)
            return _answered(lambda images: client.answer(images).probabilities, side=side, clusters=clusters)

    def _open(self) -> Client:
        return Client(self._url, model=self._model, timeout=ANSWER_SECONDS, patience=0)
