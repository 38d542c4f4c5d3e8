"""Signatures of bundles, in minisign's format, where bundles are used and where they are served."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import minisign
import pytest
from ncd_export.rename import rename_bundle
from ncd_export.repository import add_to_repository

from ncd_serve.bundle import LABELS, MANIFEST, MODEL, Bundle
from ncd_serve.errors import DataError, MissingExtraError, UsageError
from ncd_serve.naming import Names
from ncd_serve.places import ExportPlace, remember_export
from ncd_serve.signature import SIGNATURE
from ncd_serve.triton.repository import CONFIG, check_repository
from ncd_serve.triton.signed import sign_bundle
from tests.conftest import Ncd
from tests.serve.patterns import make_bundle


def new_key(folder: Path, name: str, password: str = "") -> tuple[Path, Path]:
    """A secret key and its public half, as `minisign -G` writes them; the password costs less than minisign's."""
    pair = minisign.KeyPair.generate()
    secret, public = folder / f"{name}.key", folder / f"{name}.pub"
    if password:
        pair.secret_key.encrypt(password, opslimit=32768, memlimit=1 << 20)
    secret.write_bytes(bytes(pair.secret_key) + b"\n")
    public.write_bytes(bytes(pair.public_key) + b"\n")
    return secret, public


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return new_key(tmp_path_factory.mktemp("keys"), "ours")


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, keys: tuple[Path, Path]) -> Path:
    """A folder with a signed bundle, and a repository that serves it."""
    place = tmp_path_factory.mktemp("exported")
    bundle = make_bundle(place / "bundle")
    add_to_repository(Bundle.read(bundle), place / "models", name="patterns")
    remember_export(bundle, ExportPlace(place / "models", "patterns"), bundle=bundle)
    _, versions = sign_bundle(bundle, keys[0], password=str)
    assert versions == [(place / "models" / name / "1").resolve() for name in ("patterns", "patterns_jpeg")]
    return place


@pytest.fixture
def place(exported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported, tmp_path / "place"))


def refusal(action: str, path: Path, key: Path | str) -> str:
    with pytest.raises(DataError) as refused:
        (Bundle.read if action == "read" else check_repository)(path, public_key=str(key))  # type: ignore[operator]
    assert refused.value.hint
    return str(refused.value)


def test_a_signed_bundle_is_read_with_its_key_alone(place: Path, keys: tuple[Path, Path], tmp_path: Path) -> None:
    _, public = keys
    for key in (str(public), public.read_text().splitlines()[1]):
        assert Bundle.read(place / "bundle", public_key=key).digest == Bundle.read(place / "bundle").digest
    _, other = new_key(tmp_path, "other")
    assert "incompatible key identifiers" in refusal("read", place / "bundle", other)
    assert "not a public key" in refusal("read", place / "bundle", place / "bundle" / LABELS)
    assert "cannot read" in refusal("read", place / "bundle", "nowhere.pub")
    (place / "bundle" / SIGNATURE).unlink()
    assert "is not signed" in refusal("read", place / "bundle", public)


def test_what_was_changed_after_signing_is_refused(place: Path, keys: tuple[Path, Path]) -> None:
    bundle, public = place / "bundle", keys[1]
    whole = (bundle / MANIFEST).read_bytes()
    (bundle / MANIFEST).write_bytes(whole.replace(b"cluster-0", b"cluster-9"))
    assert "verification failed" in refusal("read", bundle, public)
    (bundle / MANIFEST).write_bytes(whole)
    (bundle / LABELS).write_text("a\nb\nc\n")
    assert "not the file that was verified" in refusal("read", bundle, public)
    (bundle / LABELS).write_text("cluster-0\ncluster-1\ncluster-2\n")
    signed = (bundle / SIGNATURE).read_text()
    assert f"trusted comment: bundle patterns {Bundle.read(bundle, public_key=str(public)).digest}" in signed
    (bundle / SIGNATURE).write_text(signed.replace("bundle patterns", "bundle parrots"))
    assert "verification failed" in refusal("read", bundle, public)


def test_a_new_name_takes_the_signature_away(place: Path, keys: tuple[Path, Path]) -> None:
    bundle, repository = place / "bundle", place / "models"
    named, version = rename_bundle(
        bundle, Names.model_validate({"clusters": {0: {"name": "auk"}}}), repository=repository, name="patterns"
    )
    assert named.manifest.cluster_names[0] == "auk" and not (bundle / SIGNATURE).exists()
    assert "is not signed" in refusal("serve", repository, keys[1])
    _, versions = sign_bundle(bundle, keys[0], password=str)
    assert version.resolve() in versions and Bundle.read(bundle, public_key=str(keys[1])) == named
    assert check_repository(repository, public_key=str(keys[1])) == ["patterns", "patterns_jpeg"]


def test_a_repository_has_to_be_that_of_signed_bundles(place: Path, keys: tuple[Path, Path], tmp_path: Path) -> None:
    repository, key = place / "models", str(keys[1])
    model, jpeg = repository / "patterns", repository / "patterns_jpeg"
    assert check_repository(repository, public_key=key) == ["patterns", "patterns_jpeg"]
    assert "incompatible key" in refusal("serve", repository, new_key(tmp_path, "other")[1])

    def changed(file: Path, text: str) -> str:
        whole = file.read_bytes()
        file.write_bytes(whole + text.encode())
        words = refusal("serve", repository, key)
        file.write_bytes(whole)
        return words

    for file in (model / "1" / MODEL, model / LABELS):
        assert f"{file} is not the file of bundle" in changed(file, "x")
    assert "verification failed" in changed(jpeg / "1" / MANIFEST, " ")
    shutil.copy(model / "1" / MODEL, model / "1" / "other.onnx")
    assert "reads other.onnx" in changed(model / CONFIG, 'default_model_filename: "other.onnx"\n')
    shutil.copytree(model, repository / "stranger")
    config = repository / "stranger" / CONFIG
    config.write_text(config.read_text().replace('name: "patterns"', 'name: "stranger"'))
    assert "stranger_jpeg" in refusal("serve", repository, key) and check_repository(repository)


def test_commands_refuse_what_is_not_signed_by_the_key(
    place: Path, keys: tuple[Path, Path], tmp_path: Path, ncd: Ncd
) -> None:
    secret, public = new_key(tmp_path, "locked", password="words")
    image = next((place / "pile").glob("*.png"))
    assign = ("assign", image, "--bundle", place / "bundle", "--public-key")
    good = ncd(*assign, keys[1])
    assert good.returncode == 0, good.stderr
    for command in (
        assign,
        ("serve", "--repository", place / "models", "--public-key"),
        ("deploy", "render", "compose", "--bundle", place / "bundle", "--out", tmp_path / "x", "--public-key"),
    ):
        bad = ncd(*command, public)
        assert bad.returncode == 3 and "incompatible key" in bad.stderr, bad.stderr
        assert [line.split()[0] for line in bad.stderr.splitlines()[-2:]] == ["error:", "hint:"]
    command = [sys.executable, "-m", "ncd_serve", "sign", str(place / "bundle"), "--key", str(secret)]
    for password, code, words in (("wrong\n", 3, "wrong password"), ("words\n", 0, "")):
        done = subprocess.run(command, input=password, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == code and words in done.stderr, done.stderr
    assert f"digest: {Bundle.read(place / 'bundle', public_key=str(public)).digest}" in done.stdout
    assert ncd("sign", place / "bundle", "--key", tmp_path / "nowhere").returncode == UsageError.exit_code


def test_without_the_extra_it_says_what_to_install(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "minisign", None)
    with pytest.raises(MissingExtraError) as refused:
        Bundle.read(place / "bundle", public_key="x")
    assert refused.value.exit_code == 6 and "ncd-serve[sign]" in str(refused.value.hint)


@pytest.mark.skipif(not shutil.which("minisign"), reason="the program minisign is not installed")
def test_minisign_itself_accepts_our_signatures_and_we_accept_its(
    place: Path, keys: tuple[Path, Path], tmp_path: Path
) -> None:
    def run(*words: object) -> str:
        command = ["minisign", *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout

    manifest = place / "bundle" / MANIFEST
    assert "Signature and comment signature verified" in run("-V", "-m", manifest, "-p", keys[1])
    secret, public = tmp_path / "own.key", tmp_path / "own.pub"
    run("-G", "-W", "-s", secret, "-p", public)
    for flags in ((), ("-l",)):  # hashed first, and as minisign did before 0.10
        run("-S", *flags, "-s", secret, "-m", manifest)
        assert json.loads(manifest.read_text())["bundle_id"] == "patterns"
        Bundle.read(place / "bundle", public_key=str(public))
    sign_bundle(place / "bundle", secret, password=str)
    assert "verified" in run("-V", "-m", manifest, "-p", public)
