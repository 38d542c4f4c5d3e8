"""Serving and looking never import torch: `--help` is quick, and the base installation is small."""

import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "torchvision", "timm", "sklearn", "scipy", "matplotlib", "onnx")
CODE = """
import sys
from ncd_serve.cli.app import main
sys.argv = ["ncd-serve", *sys.argv[1:]]
try:
    main()
except SystemExit:
    pass
print("HEAVY", *(name for name in {heavy} if name in sys.modules))
"""


def heavy_imports(*arguments: object) -> str:
    command = [sys.executable, "-c", CODE.format(heavy=HEAVY), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.rpartition("HEAVY")[2].strip()


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("--version",),
        ("train", "--help"),
        ("pretrain", "--help"),
        ("compare", "--list"),
        ("doctor",),
        ("serve", "--repository", "nowhere"),
        ("query", __file__, "--url", "grpc://127.0.0.1:1"),
    ],
)
def test_command_stays_light(arguments: tuple[str, ...]) -> None:
    assert heavy_imports(*arguments) == ""


def test_assign_stays_light(bundle: Path, glyphs: Path) -> None:
    assert heavy_imports("assign", glyphs / "test" / "E", "--bundle", bundle) == ""
