"""The notebook of docs/ runs as it is, in a smaller form, and shows what a notebook should."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ncd_serve.errors import NcdError
from ncd_serve.triton import find_triton

NOTEBOOK = Path(__file__).parents[2] / "docs" / "notebooks" / "quickstart.ipynb"
TAG = re.compile("<[^>]+>")


def run_cells(cells: list[str] | None, folder: Path) -> list[Any]:
    """Run the notebook's cells, or the given ones, in a new kernel; returns the code cells with their outputs."""
    nbformat = pytest.importorskip("nbformat", reason="needs nbformat, of the extra dev")
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient, of the extra dev")
    pytest.importorskip("ipykernel", reason="needs ipykernel, of the extra dev")
    v4 = nbformat.v4
    notebook = (
        v4.new_notebook(cells=[v4.new_code_cell(text) for text in cells]) if cells else nbformat.read(NOTEBOOK, 4)
    )
    where = {"metadata": {"path": str(folder)}}
    client = nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3", resources=where)
    client.execute()
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs_of(cell: Any) -> list[str]:
    """Return the outputs of a cell: printed text, HTML, `image/png` for a picture, or plain text."""
    shown = []
    for output in cell.outputs:
        data = output.get("data", {})
        picture = "image/png" if "image/png" in data else ""
        shown.append(output.get("text") or data.get("text/html") or picture or data.get("text/plain", ""))
    return shown


def test_the_notebook_is_kept_as_one_execution_left_it_or_without_outputs() -> None:
    """docs/execute.py runs all cells in their order; a cell that was run alone would tell something else."""
    nbformat = pytest.importorskip("nbformat", reason="needs nbformat, of the extra dev")
    notebook = nbformat.read(NOTEBOOK, 4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    outputs = [output for cell in cells for output in cell.outputs]
    counts = list(range(1, len(cells) + 1)) if outputs else [None] * len(cells)
    assert [cell.execution_count for cell in cells] == counts
    assert "error" not in {output.output_type for output in outputs} and NOTEBOOK.stat().st_size < 1_000_000


@pytest.mark.slow
@pytest.mark.triton
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pandas", reason="the notebook groups a table with pandas")
    try:
        find_triton()
    except NcdError as error:
        pytest.skip(f"no Triton here: {error}")
    monkeypatch.setenv("NCD_QUICK", "1")
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # where the notebook makes its folder
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    cells = run_cells(None, tmp_path)

    def shown(start: str) -> list[str]:
        (cell,) = (cell for cell in cells if start in cell.source)
        return outputs_of(cell)

    discovered = shown("run = discover(")
    assert any(re.fullmatch(r'<progress value="(\d+)" max="\1"></progress> epoch 2/2.*', text) for text in discovered)
    lines = Counter(TAG.sub("", text).strip() for text in discovered)
    assert any("100 unlabelled images for 5 clusters" in line for line in lines)
    assert sum(line.startswith("epoch") for line in lines) >= 2
    assert [line for line, times in lines.items() if times > 1 and "trunk maps" not in line] == []
    assert "nearest known class" in shown("run.clusters")[0] and "cluster_balance" in shown("run.metrics")[0]
    assert "image/png" in shown("run.plot()")
    assert "hint:" in shown("except NcdError")[-1]
    assert "stopped" in shown("press_stop")[-1]
    assert shown("stopped.resume()")[-1].strip() == "3 epochs are done"
    rows = shown("ncd_serve.serve(")[-1].splitlines()
    assert len(rows) == 20 and all(re.match(r"[AEIOU]-\d+\.png cluster-\d [01]\.\d\d ", row) for row in rows)
    assert not list(tmp_path.glob("quickstart-*"))


@pytest.mark.slow
def test_importing_leaves_the_notebooks_matplotlib_as_it_is(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    cells = [
        "import matplotlib; before = matplotlib.get_backend(auto_select=False), dict(matplotlib.rcParams)",
        "import ncd_serve; from ncd_training import *",
        "from ncd_training.run import train; from ncd_training.summary import page, plots, tables",
        "import sys; print('matplotlib.pyplot' in sys.modules)",
        "print(before == (matplotlib.get_backend(auto_select=False), dict(matplotlib.rcParams)))",
    ]
    ran = run_cells(cells, tmp_path)
    assert [outputs_of(cell)[-1].strip() for cell in ran[3:]] == ["False", "True"]
