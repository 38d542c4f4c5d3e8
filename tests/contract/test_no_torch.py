"""Serving and looking never import torch: `--help` is quick, and the base installation is small."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "torchvision", "timm", "sklearn", "scipy", "matplotlib", "onnx", "ray")
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
        ("recipes",),
        pytest.param(("doctor",), marks=pytest.mark.slow),
        ("serve", "--repository", "nowhere"),
        ("query", __file__, "--url", "grpc://127.0.0.1:1"),
    ],
)
def test_command_stays_light(arguments: tuple[str, ...]) -> None:
    assert heavy_imports(*arguments) == ""


def test_names_need_onnx_alone(bundle: Path, tmp_path: Path) -> None:
    assert heavy_imports("name", "list", "--bundle", bundle) == ""
    assert heavy_imports("name", "export", "--bundle", bundle, "--out", tmp_path / "names.json") == ""
    copy = shutil.copytree(bundle, tmp_path / "bundle")
    where = ("--bundle", copy, "--repository", tmp_path / "models")
    assert heavy_imports("name", "apply", tmp_path / "names.json", *where) == "onnx"
    assert (tmp_path / "models" / "ncd_global" / "1").is_dir()


def test_assign_and_drift_stay_light(bundle: Path, glyphs: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.csv"
    assert heavy_imports("assign", glyphs / "test", "--bundle", bundle, "--out", rows) == ""
    assert heavy_imports("drift", rows, "--bundle", bundle) == ""
    assert (tmp_path / "rows.csv.drift.svg").is_file()


def test_deploying_stays_light(bundle: Path, repository: Path, tmp_path: Path) -> None:
    where = ("--bundle", bundle, "--repository", repository, "--out", tmp_path / "out")
    assert heavy_imports("deploy", "render", "helm", *where) == ""
    assert (tmp_path / "out" / "chart" / "Chart.yaml").is_file()
