"""Rows in a file that can be resumed, and rows on the terminal."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from ncd_serve.errors import DataError, ServerError, UsageError
from ncd_serve.prediction import Prediction
from ncd_serve.progress import Progress
from ncd_serve.rows.assignment import assign_images
from ncd_serve.rows.tables import partial_path, read_rows
from ncd_serve.rows.writing import RowOptions, Tally, print_rows, save_rows
from ncd_serve.runners import Answer
from tests.serve.rows.test_rows import BrightnessRunner


class FailingRunner(BrightnessRunner):
    """A model that goes away after its first answers."""

    in_flight = 1

    def answer(self, images: np.ndarray) -> Answer:  # type: ignore[type-arg]
        if len(self.batches) == 2:
            raise ServerError("gone")
        return super().answer(images)


class Job:
    """Arguments that all calls share, and what was said."""

    def __init__(self, runner: BrightnessRunner) -> None:
        self.said = io.StringIO()
        self.progress, self.opened = Progress(Console(file=self.said)), 0
        self._runner = runner

    @contextmanager
    def open(self) -> Iterator[BrightnessRunner]:
        self.opened += 1
        yield self._runner

    def save(self, images: list[Path], target: Path, *, resume: bool = False) -> str:
        save_rows(images, self.open, target=target, resume=resume, options=RowOptions(), progress=self.progress)
        return self.said.getvalue().replace("\n", "")


@pytest.fixture
def photos(tmp_path: Path) -> list[Path]:
    (tmp_path / "photos").mkdir()
    paths = [tmp_path / "photos" / f"{number}.png" for number in range(10)]
    for number, path in enumerate(paths):
        Image.new("RGB", (8, 8), (number * 25,) * 3).save(path)
    return paths


def test_an_interrupted_file_is_resumed_and_each_image_asked_once(photos: list[Path], tmp_path: Path) -> None:
    target, first = tmp_path / "rows.csv", Job(FailingRunner())
    with pytest.raises(ServerError, match="gone"):
        first.save(photos, target)
    assert f"8 rows are kept in {partial_path(target)}: continue with --resume" in first.said.getvalue().replace(
        "\n", ""
    )
    with pytest.raises(UsageError, match="holds rows of an unfinished run"):
        first.save(photos, target)
    with pytest.raises(DataError, match="row 1 of"):
        Job(BrightnessRunner()).save(photos[::-1], target, resume=True)
    runner = BrightnessRunner()
    said = Job(runner).save(photos, target, resume=True)
    assert f"10 rows in {target} (8 from before, 2 ok)" in said and "the new ones: " in said
    assert runner.batches == [2]
    assert [row.path for row in read_rows(str(target))] == list(map(str, photos))
    again = Job(BrightnessRunner())
    assert again.save(photos, target, resume=True) == f"{target} is already complete"
    assert again.opened == 0


def test_mistakes_are_raised_before_the_model_is_opened(photos: list[Path], tmp_path: Path) -> None:
    job = Job(BrightnessRunner())
    for images, target, kind in (
        (photos, tmp_path / "rows.xlsx", UsageError),
        ([tmp_path / "none"], tmp_path / "rows.csv", DataError),
    ):
        with pytest.raises(kind):
            job.save(images, target)
    assert job.opened == 0


def test_rows_are_printed_in_the_form_that_is_wanted(photos: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    job, out = Job(BrightnessRunner()), Console(file=io.StringIO(), width=200)
    for form in (None, "jsonl", "table"):
        print_rows(photos[:2], job.open, form=form, options=RowOptions(top_k=1), out=out, progress=job.progress)
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.startswith("path,status,cluster_id") and len(rows) == 4
    assert [json.loads(row)["path"] for row in rows[2:]] == list(map(str, photos[:2]))
    assert "confidence" in out.file.getvalue() and str(photos[0]) in out.file.getvalue()  # type: ignore[attr-defined]


def test_strings_paths_and_images_in_memory_are_alike(photos: list[Path]) -> None:
    image = Image.open(photos[3])
    rows = list(assign_images([str(photos[3]), photos[3], image, np.asarray(image)], runner=BrightnessRunner()))
    assert [row.path for row in rows] == [str(photos[3])] * 2 + ["image-0", "image-1"]
    assert len({(row.cluster_id, row.confidence) for row in rows}) == 1
    (alone,) = assign_images(str(photos[3]), runner=BrightnessRunner())  # type: ignore[arg-type]
    assert alone == rows[0]


@pytest.mark.parametrize(
    "array", [np.zeros((8, 8, 3), np.float32), np.zeros((8, 8), np.uint8), np.zeros((8, 8, 4), np.uint8)]
)
def test_arrays_that_are_no_images_are_refused(array: np.ndarray) -> None:  # type: ignore[type-arg]
    with pytest.raises(UsageError, match=r"is uint8 \[height, width, 3\], not") as refused:
        list(assign_images([array], runner=BrightnessRunner()))
    assert refused.value.hint


def test_rows_are_summed_up_by_cluster() -> None:
    tally = Tally()
    rows = [Prediction("a", "ok", 1, "gull", fit="typical"), Prediction("b", "unsure", 1, "gull", fit="outlier")]
    rows += [Prediction("c", "ok", 0, "tern", fit="outlier"), Prediction.failed("d", "no image")]
    assert list(tally.counting(rows)) == rows
    assert tally.by_cluster() == "gull 2, tern 1; 2 outliers"
    assert tally.statuses == {"ok": 2, "unsure": 1, "error": 1}
    assert list(Tally().counting([])) == [] and Tally().by_cluster() == "no image has a cluster; 0 outliers"
