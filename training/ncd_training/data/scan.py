"""Scan of a run's images before the first epoch, so that no bad file ends a run hours later.

The scanned manifest is kept in the run directory. Every later command on the run gets the same images or an error.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple, TypeVar

from ncd_serve.errors import DataError
from ncd_serve.files import atomic_path
from ncd_serve.preprocess import open_image, read_image
from ncd_serve.progress import Track
from ncd_serve.text import printable
from ncd_training.base.processes import in_threads
from ncd_training.data.manifest import Manifest

T = TypeVar("T")
_DECODED_SIDE = 32  # px: JPEGs are decoded at a fraction of their size, but every byte is read
_SIZED_IMAGES, _LARGE_SIDE = 30, 256
_MAX_NAMED_FILES = 10  # in an error message
_SPLITS = ("labelled", "unlabelled", "known_test", "novel_test")
_FACTS = ("name", "known_classes", "novel_classes", "novel_names", "published", "open_world", "notes")


class Finding(NamedTuple):
    """File, and the reason why it is bad."""

    path: Path
    reason: str


class Stamp(NamedTuple):
    """Size, modification time and hash of a file."""

    size: int
    modified_ns: int
    digest: bytes


@dataclass(frozen=True)
class Findings:
    """Skipped files, duplicates that stay because a published split has them, and stamps of all files."""

    skipped: tuple[Finding, ...] = ()
    duplicates: tuple[Finding, ...] = ()
    stamps: dict[Path, Stamp] = field(default_factory=dict, compare=False, repr=False)

    def lines(self, limit: int | None = None) -> list[str]:
        """Return one line for each bad file, up to `limit` of a kind, and a line with the number of the others."""
        kinds = (("skipped", self.skipped), ("kept, as published,", self.duplicates))
        return [line for word, findings in kinds for line in _shortened(word, findings, limit)]


class _Look(NamedTuple):
    problem: str
    stamp: Stamp = Stamp(0, 0, b"")


Mapper = Callable[[Callable[[Path], _Look], list[Path]], Iterable[_Look]]


def typical_side(paths: Sequence[Path]) -> int | None:
    """Return the median shorter side of some of the images, in px; a large image may count as smaller than it is.

    None if none of them can be read.
    """
    sides = []
    for path in paths[:: len(paths) // _SIZED_IMAGES + 1]:
        with suppress(DataError):
            sides.append(min(open_image(path, at_least=_LARGE_SIDE).size))
    return int(median(sides)) if sides else None


def scan(
    manifest: Manifest, *, track: Track, strict: bool = False, mapper: Mapper | None = None
) -> tuple[Manifest, Findings]:
    """Return the manifest without unusable images, and the findings. If `strict`, unusable images raise DataError.

    Of files with the same bytes only the first stays: labelled before unlabelled, training before test images.
    `mapper` distributes the work over training processes.
    """
    groups = [[path for path, _ in rows] for rows in _splits(manifest)]
    paths = [path for group in groups for path in group]
    mapper = mapper or (lambda look, files: track(in_threads(look, files), "checking images", len(files)))
    looks = list(mapper(_look, paths))
    unreadable, repeated = [look.problem for look in looks], _repeated(paths, looks)
    reasons = unreadable if manifest.published else [a or b for a, b in zip(unreadable, repeated, strict=True)]
    findings = Findings(
        skipped=_findings(paths, reasons),
        duplicates=_findings(paths, repeated) if manifest.published else (),
        stamps={path: look.stamp for path, look in zip(paths, looks, strict=True)},
    )
    if strict and findings.skipped:
        raise DataError(
            "\n".join([f"{len(findings.skipped):,} images cannot be used", *findings.lines(_MAX_NAMED_FILES)]),
            hint="remove or replace them; without --strict-data they are skipped",
        )
    bounds = [0, *accumulate(len(group) for group in groups)]
    by_group = [reasons[start:end] for start, end in pairwise(bounds)]
    if all(by_group[1]):
        raise DataError(
            f"none of the {len(manifest.unlabelled)} unlabelled images can be used",
            hint=f"replace the images; for example, {manifest.unlabelled[0]}: {by_group[1][0]}",
        )
    return _without(manifest, by_group), findings


def save_manifest(target: Path, manifest: Manifest, stamps: dict[Path, Stamp]) -> None:
    """Write a scanned manifest: a line of facts, then one for each image.

    Paths are absolute, so a run can be opened from any folder. Labels of unlabelled images are their true classes if
    the dataset has them, for reports alone.
    """
    rows = [
        (split, str(path.absolute()), label, *stamps[path][:2], stamps[path].digest.hex())
        for split, images in zip(_SPLITS, _splits(manifest), strict=True)
        for path, label in images
    ]
    facts = {name: getattr(manifest, name) for name in _FACTS}
    facts |= {"has_truth": manifest.truth is not None, "images": len(rows)}
    with atomic_path(target) as temporary, temporary.open("w", encoding="ascii") as stream:
        stream.writelines(json.dumps(line) + "\n" for line in (facts, *rows))  # names on disk need not be UTF-8


def load_manifest_of_run(source: Path, *, track: Track | None = None) -> Manifest:
    """Read the manifest of a run. With `track`, check the files: DataError if one is missing or has changed."""
    splits: dict[str, list[tuple[Path, int]]] = {name: [] for name in _SPLITS}
    files: dict[Path, Stamp] = {}
    try:
        with source.open(encoding="ascii") as stream:
            facts, *rows = map(json.loads, stream)
        for split, name, label, size, modified, digest in rows:
            splits[split].append((path := Path(name), label))
            files[path] = Stamp(size, modified, bytes.fromhex(digest))
        if len(rows) != facts["images"]:
            raise ValueError(f"{len(rows)} of its {facts['images']} images are there")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{source} is damaged: {error}", hint="restore it from a copy, or train again") from None
    if track is not None:
        _check_files(files, source.parent, track)
    unlabelled = splits["unlabelled"]
    return Manifest(
        name=facts["name"],
        labelled=splits["labelled"],
        unlabelled=[path for path, _ in unlabelled],
        known_classes=facts["known_classes"],
        novel_classes=facts["novel_classes"],
        truth=[label for _, label in unlabelled] if facts["has_truth"] else None,
        novel_names=tuple(facts["novel_names"]),
        known_test=tuple(splits["known_test"]),
        novel_test=tuple(splits["novel_test"]),
        published=facts["published"],
        open_world=facts["open_world"],
        notes=tuple(facts["notes"]),
    )


def _check_files(files: dict[Path, Stamp], run: Path, track: Track) -> None:
    """Raise DataError if a file has changed. Only a file with another modification time is read again."""
    looks = track(in_threads(lambda path: _changed(path, files[path]), list(files)), "checking images", len(files))
    wrong = [Finding(path, reason) for path, reason in zip(files, looks, strict=True) if reason]
    if wrong:
        raise DataError(
            f"{len(wrong):,} of the {len(files):,} images of {run} have changed since the run was started; "
            f"{wrong[0].path}: {wrong[0].reason}",
            hint="restore the images, or start another run",
        )


def _changed(path: Path, stamp: Stamp) -> str:
    try:
        stat = path.stat()
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if stat.st_size != stamp.size:
        return f"{stat.st_size:,} bytes instead of {stamp.size:,}"
    if stat.st_mtime_ns != stamp.modified_ns and _digest(path.read_bytes()) != stamp.digest:
        return "its content has changed"
    return ""


def _splits(manifest: Manifest) -> list[list[tuple[Path, int]]]:
    truth = manifest.truth or [-1] * len(manifest.unlabelled)
    unlabelled = list(zip(manifest.unlabelled, truth, strict=True))
    return [manifest.labelled, unlabelled, list(manifest.known_test), list(manifest.novel_test)]


def _look(path: Path) -> _Look:
    try:
        content = read_image(path)
        open_image(content, at_least=_DECODED_SIDE)
        modified = path.stat().st_mtime_ns
    except DataError as error:
        return _Look(str(error))
    return _Look("", Stamp(len(content), modified, _digest(content)))


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


def _repeated(paths: Sequence[Path], looks: Sequence[_Look]) -> list[str]:
    """Return for each image the earlier file that it repeats, as a reason; empty if it repeats none."""
    first: dict[bytes, Path] = {}
    reasons = []
    for path, (problem, stamp) in zip(paths, looks, strict=True):
        earlier = None if problem else first.get(stamp.digest)
        if earlier is None and not problem:
            first[stamp.digest] = path
        reasons.append("" if earlier is None else "listed twice" if earlier == path else f"same bytes as {earlier}")
    return reasons


def _findings(paths: Sequence[Path], reasons: Sequence[str]) -> tuple[Finding, ...]:
    return tuple(Finding(path, reason) for path, reason in zip(paths, reasons, strict=True) if reason)


def _without(manifest: Manifest, reasons: Sequence[Sequence[str]]) -> Manifest:
    """Return the manifest without rejected images."""
    labelled, unlabelled, known_test, novel_test = reasons
    return replace(
        manifest,
        labelled=_good(manifest.labelled, labelled),
        unlabelled=_good(manifest.unlabelled, unlabelled),
        truth=None if manifest.truth is None else _good(manifest.truth, unlabelled),
        known_test=tuple(_good(manifest.known_test, known_test)),
        novel_test=tuple(_good(manifest.novel_test, novel_test)),
    )


def _good(items: Sequence[T], reasons: Sequence[str]) -> list[T]:
    return [item for item, reason in zip(items, reasons, strict=True) if not reason]


def _shortened(word: str, findings: Sequence[Finding], limit: int | None) -> list[str]:
    shown = [printable(f"{word} {finding.path}: {finding.reason}") for finding in findings[:limit]]
    more = len(findings) - len(shown)
    return [*shown, f"{word} {more:,} more"] if more else shown
