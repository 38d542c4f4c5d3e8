"""The names that users may rely on; everything else is private and may change."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import ncd_training
import pytest

import ncd_serve

PUBLIC = {
    ncd_serve: [
        "AsyncClient",
        "Bundle",
        "Client",
        "NcdError",
        "OnnxRunner",
        "Prediction",
        "Source",
        "__version__",
        "assign_images",
        "find_sources",
        "serve",
    ],
    ncd_training: ["Run", "compare", "discover", "dry_run", "estimate_classes", "open_run", "pretrain"],
}
TORCH = ("torch", "torchvision", "timm")
PACKAGES = pytest.mark.parametrize("package", PUBLIC, ids=lambda package: package.__name__)


@PACKAGES
def test_public_names_are_this_list(package: ModuleType) -> None:
    assert list(package.__all__) == PUBLIC[package] == sorted(package.__all__)
    assert dir(package) == PUBLIC[package]


@PACKAGES
def test_public_names_can_be_imported_and_say_what_they_are(package: ModuleType) -> None:
    for name in PUBLIC[package]:
        thing = getattr(package, name)
        assert isinstance(thing, str) or thing.__doc__, name


@PACKAGES
def test_a_name_that_is_not_public_is_an_attribute_error(package: ModuleType) -> None:
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'nothing'"):
        _ = package.nothing


@pytest.mark.parametrize(
    ("package", "heavy"),
    [
        ("ncd_serve", (*TORCH, "sklearn", "scipy", "matplotlib", "onnx")),
        ("ncd_training", (*TORCH, "matplotlib.pyplot")),
    ],
)
@pytest.mark.parametrize("code", ["import {package}", "from {package} import *"])
def test_importing_brings_no_torch(code: str, package: str, heavy: tuple[str, ...]) -> None:
    look = f"{code.format(package=package)}\nimport sys\nprint(*(name for name in {heavy} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == ""
