"""Nodes of a generation: probabilities of no cluster and of a known class, and clusters that were appended later.

The exported graph stays as it was verified. Each generation adds a block after it. The block of the first computes the
mixture of all classes; the block of a later one also hands images to its new clusters. For all other images it passes
on what came before it, bit for bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from ncd_export.nodes import Nodes, drop_nodes, rename_tensors

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray
    from onnx import GraphProto

    from ncd_serve.fit import FitLimits
    from ncd_serve.mixture import Mixture

ODDS = ("outside", "known")  # outputs that follow the number of clusters
_ODDS_PREFIX = "outside/"
_MAX_ODDS = 13.0
_LAST = np.array([np.iinfo(np.int64).max])


def write_first_generation(path: Path, mixture: Mixture) -> None:
    """Add the outputs `outside` and `known` to the file of an exported graph, which has no other blocks yet."""
    model = onnx.load(path)
    nodes = Nodes(model.graph, _prefix(1))
    names = ODDS if mixture.known_classes else ODDS[:1]
    batch = model.graph.input[0].type.tensor_type.shape.dim[0].dim_param
    model.graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, [batch]) for name in names)
    _add_odds(model.graph, mixture, *_add_mixture(nodes, mixture, _add_unit(nodes)))
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, path)


def append_clusters(
    graph: GraphProto, mixture: Mixture, limits: FitLimits, *, added: int, known: int, generation: int
) -> None:
    """Append the last `added` classes of a mixture as clusters, to a graph without merges.

    `limits` are those of fit of all clusters, `known` is the number of known classes.
    """
    drop_nodes(graph, _ODDS_PREFIX)
    nodes, outputs = Nodes(graph, _prefix(generation)), {output.name: output for output in graph.output}
    changed = [name for name in outputs if name not in ("embedding", *ODDS)]
    before = {name: f"{_prefix(generation)}before/{name}" for name in changed}
    rename_tensors(graph, before)
    unit = _add_unit(nodes)
    places, joint = _add_mixture(nodes, mixture, unit)
    clusters = outputs["probabilities"].type.tensor_type.shape.dim[1]
    clusters.dim_value += added
    first_cluster, first_new = len(mixture.means) - clusters.dim_value, len(mixture.means) - added
    best = nodes.inner("ArgMax", [joint], "best", axis=1, keepdims=0)
    is_new = nodes.inner("GreaterOrEqual", [best, nodes.store("first_new", np.array(first_new))], "is_new")
    ids = nodes.inner("Sub", [best, nodes.store("first_cluster", np.array(first_cluster))], "ids")
    nodes.add("Where", [is_new, ids, before["cluster_id"]], "cluster_id")
    fresh = _add_probabilities(nodes, joint, is_new, before, first_cluster=first_cluster, added=added)
    if "fit" in outputs:
        new = nodes.inner("Sub", [best, nodes.store("new_from", np.array(first_new))], "new")
        _add_fit(nodes, unit, new, fresh, is_new, before, limits, added=added)
    if "class_id" in outputs:
        _add_class(nodes, ids, is_new, before, known=known, open_world=first_cluster == 0)
    _add_odds(graph, mixture, places, joint)


def _prefix(generation: int) -> str:
    return f"generation-{generation}/"


def _add_mixture(nodes: Nodes, mixture: Mixture, unit: str) -> tuple[str, str]:
    """Add `Mixture.project` and `Mixture.log_joint`; return the names of the places [N, m] and of the joint [N, T]."""
    axis = nodes.store("axis", np.array([1]))
    projected = nodes.inner("MatMul", [unit, nodes.store("projection", _f32(mixture.projection))], "projected")
    places = nodes.inner("Add", [projected, nodes.store("offset", _f32(mixture.offset))], "places")
    own = nodes.inner("ReduceSumSquare", [places, axis], "own_squares", keepdims=1)
    products = nodes.inner("MatMul", [places, nodes.store("doubled_means", _f32(-2 * mixture.means.T))], "products")
    others = nodes.store("mean_squares", _f32((mixture.means**2).sum(1)))
    sums = nodes.inner("Add", [nodes.inner("Add", [own, products], "part_squares"), others], "sum_squares")
    squares = nodes.inner("Relu", [sums], "squares")
    log_weights = np.log(mixture.weights)
    return places, _add_student(nodes, squares, mixture, mixture.spread, log_weights, "joint")


def _add_student(
    nodes: Nodes, squares: str, mixture: Mixture, spread: float, log_weights: NDArray[np.floating[Any]], output: str
) -> str:
    """Add `mixture.log_student` of squared distances, plus log weights."""
    dims, tail = len(mixture.offset), mixture.tail
    scaled = nodes.inner(
        "Mul", [squares, nodes.store(f"{output}_scale", _f32(1 / (tail * spread)))], f"{output}_scaled"
    )
    raised = nodes.inner("Add", [scaled, nodes.store(f"{output}_one", _f32(1.0))], f"{output}_raised")
    logs = nodes.inner("Log", [raised], f"{output}_logs")
    power = nodes.store(f"{output}_power", _f32(-(tail + dims) / 2))
    constant = nodes.store(f"{output}_constant", _f32(log_weights - dims / 2 * np.log(spread)))
    return nodes.inner("Add", [nodes.inner("Mul", [logs, power], f"{output}_tail"), constant], output)


def _add_unit(nodes: Nodes) -> str:
    """Add `fit.directions` of the embedding."""
    length = nodes.inner("ReduceL2", ["embedding", nodes.store("features", np.array([1]))], "length", keepdims=1)
    safe = nodes.inner("Max", [length, nodes.store("tiny", _f32(1e-12))], "safe_length")
    return nodes.inner("Div", ["embedding", safe], "unit")


def _add_odds(graph: GraphProto, mixture: Mixture, places: str, joint: str) -> None:
    """Add `Mixture.outside`, and `Mixture.known` where it is an output: models of older versions do not have it."""
    nodes = Nodes(graph, _ODDS_PREFIX)
    squares = nodes.inner("ReduceSumSquare", [places, nodes.store("axis", np.array([1]))], "squares", keepdims=1)
    unseen = _add_student(nodes, squares, mixture, mixture.unseen_spread, np.array(0.0), "unseen")
    _add_probability(nodes, [joint, unseen], mixture.is_cluster, mixture.slope, mixture.intercept, "outside")
    if "known" in {output.name for output in graph.output}:
        slope, intercept = -mixture.known_slope, -mixture.known_intercept
        _add_probability(nodes, [joint, unseen], mixture.is_known, slope, intercept, "known")


def _add_probability(
    nodes: Nodes, logs: list[str], inside: NDArray[np.bool_], slope: float, intercept: float, output: str
) -> None:
    """Add the calibrated log ratio of everything else to the classes inside, as a probability."""
    joint, unseen = logs
    axis = nodes.store(f"{output}_axis", np.array([1]))
    chosen, rest = (
        nodes.inner("Gather", [joint, nodes.store(f"{output}_{name}_ids", np.flatnonzero(mask))], name, axis=1)
        for name, mask in ((f"{output}_inside", inside), (f"{output}_rest", ~inside))
    )
    others = nodes.inner("Concat", [rest, unseen], f"{output}_others", axis=1)
    outer = nodes.inner("ReduceLogSumExp", [others, axis], f"{output}_outer", keepdims=0)
    inner = nodes.inner("ReduceLogSumExp", [chosen, axis], f"{output}_inner", keepdims=0)
    score = nodes.inner("Sub", [outer, inner], f"{output}_score")
    sloped = nodes.inner("Mul", [score, nodes.store(f"{output}_slope", _f32(slope))], f"{output}_sloped")
    odds = nodes.inner("Add", [sloped, nodes.store(f"{output}_intercept", _f32(intercept))], f"{output}_odds")
    nodes.add("Sigmoid", [odds], output)


def _add_probabilities(
    nodes: Nodes, joint: str, is_new: str, before: dict[str, str], *, first_cluster: int, added: int
) -> str:
    """Add probabilities and confidence; return the name of the confidence in the new clusters [N]."""
    ends = nodes.store("ends", _LAST)
    axis = nodes.store("classes", np.array([1]))
    part = nodes.inner("Slice", [joint, nodes.store("starts", np.array([first_cluster])), ends, axis], "clusters")
    fresh = nodes.inner("Softmax", [part], "fresh", axis=1)
    pads = nodes.store("pads", np.array([0, 0, 0, added]))
    padded = nodes.inner("Pad", [before["probabilities"], pads], "padded")
    column = nodes.inner("Unsqueeze", [is_new, axis], "is_new_column")
    nodes.add("Where", [column, fresh, padded], "probabilities")
    confidence = nodes.inner("ReduceMax", [fresh, axis], "fresh_confidence", keepdims=0)
    nodes.add("Where", [is_new, confidence, before["confidence"]], "confidence")
    return confidence


def _add_fit(
    nodes: Nodes,
    unit: str,
    new: str,
    confidence: str,
    is_new: str,
    before: dict[str, str],
    limits: FitLimits,
    *,
    added: int,
) -> None:
    """Add `FitLimits.judge` for images of new clusters, numbered by `new` [N]."""
    axis, zero = nodes.store("columns", np.array([1])), nodes.store("zero", np.array(0))
    number = nodes.inner("Max", [new, zero], "number")
    cosines = nodes.inner("MatMul", [unit, nodes.store("centres", _f32(limits.centres[-added:].T))], "cosines")
    column = nodes.inner("Unsqueeze", [number, axis], "number_column")
    cosine = nodes.inner(
        "Squeeze", [nodes.inner("GatherElements", [cosines, column], "picked", axis=1), axis], "cosine"
    )
    one = nodes.store("one", _f32(1.0))
    distance = nodes.inner("Sub", [one, cosine], "distance")
    low, high = nodes.store("low", _f32(1e-6)), nodes.store("high", _f32(1 - 1e-6))
    sure = nodes.inner("Clip", [confidence, low, high], "sure")
    odds = nodes.inner(
        "Log", [nodes.inner("Div", [sure, nodes.inner("Sub", [one, sure], "rest")], "ratio")], "log_odds"
    )
    # Odds of a probability near 1 cannot be told apart in single precision.
    values = {
        "outlier_distance": limits.outlier_distance,
        "unusual_distance": limits.unusual_distance,
        "unusual_odds": np.minimum(limits.unusual_odds, _MAX_ODDS),
    }
    far, unusual_far, unsure = (
        nodes.inner("Gather", [nodes.store(f"{name}_values", _f32(limit[-added:])), number], name)
        for name, limit in values.items()
    )
    unlike = nodes.inner("Greater", [distance, unusual_far], "unlike")
    unusual = nodes.inner("Or", [unlike, nodes.inner("Less", [odds, unsure], "unsure")], "unusual")
    mild = nodes.inner("Cast", [unusual], "mild", to=TensorProto.INT64)
    outlier = nodes.inner("Greater", [distance, far], "outlier")
    fit = nodes.inner("Where", [outlier, nodes.store("two", np.array(2)), mild], "new_fit")
    nodes.add("Where", [is_new, fit, before["fit"]], "fit")


def _add_class(nodes: Nodes, ids: str, is_new: str, before: dict[str, str], *, known: int, open_world: bool) -> None:
    """Add class ids: in an open world the clusters are the classes, otherwise they come after the known classes."""
    if open_world:
        nodes.add("Identity", ["cluster_id"], "class_id")
    else:
        classes = nodes.inner("Add", [ids, nodes.store("known", np.array(known))], "classes_of_ids")
        nodes.add("Where", [is_new, classes, before["class_id"]], "class_id")
    nodes.add("Or", [is_new, before["is_novel"]], "is_novel")


def _f32(values: NDArray[np.floating[Any]] | float) -> NDArray[np.float32]:
    return np.asarray(values, np.float32)
