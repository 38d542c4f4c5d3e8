"""`ncd-serve compare`: the paper's tables as data, and a real comparison that is interrupted, resumed and reported."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from ncd_training.data.datasets import DATASETS
from ncd_training.data.manifest import Manifest
from ncd_training.study.compare import Job, Ledger, RunCost, Wishes, _run_and_measure, departures, plan_jobs
from ncd_training.study.compare_rows import row_set, set_names
from ncd_training.study.compare_run import notes
from ncd_training.study.compare_table import Comparison, collect, mean_and_deviation
from PIL import Image
from rich.console import Console

from ncd_serve.cli.app import app
from ncd_serve.errors import DataError, NcdError, UsageError

QUICK = {
    "model.weights": "none",
    "optim.epochs": 1,
    "rotations.epochs": 0,
    "supervised.epochs": 0,
    "data.cache_views": 2,
}


def compare(*arguments: object) -> int:
    """The command in this process, where torch is loaded already; its exit code."""
    return app([*map(str, ("compare", *arguments))], standalone_mode=False) or 0


def wishes(dataset: str = "cub200", *recipes: str, **overrides: Any) -> Wishes:
    return Wishes(recipes, None, {"data.dataset": dataset}, overrides)


@pytest.mark.parametrize("name", set_names())
def test_a_set_can_be_run_on_every_dataset_with_published_figures(name: str) -> None:
    rows = row_set(name).rows
    assert len({row.label for row in rows}) == len(rows) > 1
    for dataset in row_set(name).datasets:
        real = "imagenet-b" if dataset == "imagenet" else dataset
        assert real in DATASETS
        assert any(row.figures(real) for row in rows)
        for recipes in ((), ("quick",)):
            configs = [wishes(real, *recipes).config(row) for row in rows]
            assert all(a != b for number, a in enumerate(configs) for b in configs[:number]), "two rows are the same"


def test_the_issue_s_tables_are_there() -> None:
    assert set(set_names()) == {
        "bank-sizes",
        "baselines",
        "branches",
        "class-number",
        "components",
        "divergence",
        "fine-grained",
        "generic",
        "open-world",
        "ranking",
        "since-2021",
        "sources",
        "supervised-stage",
        "v-sampling",
    }


@pytest.mark.parametrize(
    ("name", "label", "dataset", "figure"),
    [
        ("fine-grained", "full", "cub200", (47.8, 2.4)),
        ("fine-grained", "rankstat", "stanford-cars", (53.8, None)),
        ("fine-grained", "dtc", "aircraft", (58.7, None)),
        ("generic", "mcl", "cifar100", (21.3, None)),
        ("generic", "full", "imagenet-c", (88.9, None)),
        ("components", "no-bce", "cub200", (2.2, None)),
        ("components", "no-self-supervision", "imagenet100", (65.3, None)),
        ("branches", "p+p", "stanford-cars", (57.9, None)),
        ("bank-sizes", "v-32768", "cub200", (49.3, None)),
        ("v-sampling", "cam", "cifar100", (76.5, None)),
        ("ranking", "cosine-soft", "imagenet100", (67.5, None)),
        ("sources", "p-g", "cub200", (44.3, None)),
        ("supervised-stage", "with", "cifar10", (90.8, None)),
        ("divergence", "jensen-shannon", "cub200", (47.9, None)),
        ("class-number", "full-estimated", "cub200", (44.6, None)),
        ("baselines", "kmeans", "cub200", (20.4, None)),
    ],
)
def test_published_figures(name: str, label: str, dataset: str, figure: tuple[float, float | None]) -> None:
    (row,) = row_set(name).pick([label])
    assert row.figures(dataset) == {"novel": figure}
    assert row.figures("glyphs") == row.figures(None) == {}


def test_an_open_world_has_two_published_figures() -> None:
    (row,) = row_set("open-world").pick(["full"])
    assert row.figures("imagenet100-open25") == {"seen": (89.5, None), "novel": (71.3, None)}
    assert wishes("imagenet100-open25").config(row).model.heads == "open_world"


def test_a_row_s_settings_win_over_recipes_and_lose_to_set() -> None:
    (row,) = row_set("class-number").pick(["full-estimated"])
    assert wishes().config(row).data.novel_classes == 43
    assert wishes("stanford-cars").config(row).data.novel_classes == "auto"
    assert wishes(**{"data.novel_classes": 50}).config(row).data.novel_classes == 50
    without, with_stage = row_set("supervised-stage").rows
    assert [wishes("cub200", "quick").config(row).supervised.epochs for row in (without, with_stage)] == [0, 6]


def test_departures_from_the_paper_are_named() -> None:
    rows = row_set("baselines").pick(["full", "dtc"])
    lines = departures(rows, wishes("cub200", "quick"))
    assert "model.backbone: efficientnet_lite0 for resnet50" in lines
    assert "optim.epochs: 20 for 200, 24 for 110" in lines
    assert departures(rows, wishes()) == []
    manifest = Manifest("cub200", [], [], [], None, notes=("a remark",))
    assert notes(row_set("baselines"), rows, wishes(), manifest)[:2] == [
        "a remark",
        "The settings are those of the paper.",
    ]
    assert "obtained with other settings" in notes(row_set("baselines"), rows, wishes("cub200", "quick"), manifest)[1]


def test_mean_and_deviation_by_hand() -> None:
    assert mean_and_deviation([44.0, 48.0, 52.0]) == (48.0, 4.0)
    assert mean_and_deviation([48.0]) == (48.0, None)
    assert mean_and_deviation([]) == (None, None)


def finished(job: Job, **acc: float) -> None:
    job.run.path.mkdir(parents=True)
    scores = {name: {"images": 8, "acc": value} for name, value in acc.items()}
    job.run.summary.write_text(json.dumps({"method": job.row.method, "baselines": {}, "scores": scores}))
    job.run.write_metrics([{}] * job.config.optim.epochs)


def table_of(jobs: list[Job], folder: Path, dataset: str) -> Comparison:
    return collect(jobs, Ledger(folder), folder, title="title", dataset=dataset, notes=[])


def printed(found: Comparison, width: int) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width).print(found.table(width))
    return stream.getvalue()


def test_many_rows_and_many_columns_fit_a_terminal(tmp_path: Path) -> None:
    jobs, ledger = plan_jobs(row_set("baselines").rows, [0], wishes(), tmp_path), Ledger(tmp_path)
    for job in jobs:
        finished(job, **{"unlabelled-train": 0.4, "novel-test": 0.3, "known-test": 0.2})
        ledger.add(job, RunCost(800.0, 1500.0, 2_400_000_000))
    text = printed(table_of(jobs, tmp_path, "cub200"), 80)
    assert "…" not in text and "local-only" in text and "CPU time" in text


def picture_size(folder: Path) -> tuple[int, int]:
    with Image.open(folder / "comparison.png") as picture:
        return picture.size


def test_published_figures_stand_beside_what_they_were_measured_on(tmp_path: Path) -> None:
    jobs = plan_jobs(row_set("fine-grained").pick(["full", "dtc"]), [0, 1], wishes(), tmp_path)
    assert [job.name for job in jobs] == ["dtc-0", "full-0", "dtc-1", "full-1"]
    finished(jobs[1], **{"unlabelled-train": 0.4, "novel-test": 0.3})
    finished(jobs[3], **{"unlabelled-train": 0.5, "novel-test": 0.3})
    assert table_of(jobs, tmp_path, "cub200").cells() == [
        ["row", "unlabelled-train", "paper", "novel-test", "seeds", "time", "CPU time", "memory"],
        ["dtc", "-", "33.6", "-", "0", "-", "-", "-"],
        ["full", "45.0±7.1", "47.8±2.4", "30.0±0.0", "2", "-", "-", "-"],
    ]


def test_an_open_world_is_shown_by_both_protocols(tmp_path: Path) -> None:
    (job,) = jobs = plan_jobs(row_set("open-world").pick(["orca"]), [0], wishes("imagenet100-open50"), tmp_path)
    paper = {f"unlabelled-train, {part} images, paper's protocol": 0.5 for part in ("seen", "novel", "all")}
    once = {f"unlabelled-train, {part} images, one matching": 0.4 for part in ("seen", "novel", "all")}
    finished(job, **{"unlabelled-train": 0.4, **paper, **once})
    header, row = table_of(jobs, tmp_path, "imagenet100-open50").cells()
    assert list(zip(header, row, strict=True))[:6] == [
        ("row", "orca"),
        ("seen images, paper's protocol", "50.0"),
        ("paper", "89.1"),
        ("novel images, paper's protocol", "50.0"),
        ("paper", "72.1"),
        ("all images, paper's protocol", "50.0"),
    ]
    found = table_of(jobs, tmp_path, "imagenet100-open50")
    for width, first in ((80, ["row", "orca"]), (300, header)):
        assert len(found.table(width).columns) == len(first)
        assert "…" not in printed(found, width)
    found.draw(tmp_path)
    assert picture_size(tmp_path)[0] > 1000  # two panels


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["branchs"], "unknown set of rows"),
        ([], "no set of rows"),
        (["branches", "--rows", "g,q"], "unknown row 'q'"),
        (["branches", "--seeds", "0,x"], "cannot read --seeds"),
        (["branches", "--seeds", "1,1"], "cannot read --seeds"),
        (["branches", "--dataset", "cubb"], "unknown dataset"),
        (["branches", "--dataset", "glyphs", "--manifest", "list.csv"], "cannot be mixed"),
        (["branches", "--dataset", "glyphs", "--recipe", "slow"], "unknown recipe"),
        (["baselines", "--dataset", "glyphs", "--recipe", "own-images"], "row dtc: self_labels.weight needs"),
        (["baselines", "--dataset", "glyphs", "--set", "optim.epochs=1"], "row kmeans: the method kmeans"),
    ],
)
def test_mistakes_are_found_before_any_training(arguments: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        compare(*arguments, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_rows_cannot_be_compared_where_nobody_knows_the_true_classes(glyphs: Path, tmp_path: Path) -> None:
    folders = "--labelled", glyphs / "train", "--unlabelled", glyphs / "test"
    with pytest.raises(DataError, match="no true labels"):
        compare("branches", *folders, "--set", "data.novel_classes=2", "--out", tmp_path / "out")


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert compare("--list") == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in set_names())


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory, glyphs: Path, tiny_settings: list[str]) -> list[str]:
    """Two rows on a few images."""
    out = tmp_path_factory.mktemp("compare") / "out"
    settings = [part for key, value in QUICK.items() for part in ("--set", f"{key}={value}")]
    given = ["branches", "--rows", "g,p", "--dataset", "glyphs", "--data-root", str(glyphs), "--out", str(out)]
    return [*given, *tiny_settings, *settings]


@pytest.fixture(scope="module")
def first_seed(arguments: list[str]) -> Path:
    """Interrupted in its first run, and gone on with."""
    out = folder_of(arguments)
    watcher = Thread(target=interrupt_at, args=[out / "g-0" / "checkpoints" / "last.safetensors"])
    watcher.start()
    assert compare(*arguments) == 130
    watcher.join()
    assert not (out / "p-0").exists()
    assert compare(*arguments) == 0
    return out


@pytest.fixture(scope="module")
def both_seeds(arguments: list[str], first_seed: Path) -> list[str]:
    given = [*arguments, "--seeds", "0,1"]
    assert compare(*given) == 0
    return given


def interrupt_at(appears: Path) -> None:
    """Ctrl-C for this process as soon as a file exists."""
    until = time.monotonic() + 250
    while not appears.exists() and time.monotonic() < until:
        time.sleep(0.02)
    if appears.exists():
        os.kill(os.getpid(), signal.SIGINT)


def folder_of(arguments: list[str]) -> Path:
    return Path(arguments[arguments.index("--out") + 1])


def costs_in(out: Path) -> dict[str, dict[str, Any]]:
    costs: dict[str, dict[str, Any]] = json.loads((out / "comparison.json").read_text())
    return costs


@pytest.mark.slow
def test_an_interrupted_comparison_goes_on(first_seed: Path) -> None:
    assert "resuming" in (first_seed / "g-0" / "log.txt").read_text()
    costs = costs_in(first_seed)
    assert list(costs) == ["g-0", "p-0"]
    for cost in costs.values():
        assert cost["error"] is None
        assert cost["cpu_seconds"] > 0
        assert 5e7 < cost["memory"] < 5e10


@pytest.mark.slow
def test_rows_share_one_cache_of_views(both_seeds: list[str]) -> None:
    # Each seed has a random trunk of its own, whose views are cached by the first run that needs them.
    out = folder_of(both_seeds)
    assert len(list((out / "views").glob("*.npy"))) == 2
    assert [costs_in(out)[name]["cached"] for name in ("g-0", "p-0", "g-1", "p-1")] == [True, False, True, False]


@pytest.mark.slow
def test_one_table_in_every_form(both_seeds: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    out = folder_of(both_seeds)
    trained = (out / "g-0" / "summary.json").stat().st_mtime_ns
    assert compare(*both_seeds) == 0
    assert (out / "g-0" / "summary.json").stat().st_mtime_ns == trained, "a finished run is not run again"
    scores = [json.loads((out / name / "summary.json").read_text())["scores"] for name in ("g-0", "g-1")]
    acc, deviation = mean_and_deviation([100 * score["unlabelled-train"]["acc"] for score in scores])
    rows = list(csv.DictReader((out / "comparison.csv").read_text().splitlines()))
    assert [row["row"] for row in rows] == ["g", "p"]
    assert float(rows[0]["unlabelled-train, mean"]) == pytest.approx(acc, abs=0.01)
    assert float(rows[0]["unlabelled-train, deviation"]) == pytest.approx(deviation, abs=0.01)
    assert rows[0]["seeds"] == "2"
    assert float(rows[0]["seconds"]) > 0
    shown, written = capsys.readouterr().out, (out / "comparison.md").read_text()
    assert f"{acc:.1f}±{deviation:.1f}" in shown
    assert f"| g | {acc:.1f}±{deviation:.1f} |" in written
    assert "known-test" in written
    assert picture_size(out)[0] > 300


@pytest.mark.slow
def test_a_lost_run_is_run_again_and_a_failing_one_takes_no_other_down(
    both_seeds: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = folder_of(both_seeds)
    for name in ("g-1", "p-1"):
        shutil.rmtree(out / name)
    python = tmp_path / "python"  # a disk that is full for one of the runs
    python.write_text(
        f'#!/bin/sh\ncase "$*" in *g-1*) echo "error: the disk is full"; exit 3;; esac\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    assert compare(*both_seeds) == 3
    assert "g failed: the disk is full" in capsys.readouterr().err
    rows = {row["row"]: row for row in csv.DictReader((out / "comparison.csv").read_text().splitlines())}
    assert (rows["g"]["seeds"], rows["p"]["seeds"]) == ("1", "2")
    assert rows["g"]["error"] == "the disk is full"
    assert "- g failed: the disk is full" in (out / "comparison.md").read_text()


@pytest.mark.slow
def test_runs_of_other_settings_are_not_mixed(arguments: list[str], first_seed: Path) -> None:
    with pytest.raises(UsageError, match=r"g-0 was run with optim.learning_rate = 0.1, not 0.5") as caught:
        compare(*arguments, "--set", "optim.learning_rate=0.5")
    assert caught.value.hint == "choose another --out"


def test_a_foreign_run_is_left_alone(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "g-0").mkdir()
    with pytest.raises(NcdError, match="not made by this comparison"):
        compare(*arguments, "--out", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["g-0"]


def test_a_run_does_not_count_the_memory_of_the_process_that_started_it(tmp_path: Path) -> None:
    held = np.ones(500 * 10**6, np.uint8)
    cost, _ = _run_and_measure([sys.executable, "-c", "import time; time.sleep(0.5)"], tmp_path / "said.log")
    assert 1e6 < cost.memory < len(held) / 5


@pytest.mark.slow
def test_a_page_tells_all(both_seeds: list[str]) -> None:
    assert compare(*both_seeds, "--report") == 0
    out = folder_of(both_seeds)
    page = (out / "comparison.html").read_text()
    for part in (
        "against ",
        "95% interval",
        "<svg",
        "data:image/png;base64",
        "model.branches",
        "scikit-learn",
        "Seeds 0, 1",
    ):
        assert part in page
    assert not re.search(r"(src|href)=\"(?!data:|#)", page), "the page needs no other file"
    assert "against" in (out / "comparison.md").read_text()


def test_figures_of_another_protocol_are_not_compared() -> None:
    chosen = row_set("since-2021")
    rows = chosen.pick(["simgcd", "dual"])
    assert all(row.figures("cub200") == {} for row in rows[1:])
    manifest = Manifest("cub200", [], [], [], None)
    line = notes(chosen, rows, wishes(), manifest)[0]
    assert "not comparable" in line and "DINO ViT-B/16" in line and "simgcd 60.3 / 65.6 / 57.7" in line
    mixed = notes(chosen, rows, wishes(), manifest, comparable=False)
    assert not any("The settings are those of the paper" in line for line in mixed)


def test_the_piles_of_a_cell_are_the_seeds_own(tmp_path: Path) -> None:
    piles = {seed: {"dataset": None, "manifest": tmp_path / f"{seed}.csv", "pile": "mixed"} for seed in (0, 1)}
    jobs = plan_jobs(row_set("since-2021").pick(["simgcd"]), [0, 1], wishes(), tmp_path, piles)
    assert [job.config.data.manifest for job in jobs] == [tmp_path / "0.csv", tmp_path / "1.csv"]
    assert {job.config.data.dataset for job in jobs} == {None}
