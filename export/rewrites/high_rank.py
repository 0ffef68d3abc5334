"""Elementwise operators on tensors of many dimensions, computed on fewer.

LiteRT's elementwise kernels take four to six dimensions, few of them more, however simple the
shapes are. Neighbouring dimensions that all operands share, or that all but the same ones repeat,
are merged; what still has too many is expanded and computed flat.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from tpu2edge.export.rewrites import graph

__all__ = ["apply"]

aten = torch.ops.aten

_MOST_DIMS = 4


def apply(program: ExportedProgram) -> int:
    """Merge dimensions in place; gives the number of operators."""
    count = 0
    for node in list(program.graph.nodes):
        if node.op != "call_function" or not _is_elementwise(node):
            continue
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dim() <= _MOST_DIMS:
            continue
        if all(isinstance(size, int) for size in value.shape) and _merge(node, value):
            count += 1
    if count:
        program.graph.eliminate_dead_code()
        program.graph_module.recompile()
    return count


def _is_elementwise(node: Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags and node.target is not aten.clone.default


def _merge(node: Node, value: torch.Tensor) -> bool:
    operands = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    rank, shape = value.dim(), list(value.shape)
    padded = {n: [1] * (rank - n.meta["val"].dim()) + list(n.meta["val"].shape) for n in operands}
    same = all(sizes == shape or math.prod(sizes) == 1 for sizes in padded.values())
    limit = 6 if same or node.target in _WIDE else _MOST_DIMS
    if node.target in _BOUNDED:
        limit = min(limit, 5)
    if rank <= limit and node.target not in _NARROW:
        return False
    groups: list[list[int]] = []
    for axis, size in enumerate(shape):
        if size == 1:
            continue
        kind = [padded[n][axis] == size for n in operands]
        last = groups[-1][-1] if groups else None
        if last is not None and kind == [padded[n][last] == shape[last] for n in operands]:
            groups[-1].append(axis)
        else:
            groups.append([axis])
    expand = len(groups) > _MOST_DIMS
    if expand:
        groups = [list(range(rank))]
    merged = [math.prod(shape[a] for a in group) for group in groups] or [1]
    new: dict[Node, Node] = {}
    for operand in operands:
        sizes = padded[operand]
        source = operand
        if math.prod(sizes) == 1:
            sizes_new = [1] * len(merged)
        elif expand:
            if sizes != shape:
                source = graph.call(node, aten.expand.default, operand, shape, like=node)
            sizes_new = merged
        else:
            sizes_new = [math.prod(sizes[a] for a in group) for group in groups] or [1]
        if list(source.meta["val"].shape) != sizes_new and not source.meta["val"].is_contiguous():
            source = graph.call(
                node, aten.clone.default, source, like=node, memory_format=torch.contiguous_format
            )
        new[operand] = (
            graph.call(node, aten.view.default, source, sizes_new, like=node)
            if (list(source.meta["val"].shape) != sizes_new)
            else source
        )
    args = torch.fx.node.map_arg(node.args, lambda n: new.get(n, n))
    kwargs = torch.fx.node.map_arg(node.kwargs, lambda n: new.get(n, n))
    flat = graph.call(node, node.target, *args, like=node, **kwargs)
    if not flat.meta["val"].is_contiguous():
        flat = graph.call(
            node, aten.clone.default, flat, like=node, memory_format=torch.contiguous_format
        )
    back = graph.call(node, aten.view.default, flat, shape, like=node)
    node.replace_all_uses_with(back)
    node.graph.erase_node(node)
    return True


# Kernels that broadcast up to six dimensions, and those that take four even of equal shapes.
_WIDE: Any = frozenset(
    (aten.add.Tensor, aten.mul.Tensor, aten.sub.Tensor, aten.add.Scalar, aten.mul.Scalar)
)
_NARROW: Any = frozenset((aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor, aten.pow.Scalar))
# What becomes a MAXIMUM or MINIMUM with a number, which the converter takes up to five.
_BOUNDED: Any = frozenset(
    (
        aten.relu.default,
        aten.relu6.default,
        aten.hardtanh.default,
        aten.clamp.default,
        aten.clamp.Tensor,
        aten.clamp_min.default,
        aten.clamp_max.default,
        aten.maximum.default,
        aten.minimum.default,
    )
)
