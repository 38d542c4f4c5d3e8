"""Merged clusters in the served graph: appended nodes add the probabilities of one cluster to those of another.

The exported graph is unchanged apart from the names of its outputs. So a merge can be undone: without the appended
nodes, the graph is the one that was exported and verified.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from onnx import GraphProto

from ncd_export.nodes import Nodes, drop_nodes, rename_tensors
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
    rename_tensors(graph, {name: _UNMERGED_PREFIX + name for name in _CHANGED_OUTPUTS if name in answers})
    sums, nodes = _sums(answers["probabilities"].dim[1].dim_value, merged), Nodes(graph, _NODE_PREFIX)
    nodes.add("MatMul", [_UNMERGED_PREFIX + "probabilities", nodes.store("clusters", sums)], "probabilities")
    nodes.add("ArgMax", ["probabilities"], "cluster_id", axis=1, keepdims=0)
    nodes.add("ReduceMax", ["probabilities", nodes.store("axis", np.array([1]))], "confidence", keepdims=0)
    if "class_id" in answers:
        _add_class(nodes, sums, known)


def _add_class(nodes: Nodes, sums: NDArray[np.float32], known: int) -> None:
    (decision,) = (node for node in nodes.graph.node if _UNMERGED_PREFIX + "class_id" in node.output)
    if decision.op_type == "ArgMax":  # of a joint head, with probabilities of its own
        classes = np.eye(known + len(sums), dtype=np.float32)
        classes[known:, known:] = sums
        before, after = _NODE_PREFIX + "class_probabilities", _NODE_PREFIX + "merged_class_probabilities"
        nodes.add("Softmax", [decision.input[0]], before, axis=1)
        nodes.add("MatMul", [before, nodes.store("classes", classes)], after)
        nodes.add("ArgMax", [after], "class_id", axis=1, keepdims=0)
    elif decision.op_type == "Where":  # a joint head with appended clusters: ids are decided already
        targets = np.concatenate([np.arange(known), known + sums.argmax(1)])
        nodes.add("Gather", [nodes.store("targets", targets), decision.output[0]], "class_id")
    else:  # in an open world the clusters are the classes
        nodes.add("Identity", ["cluster_id"], "class_id")
    nodes.add("GreaterOrEqual", ["class_id", nodes.store("known", np.array(known))], "is_novel")


def _sums(clusters: int, merged: Mapping[int, int]) -> NDArray[np.float32]:
    """Return the matrix [C, C] that adds the probability of each cluster (row) to its target (column)."""
    return np.eye(clusters, dtype=np.float32)[[merged.get(number, number) for number in range(clusters)]]


def _undo(graph: GraphProto) -> None:
    drop_nodes(graph, _NODE_PREFIX)
    rename_tensors(graph, {_UNMERGED_PREFIX + name: name for name in _CHANGED_OUTPUTS})
