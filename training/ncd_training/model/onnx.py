"""Frozen trunk in ONNX Runtime, whose convolutions on a CPU are up to three times as fast as torch's.

A separate process writes the ONNX file, so that the memory of the export is freed afterwards.
"""

from __future__ import annotations

import contextlib
import io
import logging
import subprocess
import sys
import warnings
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ncd_serve.errors import MissingExtraError
from ncd_serve.runners import Session, open_session
from ncd_training.config.schema import ModelConfig

if TYPE_CHECKING:
    from ncd_training.config.schema import TrainConfig
    from ncd_training.model.branches import Trunk


_PACKAGES = ("onnx", "onnxscript")


def configured_trunk(config: TrainConfig) -> OnnxTrunk | None:
    """Return the trunk in ONNX Runtime if it is configured and there is no GPU, else None."""
    if not config.optim.onnx_trunk or torch.cuda.is_available():
        return None
    for package in _PACKAGES:
        if find_spec(package) is None:
            text = f"optim.onnx_trunk=true needs {package}, which is not installed"
            raise MissingExtraError(text, hint="pip install 'ncd-serve[export]', or --set optim.onnx_trunk=false")
    return OnnxTrunk(config.model, config.data.resolution)


class OnnxTrunk:
    """Trunk in ONNX Runtime. A new session is made whenever the trunk's weights have changed."""

    def __init__(self, model: ModelConfig, resolution: int) -> None:
        self._model, self._resolution = model, resolution
        self._digest, self._version = "", -1

    def maps(self, trunk: Trunk, images: Tensor, *, at_once: int) -> Tensor:
        """Return the maps of uint8 images [B, 3, H, W], computed for `at_once` images at a time."""
        session = self._session(trunk)
        pixels = images.permute(0, 2, 3, 1).contiguous()
        parts = [session.run(["maps"], {"image": few.numpy()})[0] for few in pixels.split(at_once)]
        return torch.cat([torch.from_numpy(part) for part in parts])

    def _session(self, trunk: Trunk) -> Session:
        version = sum(tensor._version for tensor in trunk.state_dict().values())  # counts changes in place
        if version != self._version:
            self._digest, self._version = weights_digest(trunk), version
        key = f"{self._digest} {self._resolution}"
        if key not in _sessions():
            _sessions().clear()
            _sessions()[key] = self._made(trunk)
        return _sessions()[key]

    def _made(self, trunk: Trunk) -> Session:
        with TemporaryDirectory() as scratch:
            weights, model = Path(scratch) / "trunk.safetensors", Path(scratch) / "trunk.onnx"
            save_file({name: tensor.contiguous() for name, tensor in trunk.state_dict().items()}, weights)
            arguments = [self._model.model_dump_json(), str(self._resolution), str(weights), str(model)]
            # In a new process session, or Ctrl-C would interrupt the export as well.
            subprocess.run([sys.executable, "-m", __name__, *arguments], check=True, start_new_session=True)
            return open_session(model, threads=torch.get_num_threads())


def weights_digest(trunk: Trunk) -> str:
    """Return a hash of a trunk's weights."""
    digest = sha256()
    for tensor in trunk.state_dict().values():
        digest.update(tensor.cpu().numpy().tobytes())
    return digest.hexdigest()


@cache
def _sessions() -> dict[str, Session]:
    """Return the cache of the newest session, by weights and resolution: a run builds a trunk several times."""
    return {}


def _write(model: ModelConfig, resolution: int, weights: Path, target: Path) -> None:
    from ncd_training.model.branches import Trunk
    from ncd_training.model.weights import configured_parts

    class TrunkGraph(OnnxGraph):
        output_names = ("maps",)

        def __init__(self) -> None:
            super().__init__()
            self.trunk = Trunk(configured_parts(model, resolution))
            self.trunk.load_state_dict(load_file(weights))

        def forward(self, image: Tensor) -> Tensor:
            maps: Tensor = self.trunk(image.permute(0, 3, 1, 2))
            return maps

    write_onnx(TrunkGraph(), target, resolution=resolution, metadata={})


OPSET = 20  # torch exports it without a conversion; ONNX Runtime reads it since 1.17


class OnnxGraph(nn.Module):
    """Graph from uint8 images [N, H, W, 3] to named outputs."""

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of the outputs, in the order of `forward`."""
        raise NotImplementedError


def write_onnx(graph: OnnxGraph, target: Path, *, resolution: int, metadata: dict[str, str]) -> None:
    """Write the graph as ONNX with `metadata` about its origin; onnx checks the result."""
    import onnx

    example = torch.zeros(2, resolution, resolution, 3, dtype=torch.uint8)
    with _quiet(), _plain_attention(graph):
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
def _plain_attention(graph: nn.Module):  # type: ignore[no-untyped-def]
    """Let timm's attention compute in single steps: the exporter fails on some fused forms."""
    fused = [module for module in graph.modules() if getattr(module, "fused_attn", False)]
    for module in fused:
        module.fused_attn = False  # type: ignore[assignment]
    try:
        yield
    finally:
        for module in fused:
            module.fused_attn = True  # type: ignore[assignment]


@contextlib.contextmanager
def _quiet():  # type: ignore[no-untyped-def]
    """Silence the exporter, which prints its progress and warns about its own internals."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


if __name__ == "__main__":
    _write(ModelConfig.model_validate_json(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
