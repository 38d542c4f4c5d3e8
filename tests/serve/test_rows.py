"""From files to rows, and rows to tables."""

import csv
import io
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image
from rich.console import Console

from ncd_serve.assignment import assign_images
from ncd_serve.errors import DataError, UsageError
from ncd_serve.images import find_images
from ncd_serve.prediction import COLUMNS, Prediction
from ncd_serve.preprocess import PreprocessSpec
from ncd_serve.tables import terminal_table, write_rows

NAMES = ["dark", "bright: very", "<odd>"]


class BrightnessRunner:
    """Answers with how bright an image is; remembers the sizes of the batches it was asked."""

    preprocess = PreprocessSpec(resolution=8, resize=8)
    cluster_names = NAMES
    max_batch = 4
    in_flight = 2

    def __init__(self) -> None:
        self.batches: list[int] = []

    def probabilities(self, images: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
        self.batches.append(len(images))
        bright = images.mean(axis=(1, 2, 3)) / 255
        return np.stack([0.9 - 0.8 * bright, 0.8 * bright, np.full(len(images), 0.1)], 1).astype(np.float32)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    for number in range(10):
        Image.new("RGB", (8, 8), (number * 25,) * 3).save(tmp_path / f"{number}.png")
    (tmp_path / "5.png").write_bytes(b"broken")
    return tmp_path


def test_one_row_per_image_in_order_and_bad_images_are_rows(pictures: Path) -> None:
    runner = BrightnessRunner()
    rows = list(assign_images(find_images([pictures]), runner))
    assert [Path(row.path).stem for row in rows] == [str(number) for number in range(10)]
    assert [row.status for row in rows].count("error") == 1
    assert rows[5].error == "not an image of a known format"
    assert rows[0].cluster_name == "dark" and rows[9].cluster_name == "bright: very"
    assert sorted(runner.batches) == [2, 3, 4]


def test_a_row_by_hand() -> None:
    row = Prediction.from_probabilities("x.png", np.array([0.25, 0.625, 0.125], np.float32), names=NAMES, top_k=2)
    assert (row.cluster_id, row.cluster_name, row.confidence, row.margin) == (1, "bright: very", 0.625, 0.375)
    assert [candidate.cluster_id for candidate in row.top_k] == [1, 0]


def test_every_format_holds_the_same_rows(pictures: Path, tmp_path: Path) -> None:
    rows = list(assign_images(find_images([pictures]), BrightnessRunner()))
    for suffix in ("csv", "jsonl", "parquet"):
        write_rows(rows, tmp_path / f"rows.{suffix}")
    from_csv = list(csv.DictReader((tmp_path / "rows.csv").read_text().splitlines()))
    from_jsonl = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    from_parquet = pq.read_table(tmp_path / "rows.parquet").to_pylist()
    assert tuple(from_csv[0]) == tuple(from_jsonl[0]) == tuple(from_parquet[0]) == COLUMNS
    assert from_jsonl == from_parquet
    for text, row in zip(from_csv, from_jsonl, strict=True):
        assert json.loads(text["top_k"]) == row["top_k"]
        assert (float(text["confidence"]) if text["confidence"] else None) == row["confidence"]


def test_the_terminal_shows_names_as_they_are() -> None:
    stream = io.StringIO()
    row = Prediction("[red]x[/red].png", "ok", 2, "[bold]", 0.5, 0.1)
    Console(file=stream, width=120).print(terminal_table([row, Prediction.failed("y", "[/]")]))
    assert "[red]x[/red].png" in stream.getvalue() and "[bold]" in stream.getvalue()


def test_unknown_formats_and_missing_images_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"rows\.xlsx"):
        write_rows([], tmp_path / "rows.xlsx")
    with pytest.raises(DataError, match="no such file"):
        find_images([tmp_path / "none"])
    with pytest.raises(DataError, match="no images in"):
        find_images([tmp_path])
