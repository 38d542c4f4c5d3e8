"""Look at every image before the first epoch, so that no bad file ends a run hours later."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from ncd_serve.errors import DataError
from ncd_serve.preprocess import open_image
from ncd_training.manifest import Manifest
from ncd_training.progress import Track

_SMALL = 32  # decode JPEGs at a fraction of their size: every byte is still read


def scan(manifest: Manifest, *, track: Track) -> tuple[Manifest, dict[Path, str]]:
    """The manifest without unreadable images, and the reason for each that was left out."""
    paths = manifest.images + [path for path, _ in (*manifest.known_test, *manifest.novel_test)]
    with ThreadPoolExecutor() as pool:
        reasons = dict(zip(paths, track(pool.map(_problem, paths), "checking images", len(paths)), strict=True))
    bad = {path: reason for path, reason in reasons.items() if reason}
    kept = [number for number, path in enumerate(manifest.unlabelled) if path not in bad]
    if not kept:
        raise DataError(f"none of the {len(manifest.unlabelled)} unlabelled images can be read", hint=_example(bad))
    clean = replace(
        manifest,
        labelled=[pair for pair in manifest.labelled if pair[0] not in bad],
        unlabelled=[manifest.unlabelled[number] for number in kept],
        truth=None if manifest.truth is None else [manifest.truth[number] for number in kept],
        known_test=tuple(pair for pair in manifest.known_test if pair[0] not in bad),
        novel_test=tuple(pair for pair in manifest.novel_test if pair[0] not in bad),
    )
    return clean, bad


def _problem(path: Path) -> str:
    try:
        open_image(path, at_least=_SMALL)
    except DataError as error:
        return str(error)
    return ""


def _example(bad: dict[Path, str]) -> str:
    path, reason = next(iter(bad.items()))
    return f"for example {path}: {reason}"
