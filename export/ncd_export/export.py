"""From a run to a verified bundle and a Triton model repository."""

from __future__ import annotations

import uuid
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from ncd_training.run_dir import RunDir
from ncd_training.setup import Setup
from ncd_training.train import load_state

from ncd_export.graph import ExportGraph
from ncd_export.repository import MAX_BATCH, add_to_repository
from ncd_export.to_onnx import write_onnx
from ncd_export.verify import Verification, verify
from ncd_serve.bundle import CARD, LABELS, MANIFEST, MODEL, VERIFICATION, Bundle, BundleManifest
from ncd_serve.files import atomic_directory, sha256, write_json, write_text

_PACKAGES = ("ncd-serve", "torch", "onnx", "onnxruntime-gpu")


class Exported(NamedTuple):
    """What an export leaves behind."""

    bundle: Bundle
    version_folder: Path
    verification: Verification


def export_run(setup: Setup, run: RunDir, *, out: Path, repository: Path, name: str) -> Exported:
    """Write the bundle, and add it to the repository, only after its answers were compared with torch's."""
    state = load_state(setup, run)
    graph = ExportGraph(state.model).cpu().eval()
    bundle_id = uuid.uuid4().hex[:12]
    spec = setup.config.data.preprocess
    with atomic_directory(out) as folder:
        with setup.console.status("exporting and verifying"):
            facts = {"bundle_id": bundle_id, "dataset": setup.manifest.name, "method": "dual", **_versions()}
            write_onnx(graph, folder / MODEL, resolution=spec.resolution, metadata=facts)
            verification = verify(graph, folder / MODEL, setup.manifest.unlabelled, spec, max_batch=MAX_BATCH)
        write_json(folder / VERIFICATION, verification.as_dict())
        _write_descriptions(folder, bundle_id, setup, run.read_summary(), epochs=state.epoch)
    bundle = Bundle.read(out)
    return Exported(bundle, add_to_repository(bundle, repository, name=name), verification)


def _write_descriptions(folder: Path, bundle_id: str, setup: Setup, summary: dict[str, Any], *, epochs: int) -> None:
    names = [f"cluster-{number}" for number in range(setup.clusters)]
    if setup.config.model.heads == "open_world":
        names = [*setup.manifest.known_classes, *names]
    write_text(folder / LABELS, "".join(f"{name}\n" for name in names))
    manifest = BundleManifest(
        bundle_id=bundle_id,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        dataset=setup.manifest.name,
        method="dual",
        preprocess=setup.config.data.preprocess,
        known_classes=setup.manifest.known_classes,
        cluster_names=names,
        training={
            "trunk": setup.config.model.trunk,
            "initial_weights": _origin(setup, summary),
            "branches": setup.config.model.branches,
            "epochs": epochs,
            "labelled_images": len(setup.manifest.labelled),
            "unlabelled_images": len(setup.manifest.unlabelled),
        },
        versions=_versions(),
        sha256={},
    )
    write_text(folder / CARD, _card(manifest, summary))
    hashes = {name: sha256(folder / name) for name in (MODEL, LABELS, VERIFICATION, CARD)}
    write_text(folder / MANIFEST, manifest.model_copy(update={"sha256": hashes}).model_dump_json(indent=2) + "\n")


def _origin(setup: Setup, summary: dict[str, Any]) -> str:
    """Where trunk and tail started from."""
    if "weights" in summary:
        return "{format}, {file}, sha256 {sha256}".format(**summary["weights"])
    return "self-supervised by rotation" if setup.config.rotations.epochs else "random"


def _card(manifest: BundleManifest, summary: dict[str, Any]) -> str:
    environment = Environment(loader=PackageLoader("ncd_export"), undefined=StrictUndefined, trim_blocks=True)
    return environment.get_template("model_card.md.jinja").render(manifest=manifest, summary=summary)


def _versions() -> dict[str, str]:
    return {name: version(name) for name in _PACKAGES}
