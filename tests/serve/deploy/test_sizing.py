"""Sizes on numbers worked by hand, and a real measurement."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ncd_serve.deploy.memory import DECODING_MIB
from ncd_serve.deploy.sizing import Demand, Figures, Quantity, size_up
from ncd_serve.errors import DataError
from ncd_serve.triton import jpeg
from ncd_serve.triton.jpeg.decoder import MEMORY_BYTES
from tests.conftest import Ncd

FIGURES = Figures(
    model_ms=20.0, decode_ms=5.0, file_bytes=100_000, tensor_bytes=150_528, peak_mib=320, view_bytes=200_000
)


def by_name(lines: list[Quantity]) -> dict[str, float]:
    return {line.what: line.value for line in lines}


def test_a_million_images_a_day_by_hand() -> None:
    answers = by_name(size_up(Demand(86_400 * 10, peak=2.0, utilisation=0.5, cores=4), FIGURES))
    assert answers["images at the peak"] == 20
    assert answers["cores"] == pytest.approx(20 * 0.025 / 0.5)
    assert answers["replicas"] == 1
    assert answers["memory of a replica"] == 3.25  # (1.5 x 320 + 1536 + 4 x 320) MiB in steps of 256
    assert answers["network, decoded images"] == pytest.approx(20 * 150_528 * 8 / 1e9)
    assert answers["network, image files"] == pytest.approx(0.016)
    assert "disk for cached views" not in answers


def test_a_hundred_times_as_much_needs_a_hundred_times_as_many() -> None:
    answers = by_name(size_up(Demand(86_400 * 1000, peak=2.0, utilisation=0.5, cores=4), FIGURES))
    assert (answers["cores"], answers["replicas"]) == (pytest.approx(100), 25)


def test_gpus_by_hand() -> None:
    demand = Demand(86_400 * 1000, peak=3.0, utilisation=0.5, gpu_rate=2000, training_images=1e6, views=4)
    answers = by_name(size_up(demand, FIGURES))
    assert answers["GPUs, one a replica"] == 3
    assert answers["cores that decode"] == pytest.approx(30)
    assert answers["disk for cached views"] == pytest.approx(800)


def test_a_bundle_that_does_not_know_its_views() -> None:
    old = Figures(**{**vars(FIGURES), "view_bytes": None})
    assert size_up(Demand(1000), old)
    with pytest.raises(DataError, match="the size of a cached view"):
        size_up(Demand(1000, training_images=10), old)


def test_as_it_is_typed(ncd: Ncd, bundle: Path, glyphs: Path, tmp_path: Path) -> None:
    load = ("--images-per-day", "1e9", "--training-images", "1e6")
    done = ncd("plan", "--bundle", bundle, "--sample", glyphs / "test", *load, "--json")
    assert done.returncode == 0, done.stderr
    lines = {line["what"]: line for line in json.loads(done.stdout)}
    assert lines["model, one core"]["value"] > 0 and lines["model, one core"]["origin"] == "measured"
    assert lines["images at the peak"]["value"] == pytest.approx(1e9 / 86_400 * 2)
    assert lines["disk for cached views"]["formula"] == "1,000,000 x 8 views x 8,192 B"
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.png").write_text("no image")
    for sample, images, code, reason in (
        (tmp_path / "empty", "1", 3, "no images in"),
        (tmp_path / "notes.png", "1", 3, "notes.png: not an image"),
        (glyphs, "-1", 2, "--images-per-day"),
        (glyphs, "inf", 2, "--images-per-day"),
    ):
        refused = ncd("plan", "--bundle", bundle, "--sample", sample, "--images-per-day", images)
        assert refused.returncode == code and reason in refused.stderr and "Traceback" not in refused.stderr


def test_pods_have_memory_for_all_decoders_of_the_model_that_takes_files() -> None:
    assert "KIND_CPU count: {instances}" in jpeg._CONFIG and '"{decoders}"' in jpeg._CONFIG
    each = (MEMORY_BYTES >> 20) + 64  # an image, and the process that decodes it
    assert DECODING_MIB == jpeg.INSTANCES * jpeg.DECODERS * each == 1280
