"""Nodes that are appended to an exported graph, under names with a prefix of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from onnx import GraphProto, helper, numpy_helper

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray


class Nodes:
    """Writer of nodes and constants whose names begin with `prefix`."""

    def __init__(self, graph: GraphProto, prefix: str) -> None:
        self.graph, self._prefix = graph, prefix

    def add(self, kind: str, inputs: list[str], output: str, **attributes: Any) -> str:
        """Append a node with one output; return the name of that output."""
        name = self._prefix + output.removeprefix(self._prefix)
        self.graph.node.append(helper.make_node(kind, inputs, [output], name=name, **attributes))
        return output

    def inner(self, kind: str, inputs: list[str], output: str, **attributes: Any) -> str:
        """Append a node whose output has the prefix as well; return the name of that output."""
        return self.add(kind, inputs, self._prefix + output, **attributes)

    def store(self, name: str, values: NDArray[np.generic]) -> str:
        """Append a constant; return its name."""
        self.graph.initializer.append(numpy_helper.from_array(values, self._prefix + name))
        return self._prefix + name


def rename_tensors(graph: GraphProto, names: Mapping[str, str]) -> None:
    """Rename outputs of nodes, and inputs of those that read them; outputs of the graph keep their names."""
    for node in graph.node:
        for tensors in (node.input, node.output):
            tensors[:] = [names.get(name, name) for name in tensors]


def drop_nodes(graph: GraphProto, prefix: str) -> None:
    """Remove the last nodes and constants of a graph, as far as their names begin with a prefix."""
    for part in (graph.node, graph.initializer):
        while part and part[-1].name.startswith(prefix):
            part.pop()
