"""Run the notebook, and keep it with what it showed.

    .venv/bin/python docs/execute.py

Takes some minutes. Paths are those of a folder that is gone afterwards; pictures have few colours, so that the file
stays small.
"""

from __future__ import annotations

import io
from base64 import b64decode, b64encode
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nbformat
from nbclient import NotebookClient
from PIL import Image

NOTEBOOK = Path(__file__).resolve().parent / "notebooks" / "quickstart.ipynb"
COLOURS = 128


def main() -> None:
    """Run all cells and write the notebook."""
    notebook = nbformat.read(NOTEBOOK, 4)
    with TemporaryDirectory() as folder:
        NotebookClient(notebook, timeout=3600, resources={"metadata": {"path": folder}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # when it was run
        if cell.cell_type == "code":
            cell.outputs = [smaller(output) for output in cell.outputs if not passing(output)]
    nbformat.write(notebook, NOTEBOOK)
    print(f"{NOTEBOOK.stat().st_size / 1000:.0f} kB")


def passing(output: Any) -> bool:
    """Return True for a bar of progress, which says nothing once it is full, and for warnings about the machine."""
    return "<progress" in output.get("data", {}).get("text/html", "") or output.get("name") == "stderr"


def smaller(output: Any) -> Any:
    """Return an output whose picture has few colours."""
    data = output.get("data", {})
    if "image/png" in data:
        packed = io.BytesIO()
        picture = Image.open(io.BytesIO(b64decode(data["image/png"]))).convert("RGB")
        picture.quantize(COLOURS, dither=Image.Dither.NONE).save(packed, "png", optimize=True)
        data["image/png"] = b64encode(packed.getvalue()).decode()
    return output


if __name__ == "__main__":
    main()
