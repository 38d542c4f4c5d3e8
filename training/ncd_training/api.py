"""Functions that a notebook calls; the command line is a thin layer over them."""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ncd_serve.contract import DEFAULT_MODEL
from ncd_serve.errors import DataError, MissingExtraError, UsageError
from ncd_serve.options import (
    AnyPath,
    Backbone,
    CacheViews,
    DataRoot,
    Dataset,
    Download,
    Epochs,
    EstimatorName,
    Labelled,
    ManifestFile,
    MostClasses,
    NovelClasses,
    Pile,
    PretrainEpochs,
    PretrainImages,
    PretrainLabelled,
    PretrainMethod,
    Seed,
    StrictData,
    TensorBoard,
    Unlabelled,
    Weights,
    settings_of,
)
from ncd_serve.places import DEFAULT_REPOSITORY, ExportPlace, exported_to, next_generation
from ncd_serve.progress import Progress
from ncd_serve.text import SafeConsole
from ncd_training.base.processes import Launch
from ncd_training.base.run_dir import PRETRAINED, RunDir, default_run_name
from ncd_training.config.resolve import check_places, layers_of_call, merged, overrides_of
from ncd_training.data.carried import Carried
from ncd_training.data.prepare import Setup, list_images, prepare_unlabelled, reopen

if TYPE_CHECKING:
    from ncd_export.triton_config import Device as DeviceName

    from ncd_serve.bundle import Bundle, Change
    from ncd_serve.contract import Precision
    from ncd_training.base.run_dir import Summary
    from ncd_training.config.schema import TrainConfig
    from ncd_training.study.class_number import Estimate
    from ncd_training.study.compare_table import Comparison
    from ncd_training.study.retrain import Undecided
    from ncd_training.summary.plots import Picture

Recipe = str | Sequence[str] | None
Settings = Mapping[str, Any] | Sequence[str] | None  # {"section.key": value}, or ["section.key=value"]
ProgressOn = Progress | bool  # True: on this terminal or in this notebook; False: nowhere


def discover(
    *,
    dataset: Dataset = None,
    data_root: DataRoot = None,
    labelled: Labelled = None,
    unlabelled: Unlabelled = None,
    manifest: ManifestFile = None,
    strict_data: StrictData = False,
    novel_classes: NovelClasses = None,
    pile: Pile = None,
    backbone: Backbone = None,
    weights: Weights = None,
    download: Download = False,
    cache_views: CacheViews = None,
    epochs: Epochs = None,
    method: str | None = None,
    recipe: Recipe = None,
    config: AnyPath | None = None,
    settings: Settings = None,
    seed: Seed = None,
    tensorboard: TensorBoard = False,
    out: AnyPath | None = None,
    progress: ProgressOn = True,
) -> Run:
    """Train on labelled images of known classes and a pile of unlabelled images, and find the classes of the pile.

        run = discover(labelled="known/", unlabelled="pile/", novel_classes=12, out="runs/leaves")
        run.clusters

    Options have the names, defaults and checks of `ncd-serve train`; `settings` is its `--set`, e.g.
    `{"optim.epochs": 10}`. Mistakes raise NcdError with a hint. An interrupted call leaves a run directory:
    `open_run("runs/leaves").resume()` continues it.
    """
    resolved = _resolved(discover, locals(), method)
    shown, launch = _shown(progress), Launch.read()
    setup = _set_up(resolved, shown, launch)
    if out is None and launch.size > 1:
        raise UsageError("torchrun's processes need one run directory", hint="give --out DIR")
    folder = Path(out) if out else Path("runs") / default_run_name(setup.manifest.name)
    run = RunDir.of_this_job(folder, setup.config, launch) or RunDir.create(folder, setup.config, launch=launch)
    return _train(setup, run, shown, launch)


def retrain(
    after: AnyPath,
    add: AnyPath | None = None,
    *,
    accept: AnyPath | None = None,
    promote: bool = False,
    out: AnyPath | None = None,
    progress: ProgressOn = True,
) -> Run:
    """Train the next generation of a bundle on its old images and new ones; clusters that are the same keep their ids.

    The options are those of `ncd-serve train --after --retrain`.
    """
    from ncd_serve.bundle import Bundle
    from ncd_training.study.retrain import retrain_setup, run_of

    bundle, shown = Bundle.read(after), _shown(progress)
    beside = next_generation(run_of(bundle).path, bundle.manifest.generation)
    folder = Path(out) if out else Path(os.path.relpath(beside))
    RunDir(folder).check_new()
    setup = retrain_setup(after, add, accept=accept, promote=promote, progress=shown)
    run = RunDir.create(folder, setup.config)
    setup.keep(run)
    return _train(setup, run, shown, Launch())


def dry_run(*, progress: ProgressOn = True, **options: Any) -> None:
    """Check images and settings, train two steps, and print the plan: memory, time, size. Writes nothing.

    The options are those of `discover`.
    """
    from ncd_training.run import train as training

    bound = inspect.signature(discover).bind(**options)
    bound.apply_defaults()
    shown = _shown(progress)
    setup = _set_up(_resolved(discover, bound.arguments, bound.arguments["method"]), shown, Launch())
    if setup.config.data.novel_classes == "auto":
        guess = max(2, len(setup.manifest.unlabelled) * len(setup.manifest.known_classes) // len(setup.labels))
        shown.say(f"the number of clusters is estimated before training; this plan assumes {guess}")
        setup = setup.with_config(data=setup.config.data.model_copy(update={"novel_classes": guess}))
    training.dry_run(setup, progress=shown)


def open_run(path: AnyPath, *, progress: ProgressOn = True) -> Run:
    """Open a run directory of `discover` or `ncd-serve train`, finished or not."""
    return Run(RunDir.open(Path(path)), _shown(progress))


class Run:
    """Run directory with its clusters, scores and figures, as `discover` and `open_run` return it."""

    def __init__(self, directory: RunDir, progress: Progress) -> None:
        self._directory, self._progress = directory, progress

    def __repr__(self) -> str:
        """Return the path, and ACC where true classes are known."""
        return f"Run({str(self.path)!r}{''.join(f', {line}' for line in self.headlines)})"

    @property
    def path(self) -> Path:
        """Path of the run directory."""
        return self._directory.path

    @property
    def config(self) -> TrainConfig:
        """All settings of the run, defaults included."""
        return self._directory.config()

    @property
    def summary(self) -> Summary:
        """Final scores and those of the baselines, as in summary.json."""
        return self._directory.read_summary()

    @property
    def headlines(self) -> list[str]:
        """Lines of text with ACC beside the baselines; empty where true classes are not known."""
        from ncd_training.summary.figures import headlines

        return headlines(self.summary)

    @property
    def findings(self) -> str:
        """Line of text about the clusters: their sizes, mean confidence, unusual images and outliers."""
        from ncd_training.summary.tables import clusters_in_words

        return clusters_in_words(self.path)

    @property
    def verdict(self) -> list[str]:
        """Sentences about the quality of the clusters, from measures that need no true labels; empty if there are none.

        `summary.verdict` has the measures.
        """
        from ncd_serve.gallery.read import read_run

        return read_run(self.path).verdict if self.summary.verdict else []

    @property
    def clusters(self) -> Any:
        """Table of the clusters, the largest first: id, name, size, confidence, fit, nearest known class.

        `confidence` is the mean over the cluster's images, `fit` the share of typical ones. Tables are pandas
        DataFrames where pandas is installed, otherwise lists of dictionaries.
        """
        from ncd_training.summary.tables import clusters_table

        return clusters_table(self.path)

    @property
    def assignments(self) -> Any:
        """Table of the unlabelled images: path, cluster_id, cluster_name, confidence, fit."""
        from ncd_training.summary.tables import assignments_table

        return assignments_table(self.path)

    @property
    def metrics(self) -> Any:
        """Table of the epochs: loss terms, cluster balance, and scores where true classes are known."""
        from ncd_training.summary.tables import as_table

        return as_table(self._directory.read_metrics())

    def plot(self) -> Picture:
        """Draw the curves of the run and a map of its clusters; a notebook shows the result inline."""
        from ncd_training.summary.tables import plot_run

        return plot_run(self.path, self._directory.read_metrics())

    def resume(self) -> Run:
        """Continue an interrupted run from its last epoch; on a CPU it ends in the same weights as without the stop."""
        launch = Launch.read()
        setup = reopen(self._directory, progress=self._progress)
        _check_tensorboard(setup.config)
        return _train(setup, self._directory, self._progress, launch)

    def evaluate(self) -> Summary:
        """Score the newest checkpoint on every split that has true classes, and write the report."""
        from ncd_training.run.step import load_state
        from ncd_training.run.train import evaluate

        setup = self._trained()
        manifest = setup.manifest
        scored = manifest.truth is not None or manifest.known_test or manifest.novel_test
        if self._directory.reference.exists() and self._directory.summary.exists() and not scored:
            return self.summary  # nothing can be scored, so no image has to be read again
        state = load_state(setup, self._directory.checkpoint)
        return evaluate(setup, state, self._directory, progress=self._progress)

    def export(
        self,
        *,
        out: AnyPath | None = None,
        repository: AnyPath | None = None,
        model_name: str | None = None,
        checkpoint: AnyPath | None = None,
        precision: Precision | str = "fp32",
        min_agreement: float = 0.98,
        device: DeviceName = "cpu",
        cores: int | None = None,
        replace: bool = False,
        keep: int | None = None,
        replace_model: bool = False,
    ) -> Bundle:
        """Export the model to a verified ONNX bundle and add it to a Triton model repository.

        The options are those of `ncd-serve export`. By default it goes where the run was exported to before, first to
        `model_repository`; the model is called like the run, those of named datasets `ncd_global`.
        """
        from ncd_export.export import ExportOptions, export_run
        from ncd_export.triton_config import Hardware

        options = ExportOptions(
            checkpoint=Path(checkpoint) if checkpoint else None,
            precision=precision,
            min_agreement=min_agreement,
            hardware=Hardware(device, cores),
            replace=replace,
            keep=keep,
            replace_model=replace_model,
        )
        folder = Path(out) if out else self.path / "bundle"
        carried = Carried.read(self._directory)
        inherited = exported_to(carried.bundle) if carried else None
        before = exported_to(folder) or inherited or ExportPlace(DEFAULT_REPOSITORY, self._model_name())
        exported = export_run(
            self._trained(),
            self._directory,
            out=folder,
            repository=Path(repository) if repository else before.repository,
            name=model_name or before.model,
            progress=self._progress,
            options=options,
        )
        return exported.bundle

    @property
    def changes(self) -> list[Change]:
        """Change of every cluster since the generation before; empty for a first one."""
        carried = Carried.read(self._directory)
        return carried.changes if carried else []

    @property
    def carried_names(self) -> dict[int, str]:
        """Names of the generation before by id, with those of accepted candidates."""
        carried = Carried.read(self._directory)
        entries = carried.names.clusters if carried else {}
        return {number: entry.name for number, entry in entries.items() if entry.name}

    @property
    def unnamed(self) -> set[int]:
        """Ids of clusters that are new since the generation before, and are no accepted candidates."""
        fresh = {change.cluster_id for change in self.changes if change.kind == "new"}
        return fresh - self.carried_names.keys()

    @property
    def undecided(self) -> list[Undecided]:
        """Names of the generation before that no cluster has clearly inherited: a person decides."""
        from ncd_training.study.retrain import undecided_names

        return undecided_names(self._directory)

    def gallery(self, out: AnyPath | None = None) -> Path:
        """Write an HTML page with the images of all clusters, which opens offline, and return its path."""
        from ncd_serve.gallery.build import make_gallery

        return make_gallery(self.path, out, progress=self._progress).path

    def _model_name(self) -> str:
        """Return the default name of the exported model: that of the run, without the time and what Triton refuses."""
        if self.config.data.dataset is not None:
            return DEFAULT_MODEL
        name = re.sub(r"-\d{8}-\d{6}$", "", self.path.resolve().name)
        return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.") or DEFAULT_MODEL

    def _trained(self) -> Setup:
        setup = reopen(self._directory, progress=self._progress)
        if "auto" in (setup.config.data.novel_classes, setup.config.data.pile):
            raise DataError(f"{self.path} was stopped at its first look", hint=self._directory.next_step)
        return setup


def pretrain(
    *,
    method: PretrainMethod = None,
    dataset: Dataset = None,
    data_root: DataRoot = None,
    images: PretrainImages = None,
    labelled: PretrainLabelled = None,
    manifest: ManifestFile = None,
    strict_data: StrictData = False,
    backbone: Backbone = None,
    epochs: PretrainEpochs = None,
    recipe: Recipe = None,
    config: AnyPath | None = None,
    settings: Settings = None,
    seed: Seed = None,
    out: AnyPath | None = None,
    resume: AnyPath | None = None,
    progress: ProgressOn = True,
) -> Path:
    """Pretrain a backbone on images without labels and return the file of its weights, for `discover(weights=...)`.

    The options are those of `ncd-serve pretrain`. `resume` continues an interrupted run with its own settings.
    """
    from ncd_training.model.weights import settle
    from ncd_training.run.pretrain import pretrain as pretrain_into

    given, shown = locals(), _shown(progress)
    if resume is not None:
        run = RunDir.open(Path(resume), command="pretrain")
        setup = reopen(run, progress=shown)
    else:
        # The defaults are RotNet's; MoCo's are a recipe.
        recipes = [*(["moco"] if method == "moco" else []), *_listed(recipe)]
        # Pretraining starts from random weights unless a file is given.
        random = {"model.weights": "none", **overrides_of(settings)}
        resolved = _resolved(pretrain, {**given, "recipe": recipes, "settings": random})
        setup = prepare_unlabelled(resolved, progress=shown)
        setup = replace(setup, config=settle(setup.config, images=len(setup.manifest.images), progress=shown))
        name = default_run_name(f"{setup.manifest.name}-{setup.config.pretrain.method}")
        run = RunDir.create(Path(out) if out else Path("runs") / name, setup.config, command="pretrain")
    pretrain_into(setup, run, progress=shown)
    return run.path / PRETRAINED


def estimate_classes(
    *,
    dataset: Dataset = None,
    data_root: DataRoot = None,
    labelled: Labelled = None,
    unlabelled: Unlabelled = None,
    manifest: ManifestFile = None,
    strict_data: StrictData = False,
    estimator: EstimatorName = None,
    most: MostClasses = None,
    backbone: Backbone = None,
    weights: Weights = None,
    download: Download = False,
    cache_views: CacheViews = None,
    recipe: Recipe = None,
    config: AnyPath | None = None,
    settings: Settings = None,
    seed: Seed = None,
    out: AnyPath | None = None,
    progress: ProgressOn = True,
) -> tuple[Estimate, Path]:
    """Estimate how many novel classes the unlabelled images have; return the estimate and the folder with its curve.

    The options are those of `ncd-serve estimate-k`.
    """
    from ncd_training.study.class_features import estimate

    given, shown = locals(), _shown(progress)
    overrides = {**overrides_of(settings), "data.novel_classes": "auto"}
    setup = _set_up(_resolved(estimate_classes, {**given, "settings": overrides}), shown, Launch())
    folder = Path(out) if out else Path("runs") / default_run_name(f"{setup.manifest.name}-classes")
    run = RunDir.create(folder, setup.config, command="estimate-k")
    found = estimate(setup, run, progress=shown)
    run.drop_cache()
    return found, run.path


def compare(
    rows_of: str,
    *,
    dataset: Dataset = None,
    data_root: DataRoot = None,
    labelled: Labelled = None,
    unlabelled: Unlabelled = None,
    manifest: ManifestFile = None,
    strict_data: StrictData = False,
    novel_classes: NovelClasses = None,
    backbone: Backbone = None,
    weights: Weights = None,
    download: Download = False,
    cache_views: CacheViews = None,
    recipe: Recipe = None,
    config: AnyPath | None = None,
    settings: Settings = None,
    rows: Sequence[str] = (),
    seeds: Sequence[int] = (0,),
    cell: str | None = None,
    foreign: AnyPath | None = None,
    report: bool = False,
    out: AnyPath | None = None,
    progress: ProgressOn = True,
) -> Comparison:
    """Train the methods or variants of a set on the same images and compare them in a table with the paper's figures.

    `rows_of` names the set, e.g. `baselines`; `rows` chooses some of it. The same call continues an interrupted
    comparison. The options are those of `ncd-serve compare`.
    """
    from ncd_training.study.compare import Wishes
    from ncd_training.study.compare_rows import row_set
    from ncd_training.study.compare_run import run_comparison
    from ncd_training.study.piles import chosen_cell
    from ncd_training.summary.page import command_line

    flags = settings_of(compare, locals())
    check_places(flags)
    file = Path(config) if config else None
    wishes = Wishes(recipes=_listed(recipe), config_file=file, flags=flags, overrides=overrides_of(settings))
    place = dataset or Path(manifest or unlabelled or "data").stem
    folder = Path(out) if out else Path("runs") / "-".join(filter(None, [rows_of, place, cell]))
    chosen = row_set(rows_of)
    return run_comparison(
        rows_of,
        chosen,
        rows,
        seeds,
        wishes,
        folder,
        progress=_shown(progress),
        cell=chosen_cell(cell, Path(foreign) if foreign else None) if cell else None,
        report=command_line(sys.argv) if report else None,
    )


def _resolved(function: Callable[..., Any], values: Mapping[str, Any], method: str | None = None) -> TrainConfig:
    """Return the settings of a call of a function of this module."""
    file = Path(values["config"]) if values["config"] else None
    layers = layers_of_call(
        settings_of(function, values),
        method=method,
        recipe=_listed(values["recipe"]),
        config=file,
        settings=values["settings"],
    )
    return merged(layers)


def _set_up(config: TrainConfig, progress: Progress, launch: Launch) -> Setup:
    """Check everything before heavy work; torch is loaded only when the images are found."""
    _check_tensorboard(config)
    if "auto" in (config.data.novel_classes, config.data.pile) and launch.size > 1:
        raise UsageError(
            "one process looks at the images first",
            hint="give --pile and --novel-classes; ncd-serve estimate-k estimates the number",
        )
    listed = list_images(config, track=progress.track)
    from ncd_training.run.train import set_up

    return set_up(listed, progress=progress, launch=launch)


def _train(setup: Setup, run: RunDir, progress: Progress, launch: Launch) -> Run:
    from ncd_training.run.train import train

    if "auto" in (setup.config.data.novel_classes, setup.config.data.pile):
        from ncd_training.study.class_features import with_first_look

        setup.keep(run)
        setup = with_first_look(setup, run, progress=progress)
    train(setup, run, progress=progress, launch=launch)
    return Run(run, progress)


def _check_tensorboard(config: TrainConfig) -> None:
    if config.report.tensorboard and find_spec("tensorboard") is None:
        raise MissingExtraError.of("tensorboard", "tensorboard")


def _listed(recipe: Recipe) -> list[str]:
    return [recipe] if isinstance(recipe, str) else list(recipe or ())


def _shown(progress: ProgressOn) -> Progress:
    return progress if isinstance(progress, Progress) else Progress(SafeConsole(quiet=not progress))
