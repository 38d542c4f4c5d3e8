"""A small finished run made by hand, whose names are as hostile as names can be."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ncd_serve.bundle import HASHED, MANIFEST, BundleManifest
from ncd_serve.files import sha256
from ncd_serve.gallery import MapKind, build_gallery, read_source
from ncd_serve.preprocess import PreprocessSpec
from ncd_serve.reference import REFERENCE, Reference

SCRIPT = "<script>alert(1)</script>.png"  # below a folder, since it has a slash
CHECKPOINT = "0123456789ab"
HOSTILE_CLASS = "</script><b>owl"
KNOWN = ["gull", HOSTILE_CLASS]
SIZES = (12, 8, 4)  # of clusters 1, 0 and 2; cluster 3 is empty


def make_run(folder: Path) -> Path:
    """Cluster 1 is red and pure, cluster 0 green and mixed, cluster 2 blue; its last file is missing."""
    paths, ids, truth = [], [], []
    for cluster, size, colour in ((1, SIZES[0], "red"), (0, SIZES[1], "green"), (2, SIZES[2], "blue")):
        for number in range(size):
            paths.append(f"{colour}/{colour}-{number:02d}.png")
            ids.append(cluster)
            truth.append({1: "tern", 0: "auk" if number < 6 else "tern", 2: HOSTILE_CLASS}[cluster])
    paths[0] = SCRIPT
    for path, colour in zip(paths[:-1], truth, strict=False):
        target = folder / "images" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shade = {"tern": (200, 30, 30), "auk": (30, 160, 30)}.get(colour, (30, 30, 200))
        Image.new("RGB", (40, 30), shade).save(target)
    Reference(
        checkpoint=CHECKPOINT,
        root=folder / "images",
        paths=paths,
        cluster_ids=np.array(ids),
        confidences=np.linspace(0.99, 0.3, len(ids), dtype=np.float32),
        embeddings=embeddings(ids),
        known_ids=np.array([0 if cluster else 1 for cluster in ids]),
        known_classes=KNOWN,
        known_clusters=0,
        counts=np.bincount(ids, minlength=4),
        truth=truth,
        matched=["auk", "tern", HOSTILE_CLASS, ""],
    ).write(folder / "reference.npz")
    return folder


def embeddings(ids: list[int]) -> np.ndarray:
    """Clusters along the axes, each image a little farther from its own."""
    found = np.zeros((len(ids), 4), np.float32)
    for row, cluster in enumerate(ids):
        found[row, cluster], found[row, 3] = 1, 0.05 * (row % 5)
    return found


def make_bundle(run: Path, folder: Path, **said: Any) -> Path:
    """A bundle of the run whose model cannot be run, but whose names can be read."""
    folder.mkdir()
    for name in HASHED:
        (folder / name).write_text(name)
    shutil.copyfile(run / REFERENCE, folder / REFERENCE)
    manifest = BundleManifest(
        bundle_id="0",
        checkpoint=CHECKPOINT,
        created="now",
        dataset="birds",
        method="dual",
        preprocess=PreprocessSpec(resolution=32, resize=32),
        known_classes=KNOWN,
        training={},
        versions={},
        sha256={name: sha256(folder / name) for name in (*HASHED, REFERENCE)},
        **said,
    )
    (folder / MANIFEST).write_text(manifest.model_dump_json())
    return folder


def make_page(folder: Path, **said: Any) -> Path:
    """The gallery of such a run, about whose clusters something was said already."""
    shown = read_source(make_run(folder))
    shown = replace(shown, naming=replace(shown.naming, **said))
    return build_gallery(shown, folder / "gallery.html", kind=MapKind.PCA).path
