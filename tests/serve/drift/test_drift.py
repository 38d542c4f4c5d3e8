"""Batches beside training, on numbers worked by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from ncd_serve.bundle import Bundle, BundleManifest
from ncd_serve.drift.find import find_drift
from ncd_serve.drift.plot import draw_drift
from ncd_serve.errors import DataError
from ncd_serve.fit import Fit
from ncd_serve.prediction import Prediction
from ncd_serve.preprocess import PreprocessSpec
from ncd_serve.reference import REFERENCE, Reference


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    """200 training images, half of them in each of the first two of three clusters; confidences 0.60 to 0.795."""
    angles = np.radians(np.concatenate([np.linspace(-9, 9, 100), np.linspace(81, 99, 100)]))
    reference = Reference(
        checkpoint="",
        root=tmp_path,
        paths=[f"{number}.png" for number in range(200)],
        cluster_ids=np.repeat([0, 1], 100),
        confidences=np.tile(0.6 + np.arange(40) * 0.005, 5).astype(np.float32),
        embeddings=np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32),
        known_ids=np.zeros(200, np.int64),
        known_classes=["owl"],
        known_clusters=0,
        counts=np.array([100, 100, 0]),
        truth=[],
    )
    reference.write(tmp_path / REFERENCE)
    manifest: dict[str, Any] = {
        "bundle_id": "x",
        "created": "now",
        "dataset": "birds",
        "method": "dual",
        "preprocess": PreprocessSpec(resolution=8, resize=8),
        "known_classes": ["owl"],
        "cluster_names": ["gull", "<wren> & co", "crow"],
        "training": {},
        "versions": {},
        "sha256": {},
    }
    return Bundle(tmp_path, BundleManifest(**manifest))


def batch(clusters: Sequence[int], fits: Sequence[Fit | None] = ("typical",), less: float = 0.0) -> list[Prediction]:
    return [
        Prediction(
            str(number),
            "ok",
            cluster,
            str(cluster),
            0.6 + number % 40 * 0.005 - less,
            0.1,
            fits[number % len(fits)],
        )
        for number, cluster in enumerate(clusters)
    ]


def drifted(rows: list[Prediction], bundle: Bundle) -> list[str]:
    return [measure.name for measure in find_drift(rows, bundle).measures if measure.drifted]


def test_more_of_the_same_is_quiet(bundle: Bundle) -> None:
    found = find_drift([*batch([0, 1] * 40), Prediction.failed("broken.png", "no image")], bundle)
    assert not found.drifted and (found.images, found.unreadable) == (80, 1)
    assert [measure.difference for measure in found.measures[:2]] == pytest.approx([0.0, 0.0])
    assert found.confidences["training"] == found.confidences["batch"] == pytest.approx([0] * 6 + [0.5, 0.5, 0, 0])
    assert found.fits == {"training": found.fits["batch"], "batch": {"typical": 1.0, "unusual": 0.0, "outlier": 0.0}}


def test_each_question_finds_its_own_drift(bundle: Bundle) -> None:
    assert drifted(batch([0] * 60 + [1] * 20), bundle) == ["cluster shares"]
    assert drifted(batch([0, 1] * 40, less=0.15), bundle) == ["confidence"]
    assert drifted(batch([0, 1] * 40, ("typical", "outlier", "unusual", "outlier")), bundle) == ["fit"]


def test_differences_by_hand(bundle: Bundle) -> None:
    shares, confidence, fit = find_drift(batch([0] * 60 + [2] * 20, ("outlier", "typical"), 0.1), bundle).measures
    assert shares.difference == pytest.approx((abs(0.75 - 0.5) + 0.5 + 0.25) / 2)
    assert confidence.difference == pytest.approx(0.5)  # all of the batch's lower half is below 0.6
    assert fit.difference == pytest.approx(0.5 - 1 / 202)


def test_a_small_batch_may_differ_more(bundle: Bundle) -> None:
    few = find_drift(batch([0] * 13 + [1] * 7), bundle)
    many = find_drift(batch([0] * 1300 + [1] * 700), bundle)
    assert few.measures[0].difference == many.measures[0].difference == pytest.approx(0.15)
    assert few.measures[0].limit > 0.3 > many.measures[0].limit
    with pytest.raises(DataError, match="19 rows of readable images are too few"):
        find_drift(batch([0] * 19), bundle)


def test_merged_clusters_are_counted_together(bundle: Bundle) -> None:
    merged = Bundle(bundle.folder, bundle.manifest.model_copy(update={"merged": {1: 0}}))
    found = find_drift(batch([0] * 80), merged)
    assert not found.drifted
    assert [(share.training, share.batch) for share in found.shares] == [(1.0, 1.0), (0.0, 0.0), (0.0, 0.0)]


def test_rows_without_fit_or_of_another_model(bundle: Bundle) -> None:
    found = find_drift(batch([0, 1] * 40, (None,)), bundle)
    assert len(found.measures) == 2 and found.fits == {}
    with pytest.raises(DataError, match="cluster 3 of 0 is not one of the bundle's 3"):
        find_drift(batch([3] * 20), bundle)


def test_the_picture_holds_every_cluster_and_escapes_names(bundle: Bundle, tmp_path: Path) -> None:
    found = find_drift(batch([0, 1] * 40), bundle)
    draw_drift(found, tmp_path / "drift.svg", title="<rows>.csv")
    texts = [element.text for element in ElementTree.parse(tmp_path / "drift.svg").iter()]
    assert "<rows>.csv: 80 images, like training" in texts and "<wren> & co (1)" in texts
    draw_drift(replace(found, shares=found.shares * 40, fits={}), tmp_path / "many.svg", title="")
    assert json.dumps([e.text for e in ElementTree.parse(tmp_path / "many.svg").iter()]).count("gull (0)") <= 40
