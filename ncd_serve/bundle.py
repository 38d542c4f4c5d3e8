"""Bundle: a verified, self-contained export. Its `bundle.json` describes and hashes the other files.

The digest of a bundle is that of `bundle.json`, and so of all of it. Hashes tell damage; who knows the digest from the
export can tell another bundle, too, as can who has the public key of a signed one.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from ncd_serve.errors import DataError
from ncd_serve.files import sha256
from ncd_serve.preprocess import PreprocessSpec
from ncd_serve.reference import REFERENCE, Reference
from ncd_serve.signature import SIGNATURE, check_signature
from ncd_serve.text import check_name, first_problem

SCHEMA_VERSION = 3
MANIFEST, MODEL, LABELS, VERIFICATION, CARD = (
    "bundle.json",
    "model.onnx",
    "labels.txt",
    "verification.json",
    "MODEL_CARD.md",
)
HASHED = (MODEL, LABELS, VERIFICATION, CARD)  # in every bundle; since schema 2 the reference, too
MAX_CLUSTERS = 100_000  # more than any model has; pages and tables hold a place for each
_ATTEMPTS = 10
_ALGORITHM = "sha256:"
_MAX_MANIFEST_BYTES = 16 << 20
_EXPORT_AGAIN = "export the run again: ncd-serve export RUN"


Name = Annotated[str, AfterValidator(check_name)]
Scores = dict[str, Annotated[float, Field(ge=0, le=1)]]
# Of a file in the bundle's own folder.
FileName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")]


class _Schema(BaseModel):
    """Field that every schema has."""

    schema_version: int = Field(lt=1_000_000)


class Change(BaseModel):
    """Change of one cluster from a generation to the next."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cluster_id: int
    kind: Literal["kept", "grown", "split", "merged", "new"]
    images: int  # of training, before; 0 for a new cluster
    added: int  # images of the new batch that it was given
    moved: int  # images of training that went to other clusters; for a new cluster, that came from others
    overlap: float | None = None  # with the cluster that is most like it now; None: nothing was trained
    like: int | None = None  # id of that cluster, if it is another one


class Ancestor(BaseModel):
    """Earlier generation of a bundle."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    generation: int
    bundle_id: str
    checkpoint: str = ""  # empty in bundles of older versions
    digest: str
    folder: str  # where it was
    created: str
    clusters: int
    images: int | None = None  # that it was found in; None in bundles of older versions, as are scores
    scores: Scores = {}
    verdict: str = ""

    @classmethod
    def of(cls, bundle: Bundle) -> Ancestor:
        """Return a bundle as its descendants remember it."""
        about = bundle.manifest
        images = int(bundle.reference().counts.sum()) if REFERENCE in about.sha256 else None
        return cls(
            generation=about.generation,
            bundle_id=about.bundle_id,
            checkpoint=about.checkpoint,
            digest=bundle.digest,
            folder=str(bundle.folder.absolute()),
            created=about.created,
            clusters=len(about.cluster_names),
            images=images,
            scores=about.scores,
            verdict=about.verdict,
        )


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
    known_classes: list[Name]
    open_world: bool = False  # its first clusters are the known classes
    cluster_names: list[Name] = Field(max_length=MAX_CLUSTERS)
    merged: dict[int, int] = {}  # clusters whose images are given to another one; ids stay what they are
    junk: list[int] = []  # clusters that a person set aside
    # Corrections of single images, by their path in the reference, which the next round learns from: their cluster,
    # or "wrong" for none. Clusters beyond those of the model have images so far, but no answers yet.
    images: dict[str, int | Literal["wrong"]] = {}
    new_names: dict[int, Name] = {}
    generation: int = Field(1, ge=1)
    ancestors: list[Ancestor] = []  # earlier generations, the first one first
    changes: list[Change] = []  # since the generation before; empty for the first
    scores: Scores = {}  # ACC by split, where true classes are known; of the state that was trained
    verdict: str = ""  # on the clusters without true classes, in words
    training: dict[str, str | int | float | None]
    versions: dict[str, str]
    sha256: dict[FileName, str]

    @property
    def lineage(self) -> list[str]:
        """Checkpoints whose ids mean the same: its own, then those of earlier generations."""
        return [self.checkpoint, *(each.checkpoint for each in self.ancestors)]

    @model_validator(mode="after")
    def _fits_together(self) -> BundleManifest:
        if self.open_world and len(self.known_classes) > len(self.cluster_names):
            raise ValueError("it has more known classes than clusters")
        corrected = [number for number in self.images.values() if number != "wrong" and number not in self.new_names]
        for number in (*self.merged, *self.merged.values(), *self.junk, *corrected):
            if not 0 <= number < len(self.cluster_names):
                raise ValueError(f"cluster {number} is none of its {len(self.cluster_names)} clusters")
        return self


@dataclass(frozen=True)
class Bundle:
    """Bundle on disk whose files match the hashes of its manifest."""

    folder: Path
    manifest: BundleManifest
    digest: str = field(default="", compare=False)  # of bundle.json, whose hashes cover all other files

    @property
    def model_path(self) -> Path:
        """The ONNX file."""
        return self.folder / MODEL

    def reference(self) -> Reference:
        """Read the reference: outputs for the images that the clusters were found in."""
        found, clusters = Reference.read(self.folder / REFERENCE), len(self.manifest.cluster_names)
        if found.clusters != clusters:
            raise DataError(
                f"{self.folder / REFERENCE} is of {found.clusters} clusters, not {clusters}", hint=_EXPORT_AGAIN
            )
        return found

    def verification(self) -> dict[str, Any]:
        """Read the comparison of the ONNX model with the trained one."""
        try:
            found: dict[str, Any] = json.loads((self.folder / VERIFICATION).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise DataError(f"{self.folder / VERIFICATION} is damaged: {error}", hint=_EXPORT_AGAIN) from None
        return found

    def is_current(self) -> bool:
        """Return whether no other bundle was published in its place since it was read."""
        try:
            return BundleManifest.model_validate_json((self.folder / MANIFEST).read_bytes()) == self.manifest
        except (OSError, ValidationError):
            return False

    @classmethod
    def read(cls, folder: str | Path, *, digest: str | None = None, public_key: str | None = None) -> Bundle:
        """Open a bundle, or raise DataError: missing, of a newer schema, damaged or changed, not of this digest.

        With a public key of minisign, a file or its text, a bundle that its owner did not sign is refused, too.
        """
        bundle = cls._read_whole(Path(folder), public_key)
        if digest is not None and digest.removeprefix(_ALGORITHM) != bundle.digest.removeprefix(_ALGORITHM):
            raise DataError(
                f"{folder} has the digest {bundle.digest}, not {digest}",
                hint="it is another bundle than the one that the digest was printed for",
            )
        return bundle

    @classmethod
    def _read_whole(cls, folder: Path, public_key: str | None) -> Bundle:
        """Read a bundle that other processes may replace meanwhile."""
        for _ in range(_ATTEMPTS):
            before = _identity(folder)
            try:
                return cls._read(folder, public_key)
            except (DataError, OSError):
                if _identity(folder) == before:
                    raise  # else it was replaced by another one while it was read
        raise DataError(f"{folder} is being replaced again and again", hint="wait until it is published")

    @classmethod
    def _read(cls, folder: Path, public_key: str | None) -> Bundle:
        path = folder / MANIFEST
        if not path.is_file():
            raise DataError(f"{folder} is not a bundle: it has no {MANIFEST}", hint="ncd-serve export RUN makes one")
        try:
            if path.stat().st_size > _MAX_MANIFEST_BYTES:
                raise DataError(f"{path} is damaged: it has {path.stat().st_size:,} bytes", hint=_EXPORT_AGAIN)
            content = path.read_bytes()
            if public_key is not None:
                check_signature(content, folder / SIGNATURE, public_key)
            # First of all, since nothing else is known about the fields of a newer schema.
            schema = _Schema.model_validate_json(content).schema_version
            if schema > SCHEMA_VERSION:
                raise DataError(
                    f"{path} has schema {schema}, this version reads up to {SCHEMA_VERSION}",
                    hint="pip install --upgrade ncd-serve",
                )
            manifest = BundleManifest.model_validate_json(content)
        except ValidationError as error:
            raise DataError(f"{path} is damaged: {first_problem(error)}", hint=_EXPORT_AGAIN) from None
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}", hint="check its permissions") from None
        for name in dict.fromkeys((*HASHED, *manifest.sha256)):
            if _hash(folder / name) != manifest.sha256.get(name):
                raise DataError(f"{folder / name} is missing or not the file that was verified", hint=_EXPORT_AGAIN)
        return cls(folder, manifest, f"{_ALGORITHM}{hashlib.sha256(content).hexdigest()}")


def _hash(file: Path) -> str:
    """Return the hash of a file; an empty text if it is none, or cannot be read."""
    try:
        return sha256(file) if file.is_file() else ""
    except OSError:
        return ""


def _identity(folder: Path) -> tuple[int, int] | None:
    """Return what tells a folder from its successor of the same name; None if there is none."""
    try:
        facts = folder.stat()
    except OSError:
        return None
    return facts.st_dev, facts.st_ino
