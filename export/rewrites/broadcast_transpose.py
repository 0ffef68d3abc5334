"""Transposes after a broadcast, in a form that the converter does not merge with it.

litert-converter 0.5 merges transpose(broadcast(x)) into one broadcast with its axes in another
order, then lowers that with a reshape in place of the transpose. The result has the right shape and
the wrong order of numbers (or fails to load), whenever the broadcast is of an axis of size 1. So
every permute that a broadcast reaches, through views and elementwise operators, becomes the LiteRT
operator straight away, and so does the broadcast where a product of matrices may transpose it.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.export import ExportedProgram

from tpu2edge.export.rewrites import native
from tpu2edge.export.rewrites.graph import call

__all__ = ["apply"]

aten = torch.ops.aten

_PERMUTES = (aten.permute.default, aten.permute_copy.default, aten.transpose.int, aten.t.default)
_EXPANDS = (aten.expand.default, aten.expand_copy.default, aten.repeat.default)
_PRODUCTS = (
    aten.einsum.default,
    aten.bmm.default,
    aten.mm.default,
    aten.addmm.default,
    aten.matmul.default,
    aten.baddbmm.default,
)
# Operators that only move numbers: what a broadcast was before them, it still is after them.
_MOVES = {
    *_PERMUTES,
    *_EXPANDS,
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.view_copy.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.clone.default,
    aten.alias.default,
    aten._to_copy.default,
    aten.slice.Tensor,
    aten.slice_copy.Tensor,
    aten.select.int,
    aten.cat.default,
    aten.stack.default,
    aten.flip.default,
    aten.split_with_sizes.default,
    aten.constant_pad_nd.default,
}


def apply(program: ExportedProgram) -> int:
    """Changes in place; gives the number of operators changed."""
    graph = program.graph
    spread: set[fx.Node] = set()
    count = 0
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in _PERMUTES and spread.intersection(node.all_input_nodes):
            node = _replace(node, native.transpose, _dims(node))
            count += 1
        if _broadcasts(node) or (_carries(node) and not spread.isdisjoint(node.all_input_nodes)):
            spread.add(node)
    if spread:
        count += _opaque(graph, spread)
    if count:
        graph.eliminate_dead_code()
        program.graph_module.recompile()
    return count


def _opaque(graph: fx.Graph, spread: set[fx.Node]) -> int:
    """The expands that a product of matrices reads, as operators of LiteRT."""
    reached: set[fx.Node] = set()
    count = 0
    for node in reversed(list(graph.nodes)):
        if node.op != "call_function":
            continue
        if node.target in _PRODUCTS or (node in reached and _carries(node)):
            reached.update(spread.intersection(node.all_input_nodes))
        if node in reached and node.target is aten.expand.default and _broadcasts(node):
            shape = list(node.meta["val"].shape)
            if all(isinstance(size, int) for size in shape):
                _replace(node, native.broadcast_to, shape)
                count += 1
    return count


def _replace(node: fx.Node, op: object, values: list[int]) -> fx.Node:
    new = call(node, op, node.args[0], values)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)
    return new


def _dims(node: fx.Node) -> list[int]:
    rank = len(node.meta["val"].shape)
    if node.target is aten.t.default:
        return list(range(rank))[::-1]
    if node.target is aten.transpose.int:
        dims = list(range(rank))
        first, second = (int(dim) for dim in node.args[1:3])  # type: ignore[arg-type]
        dims[first], dims[second] = dims[second], dims[first]
        return dims
    return [int(dim) % rank for dim in node.args[1]]  # type: ignore[union-attr,arg-type]


def _carries(node: fx.Node) -> bool:
    return node.target in _MOVES or node.target is native.transpose or _is_pointwise(node)


def _is_pointwise(node: fx.Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def _broadcasts(node: fx.Node) -> bool:
    """Whether numbers of an operand stand more than once in the result, splats apart."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return False
    if node.target not in _EXPANDS and not _is_pointwise(node):
        return False
    for operand in node.all_input_nodes:
        given = operand.meta.get("val")
        if isinstance(given, torch.Tensor) and given.dim() and given.shape != value.shape:
            sizes = [size for size in given.shape if not (isinstance(size, int) and size == 1)]
            if sizes and sizes != [s for s in value.shape if not (isinstance(s, int) and s == 1)]:
                return True
    return False
