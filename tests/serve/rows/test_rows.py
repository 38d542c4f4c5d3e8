"""From files to rows, and rows to tables."""

import csv
import io
import json
import threading
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image
from rich.console import Console

from ncd_serve.errors import DataError, ServerError, UsageError
from ncd_serve.inputs.images import Source, find_images
from ncd_serve.prediction import COLUMNS, Prediction
from ncd_serve.preprocess import PreprocessSpec
from ncd_serve.rows.assignment import DECODERS, assign_images
from ncd_serve.rows.tables import finished_paths, partial_path, read_rows, terminal_table, write_rows
from ncd_serve.runners import Answer

NAMES = ["dark", "bright: very", "<odd>"]


class BrightnessRunner:
    """Answers with how bright an image is; remembers the sizes of the batches it was asked."""

    preprocess = PreprocessSpec(resolution=8, resize=8)
    cluster_names = NAMES
    max_batch = 4
    in_flight = 2

    def __init__(self) -> None:
        self.batches: list[int] = []

    def answer(self, images: np.ndarray) -> Answer:  # type: ignore[type-arg]
        self.batches.append(len(images))
        bright = images.mean(axis=(1, 2, 3)) / 255
        probabilities = np.stack([0.9 - 0.8 * bright, 0.8 * bright, np.full(len(images), 0.1)], 1)
        return Answer(probabilities.astype(np.float32), bright > 0.2, (bright > 0.5).astype(np.int64))


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
    assert [rows[0].fit, rows[5].fit, rows[9].fit] == ["typical", None, "unusual"]
    assert sorted(runner.batches) == [2, 3, 4]


def test_a_row_by_hand() -> None:
    row = Prediction.from_probabilities("x.png", np.array([0.25, 0.625, 0.125], np.float32), names=NAMES, top_k=2)
    assert (row.cluster_id, row.cluster_name, row.confidence, row.margin) == (1, "bright: very", 0.625, 0.375)
    assert [candidate.cluster_id for candidate in row.top_k] == [1, 0]


def test_less_confidence_than_wanted_is_unsure() -> None:
    probabilities = np.array([0.25, 0.625, 0.125], np.float32)
    for least, status in ((0.625, "ok"), (0.63, "unsure")):
        row = Prediction.from_probabilities("x", probabilities, names=NAMES, top_k=1, min_confidence=least)
        assert (row.status, row.cluster_id, row.confidence) == (status, 1, 0.625)


def endless(seen: list[int]) -> Iterator[Source]:
    data = io.BytesIO()
    Image.new("RGB", (8, 8)).save(data, "PNG")
    for number in count():
        seen.append(number)
        yield Source(str(number), data.getvalue)


def test_images_are_read_no_further_than_the_requests_in_flight_need() -> None:
    runner, seen = BrightnessRunner(), []  # type: ignore[var-annotated]
    rows = assign_images(endless(seen), runner)
    for taken in (1, 100, 500):
        assert [row.path for row in islice(rows, taken - 1, taken)]
        window = (runner.in_flight + 3) * runner.max_batch + 2 * DECODERS
        assert len(seen) < sum(part for part in (1, 100, 500) if part <= taken) + window


def test_a_server_that_fails_ends_the_rows_after_those_before(pictures: Path) -> None:
    class Failing(BrightnessRunner):
        def answer(self, images: np.ndarray) -> Answer:  # type: ignore[type-arg]
            if images.max() > 190:  # the pictures 8 and 9
                raise ServerError("gone")
            return super().answer(images)

    rows = assign_images(find_images([pictures]), Failing())
    assert [Path(next(rows).path).stem for _ in range(8)] == [str(number) for number in range(8)]
    with pytest.raises(ServerError, match="gone"):
        next(rows)


def test_who_stops_early_does_not_wait_for_answers() -> None:
    class Hanging(BrightnessRunner):
        released = threading.Event()

        def answer(self, images: np.ndarray) -> Answer:  # type: ignore[type-arg]
            if images.max() > 0:
                self.released.wait()
            return super().answer(images)

    def sources() -> Iterator[Source]:
        for number, shade in enumerate([0, 0, 0, 0, *[255] * 100]):
            data = io.BytesIO()
            Image.new("RGB", (8, 8), (shade,) * 3).save(data, "PNG")
            yield Source(str(number), data.getvalue)

    rows = assign_images(sources(), Hanging())
    assert next(rows).path == "0"
    rows.close()
    Hanging.released.set()


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_rows_are_kept_as_they_come_and_an_unfinished_table_goes_on(tmp_path: Path, suffix: str) -> None:
    target = tmp_path / f"rows{suffix}"
    rows = [Prediction(f"{number},\n.png", "ok", number, "a", 0.5, 0.1) for number in range(6)]

    def interrupted() -> Iterator[Prediction]:
        for row in rows[:3]:
            yield row
            assert partial_path(target).read_text().count("\n") == row.cluster_id + 1  # type: ignore[operator]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_rows(interrupted(), target)
    with partial_path(target).open("a") as stream:
        stream.write('{"path": "3,')  # what a killed process leaves
    assert not target.exists()
    assert list(finished_paths(target)) == [row.path for row in rows[:3]]
    write_rows(rows[3:], target, resume=True)
    write_rows(rows, tmp_path / f"whole{suffix}")
    assert target.read_bytes() == (tmp_path / f"whole{suffix}").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"rows{suffix}", f"whole{suffix}"]


def test_a_damaged_unfinished_table_is_refused(tmp_path: Path) -> None:
    partial_path(tmp_path / "rows.csv").write_text('{"path": "a"}\n\0\0\0\n')
    with pytest.raises(DataError, match=r"row 2 of .* is damaged"):
        list(finished_paths(tmp_path / "rows.csv"))


def test_a_table_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="cannot write"):
        write_rows([], tmp_path / "file" / "rows.csv")


def test_every_format_holds_the_same_rows(pictures: Path, tmp_path: Path) -> None:
    rows = list(assign_images(find_images([pictures]), BrightnessRunner()))
    for suffix in ("csv", "jsonl", "parquet"):
        write_rows(rows, tmp_path / f"rows.{suffix}")
    from_csv = list(csv.DictReader((tmp_path / "rows.csv").read_text().splitlines()))
    from_jsonl = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    from_parquet = pq.read_table(tmp_path / "rows.parquet").to_pylist()
    assert tuple(from_csv[0]) == tuple(from_jsonl[0]) == tuple(from_parquet[0]) == COLUMNS
    assert from_jsonl == from_parquet
    assert {row["is_novel"] for row in from_jsonl} == {True, False, None}
    assert (
        read_rows(tmp_path / "rows.csv") == read_rows(tmp_path / "rows.jsonl") == read_rows(tmp_path / "rows.parquet")
    )
    for text, row in zip(from_csv, from_jsonl, strict=True):
        assert json.loads(text["top_k"]) == row["top_k"]
        assert (float(text["confidence"]) if text["confidence"] else None) == row["confidence"]


def test_the_terminal_shows_names_as_they_are() -> None:
    stream = io.StringIO()
    rows = [Prediction("[red]x[/red].png", status, 2, "[bold]", 0.5, 0.1) for status in ("ok", "unsure")]
    Console(file=stream, width=120).print(terminal_table([*rows, Prediction.failed("y", "[/]")]))
    assert "[red]x[/red].png" in stream.getvalue() and "unsure: [bold]" in stream.getvalue()


def test_unknown_formats_and_missing_images_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"rows\.xlsx"):
        write_rows([], tmp_path / "rows.xlsx")
    with pytest.raises(DataError, match="no such file"):
        find_images([tmp_path / "none"])
    with pytest.raises(DataError, match="no images in"):
        find_images([tmp_path])


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("fit", "weird", "its fit is 'weird', not typical, unusual or outlier"),
        ("cluster_id", "-2", "its cluster is -2"),
        ("cluster_id", "two", "invalid literal"),
        ("confidence", "nan", "its confidence is nan"),
        ("is_novel", "maybe", "its is_novel is 'maybe'"),
        ("top_k", '[{"cluster_id": -1, "cluster_name": "x", "probability": 0.5}]', "its cluster is -1"),
        ("top_k", '[{"cluster_id": "1", "cluster_name": "x", "probability": 0.5}]', "its cluster is '1'"),
    ],
)
def test_rows_that_cannot_be_are_named(tmp_path: Path, field: str, value: str, reason: str) -> None:
    good = {name: "" for name in COLUMNS} | {"path": "a.png", "status": "ok", "cluster_id": "1", "confidence": "0.5"}
    good["fit"], target = "typical", tmp_path / "rows.csv"
    with target.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, COLUMNS)
        writer.writeheader()
        writer.writerows([good, {**good, field: value}])
    with pytest.raises(DataError, match=r"rows\.csv is not a table of rows: row 2: ") as refused:
        read_rows(target)
    assert reason in str(refused.value) and refused.value.hint
