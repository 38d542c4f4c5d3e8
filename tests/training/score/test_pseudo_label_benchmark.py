"""benchmarks/pseudo_labels.py on a real run."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "pseudo_labels.py"


def test_the_table_of_a_run(tiny_run: Path) -> None:
    before = sorted(tiny_run.rglob("*"))
    command = [sys.executable, str(SCRIPT), str(tiny_run), "--initial"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "20 unlabelled images, initial features" in done.stdout
    lines = [line for line in done.stdout.splitlines() if line.startswith("│")]
    assert [sum(kind in line for line in lines) for kind in ("global ranking", "cosine", "local ranking")] == [12, 2, 2]
    assert sorted(tiny_run.rglob("*")) == before
