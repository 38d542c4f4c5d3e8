"""Merged clusters in the served graph: a tail that adds the probabilities of one cluster to those of another.

The graph itself goes on with what it computed before, under other names. So a merge can be taken back: without the tail
the graph is the one that was exported and verified.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import GraphProto, helper, numpy_helper

from ncd_serve.contract import OUTPUTS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

_TAIL, _BEFORE = "merge/", "unmerged/"
_CHANGED = tuple(output.name for output in OUTPUTS if output.merged)


def set_merges(graph: GraphProto, merged: Mapping[int, int], *, known: int) -> None:
    """Give the images of each key to the cluster that it is mapped to; what was merged before is taken back first.

    `known` is the number of known classes: a graph that answers with classes has them before the clusters.
    """
    _take_back(graph)
    if not merged:
        return
    answers = {output.name: output.type.tensor_type.shape for output in graph.output}
    _rename(graph, {name: _BEFORE + name for name in _CHANGED if name in answers})
    sums = _sums(answers["probabilities"].dim[1].dim_value, merged)
    _add(graph, "MatMul", [_BEFORE + "probabilities", _store(graph, "clusters", sums)], "probabilities")
    _add(graph, "ArgMax", ["probabilities"], "cluster_id", axis=1, keepdims=0)
    _add(graph, "ReduceMax", ["probabilities", _store(graph, "axis", np.array([1]))], "confidence", keepdims=0)
    if "class_id" in answers:
        _add_class(graph, sums, known)


def _add_class(graph: GraphProto, sums: NDArray[np.float32], known: int) -> None:
    (decision,) = (node for node in graph.node if _BEFORE + "class_id" in node.output)
    if decision.op_type == "ArgMax":  # of a joint head, with probabilities of its own
        classes = np.eye(known + len(sums), dtype=np.float32)
        classes[known:, known:] = sums
        before, after = _TAIL + "class_probabilities", _TAIL + "merged_class_probabilities"
        _add(graph, "Softmax", [decision.input[0]], before, axis=1)
        _add(graph, "MatMul", [before, _store(graph, "classes", classes)], after)
        _add(graph, "ArgMax", [after], "class_id", axis=1, keepdims=0)
    else:  # in an open world the clusters are the classes
        _add(graph, "Identity", ["cluster_id"], "class_id")
    _add(graph, "GreaterOrEqual", ["class_id", _store(graph, "known", np.array(known))], "is_novel")


def _sums(clusters: int, merged: Mapping[int, int]) -> NDArray[np.float32]:
    """[C, C]: row by row, the cluster that a cluster's probability is added to."""
    return np.eye(clusters, dtype=np.float32)[[merged.get(number, number) for number in range(clusters)]]


def _take_back(graph: GraphProto) -> None:
    for part in (graph.node, graph.initializer):
        while part and part[-1].name.startswith(_TAIL):
            part.pop()
    _rename(graph, {_BEFORE + name: name for name in _CHANGED})


def _rename(graph: GraphProto, names: Mapping[str, str]) -> None:
    for node in graph.node:
        for tensors in (node.input, node.output):
            tensors[:] = [names.get(name, name) for name in tensors]


def _add(graph: GraphProto, kind: str, inputs: list[str], output: str, **attributes: Any) -> None:
    graph.node.append(helper.make_node(kind, inputs, [output], name=_TAIL + output, **attributes))


def _store(graph: GraphProto, name: str, values: NDArray[np.generic]) -> str:
    graph.initializer.append(numpy_helper.from_array(values, _TAIL + name))
    return _TAIL + name
