"""Benchmarks run for too long to be tested, but what they use of the packages must be there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.slow
def test_all_can_be_imported() -> None:
    names = sorted(path.stem for path in FOLDER.glob("*.py"))
    done = subprocess.run(
        [sys.executable, "-c", f"import {', '.join(names)}"], cwd=FOLDER, capture_output=True, text=True, check=False
    )
    assert "cub" in names and done.returncode == 0, done.stderr
