"""Export a run to a verified bundle and add it to a Triton model repository."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime
from ncd_training.base.run_dir import RunDir
from ncd_training.data.manifest import KNOWN_TEST, NOVEL_TEST, UNLABELLED_TRAIN, Manifest
from ncd_training.data.prepare import Setup
from ncd_training.model.map_cache import view_bytes
from ncd_training.model.onnx import write_onnx
from ncd_training.model.predict import run_model
from ncd_training.run.step import TrainState, load_state
from ncd_training.score.reference import checkpoint_id, embed_labelled, to_reference
from ncd_training.summary.figures import initial_weights

from ncd_export.generation import write_first_generation
from ncd_export.graph import ExportGraph
from ncd_export.model_card import render_card
from ncd_export.precision import PRECISIONS, PrecisionKind, precision_for
from ncd_export.publish import Destination, finish_interrupted, publish, publishing, seal
from ncd_export.rename import carry_names, keep_names
from ncd_export.repository import check_clusters, check_place, check_writable, disk_errors_as_data_errors
from ncd_export.triton_config import MAX_BATCH, THIS_CPU, Hardware
from ncd_export.verify import Agreement, Images, Verification, check_finite, compare_precisions, verify, verify_mixture
from ncd_serve.bundle import CARD, HASHED, MANIFEST, MODEL, VERIFICATION, Bundle, BundleManifest
from ncd_serve.contract import DEFAULT_MODEL, Precision
from ncd_serve.errors import DataError
from ncd_serve.files import staged_directory, write_json, write_text
from ncd_serve.mixture import Mixture
from ncd_serve.preprocess import PreprocessSpec, load_array
from ncd_serve.progress import Progress
from ncd_serve.reference import REFERENCE, Reference

_PACKAGES = ("ncd-serve", "torch", "onnx")
_SPLITS = (UNLABELLED_TRAIN, NOVEL_TEST, KNOWN_TEST)  # whose ACC the bundle keeps
_VERIFICATION_IMAGES, _CALIBRATION_IMAGES, _CALIBRATION_BATCH = 256, 128, 8


@dataclass(frozen=True)
class ExportOptions:
    """Settings of an export: checkpoint, precision, device, and versions to keep in the repository."""

    checkpoint: Path | None = None  # None: the newest
    precision: Precision | str = Precision.FP32
    min_agreement: float = 0.98  # smallest share of images with the same cluster as in fp32
    hardware: Hardware = THIS_CPU
    replace: bool = False
    keep: int | None = None
    replace_model: bool = False  # take over a model that has the clusters of another run

    def check(self) -> None:
        """Raise UsageError if the device cannot serve the precision."""
        precision_for(self.precision, self.hardware.device)

    @property
    def kind(self) -> PrecisionKind:
        """Row of the precision in `PRECISIONS`."""
        return PRECISIONS[Precision(self.precision)]


class Exported(NamedTuple):
    """Result of an export."""

    bundle: Bundle
    version_folder: Path
    verification: Verification
    agreement: Agreement | None


def export_run(
    setup: Setup,
    run: RunDir,
    *,
    out: str | Path,
    repository: str | Path,
    name: str = DEFAULT_MODEL,
    progress: Progress,
    options: ExportOptions | None = None,
) -> Exported:
    """Write the bundle and add it to the repository, or change neither."""
    out, repository = Path(out), Path(repository)
    options = options or ExportOptions()
    options.check()
    check_place(repository, name)
    _check_output(out)
    checkpoint = options.checkpoint or run.checkpoint
    state = load_state(setup, checkpoint)
    if not options.replace_model:
        check_clusters(repository, name, _lineage(checkpoint, out, setup))
    planned = setup.config.optim.epochs
    if state.epoch < planned:
        progress.say(f"exporting the state after {state.epoch} of {planned} epochs", style="yellow")
    finish_interrupted(out)
    with disk_errors_as_data_errors(out), staged_directory(out) as folder:
        reference = _write_reference(setup, run, state, options, folder / REFERENCE, progress)
        graph, mixture = ExportGraph(state.model, reference.limits()).cpu().eval(), reference.mixture()
        assert mixture is not None  # `_write_reference` sees to it
        manifest = _bundle_manifest(setup, run, options, state, checkpoint=reference.checkpoint)
        verification, agreement = _write_model(
            graph, folder / MODEL, manifest, mixture, setup.manifest, options, progress
        )
        # Scores are those of the finished run.
        scored = options.checkpoint is None and state.epoch == planned
        write_text(folder / CARD, render_card(manifest, setup, run.read_summary(), agreement, scored=scored))
        _write_facts(folder, manifest, verification, agreement)
        with publishing(out, repository):
            if keep_names(out, Bundle.read(folder)) or carry_names(Bundle.read(folder), setup.carried):
                progress.say("the clusters keep the names, merges and junk marks of the previous bundle")
            place = {"hardware": options.hardware, "replace": options.replace, "keep": options.keep}
            version_folder = publish(folder, out, Destination(repository=repository, name=name, **place))
    return Exported(Bundle.read(out), version_folder, verification, agreement)


def _write_facts(
    folder: Path, manifest: BundleManifest, verification: Verification, agreement: Agreement | None
) -> None:
    """Write verification, labels and manifest."""
    compared = {**verification.as_dict(), "agreement": asdict(agreement) if agreement else None}
    write_json(folder / VERIFICATION, compared)
    seal(folder, manifest, (*HASHED, REFERENCE))


def _write_reference(
    setup: Setup, run: RunDir, state: TrainState, options: ExportOptions, target: Path, progress: Progress
) -> Reference:
    """Copy the run's reference if it belongs to the exported state, else make one; return it as read from the file.

    The file rounds, and all users of the bundle must see the same values.
    """
    checkpoint = options.checkpoint or run.checkpoint
    if _is_current(run.reference, checkpoint):
        shutil.copyfile(run.reference, target)
    else:
        data, paths = setup.config.data, setup.manifest.unlabelled
        what = "evaluating unlabelled images"
        outputs = run_model(state.model, paths, data.preprocess, workers=data.workers, track=progress.track, what=what)
        check_finite(outputs.embedding, outputs.confidences)
        open_world = setup.config.model.heads == "open_world"
        labelled = embed_labelled(
            state.model, setup.manifest, data.preprocess, workers=data.workers, track=progress.track
        )
        check_finite(labelled.embedding)
        reference = to_reference(
            outputs, labelled, setup.manifest, checkpoint=checkpoint, clusters_are_classes=open_world
        )
        reference.write(target)
    return Reference.read(target)


def _is_current(file: Path, checkpoint: Path) -> bool:
    """Return whether a reference is of a checkpoint, and has all that this version writes."""
    if not file.is_file():
        return False
    reference = Reference.read(file)
    return reference.checkpoint == checkpoint_id(checkpoint) and reference.mixture() is not None


def _write_model(
    graph: ExportGraph,
    model: Path,
    manifest: BundleManifest,
    mixture: Mixture,
    images: Manifest,
    options: ExportOptions,
    progress: Progress,
) -> tuple[Verification, Agreement | None]:
    """Write the ONNX file in the requested precision; fp32 is compared with torch, fewer bits with fp32.

    The mixture of classes is added last, so that it is computed in fp32.
    """
    facts = {key: getattr(manifest, key) for key in ("bundle_id", "dataset", "method", "precision")}
    with progress.status("converting to ONNX"):
        write_onnx(graph, model, resolution=manifest.preprocess.resolution, metadata={**facts, **manifest.versions})
    spec = manifest.preprocess
    compared = _load(_compared(images), spec, progress)
    verification = verify(graph, model, compared, max_batch=MAX_BATCH, track=progress.track)
    agreement = _reduce(graph, model, compared, images, options, spec, progress) if options.kind.reduce else None
    write_first_generation(model, mixture)
    verify_mixture(model, mixture, compared, max_batch=MAX_BATCH, track=progress.track)
    return verification, agreement


def _reduce(
    graph: ExportGraph,
    model: Path,
    compared: Images,
    images: Manifest,
    options: ExportOptions,
    spec: PreprocessSpec,
    progress: Progress,
) -> Agreement:
    """Replace a model by one of fewer bits that agrees with it."""
    assert options.kind.reduce is not None
    calibration = _calibration(images) if options.kind.calibrated else []
    batches = _calibration_batches(calibration, spec, f"calibrating {options.precision}", progress)
    reduced = model.with_name("reduced.onnx")
    options.kind.reduce(model, reduced, batches)
    agreement = compare_precisions(
        model,
        reduced,
        graph.output_names,
        compared,
        precision=str(options.precision),
        calibrated_on=len(calibration),
        required=options.min_agreement,
        max_batch=MAX_BATCH,
        track=progress.track,
    )
    reduced.replace(model)
    return agreement


def _calibration_batches(
    paths: Sequence[Path], spec: PreprocessSpec, description: str, progress: Progress
) -> Iterable[Images]:
    if not paths:
        return ()
    pictures = _load(paths, spec, progress)
    batches = np.array_split(pictures, -(-len(pictures) // _CALIBRATION_BATCH))
    return progress.track(batches, description, len(batches))


def _compared(images: Manifest) -> list[Path]:
    return _spread(images.unlabelled, _VERIFICATION_IMAGES)


def _calibration(images: Manifest) -> list[Path]:
    """Return training images for calibration; none of them is used for the comparison."""
    compared = set(_compared(images))
    return _spread([path for path in images.images if path not in compared], _CALIBRATION_IMAGES)


def _spread(paths: Sequence[Path], most: int) -> list[Path]:
    """Return at most `most` paths, evenly spread, so that all clusters are likely to be among them."""
    return list(paths[:: max(1, -(-len(paths) // most))])


def _load(paths: Sequence[Path], spec: PreprocessSpec, progress: Progress) -> Images:
    return np.stack([load_array(path, spec) for path in progress.track(paths, "reading images", len(paths))])


def _bundle_manifest(
    setup: Setup, run: RunDir, options: ExportOptions, state: TrainState, *, checkpoint: str
) -> BundleManifest:
    config, manifest = setup.config, setup.manifest
    names = [f"cluster-{number}" for number in range(setup.clusters)]
    open_world = config.model.heads == "open_world"
    if open_world:
        names = [*manifest.known_classes, *names]
    finished = options.checkpoint is None and state.epoch == config.optim.epochs  # scores are those of the last state
    return BundleManifest(
        bundle_id=uuid.uuid4().hex[:12],
        checkpoint=checkpoint,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        dataset=manifest.name,
        method=config.method.name,
        precision=str(options.precision),
        preprocess=config.data.preprocess,
        known_classes=manifest.known_classes,
        open_world=open_world,
        cluster_names=names,
        training={
            "backbone": config.model.backbone,
            "initial_weights": initial_weights(config, run.read_summary()),
            "branches": config.model.branches,
            "epochs": state.epoch,
            "planned_epochs": config.optim.epochs,
            "seed": config.optim.seed,
            "labelled_images": len(manifest.labelled),
            "unlabelled_images": len(manifest.unlabelled),
            "view_bytes": view_bytes(state.model.trunk, config.data.resolution),
        },
        # onnxruntime has a different package name on each platform.
        **_generation(setup),
        **(_scores(run, names) if finished else {}),
        versions={**{name: version(name) for name in _PACKAGES}, "onnxruntime": onnxruntime.__version__},
        sha256={},
    )


def _scores(run: RunDir, names: list[str]) -> dict[str, Any]:
    """Return ACC by split as far as true classes are known, and the verdict without them."""
    summary = run.read_summary()
    acc = {split: score.acc for split, score in summary.scores.items() if split in _SPLITS}
    words = summary.verdict.sentences(names.__getitem__) if summary.verdict else []
    return {"scores": acc, "verdict": "; ".join(words)}


def _generation(setup: Setup) -> dict[str, Any]:
    """Return the facts of a later generation; none for a first one."""
    if (carried := setup.carried) is None:
        return {}
    return {"generation": carried.generation, "ancestors": carried.ancestors, "changes": carried.changes}


def _lineage(checkpoint: Path, out: Path, setup: Setup) -> list[str]:
    """Return the checkpoint to be exported, and those with the same ids: of earlier generations, and of this run."""
    before = [each.checkpoint for each in setup.carried.ancestors] if setup.carried else []
    with suppress(DataError):
        before.append(Bundle.read(out).manifest.checkpoint)
    return [checkpoint_id(checkpoint), *before]


def _check_output(out: Path) -> None:
    """Raise DataError unless `out` is new, empty or a bundle, and its folder can be written."""
    if out.exists() and not (out / MANIFEST).is_file() and not (out.is_dir() and not any(out.iterdir())):
        raise DataError(f"{out} exists and is not a bundle", hint="choose another --out")
    check_writable(out.absolute().parent)
