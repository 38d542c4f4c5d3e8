"""What any method has found can be exported."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from ncd_training import discover

from ncd_serve.bundle import Bundle
from ncd_serve.runners import OnnxRunner

LARGE = ["optim.labelled_batch=64", "optim.unlabelled_batch=32"]  # few steps
# `dual` as such is the tiny run that most other tests export; here with a head that also names known classes.
QUICK = {
    "dual": ["optim.epochs=1", "data.pile=mixed", "self_labels.weight=1.0", "self_labels.starts=2"],
    "rankstat": ["optim.epochs=1"],
    "dtc": ["optim.epochs=1", "method.dtc_warm_up_epochs=1"],
    "kcl": ["optim.epochs=1", "similarity.epochs=1", "similarity.batch=16"],
    "mcl": ["optim.epochs=1", "similarity.epochs=1", "similarity.batch=16"],
    "orca": ["optim.epochs=1", "optim.labelled_batch=16", "optim.unlabelled_batch=16"],
    "kmeans": ["optim.epochs=0"],
    "simgcd": ["optim.epochs=1", *LARGE, "data.pile=mixed"],
    "uno": ["optim.epochs=1", *LARGE],
    "gcd": ["optim.epochs=1", *LARGE, "method.starts=1"],
    "pim": ["optim.epochs=0", "method.strengths=[0.5]", "method.iterations=5", "method.starts=1"],
    "selex": ["optim.epochs=1", *LARGE, "method.levels=2"],
}


@pytest.mark.slow
@pytest.mark.parametrize("method", QUICK)
def test_what_a_method_found_is_exported_by_its_name(
    method: str, glyphs: Path, tiny_settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ncd_training.objective.contrast._HIDDEN", 64)
    settings, folder = [*tiny_settings[1::2], *QUICK[method]], tmp_path / "bundle"
    source = {"dataset": "glyphs", "data_root": glyphs}
    run = discover(**source, method=method, settings=settings, out=tmp_path / "run", progress=False)
    run.export(out=folder, repository=tmp_path / "repository")
    bundle = Bundle.read(folder)
    assert bundle.manifest.method == method
    named = bundle.manifest.open_world
    assert named == (method in ("dual", "orca", "simgcd"))
    assert not named or bundle.manifest.cluster_names[:21] == bundle.manifest.known_classes
    side = bundle.manifest.preprocess.resolution
    answer = OnnxRunner(bundle).answer(np.zeros((2, side, side, 3), np.uint8))
    assert answer.probabilities.shape == (2, len(bundle.manifest.cluster_names))
    np.testing.assert_allclose(answer.probabilities.sum(axis=1), 1.0, atol=1e-5)
