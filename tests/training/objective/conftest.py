"""Images that every method must tell apart, with projections small enough for a test."""

import pytest

from tests.blobs import Blobs


@pytest.fixture(scope="package")
def blobs(tmp_path_factory: pytest.TempPathFactory) -> Blobs:
    return Blobs(tmp_path_factory.mktemp("blobs"))


@pytest.fixture(scope="package")
def mixed_blobs(tmp_path_factory: pytest.TempPathFactory) -> Blobs:
    return Blobs(tmp_path_factory.mktemp("mixed-blobs"), mixed=True)


@pytest.fixture(autouse=True)
def small_projections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ncd_training.objective.contrast._HIDDEN", 64)
