"""Candidates for new categories in a batch of images, beside the images that a bundle's clusters were found in."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ncd_serve.bundle import Bundle, Name
from ncd_serve.discovery.corrections import check_accepted, corrected, corrections_of
from ncd_serve.discovery.groups import Group, find_groups, join_groups
from ncd_serve.errors import DataError
from ncd_serve.gallery.embed import embed
from ncd_serve.inputs.images import find_images
from ncd_serve.naming import WRONG
from ncd_serve.progress import SILENT, Progress
from ncd_serve.rows.tables import FORMATS, read_rows
from ncd_serve.text import first_problem

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from ncd_serve.mixture import Mixture
    from ncd_serve.reference import Reference

    Floats = NDArray[np.floating[Any]]

MIN_IMAGES = 20  # of a batch
MIN_STRENGTH = 0.95  # of a candidate
MIN_GROUP_STRENGTH = 0.5  # of groups that may be parts of one candidate
_MAX_IMAGES = 10_000  # of a batch; more are an even sample
_OUTSIDE = 0.5


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Candidate(_Strict):
    """Images that are probably of one new category."""

    images: Annotated[list[str], Field(min_length=2)]  # paths, the most central first
    name: Name | None = None  # a person may give one
    strength: float = Field(1.0, ge=0, le=1)  # probability that they are of no class of the model
    purity: float = Field(1.0, ge=0, le=1)  # share of them that images of training do not explain
    evidence: float = 0.0  # mean log ratio of their density in the group to that in all classes
    nearest: str = ""  # cluster or known class whose mean is nearest


class Candidates(_Strict):
    """Content of candidates.json. A person may remove entries, remove images and give names."""

    checkpoint: str  # of the model that was asked
    generation: int
    candidates: list[Candidate]

    @classmethod
    def read(cls, path: str | Path) -> Candidates:
        """Read the file; raise DataError with the reason if it is invalid."""
        try:
            return cls.model_validate_json(Path(path).read_bytes())
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}", hint="check the path") from None
        except ValidationError as error:
            raise DataError(f"{path}: {first_problem(error)}", hint="ncd-serve discover writes such files") from None

    def check(self, bundle: Bundle) -> None:
        """Raise DataError unless the next generation of this bundle can have a cluster for each of them."""
        about = bundle.manifest
        if (self.checkpoint, self.generation) != (about.checkpoint, about.generation):
            raise DataError(
                f"these candidates are of generation {self.generation} of model {self.checkpoint}, "
                f"the bundle is generation {about.generation} of model {about.checkpoint}",
                hint=f"ncd-serve discover NEW --bundle {bundle.folder} looks at them with this one",
            )
        self._check_each_other()
        said = corrections_of(bundle, bundle.reference())
        for candidate in self.candidates:
            check_accepted(said, candidate.images)
            if candidate.name in about.cluster_names:
                raise DataError(
                    f"a cluster is called '{candidate.name}' already",
                    hint="give the candidate another name; clusters can be merged later",
                )

    def _check_each_other(self) -> None:
        """Raise DataError if two candidates have an image or a name in common."""
        for one, other in combinations(self.candidates, 2):
            if common := set(one.images) & set(other.images):
                raise DataError(f"{min(common)} is in two candidates", hint="leave it in one of them")
            if one.name and one.name == other.name:
                raise DataError(f"two candidates are called '{one.name}'", hint="put the images of both into one")


@dataclass(frozen=True)
class Batch:
    """New images with their embeddings by a bundle's model."""

    paths: list[str]
    embeddings: Floats  # [N, d]
    unreadable: list[tuple[str, str]]  # paths, with the reason


@dataclass(frozen=True)
class Discovery:
    """Findings in a batch: candidates for new categories, and the images behind them."""

    images: int
    unreadable: int
    candidates: Candidates
    # Of the images of no candidate:
    outside: int  # those that are probably in none of the clusters
    known: dict[str, int]  # those that are likeliest of a known class, the most frequent first


def discover(
    images: str | Path | Batch,
    bundle: Bundle | str | Path,
    *,
    min_strength: float = MIN_STRENGTH,
    progress: Progress = SILENT,
) -> Discovery:
    """Look for new categories in a folder of images, or in the images of rows that `query` or `assign` wrote."""
    bundle = bundle if isinstance(bundle, Bundle) else Bundle.read(bundle)
    reference, mixture = mixture_of(bundle)
    batch = images if isinstance(images, Batch) else read_batch(images, bundle, progress=progress)
    batch = _unjudged(batch, bundle)
    if len(batch.paths) < MIN_IMAGES:
        raise DataError(
            f"{len(batch.paths)} readable images are too few to look for categories", hint=f"give at least {MIN_IMAGES}"
        )
    with progress.status("looking for new categories"):
        places, (training, classes) = mixture.project(batch.embeddings), reference.places()
        groups = find_groups(mixture, places, training, min_strength=MIN_GROUP_STRENGTH)
        found = [group for group in join_groups(groups, places, training, classes) if group.strength >= min_strength]
    names = [*reference.known_classes[: reference.first_cluster], *bundle.manifest.cluster_names]
    grouped = {int(row) for group in found for row in group.rows}
    likeliest = mixture.log_joint(places).argmax(1).tolist()
    others = [number for row, number in enumerate(likeliest) if row not in grouped]
    known = Counter(names[number] for number in others if number < reference.first_cluster)
    about = bundle.manifest
    ordered = sorted(found, key=lambda group: -len(group.rows))
    proposed = [_candidate(group, batch.paths, names) for group in ordered]
    return Discovery(
        images=len(batch.paths),
        unreadable=len(batch.unreadable),
        candidates=Candidates(checkpoint=about.checkpoint, generation=about.generation, candidates=proposed),
        outside=int((mixture.outside_at(np.delete(places, [*grouped], axis=0)) > _OUTSIDE).sum()),
        known=dict(known.most_common()),
    )


def mixture_of(bundle: Bundle, *, without: Iterable[str] = ()) -> tuple[Reference, Mixture]:
    """Return reference and mixture of a bundle after corrections; DataError if an older version made it.

    Images `without`, by absolute path, are set aside.
    """
    reference = bundle.reference()
    reference = corrected(reference, corrections_of(bundle, reference) | dict.fromkeys(without, WRONG))
    mixture = reference.mixture()
    if mixture is None:
        raise DataError(f"{bundle.folder} was exported by an older version", hint="ncd-serve export RUN once more")
    return reference, mixture


def read_batch(images: str | Path, bundle: Bundle, *, progress: Progress = SILENT) -> Batch:
    """Embed the images of a folder or of rows, copies of an image once; an even sample of very many."""
    files = _files(Path(images))
    batch = embedded(files[:: -(-len(files) // _MAX_IMAGES)], bundle, progress=progress)
    if batch.embeddings.shape[1] != bundle.reference().embeddings.shape[1]:
        raise DataError(
            f"{bundle.folder} has a reference of another backbone than its model", hint="ncd-serve export RUN once more"
        )
    _, first = np.unique(batch.embeddings, axis=0, return_index=True)
    rows = np.sort(first)
    return Batch([batch.paths[row] for row in rows], batch.embeddings[rows], batch.unreadable)


def accepted(
    add: str | Path, accept: str | Path | None, bundle: Bundle, *, progress: Progress
) -> tuple[Batch, Candidates]:
    """Return a batch, and the candidates that become clusters: those of a file, or all that are found in the batch."""
    chosen = Candidates.read(accept) if accept else None
    if chosen:
        chosen.check(bundle)
    batch = read_batch(add, bundle, progress=progress)
    return batch, chosen or discover(batch, bundle, progress=progress).candidates


def _unjudged(batch: Batch, bundle: Bundle) -> Batch:
    """Return the batch without images that a person has given to a cluster: these are not new."""
    said = corrections_of(bundle, bundle.reference())
    rows = [row for row, path in enumerate(batch.paths) if said.get(os.path.normpath(path), WRONG) == WRONG]
    return replace(batch, paths=[batch.paths[row] for row in rows], embeddings=batch.embeddings[rows])


def embedded(files: Sequence[Path], bundle: Bundle, *, progress: Progress = SILENT) -> Batch:
    """Embed image files; those that cannot be read are set aside."""
    answers = embed(bundle, files, progress=progress)
    paths, vectors, bad = list[str](), list["Floats"](), list[tuple[str, str]]()
    for file, answer in zip(files, answers, strict=True):
        if isinstance(answer, str):
            bad.append((str(file), answer))
        else:
            paths.append(os.path.normpath(file.absolute()))
            vectors.append(answer)
    if not paths:
        raise DataError(
            f"none of the {len(files)} images can be read: {bad[0][0]}: {bad[0][1]}",
            hint="check the images, and whether they were moved",
        )
    return Batch(paths, np.stack(vectors), bad)


def _files(images: Path) -> list[Path]:
    if images.suffix in FORMATS and images.is_file():
        found = [Path(row.path) for row in read_rows(images) if row.status != "error"]
    else:
        found = find_images([images])
    if not found:
        raise DataError(f"no images in {images}", hint="give a folder of images, or rows of query or assign")
    return list(dict.fromkeys(found))


def _candidate(group: Group, paths: list[str], names: list[str]) -> Candidate:
    return Candidate(
        images=[paths[row] for row in group.rows],
        strength=round(group.strength, 4),
        purity=round(group.purity, 4),
        evidence=round(group.evidence, 2),
        nearest=names[group.nearest],
    )
