"""The page of a run: figures, what is missing, and names that are just names."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from ncd_training.base.run_dir import RunDir, Summary
from ncd_training.config.schema import TrainConfig
from ncd_training.data.manifest import Manifest
from ncd_training.data.prepare import Setup
from ncd_training.summary.figures import PAIRS, Curve, curves
from ncd_training.summary.page import balance, changed_settings, command_line, render_report, scores_by_split, times
from ncd_training.summary.plots import chart

from ncd_serve.reference import Reference

SCORES = {"images": 8, "acc": 0.75, "nmi": 0.5, "ari": 0.25}
EVIL = "<script>alert('1')</script>"
LOG = """2026-03-01 10:00:00  birds: 4 labelled images
2026-03-01 10:01:00  epoch 1/3  60 s left
2026-03-01 10:02:00  epoch 2/3  60 s left
2026-03-01 10:02:30  ended by KeyboardInterrupt
2026-03-02 10:00:00  resuming after epoch 1 of 3
2026-03-02 10:01:00  epoch 2/3  60 s left
2026-03-02 10:02:02  epoch 3/3  0 s left
"""


class Page(HTMLParser):
    """The words of a page and the elements it is made of."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: set[str] = set()
        self.addresses: list[str] = []
        self.values: list[float] = []
        self._words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.add(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("href", "src")]
        self.values += [float(value or "nan") for name, value in attrs if tag == "data" and name == "value"]

    def handle_data(self, data: str) -> None:
        self._words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self._words).split())


@pytest.fixture
def setup() -> Setup:
    config = TrainConfig().model_dump()
    config["data"] |= {"labelled": "/data/known", "unlabelled": '/data/it\'s "new"', "novel_classes": 2}
    config["optim"] |= {"epochs": 3, "seed": 7}
    images = [Path(f"{number}.png") for number in range(12)]
    manifest = Manifest(
        name="birds",
        labelled=[(path, number % 2) for number, path in enumerate(images[:4])],
        unlabelled=images[4:],
        known_classes=["hen", EVIL],
        novel_classes=None,
        truth=[0] * 4 + [1] * 4,
        novel_names=("dodo", "<b>emu</b>"),
        notes=("look & see",),
    )
    return Setup(TrainConfig.model_validate(config), manifest)


@pytest.fixture
def run(setup: Setup, tmp_path: Path) -> RunDir:
    """All files of a finished run, written by hand."""
    run = RunDir.create(tmp_path / "a 'run'", setup.config)
    run.write_metrics(
        [
            {"epoch": epoch, "cross_entropy": 3.0 / epoch, "acc": 0.25 * epoch, "nmi": 0.5, "ari": -0.125}
            | {"pseudo_global_precision": 0.5, "pseudo_global_recall": 0.125, "cluster_balance": 0.5}
            for epoch in (1, 2, 3)
        ]
    )
    classes = [{"class": "dodo", "images": 4, "cluster": 1, "share": 1.0}]
    classes += [{"class": "<b>emu</b>", "images": 4, "cluster": 0, "share": 0.5}]
    quality = {"precision": 0.5, "recall": 0.125, "auc": 0.875, "precision_at_positives": 0.625}
    summary = {
        "baselines": {"k-means on raw pixels": {**SCORES, "acc": 0.375}},
        "scores": {"unlabelled-train": {**SCORES, "classes": classes}},
        "pseudo_labels": {"global": quality},
        "weights": {"file": "a&b.pth", "format": "timm", "sha256": "abc"},
    }
    run.summary.write_text(json.dumps(summary))
    run.log.write_text(LOG)
    (run.path / "skipped.txt").write_text(f"skipped /data/{EVIL}.png: the file is empty\n")
    (run.plots / "tsne-init.png").write_bytes(b"first")
    (run.plots / "tsne-epoch-10.png").write_bytes(b"last")
    (run.plots / "tsne-epoch-2.png").write_bytes(b"middle")
    _reference().write(run.reference)
    return run


def _reference() -> Reference:
    return Reference(
        checkpoint="0" * 12,
        root=Path("/data"),
        paths=[f"{number}.png" for number in range(8)],
        cluster_ids=np.array([0] * 2 + [1] * 6),
        confidences=np.full(8, 0.5, np.float32),
        embeddings=np.ones((8, 2), np.float32),
        known_ids=np.zeros(8, np.int64),
        known_classes=["hen"],
        known_clusters=0,
        counts=np.array([2, 6]),
        truth=[],
    )


def page(setup: Setup, run: RunDir, *, epoch: int = 3, scored: bool = True) -> Page:
    return Page(render_report(setup, run, epoch=epoch, scored=scored))


def test_a_finished_run(setup: Setup, run: RunDir) -> None:
    found = page(setup, run)
    assert found.text.startswith("birds: a 'run'")
    assert "8 unlabelled images in 2 clusters, with the help of 4 labelled images of 2 known classes" in found.text
    assert " finished " in found.text and "not finished" not in found.text
    assert "cluster-1 6 images confidence 0.50 cluster-0 2 images" in found.text  # the page opens with the clusters
    # Best of the baselines, cluster sizes of the reference, its mean confidence.
    assert "0.750 transductive; k-means reaches 0.375" in found.text
    assert "2 to 6 images in a cluster" in found.text and "mean confidence 0.500" in found.text
    assert "timm, a&b.pth, sha256 abc" in found.text and "look & see" in found.text
    assert {0.375, 0.75, 0.5, 0.25, 0.875, 0.625} < set(found.values)
    assert "unlabelled-train, all classes" in found.text
    assert found.text.index("<b>emu</b> 4") < found.text.index("dodo 4"), "the worst class is first"
    assert "1 image file was skipped" in found.text and "kept as published" not in found.text
    assert f"ncd-serve export '{run.path.parent}/a '\"'\"'run'\"'\"''" in found.text


def test_it_needs_nothing_else(setup: Setup, run: RunDir) -> None:
    found = page(setup, run)
    assert "script" not in found.elements and "link" not in found.elements and "b" in found.elements
    shown = [address for address in found.addresses if address.startswith("data:image/png")]
    assert [address.partition(",")[2] for address in shown] == ["Zmlyc3Q=", "bWlkZGxl", "bGFzdA=="], "in their order"
    strips = [address for address in found.addresses if address.startswith("data:image/jpeg")]
    assert len(strips) == 2, "a strip of pictures for each cluster"
    links = set(found.addresses) - set(shown) - set(strips)
    assert links >= {"gallery.html", "config.toml", "skipped.txt", "plots/tsne-init.png"}
    assert not [link for link in links if ":" in link or link.startswith("/")]


def test_names_are_just_names(setup: Setup, run: RunDir) -> None:
    setup = replace(setup, manifest=replace(setup.manifest, name='"><img src=x onerror=alert(1)>'))
    found = page(setup, run)
    assert f"hen, {EVIL}" in found.text and f"skipped /data/{EVIL}.png" in found.text
    assert 'it\'s "new"' in found.text
    assert "script" not in found.elements and "x" not in found.addresses


def test_what_nobody_knows_is_said_to_be_missing(setup: Setup, run: RunDir) -> None:
    setup = replace(setup, manifest=replace(setup.manifest, truth=None))
    run.summary.write_text(json.dumps({"baselines": {}, "scores": {}}))
    run.write_metrics([{"epoch": epoch, "cross_entropy": 1.0, "cluster_balance": 0.5} for epoch in (1, 2, 3)])
    found = page(setup, run)
    assert "The unlabelled images have no true labels, so ACC" in found.text
    assert "Pseudo labels" not in found.text and "Precision" not in found.text
    assert "Coloured by cluster" in found.text and "cluster balance 0.811" in found.text


def test_an_interrupted_run_shows_no_scores_of_another_state(setup: Setup, run: RunDir) -> None:
    found = page(setup, run, epoch=2, scored=False)
    assert " not finished " in found.text and "This run was interrupted after 2 of 3 epochs" in found.text
    assert "ncd-serve train --resume" in found.text and "ncd-serve export '" not in found.text
    assert "ACC, unlabelled-train 0.500 transductive; after epoch 2" in found.text
    assert "cluster balance 0.500 1 is even; after epoch 2" in found.text
    assert "k-means on raw pixels" in found.text and "dodo" not in found.text
    assert 0.375 in found.values and 0.875 not in found.values


def test_a_run_that_was_looked_at_on_its_way(setup: Setup, run: RunDir) -> None:
    found = page(setup, run, epoch=2)
    assert "not finished: 2 of 3 epochs are done, and the scores are those of that state" in found.text
    assert "After epoch 2, pairs of images" in found.text and "dodo" in found.text


def test_before_the_first_epoch(setup: Setup, tmp_path: Path) -> None:
    found = page(setup, RunDir.create(tmp_path / "run", setup.config), epoch=0, scored=False)
    assert "interrupted after 0 of 3 epochs" in found.text and "No epoch of discovery is finished yet" in found.text
    assert "All image files could be used" in found.text


def test_figures_that_are_no_numbers(setup: Setup, run: RunDir) -> None:
    run.write_metrics([{"epoch": 1, "cross_entropy": math.nan}, {"epoch": 2, "cross_entropy": math.inf}])
    assert "cross entropy inf" in page(setup, run, epoch=2).text


def test_very_many_files_that_were_left_out(setup: Setup, run: RunDir) -> None:
    (run.path / "skipped.txt").write_text("".join(f"skipped {number}.png: empty\n" for number in range(1002)))
    found = page(setup, run).text
    assert "1,002 image files were skipped" in found and "999.png: empty ... and 2 more in skipped.txt" in found


def test_scores_of_a_split_are_together() -> None:
    names = ["unlabelled-train", "unlabelled-train, novel images, one matching", "known-test", "known-test, joint head"]
    found = scores_by_split(
        Summary.model_validate({"baselines": {"k-means": SCORES}, "scores": dict.fromkeys(names, SCORES)})
    )
    assert {split: [row.what for row in rows] for split, rows in found.items()} == {
        "unlabelled-train": ["k-means", "cluster head", "novel images, one matching"],
        "known-test": ["known head", "joint head"],
    }


def test_settings_that_differ() -> None:
    plain = TrainConfig()
    assert changed_settings(plain) == []
    optim = plain.optim.model_copy(update={"epochs": 5, "milestones": (3, 4)})
    data = plain.data.model_copy(update={"dataset": "cub200", "cache_dir": Path("/tmp/x")})
    found = changed_settings(plain.model_copy(update={"optim": optim, "data": data}))
    assert [tuple(setting) for setting in found] == [
        ("data.cache_dir", '"/tmp/x"', "not set"),
        ("optim.epochs", "5", "200"),
        ("optim.milestones", "[3, 4]", "[170]"),
    ]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["/env/bin/ncd-serve", "train", "--out", "my run"], "/env/bin/ncd-serve train --out 'my run'"),
        (["/site-packages/ncd_serve/__main__.py", "demo"], "python -m ncd_serve demo"),
        ([], ""),
    ],
)
def test_the_command_can_be_typed_again(words: list[str], line: str) -> None:
    assert command_line(words) == line


def test_the_duration_of_a_resumed_run_leaves_the_pause_out() -> None:
    # 150 s on the first day, 122 s on the second; epochs of 60 s and 62 s from one end to the next.
    assert times(LOG) == {
        "started": "2026-03-01 10:00:00",
        "last epoch ended": "2026-03-02 10:02:02",
        "duration": "5 min",
        "an epoch": "61 s (median)",
    }


def test_a_killed_run_counts_up_to_its_last_line() -> None:
    killed = LOG.replace("2026-03-01 10:02:30  ended by KeyboardInterrupt\n", "")
    assert times(killed)["duration"] == "4 min"  # 120 s and 122 s


def test_a_run_that_was_stopped_before_its_first_epoch_has_a_pause_too() -> None:
    lines = ["10:00:00  birds", "10:00:30  ended by SystemExit", "12:00:00  birds", "12:00:50  epoch 1/3  60 s left"]
    log = "".join(f"2026-03-01 {line}\n" for line in lines)
    assert times(log)["duration"] == "80 s" and "an epoch" not in times(log)


def test_times_that_are_not_known_yet_are_left_out() -> None:
    assert times("2026-03-01 10:00:00  birds") == {"started": "2026-03-01 10:00:00"}
    assert times("") == {}


def test_balance_of_sizes() -> None:
    assert balance([5, 5]) == 1 and balance([10, 0]) == 0
    assert balance([2, 6]) == pytest.approx(0.8112781)  # -(1/4 log2 1/4 + 3/4 log2 3/4)


def test_lines_of_a_chart() -> None:
    rows = [
        {"epoch": 1, "pseudo_global_precision": 0.5},
        {"epoch": 2, "pseudo_global_precision": math.nan, "pseudo_local_precision": 0.0},
        {"epoch": 4, "pseudo_global_precision": 1.0, "pseudo_global_recall": 0.25},
    ]
    drawn = sorted(curves(rows, PAIRS), key=lambda curve: (curve.colour, curve.dashed))
    found = chart(drawn, top=1.0, levels={"k-means": 0.75})
    precision, recall, local = found.lines
    assert [(dot.x, dot.y) for dot in precision.dots] == [
        (25, 50),
        (100, 0),
    ] and precision.path == "M25.00 50.00 100.00 0.00"
    assert [line.colour for line in found.lines] == [0, 0, 1] and [line.dashed for line in found.lines] == [
        False,
        True,
        False,
    ]
    assert recall.last == 0.25 and local.dots[0].y == 100
    assert found.levels == [("k-means", 25, 0.75)]
    assert [(tick.place, tick.label) for tick in found.x_ticks] == [(25 * mark, str(mark)) for mark in range(5)]
    assert [tick.label for tick in found.y_ticks] == ["0", "0.2", "0.4", "0.6", "0.8", "1"]


def test_a_scale_of_its_own() -> None:
    found = chart([Curve("term", [(1, 4.5), (2, -1.0)], colour=0, dashed=False)])
    assert [(tick.place, tick.label) for tick in found.y_ticks] == [
        (100, "-2"),
        (75, "0"),
        (50, "2"),
        (25, "4"),
        (0, "6"),
    ]
    assert [dot.y for dot in found.lines[0].dots] == [18.75, 87.5]
    assert chart([Curve("term", [(1, 0.0)], colour=0, dashed=False)]).lines[0].dots[0].y == 100
