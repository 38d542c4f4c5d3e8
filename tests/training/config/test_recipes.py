"""The paper's hyper-parameters, benchmark by benchmark."""

import pytest
from ncd_training.config.resolve import recipe_for, resolve_config
from ncd_training.data.datasets import DATASETS

# trunk, pixels, augmentation, consistency weight, ramp-up, epochs, learning rate, milestones
FINE_GRAINED = ("resnet50", 224, "crop", 50.0, 150, 200, 0.1, (170,))
PAPER = {
    "aircraft": FINE_GRAINED,
    "cifar10": ("cifar_resnet18", 32, "cifar10", 5.0, 50, 200, 0.1, (170,)),
    "cifar100": ("cifar_resnet18", 32, "cifar100", 50.0, 150, 200, 0.1, (170,)),
    "cub200": FINE_GRAINED,
    "imagenet-a": ("resnet18", 224, "crop", 10.0, 50, 90, 0.03, (30, 60)),
    "imagenet-b": ("resnet18", 224, "crop", 10.0, 50, 90, 0.03, (30, 60)),
    "imagenet-c": ("resnet18", 224, "crop", 10.0, 50, 90, 0.03, (30, 60)),
    "imagenet100": FINE_GRAINED,
    "imagenet100-open25": FINE_GRAINED,
    "imagenet100-open50": FINE_GRAINED,
    "stanford-cars": FINE_GRAINED,
}


@pytest.mark.parametrize("dataset", sorted(set(DATASETS) - {"glyphs"}))
def test_a_benchmark_starts_from_the_paper_s_settings(dataset: str) -> None:
    recipe = recipe_for(dataset)
    assert recipe is not None
    config = resolve_config(recipes=[recipe], overrides={"data.dataset": dataset})
    data, loss, optim = config.data, config.loss, config.optim
    assert PAPER[dataset] == (
        config.model.backbone,
        data.resolution,
        data.augmentation,
        loss.consistency_weight,
        loss.ramp_epochs,
        optim.epochs,
        optim.learning_rate,
        optim.milestones,
    )
    assert (optim.labelled_batch, optim.unlabelled_batch, optim.momentum, optim.weight_decay) == (128, 64, 0.9, 1e-4)
    assert (config.pseudo_labels.global_top_k, config.pseudo_labels.local_top_k) == (5, 30)
    assert (config.model.dictionary_size, config.model.bank_size, loss.temperature) == (2048, 2048, 0.07)
    assert config.supervised.epochs == 0, "the paper has no supervised stage by default"


def test_every_recipe_of_a_dataset_names_a_dataset_that_exists() -> None:
    assert {resolve_config(recipes=[recipe_for(name) or ""]).data.dataset for name in DATASETS} <= set(DATASETS)
