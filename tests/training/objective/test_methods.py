"""The baselines: formulas on numbers worked by hand, and every method on blobs that anyone could tell apart."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ncd_training.base.run_dir import RunDir
from ncd_training.config.resolve import Layer, merged, method_names, method_recipes, parse_override, resolve_config
from ncd_training.config.schema import MethodConfig
from ncd_training.model.branches import CentreHead, CosineHead
from ncd_training.objective.dtc import DeepTransferClustering, DtcSettings, sharpened, start_head
from ncd_training.objective.kcl_mcl import SimilarityNetwork, pairwise_kl
from ncd_training.objective.kmeans import set_to_centres
from ncd_training.objective.method import Batch, Material, checked, method_named
from ncd_training.objective.orca import margin_cross_entropy, positive_bce, positive_pairs
from ncd_training.run import train as training
from ncd_training.score.metrics import open_world_scores
from rich.console import Console
from sklearn.cluster import KMeans
from torch import nn

from ncd_serve import progress
from ncd_serve.errors import UsageError
from tests.blobs import EACH, NOVEL, Blobs, Seen, blob_config, blob_state, discover
from tests.runs import SILENT, ready

QUIET = Console(quiet=True)
METHODS = ("dual", "rankstat", "dtc", "kcl", "mcl", "kmeans", "orca", "simgcd", "uno", "gcd", "pim", "selex")


@pytest.mark.parametrize("method", METHODS)
def test_every_method_finds_blobs(method: str, blobs: Blobs, monkeypatch: pytest.MonkeyPatch) -> None:
    assert discover(blob_config(method), blobs, monkeypatch) >= 0.95


@pytest.mark.parametrize("variant", ["baseline", "te", "tep"])
def test_every_variant_of_dtc_finds_blobs(variant: str, blobs: Blobs, monkeypatch: pytest.MonkeyPatch) -> None:
    config = blob_config("dtc", **{"method.variant": variant})
    assert discover(config, blobs, monkeypatch) >= 0.95


def test_dtc_probabilities_are_student_s_t() -> None:
    head = CentreHead(2, 2)
    with torch.no_grad():
        head.project.weight.copy_(torch.eye(2))
        head.project.bias.zero_()
        head.centres.copy_(torch.tensor([[0.0, 0.0], [1.0, 0.0]]))
    # Squared distances 0 and 1: in proportion to 1 and 1/2.
    torch.testing.assert_close(head(torch.zeros(1, 2)).softmax(dim=1), torch.tensor([[2 / 3, 1 / 3]]))


def test_dtc_targets_are_squared_and_evened_out() -> None:
    q = torch.tensor([[0.8, 0.2], [0.4, 0.6]])
    # 0.64/1.2 : 0.04/0.8 and 0.16/1.2 : 0.36/0.8
    expected = torch.tensor([[0.533333, 0.05], [0.133333, 0.45]])
    torch.testing.assert_close(sharpened(q), expected / expected.sum(dim=1, keepdim=True), atol=1e-6, rtol=0)


def test_dtc_starts_where_k_means_after_pca_is() -> None:
    features = torch.from_numpy(np.random.default_rng(0).standard_normal((60, 10))).float() + 3.0
    head = CentreHead(10, 4)
    start_head(head, features, seed=0)
    with torch.no_grad():
        moved = head.project(features)
        distances = torch.cdist(moved, head.centres)
    torch.testing.assert_close(moved.mean(dim=0), torch.zeros(4), atol=1e-5, rtol=0)
    assert torch.equal(head(features).argmax(dim=1), distances.argmin(dim=1))
    best = KMeans(4, n_init=20, random_state=0).fit(moved.numpy()).inertia_
    assert distances.amin(dim=1).square().sum().item() == pytest.approx(best, rel=1e-3)


def test_dtc_can_have_more_clusters_than_features() -> None:
    features = torch.from_numpy(np.random.default_rng(0).standard_normal((30, 3))).float()
    head = CentreHead(3, 5)
    start_head(head, features, seed=0)
    assert len(head(features).argmax(dim=1).unique()) == 5


def test_temporal_ensemble_is_a_bias_corrected_mean(blobs: Blobs) -> None:
    config = blob_config("dtc", **{"method.variant": "te"})
    method = DeepTransferClustering(DtcSettings.model_validate(config.method.own), config.loss, images=2, clusters=2)
    steps = [torch.tensor([[0.9, 0.1]]), torch.tensor([[0.5, 0.5]])]
    for q in steps:
        output: Any = Seen(blobs.pile)
        output.cluster_logits = q.log()
        method.remember(Batch([output], [], torch.tensor([]), torch.tensor([1]), 1.0), branches=None, generator=None)
    # 0.6 * 0.4 of the first and 0.4 of the second, over 1 - 0.36.
    torch.testing.assert_close(method._mean_so_far(torch.tensor([1])), 0.375 * steps[0] + 0.625 * steps[1])
    never = torch.tensor([[0.3, 0.7]])
    torch.testing.assert_close(method._mean_so_far(torch.tensor([0]), never), never)


def test_kcl_on_numbers_worked_by_hand() -> None:
    clusters = torch.tensor([[0.5, 0.5], [0.25, 0.75]], requires_grad=True)
    there, back = 0.5 * math.log(2) + 0.5 * math.log(2 / 3), 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    alike = pairwise_kl(clusters, torch.ones(2, 2), margin=2.0)
    assert alike.item() == pytest.approx(2 * (there + back) / 4, abs=1e-6)
    different = pairwise_kl(clusters, torch.eye(2), margin=2.0)
    assert different.item() == pytest.approx(2 * (4.0 - there - back) / 4, abs=1e-6)
    far = pairwise_kl(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.eye(2), margin=2.0)
    assert far.item() == pytest.approx(0.0, abs=1e-6), "beyond the margin nothing is asked"


def test_kcl_gradient_flows_into_the_second_of_a_pair() -> None:
    clusters = torch.tensor([[0.5, 0.5], [0.25, 0.75]], requires_grad=True)
    pairwise_kl(clusters, torch.ones(2, 2), margin=2.0).backward()
    # d/dq of 2/4 (KL(p1||q2) + KL(p2||q1)) is -p/q / 2; the diagonal, p/p, adds -1/2.
    p = clusters.detach()
    torch.testing.assert_close(clusters.grad, -0.5 * (p.flip(0) / p + 1.0))


def test_similarity_of_pairs_is_that_of_vectors_side_by_side() -> None:
    torch.manual_seed(0)
    network = SimilarityNetwork(nn.Identity(), 3).eval()
    together = nn.Linear(6, 12)
    with torch.no_grad():
        together.weight.copy_(torch.cat([network.left.weight, network.right.weight], dim=1))
        together.bias.copy_(network.left.bias)
    features = torch.rand(4, 3)
    for i in range(4):
        for j in range(4):
            plain = network.judge(F.relu(network.norm(together(torch.cat([features[i], features[j]]))[None])))
            torch.testing.assert_close(network.compare(features)[i, j], plain[0])


def test_orca_partners() -> None:
    labels = torch.tensor([0, 1, 0])
    features = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.1], [0.1, 1.0], [5.0, 5.0]])
    # The two of class 0 have each other, the one of class 1 has itself; an unlabelled image never takes itself.
    assert positive_pairs(features, labels).tolist() == [2, 1, 0, 1, 2]


def test_orca_s_terms_on_numbers_worked_by_hand() -> None:
    # The true logit 0 is raised to 10 * 0.1 = 1.
    loss = margin_cross_entropy(torch.zeros(1, 2), torch.tensor([0]), torch.tensor(0.1))
    assert loss.item() == pytest.approx(math.log(1 + math.exp(-1)))
    pair = positive_bce(torch.tensor([[0.5, 0.5]]), torch.tensor([[1.0, 0.0]]))
    assert pair.item() == pytest.approx(math.log(2))


def test_orca_s_margin_is_how_uncertain_the_pile_is(blobs: Blobs) -> None:
    config = blob_config("orca")
    state = blob_state(config)
    material = Material(blobs.views, blobs.labels, [Path()] * (NOVEL * EACH), config, progress.silent)
    state.method.before_epoch(state.model, state.epoch, material)
    with torch.no_grad():
        likeliest = state.model.branches[0](blobs.pile).cluster_logits.softmax(dim=1).amax(dim=1).mean()
    assert state.method.margin == pytest.approx(min(0.5, 1.0 - likeliest.item()), abs=0.02)


@pytest.mark.parametrize("build", [nn.Linear, CosineHead])
def test_k_means_head_says_which_centre_is_nearest(build: Any) -> None:
    features = torch.from_numpy(np.random.default_rng(0).standard_normal((80, 6))).float()
    head = build(6, 5)
    set_to_centres(head, features, seed=0)
    compared = F.normalize(features, dim=1) if build is CosineHead else features
    found = KMeans(5, n_init=20, random_state=0).fit(compared.numpy())
    same = head(features).argmax(dim=1).numpy() == found.labels_
    assert same.mean() >= (0.9 if build is CosineHead else 1.0), "directions of centres stand for centres"


def test_open_world_accuracy_by_both_protocols() -> None:
    true = np.array([0, 0, 1, 1, 2, 2, 3, 3])  # two known classes, then two novel ones
    predicted = np.array([0, 0, 1, 2, 2, 2, 0, 1])
    scores = open_world_scores(predicted, true, known=2, named=True)
    acc = {name.removeprefix("unlabelled-train, "): score.acc for name, score in scores.items()}
    # Novel images alone: 2 is class 2, and 0 or 1 is class 3, so 3 of 4. On all images class 3 gets nothing.
    assert acc["seen images, paper's protocol"] == pytest.approx(3 / 4)
    assert acc["novel images, paper's protocol"] == pytest.approx(3 / 4)
    assert acc["all images, paper's protocol"] == pytest.approx(5 / 8)
    assert acc["seen images, one matching"] == pytest.approx(3 / 4)
    assert acc["novel images, one matching"] == pytest.approx(2 / 4)
    unnamed = open_world_scores((predicted + 1) % 4, true, known=2, named=False)
    assert unnamed["unlabelled-train, seen images, paper's protocol"].acc == pytest.approx(3 / 4)


@pytest.mark.parametrize("method", ["dtc", "kcl", "orca", "uno", "selex"])
def test_a_resumed_run_ends_alike_and_true_classes_change_nothing(
    method: str, glyphs: Path, tiny_settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records of images, Adam's moments and the margin are all in the checkpoint."""
    from dataclasses import replace

    from safetensors.torch import load_file

    settings = dict(parse_override(text) for text in tiny_settings[1::2])
    settings |= {"data.root": str(glyphs), "similarity.epochs": 1, "similarity.batch": 16, "report.tsne_epochs": []}
    settings |= {"optim.batch_by_size": False}
    if method == "dtc":
        settings |= {"method.warm_up_epochs": 1, "method.variant": "tep"}
    if method in ("dtc", "kcl"):
        settings["optim.labelled_batch"] = 0
    prepared = ready(resolve_config(recipes=["glyphs", *method_recipes(method)], overrides=settings))
    whole = RunDir.create(tmp_path / "whole", prepared.config)
    training.train(prepared, whole, progress=SILENT)
    hidden = replace(prepared, manifest=replace(prepared.manifest, truth=None))
    train_epoch = training.train_epoch

    def interrupted(state: Any, *rest: Any) -> Any:
        if state.epoch == 1:
            raise KeyboardInterrupt
        return train_epoch(state, *rest)

    monkeypatch.setattr(training, "train_epoch", interrupted)
    parts = RunDir.create(tmp_path / "parts", hidden.config)
    with pytest.raises(KeyboardInterrupt):
        training.train(hidden, parts, progress=SILENT)
    monkeypatch.setattr(training, "train_epoch", train_epoch)
    training.train(hidden, parts, progress=SILENT)
    first, second = load_file(whole.checkpoint), load_file(parts.checkpoint)
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def test_a_method_without_its_recipe_is_refused() -> None:
    with pytest.raises(UsageError, match=r"needs model\.branches=global"):
        checked(resolve_config(overrides={"method.name": "orca"}))
    with pytest.raises(UsageError, match="unknown method 'rankstats'"):
        method_recipes("rankstats")
    with pytest.raises(UsageError, match="do not use the recipe own-images"):
        checked(resolve_config(recipes=["cub200", "kcl", "own-images"]))
    assert MethodConfig().name == "dual"


def test_a_method_s_own_settings_are_complete_and_checked() -> None:
    config = checked(resolve_config(recipes=["dtc"], overrides={"method.variant": "te"}))
    assert config.method.own == {"variant": "te", "warm_up_epochs": 10, "refresh_epochs": 5, "memory": 0.6}
    assert resolve_config(overrides={"method": config.method.model_dump()}).method == config.method
    with pytest.raises(UsageError, match=r"unknown config key 'method\.varian'") as caught:
        checked(resolve_config(recipes=["dtc"], overrides={"method.varian": "te"}))
    assert caught.value.hint == "did you mean 'variant'?"
    with pytest.raises(UsageError, match=r"method\.memory must be less than 1"):
        checked(resolve_config(recipes=["dtc"], overrides={"method.memory": 2}))


def test_settings_of_runs_made_before_methods_had_sections_are_understood() -> None:
    old = {"method": {"name": "dtc", "dtc_variant": "te", "kcl_margin": 2.0, "orca_margin": 0.5}}
    assert checked(
        merged([Layer("config.toml", {"model": resolve_config(recipes=["dtc"]).model.model_dump(), **old})])
    ).method.own == {"variant": "te", "warm_up_epochs": 10, "refresh_epochs": 5, "memory": 0.6}


def test_every_method_has_a_recipe_and_a_title() -> None:
    assert method_names() == sorted(METHODS)
    assert all(method_named(name).title for name in METHODS)
