"""Proof that the exported file answers like the trained model: torch against ONNX Runtime on real images."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from ncd_export.graph import ExportGraph
from ncd_serve.errors import ExportMismatchError
from ncd_serve.preprocess import PreprocessSpec, load_array
from ncd_serve.runners import open_session

if TYPE_CHECKING:
    from collections.abc import Sequence

TOLERANCE = 1e-4
BATCH_SIZES = (1, 2, 7)
MAX_IMAGES = 256


@dataclass(frozen=True)
class Verification:
    """Largest differences between torch and ONNX Runtime, and the share of images with the same cluster id."""

    images: int
    batch_sizes: tuple[int, ...]
    max_difference: dict[str, float]
    equal_ids: float
    tolerance: float = TOLERANCE

    @property
    def passed(self) -> bool:
        """Whether the export may be used."""
        return self.equal_ids == 1.0 and max(self.max_difference.values()) <= self.tolerance

    def as_dict(self) -> dict[str, Any]:
        """For verification.json."""
        return {**asdict(self), "passed": self.passed}


def verify(
    graph: ExportGraph, model: Path, paths: Sequence[Path], spec: PreprocessSpec, *, max_batch: int
) -> Verification:
    """Compare both on image files, in batches of 1, 2, 7 and `max_batch`; raises ExportMismatchError."""
    images = np.stack([load_array(path, spec) for path in _spread(paths)])
    expected = _torch_outputs(graph, images)
    session = open_session(model)
    differences = dict.fromkeys(("confidence", "probabilities", "embedding"), 0.0)
    ids = [name for name in graph.output_names if name not in differences]
    equal = 1.0
    batch_sizes = (*BATCH_SIZES, max_batch)
    for size in batch_sizes:
        parts = [
            session.run(list(graph.output_names), {"image": images[start : start + size]})
            for start in range(0, len(images), size)
        ]
        answer = dict(
            zip(graph.output_names, (np.concatenate(arrays) for arrays in zip(*parts, strict=True)), strict=True)
        )
        equal = min(equal, *(float((answer[name] == expected[name]).mean()) for name in ids))
        for name in differences:
            differences[name] = max(differences[name], _difference(answer[name], expected[name]))
    result = Verification(len(images), batch_sizes, differences, equal)
    if not result.passed:
        raise ExportMismatchError(
            f"the exported model differs from the trained one: {equal:.1%} equal ids, largest difference "
            f"{max(differences.values()):.2g} (allowed: {TOLERANCE:g})",
            hint="nothing was written; please report this with the run's config.toml",
        )
    return result


@torch.inference_mode()
def _torch_outputs(graph: ExportGraph, images: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
    outputs = [graph(torch.from_numpy(images[start : start + 64])) for start in range(0, len(images), 64)]
    return {name: torch.cat([getattr(output, name) for output in outputs]).numpy() for name in graph.output_names}


def _difference(answer: NDArray[Any], expected: NDArray[Any]) -> float:
    """Largest difference, relative where values are larger than 1: embeddings have no fixed scale."""
    return float(np.abs(answer - expected).max() / max(1.0, np.abs(expected).max()))


def _spread(paths: Sequence[Path]) -> list[Path]:
    """At most MAX_IMAGES of them, evenly spread, so that every cluster has a chance."""
    step = max(1, -(-len(paths) // MAX_IMAGES))
    return list(paths[::step])
