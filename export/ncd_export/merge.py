"""Merged clusters in the served graph: appended nodes add the probabilities of one cluster to those of another.

The exported graph is unchanged apart from the names of its outputs. So a merge can be undone: without the appended
nodes, the graph is the one that was exported and verified.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import GraphProto, helper, numpy_helper

from ncd_serve.contract import OUTPUTS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

_NODE_PREFIX, _UNMERGED_PREFIX = "merge/", "unmerged/"
_CHANGED_OUTPUTS = tuple(output.name for output in OUTPUTS if output.merged)


def set_merges(graph: GraphProto, merged: Mapping[int, int], *, known: int) -> None:
    """Merge each cluster that is a key of `merged` into its value; earlier merges are undone first.

    `known` is the number of known classes, which come before the clusters in a graph with class ids.
    """
    _undo(graph)
    if not merged:
        return
    answers = {output.name: output.type.tensor_type.shape for output in graph.output}
    _rename(graph, {name: _UNMERGED_PREFIX + name for name in _CHANGED_OUTPUTS if name in answers})
    sums = _sums(answers["probabilities"].dim[1].dim_value, merged)
    _add(graph, "MatMul", [_UNMERGED_PREFIX + "probabilities", _store(graph, "clusters", sums)], "probabilities")
    _add(graph, "ArgMax", ["probabilities"], "cluster_id", axis=1, keepdims=0)
    _add(graph, "ReduceMax", ["probabilities", _store(graph, "axis", np.array([1]))], "confidence", keepdims=0)
    if "class_id" in answers:
        _add_class(graph, sums, known)


def _add_class(graph: GraphProto, sums: NDArray[np.float32], known: int) -> None:
    (decision,) = (node for node in graph.node if _UNMERGED_PREFIX + "class_id" in node.output)
    if decision.op_type == "ArgMax":  # of a joint head, with probabilities of its own
        classes = np.eye(known + len(sums), dtype=np.float32)
        classes[known:, known:] = sums
        before, after = _NODE_PREFIX + "class_probabilities", _NODE_PREFIX + "merged_class_probabilities"
        _add(graph, "Softmax", [decision.input[0]], before, axis=1)
        _add(graph, "MatMul", [before, _store(graph, "classes", classes)], after)
        _add(graph, "ArgMax", [after], "class_id", axis=1, keepdims=0)
    else:  # in an open world the clusters are the classes
        _add(graph, "Identity", ["cluster_id"], "class_id")
    _add(graph, "GreaterOrEqual", ["class_id", _store(graph, "known", np.array(known))], "is_novel")


def _sums(clusters: int, merged: Mapping[int, int]) -> NDArray[np.float32]:
    """Return the matrix [C, C] that adds the probability of each cluster (row) to its target (column)."""
    return np.eye(clusters, dtype=np.float32)[[merged.get(number, number) for number in range(clusters)]]


def _undo(graph: GraphProto) -> None:
    for part in (graph.node, graph.initializer):
        while part and part[-1].name.startswith(_NODE_PREFIX):
            part.pop()
    _rename(graph, {_UNMERGED_PREFIX + name: name for name in _CHANGED_OUTPUTS})


def _rename(graph: GraphProto, names: Mapping[str, str]) -> None:
    for node in graph.node:
        for tensors in (node.input, node.output):
            tensors[:] = [names.get(name, name) for name in tensors]


def _add(graph: GraphProto, kind: str, inputs: list[str], output: str, **attributes: Any) -> None:
    graph.node.append(helper.make_node(kind, inputs, [output], name=_NODE_PREFIX + output, **attributes))


def _store(graph: GraphProto, name: str, values: NDArray[np.generic]) -> str:
    graph.initializer.append(numpy_helper.from_array(values, _NODE_PREFIX + name))
    return _NODE_PREFIX + name
