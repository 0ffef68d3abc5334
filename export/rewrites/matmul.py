"""Products of matrices that BATCH_MATMUL does not take: integers, and more than five dimensions.

The converter merges reshapes into the product that follows, to ranks that BATCH_MATMUL refuses; a
barrier between them keeps the product in three dimensions.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from tpu2edge.export.rewrites import graph

__all__ = ["DECOMPOSITIONS", "keep_rank"]

aten = torch.ops.aten
Tensor = torch.Tensor

_MOST_DIMS = 5
_PRODUCTS = (aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default)
_RESHAPES = (
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.clone.default,
    aten.expand.default,
    aten.permute.default,
    aten.unsqueeze.default,
    aten.squeeze.dims,
    aten.squeeze.dim,
)


def _integers(a: Tensor, b: Tensor) -> Any:
    if a.is_floating_point() or a.is_complex():
        return NotImplemented
    small = a.dtype in (torch.int8, torch.int16, torch.uint8, torch.bool)
    x, y = (t.to(torch.int32) if small else t for t in (a, b))
    total = (x.unsqueeze(-1) * y.unsqueeze(-3)).sum(-2, dtype=x.dtype)
    return total.to(a.dtype)


def _add(c: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
    if a.is_floating_point() or a.is_complex():
        return NotImplemented
    total = _integers(a, b)
    total = total if alpha == 1 else total * alpha
    return total if beta == 0 else total + (c if beta == 1 else c * beta)


def _trilinear(
    a: Tensor,
    b: Tensor,
    c: Tensor,
    expand1: list[int],
    expand2: list[int],
    expand3: list[int],
    sumdim: list[int],
    unroll_dim: int = 1,
) -> Tensor:
    for axis in sorted(expand1):
        a = a.unsqueeze(axis)
    for axis in sorted(expand2):
        b = b.unsqueeze(axis)
    for axis in sorted(expand3):
        c = c.unsqueeze(axis)
    product = a * b * c
    return product.sum(sumdim) if sumdim else product


def keep_rank(program: ExportedProgram) -> int:
    """Put barriers around products whose operands or results are reshaped from many dimensions."""
    count = 0
    barrier: Callable[..., Any] | None = None
    for node in list(program.graph.nodes):
        if node.target not in _PRODUCTS:
            continue
        if not (any(_many(arg) for arg in node.all_input_nodes) or _used_by_many(node)):
            continue
        if barrier is None:
            from litert_torch.backend import optimization_barrier as module

            barrier = module.optimization_barrier_op
        operands = list(node.all_input_nodes)
        for arg, kept in zip(operands, _barred(node, operands, barrier), strict=False):
            node.replace_input_with(arg, kept)
        # A barrier of one tensor alone cannot be lowered.
        (kept, _) = _barred(node.next, [node, operands[0]], barrier)
        tied = kept.args[0]
        node.replace_all_uses_with(kept, delete_user_cb=lambda user, tied=tied: user is not tied)
        count += 1
    if count:
        program.graph_module.recompile()
    return count


def _barred(before: Node, values: list[Node], barrier: Callable[..., Any]) -> list[Node]:
    if len(values) == 1:
        values = values * 2
    tied = graph.call(before, barrier, values, like=values[0])
    return [
        graph.call(before, operator.getitem, tied, index, like=value)
        for index, value in enumerate(values)
    ]


def _many(node: Node) -> bool:
    while True:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and value.dim() > _MOST_DIMS:
            return True
        if node.target not in _RESHAPES:
            return False
        node = node.args[0]  # type: ignore[assignment]


def _used_by_many(node: Node) -> bool:
    for user in node.users:
        value = user.meta.get("val")
        if user.target not in _RESHAPES or not isinstance(value, Tensor):
            continue
        if value.dim() > _MOST_DIMS or _used_by_many(user):
            return True
    return False


DECOMPOSITIONS: dict[Any, Any] = {
    aten.mm.default: _integers,
    aten.bmm.default: _integers,
    aten.addmm.default: _add,
    aten.baddbmm.default: _add,
    aten._trilinear.default: _trilinear,
}
