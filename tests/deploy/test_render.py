"""`ncd-serve deploy render` as a user runs it: what it says, what it refuses, what it leaves alone."""

from __future__ import annotations

import dataclasses
import re
import shutil
from pathlib import Path

import pytest

from ncd_serve.bundle import Bundle
from ncd_serve.deploy import Target
from ncd_serve.deploy.facts import Deployment, _storage, collect_facts
from ncd_serve.deploy.render import MARK, render
from ncd_serve.errors import DataError, NcdError, UsageError
from tests.conftest import Ncd


def test_the_command_says_what_to_do_next(ncd: Ncd, bundle: Path, repository: Path, tmp_path: Path) -> None:
    where = ("--bundle", bundle, "--repository", repository)
    done = ncd("deploy", "render", "helm", *where, "--out", tmp_path / "helm", "--image", "birds:1")
    assert done.returncode == 0, done.stderr
    assert re.search(r"ncd_global, bundle [0-9a-f]{12}: \d+ CPUs and \d+ MiB for each server", done.stdout)
    assert f"--build-context repository={repository} --tag birds:1 {tmp_path}/helm/image" in done.stdout
    assert f"helm install ncd-global {tmp_path}/helm/chart" in done.stdout
    assert "image: birds:1\n" in (tmp_path / "helm" / "chart" / "values.yaml").read_text()
    for target, word in (("compose", f"copy {repository} to"), ("kserve", "make the service account ncd-global")):
        stored = ncd("deploy", "render", target, *where, "--out", tmp_path / target, "--repository-uri", "s3://b/m")
        assert f"next:  {word}" in stored.stdout
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "values.yaml").touch()
    for out, arguments, code, reason in (
        ("new", ("swarm", *where), 2, "swarm"),
        ("new", ("helm", "--bundle", tmp_path), 3, "is not a bundle"),
        ("new", ("helm", *where, "--image", "No Such:Image"), 2, "is not the name of an image"),
        ("mine", ("helm", *where), 3, "was not made by ncd-serve deploy render"),
    ):
        refused = ncd("deploy", "render", *arguments, "--out", tmp_path / out)
        assert refused.returncode == code and reason in refused.stderr and "Traceback" not in refused.stderr
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        (UsageError, {"image": "registry.example.com/Birds"}, "not the name of an image"),
        (UsageError, {"image": 'birds"\nprivileged: true'}, "not the name of an image"),
        (UsageError, {"image": "birds:tag:tag"}, "not the name of an image"),
        (UsageError, {"repository_uri": "http://bucket/models"}, "not the address of a model repository"),
        (UsageError, {"repository_uri": "s3://"}, "not the address of a model repository"),
        (UsageError, {"repository_uri": "gs://https://host/bucket"}, "not the address of a model repository"),
        (UsageError, {"repository_uri": "s3://user:password@bucket"}, "not the address of a model repository"),
        (UsageError, {"repository_uri": "s3://b/x y"}, "not the address of a model repository"),
        (UsageError, {"model": "_birds_"}, "cannot be a label"),
        (UsageError, {"model": "b" * 64}, "cannot be a label"),
        (DataError, {"model": "fish"}, "has no model 'fish'"),
    ],
)
def test_what_cannot_be_is_refused(
    bundle: Path, repository: Path, kind: type[NcdError], settings: dict[str, str], reason: str
) -> None:
    with pytest.raises(kind, match=reason):
        collect_facts(Bundle.read(bundle), repository, **{"model": "ncd_global", **settings})


@pytest.mark.parametrize(
    ("uri", "storage", "port"),
    [
        ("s3://birds/models", "s3", 443),
        ("s3://http://minio/birds", "s3", 80),
        ("s3://https://minio:9000/birds/a=b/v1", "s3", 9000),
        ("gs://birds", "gs", 443),
        ("pvc://claim/models", "pvc", 443),
    ],
)
def test_places_of_repositories(uri: str, storage: str, port: int) -> None:
    assert _storage(uri) == (storage, port)


def test_a_repository_that_serves_another_bundle(bundle: Path, repository: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(repository, tmp_path / "models")
    config = copy / "ncd_global" / "config.pbtxt"
    config.write_text(config.read_text().replace(Bundle.read(bundle).manifest.bundle_id, "0123456789ab"))
    with pytest.raises(DataError, match=r"serves bundle 0123456789ab .*, not"):
        collect_facts(Bundle.read(bundle), copy, model="ncd_global")
    with pytest.raises(DataError, match="cannot read"):
        collect_facts(Bundle.read(bundle), tmp_path / "nowhere", model="ncd_global")


def test_foreign_code_is_deployed_only_if_asked_for(bundle: Path, repository: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(repository, tmp_path / "models")
    (copy / "ncd_global_jpeg" / "1" / "helper.py").write_text("print('hello')\n")
    with pytest.raises(DataError, match=r"runs code of its own: 1/helper\.py") as refused:
        collect_facts(Bundle.read(bundle), copy, model="ncd_global")
    assert "--allow-python-models" in str(refused.value.hint)
    assert collect_facts(Bundle.read(bundle), copy, model="ncd_global", python_models=True).model == "ncd_global"


def test_rendering_again_replaces_what_nobody_changed(deployment: Deployment, tmp_path: Path) -> None:
    out = tmp_path / "out"
    render(deployment, Target.HELM, out)
    render(deployment, Target.KSERVE, out)
    assert not (out / "chart").exists() and (out / "inferenceservice.yaml").is_file()
    (out / "inferenceservice.yaml").write_text("mine")
    with pytest.raises(DataError, match=r"inferenceservice\.yaml was changed after it was rendered"):
        render(deployment, Target.KSERVE, out)
    assert (out / "inferenceservice.yaml").read_text() == "mine"
    (out / MARK).write_text("{")
    with pytest.raises(DataError, match="was not made by"):
        render(deployment, Target.KSERVE, out)


def test_a_file_in_the_way(deployment: Deployment, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    for out in (tmp_path / "out", tmp_path / "out" / "below"):
        with pytest.raises(DataError):
            render(deployment, Target.HELM, out)
    assert (tmp_path / "out").read_text() == "mine"


def test_storage_that_a_target_cannot_reach(deployment: Deployment, tmp_path: Path) -> None:
    claimed = dataclasses.replace(deployment, repository_uri="pvc://claim", storage="pvc")
    with pytest.raises(UsageError, match="no volume claims"):
        render(claimed, Target.COMPOSE, tmp_path / "out")
    elsewhere = dataclasses.replace(deployment, repository_uri="s3://https://minio:9000/birds", storage="s3")
    with pytest.raises(UsageError, match="from its Secret"):
        render(elsewhere, Target.KSERVE, tmp_path / "out")
    assert not (tmp_path / "out").exists()
