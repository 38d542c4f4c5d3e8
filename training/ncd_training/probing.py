"""From a run's images to the features that the number of novel classes is estimated on, and to the estimate's files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ncd_serve.files import write_json
from ncd_training.class_number import Estimate, balanced_estimate, dtc_estimate, gcd_estimate
from ncd_training.clustering import class_whitening, main_directions
from ncd_training.config import MethodConfig, ModelConfig
from ncd_training.evaluate import Ids
from ncd_training.method import mean_over_views
from ncd_training.plots import draw_estimate
from ncd_training.randomness import Purpose, seed_for
from ncd_training.stages import train_from_labels, train_rotations, train_supervised
from ncd_training.train import build_state, gather
from ncd_training.views import FileViews
from ncd_training.weights import initial_trunk

if TYPE_CHECKING:
    from ncd_training.config import TrainConfig
    from ncd_training.run_dir import RunDir
    from ncd_training.setup import Setup

_ESTIMATORS = {"balanced": balanced_estimate, "dtc": dtc_estimate, "gcd": gcd_estimate}
_MOST = 100


def estimate(setup: Setup, run: RunDir) -> Estimate:
    """The number of novel classes; its curve is left in the run directory."""
    settings, seed = setup.config.estimate, setup.config.optim.seed
    features = _features(setup, run, probes=0 if settings.estimator == "gcd" else _probe_classes(setup))
    found = _ESTIMATORS[settings.estimator](
        features.labelled,
        features.labels,
        features.unlabelled,
        settings,
        most=_most(setup),
        seed=seed_for(seed, Purpose.ESTIMATE) % 2**32,
        track=setup.track,
    )
    # Fewer than two clusters cannot be trained.
    found = replace(found, classes=max(2, found.classes))
    if found.by_accuracy == _most(setup):
        text = f"the best number is the largest that was tried, {found.by_accuracy}: there may be more, try --most"
        setup.console.print(text, style="yellow", highlight=False)
    write_json(run.estimate, found.facts())
    draw_estimate(found, run.plots / "estimate.png")
    return found


def with_estimate(setup: Setup, run: RunDir) -> Setup:
    """`--novel-classes auto`: estimate, and keep the number in the run's configuration, where a resume finds it."""
    found = estimate(setup, run)
    setup.console.print(f"estimate: {found.line}", highlight=False)
    data = setup.config.data.model_copy(update={"novel_classes": found.classes})
    setup = replace(setup, config=setup.config.model_copy(update={"data": data}))
    run.write_config(setup.config)
    return setup


@dataclass(frozen=True)
class _Features:
    """Unit rows in the geometry of the classes that were trained on."""

    labelled: Tensor  # of the classes that the estimator may look at
    labels: Ids  # counted from 0
    unlabelled: Tensor


def _most(setup: Setup) -> int:
    return setup.config.estimate.most or min(_MOST, len(setup.manifest.unlabelled) // 2)


def _probe_classes(setup: Setup) -> int:
    known = len(setup.manifest.known_classes)
    return min(known - 2, max(2, round(setup.config.estimate.probe_share * known)))


def _features(setup: Setup, run: RunDir, *, probes: int) -> _Features:
    """Train on the known classes but the probes, as the recipe says, and look at the images with that.

    Without probes (gcd) it is all known classes that are trained on and looked at.
    """
    config, labels = _plain(setup.config), np.array(setup.labels)
    order = np.random.default_rng([config.optim.seed, Purpose.ESTIMATE]).permutation(len(setup.manifest.known_classes))
    numbers = np.argsort(order)[labels]  # probes are the first ones
    trained, looked_at = np.flatnonzero(numbers >= probes), np.flatnonzero(numbers < (probes or len(order)))
    taught = torch.from_numpy(numbers[trained] - probes)
    manifest = replace(setup.manifest, known_classes=[setup.manifest.known_classes[i] for i in order[probes:]])
    setup = replace(setup, config=config, manifest=manifest)
    parts, _ = initial_trunk(config, weights=config.model.weights)
    state = build_state(setup, parts)
    if config.rotations.epochs:
        pictures = FileViews(manifest.images, config.data)
        train_rotations(state.model, pictures, len(manifest.images), config, track=setup.track)
    if config.from_labels.epochs:
        pictures = FileViews(manifest.images, config.data).only(trained)
        train_from_labels(state.model, pictures, taught, config, track=setup.track)
    material = gather(setup, state.model, run)
    if config.supervised.epochs:
        train_supervised(state.model, material.views.only(trained), taught, config, track=setup.track)

    def see(maps: Tensor) -> list[Tensor]:
        return [state.model.branches[0](maps).embedding]

    with setup.console.status("looking at all images"):
        (found,) = mean_over_views(state, material, range(len(manifest.images)), see, views=config.self_labels.views)
    whitening = class_whitening(found[trained], taught, shrinkage=config.self_labels.shrinkage)
    seen = torch.cat([found[looked_at], found[len(labels) :]]) @ whitening
    directions = main_directions(F.normalize(seen - seen.mean(dim=0), dim=1), config.self_labels.dims)
    return _Features(directions[: len(looked_at)], numbers[looked_at], directions[len(looked_at) :])


def _plain(config: TrainConfig) -> TrainConfig:
    """Trunk and stages as configured, below the simplest model: its heads are thrown away."""
    model, given = ModelConfig(branches="global"), config.model
    kept = {"trunk": given.trunk, "weights": given.weights, "mean": given.mean, "std": given.std}
    update = {
        "data": config.data.model_copy(update={"novel_classes": 2}),
        "model": model.model_copy(update=kept),
        "method": MethodConfig(),
        "self_labels": config.self_labels.model_copy(update={"weight": 0.0}),
    }
    return config.model_copy(update=update)
