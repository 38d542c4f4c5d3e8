"""Tables of scores: every figure with its split, the worst classes first."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from ncd_training.base.run_dir import RunDir, Summary
from ncd_training.summary.figures import score_tables
from rich.console import Console

SCORES = {"images": 24, "acc": 0.5, "nmi": 0.25, "ari": 0.125}


def shown(summary: Summary, *, every_class: bool) -> str:
    screen = Console(file=io.StringIO(), width=120)
    for table in score_tables(summary, every_class=every_class):
        screen.print(table)
    return screen.file.getvalue()  # type: ignore[attr-defined]


def summary() -> Summary:
    classes = [
        {"class": f"bird {number:02}", "images": 2, "cluster": number, "share": number / 12} for number in range(12)
    ]
    known = {"images": 9, "acc": 0.75, "classes": [{"class": "hen", "images": 9, "share": 0.75}]}
    quality = {"precision": 0.1, "recall": 0.2, "auc": 0.9, "precision_at_positives": 0.3}
    return Summary.model_validate(
        {
            "baselines": {"k-means on raw pixels": SCORES},
            "scores": {"unlabelled-train": {**SCORES, "classes": classes}, "known-test": known},
            "pseudo_labels": {"global": quality},
        }
    )


def test_the_worst_classes() -> None:
    text = shown(summary(), every_class=False)
    assert "unlabelled-train, the worst 10 of 12 classes" in text
    assert "bird 09" in text and "bird 10" not in text
    assert "pseudo labels, unlabelled-train" in text and "0.900" in text
    assert "hen" not in text


def test_all_classes_of_all_splits() -> None:
    text = shown(summary(), every_class=True)
    assert "unlabelled-train, all classes" in text and "bird 11" in text
    assert "known-test, all classes" in text and "hen" in text


def test_nothing_to_score() -> None:
    assert "scores" in shown(Summary(), every_class=True)


def test_evaluate_says_all_of_it_as_json(tiny_run: Path, ncd: Any) -> None:
    done = ncd("evaluate", tiny_run, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    kept = RunDir.open(tiny_run).read_summary()
    assert found == kept.as_json() == json.loads((tiny_run / "summary.json").read_text())
    assert {row["class"] for row in found["scores"]["novel-test"]["classes"]} == set("AEIOU")
    assert set(found["pseudo_labels"]) == {"global", "local"}
    assert {"precision", "recall", "auc", "precision_at_positives"} < set(found["pseudo_labels"]["local"])
    assert "known-test, the worst 10 of 21 classes" not in shown(kept, every_class=False)
    assert "known-test, all classes" in shown(kept, every_class=True)
