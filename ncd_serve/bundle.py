"""Bundle: a verified, self-contained export. Its `bundle.json` describes and hashes the other files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from ncd_serve.errors import DataError
from ncd_serve.files import sha256
from ncd_serve.preprocess import PreprocessSpec
from ncd_serve.reference import REFERENCE, Reference

SCHEMA_VERSION = 2
MANIFEST, MODEL, LABELS, VERIFICATION, CARD = (
    "bundle.json",
    "model.onnx",
    "labels.txt",
    "verification.json",
    "MODEL_CARD.md",
)
HASHED = (MODEL, LABELS, VERIFICATION, CARD)  # in every bundle; since schema 2 the reference, too
_EXPORT_AGAIN = "export the run again: ncd-serve export RUN"


class _Schema(BaseModel):
    """Field that every schema has."""

    schema_version: int


class BundleManifest(BaseModel):
    """Content of `bundle.json`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int = SCHEMA_VERSION
    bundle_id: str
    checkpoint: str = ""  # the state that was exported, as in `Reference`
    created: str
    dataset: str
    method: str
    precision: str = "fp32"
    preprocess: PreprocessSpec
    known_classes: list[str]
    open_world: bool = False  # its first clusters are the known classes
    cluster_names: list[str]
    merged: dict[int, int] = {}  # clusters whose images are given to another one; ids stay what they are
    junk: list[int] = []  # clusters that a person set aside
    training: dict[str, str | int | float | None]
    versions: dict[str, str]
    sha256: dict[str, str]


@dataclass(frozen=True)
class Bundle:
    """Bundle on disk whose files match the hashes of its manifest."""

    folder: Path
    manifest: BundleManifest

    @property
    def model_path(self) -> Path:
        """The ONNX file."""
        return self.folder / MODEL

    def reference(self) -> Reference:
        """Read the reference: outputs for the images that the clusters were found in."""
        return Reference.read(self.folder / REFERENCE)

    def verification(self) -> dict[str, Any]:
        """Read the comparison of the ONNX model with the trained one."""
        found: dict[str, Any] = json.loads((self.folder / VERIFICATION).read_text(encoding="utf-8"))
        return found

    @classmethod
    def read(cls, folder: str | Path) -> Bundle:
        """Open a bundle, or raise DataError: missing, of a newer schema, damaged or changed."""
        folder = Path(folder)
        path = folder / MANIFEST
        if not path.is_file():
            raise DataError(f"{folder} is not a bundle: it has no {MANIFEST}", hint="ncd-serve export RUN makes one")
        try:
            content = path.read_bytes()
            # First of all, since nothing else is known about the fields of a newer schema.
            schema = _Schema.model_validate_json(content).schema_version
            if schema > SCHEMA_VERSION:
                raise DataError(
                    f"{path} has schema {schema}, this version reads up to {SCHEMA_VERSION}",
                    hint="pip install --upgrade ncd-serve",
                )
            manifest = BundleManifest.model_validate_json(content)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise DataError(f"{path} is damaged: {where}: {first['msg']}", hint=_EXPORT_AGAIN) from None
        for name in dict.fromkeys((*HASHED, *manifest.sha256)):
            if not (folder / name).is_file() or sha256(folder / name) != manifest.sha256.get(name):
                raise DataError(f"{folder / name} is missing or not the file that was verified", hint=_EXPORT_AGAIN)
        return cls(folder, manifest)
