"""Signed bundles in a model repository: each version has the signature of the bundle that it was exported from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from ncd_serve.bundle import LABELS, MANIFEST, MODEL, Bundle, BundleManifest
from ncd_serve.errors import DataError
from ncd_serve.files import atomic_path, locked, sha256
from ncd_serve.places import exported_to
from ncd_serve.signature import SIGNATURE, check_signature, sign
from ncd_serve.triton.jpeg import asked_by, jpeg_model_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

_HINT = "export it again, and sign it: ncd-serve sign BUNDLE"


def sign_bundle(folder: Path, key: Path, *, password: Callable[[], str]) -> tuple[Bundle, list[Path]]:
    """Write the signature of a bundle beside its manifest, and into the versions that serve it; return both."""
    bundle = Bundle.read(folder)
    content = (folder / MANIFEST).read_bytes()
    comment = f"bundle {bundle.manifest.bundle_id} {bundle.digest}"
    signature = sign(content, key, comment=comment, password=password)
    place = exported_to(folder)
    with locked(folder.absolute().parent, *([place.repository] if place else [])):
        if Bundle.read(folder).digest != bundle.digest:
            raise DataError(f"{folder} was replaced while it was signed", hint="sign it again")
        versions = _versions_of(content, place.repository / place.model) if place else []
        for target in (folder, *versions):
            with atomic_path(target / SIGNATURE) as temporary:
                temporary.write_bytes(signature)
    return bundle, versions


def _versions_of(manifest: bytes, model: Path) -> list[Path]:
    """Return the versions of a model that were made of a bundle, each before its companion for image files."""
    jpeg = model.with_name(jpeg_model_name(model.name))
    served = [file.parent for file in sorted(jpeg.glob(f"*/{MANIFEST}")) if file.read_bytes() == manifest]
    pairs = [(model / folder.name, folder) for folder in served]
    return [folder for pair in pairs for folder in pair if folder.is_dir()]


def check_signed(model: Path, config: Any, versions: Sequence[Path], public_key: str) -> None:
    """Raise DataError unless versions that Triton would load are those of bundles that the owner of a key signed."""
    files = {config.default_model_filename, *(output.label_filename for output in config.output)}
    if other := sorted(files - {"", MODEL, LABELS}):
        raise DataError(f"the model '{model.name}' reads {other[0]}, which no bundle has", hint=_HINT)
    takes_files = asked_by(config)
    for version in versions:
        described = model.with_name(jpeg_model_name(takes_files or model.name)) / version.name / MANIFEST
        manifest = _signed_manifest(described, version / SIGNATURE, public_key)
        if not takes_files:
            check_files(model, version, manifest)


def check_files(model: Path, version: Path, manifest: BundleManifest) -> None:
    """Raise DataError unless a version of a model has the files of a bundle."""
    for name, file in ((MODEL, version / MODEL), (LABELS, model / LABELS)):
        if not file.is_file() or sha256(file) != manifest.sha256.get(name):
            raise DataError(f"{file} is not the file of bundle {manifest.bundle_id}", hint="export it again")


def _signed_manifest(file: Path, signature: Path, public_key: str) -> BundleManifest:
    try:
        content = file.read_bytes()
        check_signature(content, signature, public_key)
        return BundleManifest.model_validate_json(content)
    except (OSError, ValidationError):
        raise DataError(f"{file} is missing or damaged: no signature can be checked", hint=_HINT) from None
