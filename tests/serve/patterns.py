"""A bundle made by hand: classes are patterns of 4 x 4 coloured pixels, and the embedding is the pixels themselves."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from ncd_export.generation import write_first_generation
from ncd_export.repository import add_to_repository
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from ncd_serve.bundle import CARD, HASHED, LABELS, MANIFEST, MODEL, VERIFICATION, Bundle, BundleManifest
from ncd_serve.files import sha256
from ncd_serve.mixture import fit_mixture
from ncd_serve.places import ExportPlace, remember_export
from ncd_serve.preprocess import PreprocessSpec
from ncd_serve.reference import REFERENCE, Reference

KNOWN, CLUSTERS, EACH = 4, 3, 30
SPEC = PreprocessSpec(resolution=4, resize=4)


def draw(kind: int, count: int, *, seed: int = 0) -> NDArray[np.uint8]:
    """Images of one class; known classes are 0 to 3, clusters 4 to 6, all others are new."""
    pattern = np.random.default_rng([7, kind]).uniform(60, 195, (4, 4, 3))
    noise = np.random.default_rng([seed, kind]).normal(0, 12, (count, 4, 4, 3))
    return np.clip(pattern + noise, 0, 255).astype(np.uint8)


def save(folder: Path, kind: int, count: int, *, seed: int = 0) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{kind}-{seed}-{number:02d}.png" for number in range(count)]
    for file, pixels in zip(files, draw(kind, count, seed=seed), strict=True):
        Image.fromarray(pixels).save(file)
    return files


def embedding(images: NDArray[np.uint8]) -> NDArray[np.float32]:
    return images.reshape(len(images), -1).astype(np.float32) / 255


def make_bundle(folder: Path, **said: Any) -> Path:
    """The bundle, with its images beside it."""
    folder.mkdir(parents=True)
    files = [file for kind in range(CLUSTERS) for file in save(folder.parent / "pile", KNOWN + kind, EACH)]
    pile = embedding(np.concatenate([draw(KNOWN + kind, EACH) for kind in range(CLUSTERS)]))
    known = embedding(np.concatenate([draw(kind, EACH) for kind in range(KNOWN)]))
    known_ids, ids = np.repeat(np.arange(KNOWN), EACH), np.repeat(np.arange(CLUSTERS), EACH)
    mixture = fit_mixture(
        np.concatenate([known, pile]),
        np.concatenate([known_ids, KNOWN + ids]),
        number=KNOWN + CLUSTERS,
        known=KNOWN,
    )
    reference = Reference(
        checkpoint="0123456789ab",
        root=folder.parent / "pile",
        paths=[file.name for file in files],
        cluster_ids=ids,
        confidences=np.linspace(0.9, 0.99, len(ids), dtype=np.float32),
        embeddings=pile,
        known_ids=np.zeros(len(ids), np.int64),
        known_classes=[f"known-{kind}" for kind in range(KNOWN)],
        known_clusters=0,
        counts=np.bincount(ids),
        truth=[],
    ).with_mixture(mixture)
    places = mixture.project(known).astype(np.float32)
    replace(reference, known_places=places, known_place_ids=known_ids).write(folder / REFERENCE)
    _write_model(folder / MODEL, pile.reshape(CLUSTERS, EACH, -1).mean(1))
    stored = Reference.read(folder / REFERENCE).mixture()
    assert stored is not None
    write_first_generation(folder / MODEL, stored)
    names = said.pop("cluster_names", [f"cluster-{number}" for number in range(CLUSTERS)])
    (folder / LABELS).write_text("\n".join(names) + "\n")
    (folder / VERIFICATION).write_text(json.dumps({"images": 0}))
    (folder / CARD).write_text("# patterns\n")
    manifest = BundleManifest(
        bundle_id="patterns",
        checkpoint="0123456789ab",
        created="now",
        dataset="patterns",
        method="dual",
        preprocess=SPEC,
        known_classes=[f"known-{kind}" for kind in range(KNOWN)],
        cluster_names=names,
        training={"unlabelled_images": len(ids)},
        versions={},
        sha256={name: sha256(folder / name) for name in (*HASHED, REFERENCE)},
        **said,
    )
    (folder / MANIFEST).write_text(manifest.model_dump_json())
    return folder


def export(bundle: Path, repository: Path, model: str) -> None:
    """Add the bundle to a repository, which it remembers."""
    add_to_repository(Bundle.read(bundle), repository, name=model)
    remember_export(bundle, ExportPlace(repository, model), bundle=bundle)


def _write_model(path: Path, centres: NDArray[np.float32]) -> None:
    """Logits are minus the squared distance to each centre, up to what all have in common."""
    nodes = [
        helper.make_node("Cast", ["image"], ["pixels"], to=TensorProto.FLOAT),
        helper.make_node("Flatten", ["pixels"], ["flat"]),
        helper.make_node("Div", ["flat", "white"], ["embedding"]),
        helper.make_node("MatMul", ["embedding", "weight"], ["products"]),
        helper.make_node("Add", ["products", "bias"], ["logits"]),
        helper.make_node("Softmax", ["logits"], ["probabilities"], axis=1),
        helper.make_node("ArgMax", ["probabilities"], ["cluster_id"], axis=1, keepdims=0),
        helper.make_node("ReduceMax", ["probabilities", "axis"], ["confidence"], keepdims=0),
        helper.make_node("Sub", ["cluster_id", "cluster_id"], ["fit"]),
    ]
    constants = {
        "white": np.float32(255),
        "weight": (2 * centres.T).astype(np.float32),
        "bias": -(centres**2).sum(1).astype(np.float32),
        "axis": np.array([1]),
    }
    kinds = {"cluster_id": TensorProto.INT64, "confidence": TensorProto.FLOAT, "fit": TensorProto.INT64}
    outputs = [helper.make_tensor_value_info(name, kind, ["N"]) for name, kind in kinds.items()]
    for name, size in (("probabilities", len(centres)), ("embedding", centres.shape[1])):
        outputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", size]))
    image = helper.make_tensor_value_info("image", TensorProto.UINT8, ["N", 4, 4, 3])
    stored = [numpy_helper.from_array(np.asarray(values), name) for name, values in constants.items()]
    graph = helper.make_graph(nodes, "graph", [image], outputs, stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.save(model, path)
