"""Images that a model found its clusters in, with its answers: gallery, fit and drift compare with them."""

from __future__ import annotations

import zipfile
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ncd_serve.errors import DataError
from ncd_serve.files import atomic_path
from ncd_serve.fit import FitLimits, calibrate

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ids = NDArray[np.int64]
    Floats = NDArray[np.float32]

REFERENCE = "reference.npz"
MAX_IMAGES = 10_000  # embeddings of more would outweigh the model


@dataclass(frozen=True)
class Reference:
    """Unlabelled training images, all of them or an even sample."""

    checkpoint: str  # identifies the state of the model; names and bundles have it as well
    root: Path  # where the images were
    paths: list[str]  # below it
    cluster_ids: Ids  # [N]
    confidences: Floats  # [N]
    embeddings: Floats  # [N, d]
    known_ids: Ids  # [N], the known class that each resembles most
    known_classes: list[str]
    known_clusters: int  # how many of the first clusters are known classes: all or none
    counts: Ids  # [C] images of every cluster, sampled or not
    truth: list[str]  # names of true classes, only for reports; empty if they are not known
    # [C] the true class that each cluster is matched with, "" for none, by all images, sampled or not. For reports
    # alone; empty if true classes are not known, and in files of older versions.
    matched: list[str] = field(default_factory=list)

    @property
    def clusters(self) -> int:
        """Number of clusters."""
        return len(self.counts)

    def limits(self) -> FitLimits:
        """Return the limits of fit, calibrated on these images."""
        return calibrate(self.embeddings, self.cluster_ids, self.confidences, clusters=self.clusters)

    def files(self, root: Path | None = None) -> list[Path]:
        """Return the image files, below their original folder or another one."""
        return [(root or self.root) / path for path in self.paths]

    def sampled(self) -> Reference:
        """Return a reference with at most `MAX_IMAGES` images, evenly spread."""
        rows = np.arange(0, len(self.paths), -(-len(self.paths) // MAX_IMAGES))
        if len(rows) == len(self.paths):
            return self
        return replace(
            self,
            paths=[self.paths[row] for row in rows],
            truth=[self.truth[row] for row in rows] if self.truth else [],
            **{name: getattr(self, name)[rows] for name in ("cluster_ids", "confidences", "embeddings", "known_ids")},
        )

    def write(self, path: Path) -> None:
        """Write the file; embeddings in half precision, which is plenty for pictures and distances."""
        content = {entry.name: np.array(getattr(self, entry.name)) for entry in fields(self) if entry.name != "root"}
        content |= {"root": np.array(str(self.root)), "embeddings": self.embeddings.astype(np.float16)}
        with atomic_path(path) as temporary, temporary.open("wb") as stream:
            np.savez_compressed(stream, **content)

    @classmethod
    def read(cls, path: Path) -> Reference:
        """Open the file of a run or a bundle; DataError when it is missing or damaged."""
        if not path.is_file():
            raise DataError(
                f"{path.parent} has no {path.name}: it was made by an older version, or training has not ended",
                hint="ncd-serve evaluate RUN writes a run's, ncd-serve export RUN a bundle's",
            )
        try:
            with path.open("rb") as stream, np.load(stream) as stored:
                wanted = [entry.name for entry in fields(cls) if entry.name in stored or _is_required(entry)]
                content = {name: stored[name] for name in wanted}
            if len(content.get("matched", ())) not in (0, len(content["counts"])):
                raise ValueError("not every cluster is matched or unmatched")
        except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
            raise DataError(f"{path} is damaged: {error}", hint="write it again: ncd-serve evaluate RUN") from None
        plain = ("checkpoint", "paths", "known_classes", "known_clusters", "truth", "matched")
        values = {name: content[name].tolist() for name in plain if name in content}
        rest = {"root": Path(str(content["root"])), "embeddings": content["embeddings"].astype(np.float32)}
        return cls(**{**content, **values, **rest})


def _is_required(entry: Field[Any]) -> bool:
    return entry.default is MISSING and entry.default_factory is MISSING
