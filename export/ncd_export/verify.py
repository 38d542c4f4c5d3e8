"""Verification of an exported model: torch against ONNX Runtime, fp32 against fewer bits."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from ncd_serve import progress
from ncd_serve.contract import OUTPUTS
from ncd_serve.errors import DataError, ExportMismatchError
from ncd_serve.runners import open_session

if TYPE_CHECKING:
    from pathlib import Path

    from ncd_export.graph import ExportGraph
    from ncd_serve.mixture import Mixture

TOLERANCE = 1e-4
_MIXTURE_TOLERANCE = 1e-2  # of a probability that single precision computes from large squares
BATCH_SIZES = (1, 2, 7)
_BATCHES_PER_SIZE = 4  # for sizes below the largest
_WITH_TOLERANCE = [output.name for output in OUTPUTS if output.compared == "measured"]
_EXACT = [output.name for output in OUTPUTS if output.compared == "exact"]
Images = NDArray[np.uint8]
ModelOutputs = dict[str, NDArray[Any]]


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
        """True if the exported model agrees with the trained one."""
        return self.equal_ids == 1.0 and max(self.max_difference.values()) <= self.tolerance

    def as_dict(self) -> dict[str, Any]:
        """Return the content of verification.json."""
        return {**asdict(self), "passed": self.passed}


@dataclass(frozen=True)
class Agreement:
    """Differences between the fp32 model and one of fewer bits, on images that were not used for calibration."""

    precision: str
    images: int
    calibrated_on: int
    max_difference: dict[str, float]
    equal_ids: float
    required: float


def check_finite(*outputs: NDArray[np.float32]) -> None:
    """Raise DataError if outputs of the trained model contain NaN or infinity."""
    if not all(np.isfinite(output).all() for output in outputs):
        raise DataError(
            "the outputs of the trained model contain NaN or infinity", hint="train again with a lower learning rate"
        )


def verify(
    graph: ExportGraph, model: Path, images: Images, *, max_batch: int, track: progress.Track = progress.silent
) -> Verification:
    """Compare torch and ONNX Runtime on images, in batches of 1, 2, 7 and `max_batch`; raise ExportMismatchError."""
    expected = _torch_answers(graph, images, track)
    check_finite(*(expected[name] for name in _WITH_TOLERANCE if name in expected))
    differences: dict[str, float] = {}
    equal = 1.0
    sizes = (*BATCH_SIZES, max_batch)
    for size in sizes:
        some = images if size == max_batch else images[: size * _BATCHES_PER_SIZE]
        answers = _onnx_answers(model, graph.output_names, some, batch=size, track=track)
        found, same = _compare(answers, {name: array[: len(some)] for name, array in expected.items()})
        differences, equal = {name: max(differences.get(name, 0.0), found[name]) for name in found}, min(equal, same)
    result = Verification(len(images), sizes, differences, equal)
    if not result.passed:
        raise ExportMismatchError(
            f"the exported model differs from the trained one: {equal:.1%} equal ids, largest difference "
            f"{max(differences.values()):.2g} (limit: {TOLERANCE:g})",
            hint="nothing was written; report this as a defect, with the run's config.toml",
        )
    return result


def compare_precisions(
    fp32: Path,
    reduced: Path,
    names: tuple[str, ...],
    images: Images,
    *,
    precision: str,
    calibrated_on: int,
    required: float,
    max_batch: int,
    track: progress.Track = progress.silent,
) -> Agreement:
    """Compare a model of fewer bits with the fp32 one; raise ExportMismatchError if too few ids are equal."""
    expected, answers = (_onnx_answers(model, names, images, batch=max_batch, track=track) for model in (fp32, reduced))
    differences, equal = _compare(answers, expected)
    if equal < required:
        raise ExportMismatchError(
            f"{precision} assigns {equal:.1%} of {len(images)} images to the same cluster as fp32, "
            f"and {required:.1%} are required",
            hint="nothing was written; use --precision fp32, or give a lower --min-agreement",
        )
    return Agreement(precision, len(images), calibrated_on, differences, equal, required)


def verify_mixture(
    model: Path, mixture: Mixture, images: Images, *, max_batch: int, track: progress.Track = progress.silent
) -> None:
    """Compare the outputs `outside` and `known` with numpy; raise ExportMismatchError."""
    expected = {"outside": mixture.outside} | ({"known": mixture.known} if mixture.known_classes else {})
    answers = _onnx_answers(model, ("embedding", *expected), images, batch=max_batch, track=track)
    for name, function in expected.items():
        difference = _difference(answers[name], function(answers["embedding"]))
        if difference > _MIXTURE_TOLERANCE:
            raise ExportMismatchError(
                f"the probability '{name}' differs by {difference:.2g} (limit: {_MIXTURE_TOLERANCE:g})",
                hint="nothing was written; report this as a defect, with the run's config.toml",
            )


@torch.inference_mode()
def _torch_answers(graph: ExportGraph, images: Images, track: progress.Track) -> ModelOutputs:
    parts = _batches(images, 64)
    outputs = [graph(torch.from_numpy(part)) for part in track(parts, "running torch", len(parts))]
    return {name: torch.cat([output[name] for output in outputs]).numpy() for name in graph.output_names}


def _onnx_answers(
    model: Path, names: tuple[str, ...], images: Images, *, batch: int, track: progress.Track
) -> ModelOutputs:
    session = open_session(model)
    parts = _batches(images, batch)
    description = f"running ONNX Runtime, batch {batch}"
    outputs = [session.run(list(names), {"image": part}) for part in track(parts, description, len(parts))]
    return {name: np.concatenate(arrays) for name, arrays in zip(names, zip(*outputs, strict=True), strict=True)}


def _batches(images: Images, size: int) -> list[Images]:
    return [images[start : start + size] for start in range(0, len(images), size)]


def _compare(answers: ModelOutputs, expected: ModelOutputs) -> tuple[dict[str, float], float]:
    """Return the largest difference of each output with a tolerance, and the smallest share of equal exact outputs."""
    equal = min(float((answers[name] == expected[name]).mean()) for name in _EXACT if name in expected)
    measured = [name for name in _WITH_TOLERANCE if name in expected]
    return {name: _difference(answers[name], expected[name]) for name in measured}, equal


def _difference(answer: NDArray[Any], expected: NDArray[Any]) -> float:
    """Return the largest difference, relative if values exceed 1: embeddings have no fixed scale."""
    largest = float(np.abs(answer - expected).max() / max(1.0, np.abs(expected).max()))
    return math.inf if math.isnan(largest) else largest  # NaN would pass every limit
