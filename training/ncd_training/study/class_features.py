"""Estimate of the number of novel classes from the images of a run: features, estimators, files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from ncd_serve.errors import DataError
from ncd_serve.files import write_json
from ncd_training.base.randomness import Purpose, seed_for
from ncd_training.config.schema import MethodConfig, ModelConfig, StageConfig
from ncd_training.data.prepare import with_pile
from ncd_training.data.views import FileViews
from ncd_training.model.predict import Ids
from ncd_training.model.weights import initial_trunk
from ncd_training.objective.class_cuts import class_orders, cut_trees, places_in, probe_features
from ncd_training.objective.clustering import sizes_look_equal
from ncd_training.objective.method import mean_over_views
from ncd_training.objective.recognition import Recognition, recognise
from ncd_training.pretext import Stages
from ncd_training.run.step import build_state
from ncd_training.run.train import gather
from ncd_training.study.class_number import Estimate, balanced_estimate, dtc_estimate, gcd_estimate
from ncd_training.summary.plots import save_figure

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ncd_serve.progress import Progress, Track
    from ncd_training.base.run_dir import RunDir
    from ncd_training.config.schema import TrainConfig
    from ncd_training.data.prepare import Setup
    from ncd_training.model.branches import Branch

_DEFAULT_MAX_CLASSES = 100
# With two, one is hidden in turn, and the other alone has labels. Piles without known classes were told as such with 3
# to 7 known birds or CIFAR-10 classes; of mixed ones, those with 3 to 5 known birds were taken as novel, too.
MIN_CLASSES_TO_RECOGNISE = 3
# Chance to be known, up to which an image counts. In mixed piles of known birds, 40 of them played as novel, the
# estimates are 73, 54 and (sizes fall 20:1) 45 with 0.5; 64, 48 and 39 with 0.3; 56, 44 and 31 with 0.15.
_SURELY_NOVEL = 0.2
_MIN_NOVEL_IMAGES = 4  # as for any estimate
_NETWORK_SETTINGS = ("backbone", "weights", "tail", "architecture", "arguments", "mean", "std")


def estimate(setup: Setup, run: RunDir, *, progress: Progress, look: Look | None = None) -> Estimate:
    """Estimate the number of novel classes; write the estimate and its plot to the run directory."""
    if setup.config.estimate.estimator == "balanced":
        found = _by_cuts(look or Look(setup, run, progress))
    else:
        found = _by_trials(setup, run, progress)
    # Training needs at least two clusters.
    found = replace(found, classes=max(2, found.classes))
    write_json(run.estimate, found.facts())
    draw_estimate(found, run.plots / "estimate.png")
    return found


def with_first_look(setup: Setup, run: RunDir, *, progress: Progress) -> Setup:
    """Look at the images to decide what the settings leave open, and write it to the configuration of the run.

    A resumed run reads it there.
    """
    look = Look(setup, run, progress)
    known = len(setup.manifest.known_classes)
    if setup.config.data.pile == "auto" and known < MIN_CLASSES_TO_RECOGNISE:
        progress.say(
            f"first look: {known} known classes are too few to tell whether the unlabelled images show them, too; "
            "these are taken as novel only, unless you say --pile mixed"
        )
        setup = replace(setup, config=with_pile(setup.config, "novel"))
    elif setup.config.data.pile == "auto":
        progress.say(f"first look: {_share_line(look.recognition)}")
        look.novel_rows()  # an error if there is nothing to discover
        setup = replace(setup, config=with_pile(setup.config, "mixed" if look.recognition.mixed else "novel"))
    if setup.config.data.novel_classes == "auto":
        found = estimate(setup, run, progress=progress, look=look)
        progress.say(f"first look: {found.line}; training with {found.classes} clusters")
        setup = setup.with_config(data=setup.config.data.model_copy(update={"novel_classes": found.classes}))
    run.write_config(setup.config)
    return setup


def _share_line(found: Recognition) -> str:
    images = f"the {len(found.chances):,} unlabelled images show"
    if not found.mixed:
        return f"{images} novel classes only, or nearly so"
    return f"about {found.share:.0%} of {images} known classes; these will be recognised by name"


@dataclass
class Look:
    """Features of all images before any stage of training, and the known classes that they show; computed once."""

    setup: Setup
    run: RunDir
    progress: Progress

    @cached_property
    def features(self) -> Tensor:
        """Features [N, d] of all images, labelled first.

        Skips the supervised stage: on CUB, with ImageNet weights, it does not separate unseen classes any better, and
        a network trained on some classes can only have others as probes.
        """
        plain = self.setup.with_config(supervised=StageConfig())
        taught = self.orders[0, self.orders.shape[1] // 2 :]
        return _embed(plain, self.run, taught, self.progress, lambda branch, maps: branch.tail.describe(maps))

    @cached_property
    def orders(self) -> Ids:
        """Orders of the known classes; the first half of each are probes.

        A trunk that learns from labels allows one draw only; with any other trunk, every class can be a probe.
        """
        config, known = self.setup.config, len(self.setup.manifest.known_classes)
        return class_orders(
            known, draws=1 if config.from_labels.epochs else config.estimate.draws, seed=config.optim.seed
        )

    @cached_property
    def recognition(self) -> Recognition:
        """Known classes among the unlabelled images."""
        return known_share(self.features, torch.from_numpy(self.setup.labels), self.setup.config)

    def novel_rows(self) -> Tensor:
        """Return the rows of unlabelled images that are surely novel, or all if known ones are not worth noticing.

        DataError if there are too few to discover anything.
        """
        if self.setup.config.data.pile == "novel" or not self.recognition.mixed:
            return torch.arange(len(self.setup.manifest.unlabelled))
        rows = surely_novel(self.recognition)
        if len(rows) < _MIN_NOVEL_IMAGES:
            but = f"all but {len(rows)}" if len(rows) else "all"
            raise DataError(
                f"{but} of the unlabelled images seem to show known classes: there is nothing to discover",
                hint="add images of other classes; --pile novel looks for clusters all the same",
            )
        return rows


def known_share(features: Tensor, labels: Tensor, config: TrainConfig) -> Recognition:
    """Recognise known classes among the unlabelled images by features [N, d] of all images, labelled first."""
    settings = config.self_labels
    return recognise(features, labels, shrinkage=settings.shrinkage, dims=settings.dims, seed=config.optim.seed)


def surely_novel(recognition: Recognition) -> Tensor:
    """Return the rows of images that are surely novel. Only these are counted: missed known classes would count."""
    return torch.nonzero(recognition.chances <= _SURELY_NOVEL).flatten()


def by_cuts(features: Tensor, labels: Ids, rows: Tensor, orders: Ids, config: TrainConfig, track: Track) -> Estimate:
    """Estimate by cuts, from features of all images and the `rows` of unlabelled images that count.

    Half of the known classes are probes, the others give the geometry; once for each of the `orders` of classes.
    """
    found = torch.cat([features[: len(labels)], features[len(labels) :][rows]])
    seed = _estimate_seed(config.optim.seed)
    cuts = cut_trees(found, labels, orders, config.self_labels, seed=seed, track=track)
    return balanced_estimate(cuts, equal=sizes_look_equal(torch.from_numpy(labels), orders.shape[1]))


def _by_cuts(look: Look) -> Estimate:
    config, labels = look.setup.config, look.setup.labels
    return by_cuts(look.features, labels, look.novel_rows(), look.orders, config, look.progress.track)


def _by_trials(setup: Setup, run: RunDir, progress: Progress) -> Estimate:
    """Estimate by trials, as published. DTC holds some classes back from training; GCD trains on and uses all."""
    settings, config = setup.config.estimate, setup.config
    (order,) = class_orders(len(setup.manifest.known_classes), draws=1, seed=config.optim.seed)
    most = settings.most or min(_DEFAULT_MAX_CLASSES, len(setup.manifest.unlabelled) // 2)
    dtc = settings.estimator == "dtc"
    probes = min(len(order) - 2, max(2, round(settings.probe_share * len(order)))) if dtc else 0
    found_features = _embed(setup, run, order[probes:], progress, lambda branch, maps: branch(maps).embedding)
    features = probe_features(found_features, setup.labels, order, probes, config.self_labels)
    found = (dtc_estimate if dtc else gcd_estimate)(
        features.labelled,
        features.labels,
        features.unlabelled,
        settings,
        most=most,
        seed=_estimate_seed(config.optim.seed),
        track=progress.track,
    )
    if found.by_accuracy == most:
        progress.say(
            f"the best number is the largest that was tried, {most}; there may be more classes: use a larger --most",
            style="yellow",
        )
    return found


def _estimate_seed(seed: int) -> int:
    return seed_for(seed, Purpose.ESTIMATE) % 2**32


def _embed(
    setup: Setup, run: RunDir, taught: Ids, progress: Progress, see: Callable[[Branch, Tensor], Tensor]
) -> Tensor:
    """Return what a branch sees in all images [N, d], of a network whose stages learn the classes `taught` only."""
    config, labels = _plain(setup.config), setup.labels
    trained = np.flatnonzero(np.isin(labels, taught))
    targets = torch.from_numpy(places_in(taught, labels[trained]))
    manifest = replace(setup.manifest, known_classes=[setup.manifest.known_classes[i] for i in taught])
    setup = replace(setup, config=config, manifest=manifest)
    parts, _ = initial_trunk(config, weights=config.model.weights_file)
    state = build_state(setup, parts)
    stages = Stages(state.model, config, progress.track)
    if config.rotations.epochs:
        pictures = FileViews(manifest.images, config.data)
        stages.rotations(pictures, len(manifest.images))
    if config.from_labels.epochs:
        pictures = FileViews(manifest.images, config.data).only(trained)
        stages.from_labels(pictures, targets)
    material = gather(setup, state.model.trunk, run, progress=progress)
    if config.supervised.epochs:
        stages.supervised(material.views.only(trained), targets)
    rows, views, branch = range(len(manifest.images)), config.self_labels.views, state.model.branches[0]
    with progress.status("computing features of all images"):
        (found,) = mean_over_views(state.model, material, rows, lambda maps: [see(branch, maps)], views=views)
    return found


def _plain(config: TrainConfig) -> TrainConfig:
    """Return a configuration with the same trunk and stages, and the simplest model on top: its heads are not used."""
    model, given = ModelConfig(branches="global"), config.model
    kept = {name: getattr(given, name) for name in _NETWORK_SETTINGS}
    update = {
        "data": config.data.model_copy(update={"novel_classes": 2, "pile": "novel"}),
        "model": model.model_copy(update=kept),
        "method": MethodConfig(),
        "self_labels": config.self_labels.model_copy(update={"weight": 0.0}),
    }
    return config.model_copy(update=update)


def draw_estimate(found: Estimate, target: Path) -> None:
    """Draw the curves that the estimate is read from."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    (_draw_cuts if found.cuts else _draw_trials)(found, axes)
    axes.set_title(f"number of novel classes, estimator {found.estimator}")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize="small", frameon=False)
    save_figure(figure, target)


def _draw_cuts(found: Estimate, axes: Axes) -> None:
    """Draw a line for each draw of probes: clusters of unlabelled images against clusters of probes."""
    for number, cut in enumerate(found.cuts):
        ratios = np.arange(2, 2 + len(cut.curve)) / cut.probes
        label = f"one of {len(found.cuts)} draws of held-back classes" if number == 0 else None
        axes.plot(ratios, cut.curve, color="C0", alpha=0.5, linewidth=1, label=label)
    axes.axvline(1, color="0.5", linestyle=":", label="as many clusters as held-back classes")
    axes.axhline(found.classes, color="0.5", linestyle="--", label=found.line)
    axes.set(xlabel="clusters of each held-back class", ylabel="clusters of the unlabelled images", xlim=(0, 2))
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))


def _draw_trials(found: Estimate, axes: Axes) -> None:
    """Draw the accuracy on known classes against the number of novel classes."""
    classes = [trial.classes for trial in found.trials]
    axes.plot(classes, [trial.accuracy for trial in found.trials], ".-", label="ACC of known classes")
    if found.by_silhouette is not None:
        axes.plot(classes, [trial.silhouette for trial in found.trials], ".-", label="silhouette")
    axes.axvline(found.classes, color="0.5", linestyle="--", label=found.line)
    axes.set_xlabel("novel classes")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
