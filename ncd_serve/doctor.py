"""Checks of the installation, a bundle, a repository and a server: what was found, and what to do about it."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from ncd_serve.errors import MissingExtraError, NcdError

_EXTRAS = {"torch": "train", "torchvision": "train", "timm": "train", "scikit-learn": "train", "onnx": "export"}


@dataclass(frozen=True)
class Check:
    """One thing looked at. `missing` parts are only needed for some commands; a `problem` has to be solved."""

    what: str
    verdict: Literal["ok", "missing", "problem"]
    found: str
    fix: str = ""


def examine(*, bundle: Path | None = None, repository: Path | None = None, url: str | None = None) -> list[Check]:
    """Everything about this machine, and what was asked for on top."""
    from ncd_serve.bundle import Bundle
    from ncd_serve.client import Client
    from ncd_serve.triton import check_repository, find_triton

    checks = [Check("python", "ok", platform.python_version())]
    checks += [_package(name, None) for name in ("ncd-serve", "numpy", "tritonclient")]
    checks.append(_try("onnxruntime", _providers))
    checks += [_package(name, extra) for name, extra in _EXTRAS.items()]
    checks.append(_try("triton binary", lambda: _described(find_triton())))
    if bundle is not None:
        checks.append(_try(f"bundle {bundle}", lambda: f"id {Bundle.read(bundle).manifest.bundle_id}, hashes match"))
    if repository is not None:
        checks.append(_try(f"repository {repository}", lambda: f"{len(check_repository(repository))} models"))
    if url is not None:
        checks.append(_try(f"server {url}", lambda: f"{len(Client(url).cluster_names)} clusters, answers a test image"))
    return checks


def _try(what: str, look: Callable[[], str]) -> Check:
    try:
        return Check(what, "ok", look())
    except MissingExtraError as error:
        return Check(what, "missing", str(error), error.hint or "")
    except NcdError as error:
        return Check(what, "problem", str(error), error.hint or "")


def _package(name: str, extra: str | None) -> Check:
    try:
        return Check(name, "ok", version(name))
    except PackageNotFoundError:
        return Check(name, "missing", "not installed", f"pip install 'ncd-serve[{extra}]'")


def _providers() -> str:
    import onnxruntime as ort

    return f"{ort.__version__}: {', '.join(ort.get_available_providers())}"


def _described(install: object) -> str:
    return f"{getattr(install, 'executable', '')} (from {getattr(install, 'source', '')})"
