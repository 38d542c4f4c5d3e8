"""A part of the model as an ONNX file with a dynamic batch and stable names."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from pathlib import Path

import onnx
import torch
from torch import nn

OPSET = 20  # what torch translates to without a conversion, and ONNX Runtime reads since 1.17


class OnnxGraph(nn.Module):
    """uint8 images [N, H, W, 3] to outputs with names."""

    @property
    def output_names(self) -> tuple[str, ...]:
        """What it answers with, in the order of `forward`."""
        raise NotImplementedError


def write_onnx(graph: OnnxGraph, target: Path, *, resolution: int, metadata: dict[str, str]) -> None:
    """Write the graph, checked by onnx itself, with facts about its origin inside."""
    example = torch.zeros(2, resolution, resolution, 3, dtype=torch.uint8)
    with _quiet():
        program = torch.onnx.export(
            graph.eval().cpu(),
            (example,),
            input_names=["image"],
            output_names=list(graph.output_names),
            opset_version=OPSET,
            dynamo=True,
            dynamic_shapes={"image": {0: torch.export.Dim("batch", min=1)}},
        )
    assert program is not None
    model = program.model_proto
    onnx.helper.set_model_props(model, metadata)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, target)


@contextlib.contextmanager
def _quiet():  # type: ignore[no-untyped-def]
    """The exporter prints its progress and warns about its own internals; none of it is for users."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
