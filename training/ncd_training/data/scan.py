"""Look at every image before the first epoch, so that no bad file ends a run hours later."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple, TypeVar

from ncd_serve.errors import DataError
from ncd_serve.preprocess import open_image, read_image
from ncd_training.data.manifest import Manifest
from ncd_training.base.parallel import in_processes
from ncd_serve.progress import Track

T = TypeVar("T")
_SMALL = 32  # decode JPEGs at a fraction of their size: every byte is still read
_NAMED = 10  # bad files that an error message names


class Finding(NamedTuple):
    """What is wrong with a file."""

    path: Path
    reason: str


@dataclass(frozen=True)
class Findings:
    """Files that were left out, and duplicates that stay because a published split has them."""

    skipped: tuple[Finding, ...] = ()
    duplicates: tuple[Finding, ...] = ()

    def lines(self, most: int | None = None) -> list[str]:
        """One line for each file, at most so many of a kind, and how many more there are."""
        kinds = (("skipped", self.skipped), ("kept, as published,", self.duplicates))
        return [line for word, findings in kinds for line in _shortened(word, findings, most)]


class _Look(NamedTuple):
    problem: str
    digest: bytes = b""


def scan(manifest: Manifest, *, track: Track, strict: bool = False) -> tuple[Manifest, Findings]:
    """The manifest without images that cannot be used, and what was found; with `strict`, such images are an error.

    Of files with the same bytes the first stays: labelled before unlabelled, training before test images.
    """
    groups: list[list[Path]] = [
        [path for path, _ in manifest.labelled],
        manifest.unlabelled,
        [path for path, _ in manifest.known_test],
        [path for path, _ in manifest.novel_test],
    ]
    paths = [path for group in groups for path in group]
    looks = in_processes(_look, paths, track=track, what="checking images")
    unreadable = [look.problem for look in looks]
    repeated = _repeated(paths, looks)
    reasons = unreadable if manifest.published else [a or b for a, b in zip(unreadable, repeated, strict=True)]
    findings = Findings(
        skipped=_findings(paths, reasons),
        duplicates=_findings(paths, repeated) if manifest.published else (),
    )
    if strict and findings.skipped:
        raise DataError(
            "\n".join([f"{len(findings.skipped):,} images cannot be used", *findings.lines(_NAMED)]),
            hint="remove or replace them; without --strict-data they are left out",
        )
    bounds = [0, *accumulate(len(group) for group in groups)]
    by_group = [reasons[start:end] for start, end in pairwise(bounds)]
    if all(by_group[1]):
        raise DataError(
            f"none of the {len(manifest.unlabelled)} unlabelled images can be used",
            hint=f"for example {manifest.unlabelled[0]}: {by_group[1][0]}",
        )
    return _without(manifest, by_group), findings


def _look(path: Path) -> _Look:
    try:
        content = read_image(path)
        open_image(content, at_least=_SMALL)
    except DataError as error:
        return _Look(str(error))
    return _Look("", hashlib.blake2b(content, digest_size=16).digest())


def _repeated(paths: Sequence[Path], looks: Sequence[_Look]) -> list[str]:
    """For each image, which earlier one it repeats."""
    first: dict[bytes, Path] = {}
    reasons = []
    for path, look in zip(paths, looks, strict=True):
        earlier = None if look.problem else first.get(look.digest)
        if earlier is None and not look.problem:
            first[look.digest] = path
        reasons.append("" if earlier is None else "listed twice" if earlier == path else f"same bytes as {earlier}")
    return reasons


def _findings(paths: Sequence[Path], reasons: Sequence[str]) -> tuple[Finding, ...]:
    return tuple(Finding(path, reason) for path, reason in zip(paths, reasons, strict=True) if reason)


def _without(manifest: Manifest, reasons: Sequence[Sequence[str]]) -> Manifest:
    """The manifest without the images that there is a reason against."""
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


def _shortened(word: str, findings: Sequence[Finding], most: int | None) -> list[str]:
    shown = [f"{word} {finding.path}: {finding.reason}" for finding in findings[:most]]
    more = len(findings) - len(shown)
    return [*shown, f"{word} {more:,} more"] if more else shown
