"""`drift` as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import Ncd


@pytest.fixture(scope="module")
def rows(ncd: Ncd, bundle: Path, glyphs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of consonants, which the clusters were not found in."""
    target = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    done = ncd("assign", glyphs / "test", "--bundle", bundle, "--out", target)
    assert done.returncode == 0, done.stderr
    return target


def test_as_a_table_and_as_json(ncd: Ncd, rows: Path, bundle: Path, tmp_path: Path) -> None:
    told = ncd("drift", rows, "--bundle", bundle)
    assert told.returncode == 0, told.stderr
    assert "52 images" in told.stdout and "cluster shares" in told.stdout
    assert (rows.parent / "rows.jsonl.drift.svg").is_file()
    asked = ncd("drift", rows, "--bundle", bundle, "--json", "--plot", tmp_path / "d.svg")
    found = json.loads(asked.stdout)
    assert [measure["name"] for measure in found["measures"]] == ["cluster shares", "confidence", "fit"]
    assert found["drifted"] == any(measure["drifted"] for measure in found["measures"])
    assert ("not like" in told.stdout) == found["drifted"] and (tmp_path / "d.svg").is_file()


@pytest.mark.parametrize(
    ("content", "code", "reason"),
    [
        ("", 3, "0 rows of readable images are too few"),
        ('{"path": "x"}\n', 3, "row 1: it has no path or no status"),
        ("hello", 3, "is not a table of rows"),
        (None, 3, "cannot read"),
    ],
)
def test_bad_rows(ncd: Ncd, bundle: Path, tmp_path: Path, content: str | None, code: int, reason: str) -> None:
    if content is not None:
        (tmp_path / "rows.jsonl").write_text(content)
    done = ncd("drift", tmp_path / "rows.jsonl", "--bundle", bundle)
    assert done.returncode == code and reason in done.stderr and "Traceback" not in done.stderr


def test_wrong_usage(ncd: Ncd, rows: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.txt").touch()
    kinds = ncd("drift", tmp_path / "rows.txt", "--bundle", tmp_path)
    assert kinds.returncode == 2 and "cannot read rows from 'rows.txt'" in kinds.stderr
    no_bundle = ncd("drift", rows, "--bundle", tmp_path)
    assert no_bundle.returncode == 3 and "is not a bundle" in no_bundle.stderr
