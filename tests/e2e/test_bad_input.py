"""Input made to hurt, through the command line: a clear row for each, the other rows intact, little memory."""

from __future__ import annotations

import csv
import io
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from ncd_serve.triton import TritonServer

MEGABYTES = 500
# In a process between: the peak of a child counts from that of the process it was forked from, and ours may be large.
MEASURE = """
import resource, subprocess, sys
code = subprocess.call(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10, file=sys.stderr)
sys.exit(code)
"""


@pytest.fixture(scope="module")
def pile(glyphs: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Good images between bad ones, in a folder and in an archive."""
    folder = tmp_path_factory.mktemp("pile")
    good = next((glyphs / "test").rglob("*.png"))
    jpeg = io.BytesIO()
    Image.effect_noise((200, 200), 90).save(jpeg, "JPEG")
    (folder / "1-good.png").write_bytes(good.read_bytes())
    (folder / "2-truncated.jpg").write_bytes(jpeg.getvalue()[:2000])
    Image.new("1", (20_000, 20_000)).save(folder / "3-huge.png")
    Image.new("1", (1, 9_000_000)).save(folder / "4-thin.png")
    (folder / "5-empty.png").touch()
    (folder / "6-text.png").write_text("hello")
    (folder / "7-good.png").write_bytes(good.read_bytes())
    with zipfile.ZipFile(folder.parent / "pile.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("1-good.png", good.read_bytes())
        with archive.open("2-bomb.png", "w") as stream:
            for _ in range(300):
                stream.write(bytes(1 << 20))
        archive.writestr("../3-leaves.png", good.read_bytes())
        archive.writestr("4-good.png", good.read_bytes())
    return [folder, folder.parent / "pile.zip"]


def run_measured(*arguments: object) -> tuple[list[dict[str, str]], int]:
    """The rows of a command, and the most memory that it held, in MB."""
    command = [sys.executable, "-c", MEASURE, sys.executable, "-m", "ncd_serve", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return list(csv.DictReader(done.stdout.splitlines())), int(done.stderr.split()[-1])


def assert_rows(rows: list[dict[str, str]]) -> None:
    found = {row["path"].rpartition("pile")[2]: row["error"] for row in rows}
    reasons = [
        "",
        "cannot be decoded",
        "px are more than|exceeds limit",
        "too long and thin",
        "the file is empty",
        "not an image",
        "",
        "",
        "314,572,800 bytes are more than",
        "leaves the archive",
        "",
    ]
    for (path, error), reason in zip(found.items(), reasons, strict=True):
        assert any(words in error for words in reason.split("|")) and bool(error) == bool(reason), (path, error)
    good = {(row["cluster_id"], row["confidence"]) for row in rows if row["status"] == "ok"}
    assert len({cluster for cluster, _ in good}) == 1, "the good ones are all the same image"


@pytest.mark.triton
def test_query(server: TritonServer, pile: list[Path]) -> None:
    rows, megabytes = run_measured("query", *pile, "--url", f"grpc://{server.grpc_url}")
    assert_rows(rows)
    assert megabytes < MEGABYTES


def test_assign(bundle: Path, pile: list[Path]) -> None:
    rows, megabytes = run_measured("assign", *pile, "--bundle", bundle)
    assert_rows(rows)
    assert megabytes < MEGABYTES


@pytest.mark.parametrize("device", ["cuda", "tensorrt"])
def test_a_device_that_is_not_there_is_an_error_with_a_hint(device: str, bundle: Path, glyphs: Path, ncd: Any) -> None:
    done = ncd("assign", glyphs / "test" / "E", "--bundle", bundle, "--device", device)
    if done.returncode == 0:
        pytest.skip(f"{device} works here")
    assert done.returncode == 6 and done.stdout == ""
    assert f"error: ONNX Runtime cannot use {device} here" in done.stderr and "--device cpu" in done.stderr


def test_assign_says_where_it_runs(bundle: Path, glyphs: Path, ncd: Any) -> None:
    for device, line in (("cpu", "ONNX Runtime runs on CPU\n"), ("auto", "ONNX Runtime runs on C")):
        done = ncd("assign", glyphs / "test" / "E", "--bundle", bundle, "--device", device)
        assert done.returncode == 0 and line in done.stderr
        assert done.stdout.startswith("path,status,") and "ONNX" not in done.stdout
