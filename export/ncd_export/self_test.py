"""Training and export for `ncd-serve doctor --self-test`, in a separate process.

    python -m ncd_export.self_test FOLDER

Prints one check per line as JSON. Writes a bundle, a model repository, images and torch's outputs for them to FOLDER.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ncd_serve.bundle import CARD, HASHED, LABELS, MANIFEST, MODEL, VERIFICATION, Bundle, BundleManifest
from ncd_serve.doctor.checks import Check, take_steps
from ncd_serve.doctor.self_test import ANSWERS, BUNDLE, GROUP, IMAGES, MODEL_NAME, REPOSITORY
from ncd_serve.errors import MissingExtraError, NcdError
from ncd_serve.files import sha256
from ncd_serve.fit import calibrate
from ncd_serve.preprocess import load_array

if TYPE_CHECKING:
    from ncd_training.run.self_test import SmallRun
    from numpy.typing import NDArray

    from ncd_export.graph import ExportGraph
    from ncd_serve.doctor.installation import Step

_TEST_IMAGES = 40


def examine(folder: Path) -> Iterator[Check]:
    """Yield the checks of training and export; without their packages, a single check that names the missing one."""
    try:
        from ncd_training.run.self_test import SmallRun
    except ModuleNotFoundError as error:
        missing = MissingExtraError.of("train", error.name or "torch")
        yield Check(GROUP, "training", "missing", str(missing), missing.hint or "")
        return
    run = SmallRun(folder)
    yield from take_steps(GROUP, map(_explained, run.steps()))
    yield from take_steps(GROUP, map(_explained, [("export", partial(_export, run, folder))]))


def _explained(step: Step) -> Step:
    """Return the step with unexpected errors of torch or a driver as NcdError, so that the other steps still run."""
    what, look = step

    def attempt() -> str:
        try:
            return look()
        except NcdError:
            raise
        except Exception as error:  # torch, CUDA and onnx have no common error class
            reason = str(error).strip().partition("\n")[0]
            raise NcdError(f"{type(error).__name__}: {reason}", hint="update the GPU's driver and torch") from error

    return what, attempt


def _export(run: SmallRun, folder: Path) -> str:
    """Export the trained model to a bundle and a repository, and write torch's outputs beside them."""
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingExtraError.of("export", error.name or "onnx") from None
    import torch
    from ncd_training.model.onnx import write_onnx

    from ncd_export.graph import ExportGraph
    from ncd_export.repository import add_to_repository

    spec = run.setup.config.data.preprocess
    images = np.stack([load_array(path, spec) for path in run.setup.manifest.images[-_TEST_IMAGES:]])
    model = run.trained().model.eval()
    with torch.inference_mode():
        plain = _outputs(ExportGraph(model), images)
        ids, confidences = plain["cluster_id"], plain["confidence"]
        limits = calibrate(plain["embedding"], ids, confidences, clusters=plain["probabilities"].shape[1])
        graph = ExportGraph(model, limits).eval()
        np.savez(folder / ANSWERS, **_outputs(graph, images))
    np.save(folder / IMAGES, images)
    bundle = folder / BUNDLE
    bundle.mkdir()
    write_onnx(graph, bundle / MODEL, resolution=spec.resolution, metadata={})
    _write_facts(bundle, run, clusters=plain["probabilities"].shape[1])
    add_to_repository(Bundle.read(bundle), folder / REPOSITORY, name=MODEL_NAME)
    return f"{(bundle / MODEL).stat().st_size / 1e6:.1f} MB of ONNX, valid according to onnx's checker"


def _outputs(graph: ExportGraph, images: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
    import torch

    return {name: answer.numpy() for name, answer in graph.eval()(torch.from_numpy(images)).items()}


def _write_facts(bundle: Path, run: SmallRun, *, clusters: int) -> None:
    """Write all files of a bundle except its model."""
    names = [f"cluster-{number}" for number in range(clusters)]
    (bundle / LABELS).write_text("".join(f"{name}\n" for name in names))
    for file in (VERIFICATION, CARD):
        (bundle / file).write_text("{}")
    manifest = BundleManifest(
        bundle_id="self-test",
        created="",
        dataset=run.setup.manifest.name,
        method=run.setup.config.method.name,
        preprocess=run.setup.config.data.preprocess,
        known_classes=run.setup.manifest.known_classes,
        cluster_names=names,
        training={},
        versions={},
        sha256={file: sha256(bundle / file) for file in HASHED},
    )
    (bundle / MANIFEST).write_text(manifest.model_dump_json())


def main() -> None:
    """Print the checks one by one; all other output goes to standard error."""
    out = sys.stdout
    with redirect_stdout(sys.stderr):
        for check in examine(Path(sys.argv[1])):
            print(json.dumps(asdict(check)), file=out, flush=True)


if __name__ == "__main__":
    main()
