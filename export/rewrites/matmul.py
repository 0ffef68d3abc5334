"""Products of matrices that BATCH_MATMUL does not take: integers, and more than five dimensions.

The converter merges reshapes into the product that follows, to ranks that BATCH_MATMUL refuses, or, of
a vector, to a rank that does not fit its operands (a linear layer on a map of one pixel, the context of
a global attention); a barrier between them keeps the product in three dimensions. So it does for a linear
layer on a column, (1, n, 1, c): the converter drops the last 1 of the operand and not of the result.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from tpu2edge.export.rewrites import graph, native
from tpu2edge.export.rewrites.splice import Const

__all__ = ["DECOMPOSITIONS", "SPLICES", "keep_rank"]

aten = torch.ops.aten
Tensor = torch.Tensor

_MOST_DIMS = 5
# The product with a vector that is reshaped to (1, 1, 1, n) becomes a BATCH_MATMUL of two shapes at once.
# Only there: a barrier keeps a linear layer from becoming FULLY_CONNECTED with its bias.
_MOST_DIMS_WHEN_THIN = 3
_PRODUCTS = (aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default)
# The argument whose rows become the product's: of a linear layer the input.
_ROWS: dict[Any, int] = {aten.mm.default: 0, aten.addmm.default: 1}
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


def _einsum(const: Const, equation: str, operands: list[Tensor], **_: Any) -> Any:
    """The sum of products by permutations and products of three dimensions."""
    left, arrow, output = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    repeated = any(len(set(term)) != len(term) for term in terms)
    plain = all(x.dim() <= _MOST_DIMS and x.is_floating_point() for x in operands)
    if "..." in equation or not arrow or len(operands) > 2 or (plain and not repeated):
        return NotImplemented
    for index, term in enumerate(terms):
        for label in dict.fromkeys(term):
            while terms[index].count(label) > 1:
                first = terms[index].index(label)
                second = terms[index].index(label, first + 1)
                operands = list(operands)
                operands[index] = operands[index].diagonal(0, first, second)
                rest = terms[index][:first] + terms[index][first + 1 : second]
                terms[index] = rest + terms[index][second + 1 :] + label
    if len(operands) == 1:
        return _ordered(operands[0], terms[0], output)
    (a, b), (of_a, of_b) = operands, terms
    a, of_a = _summed(a, of_a, of_b + output)
    b, of_b = _summed(b, of_b, of_a + output)
    size = {**dict(zip(of_a, a.shape, strict=True)), **dict(zip(of_b, b.shape, strict=True))}
    batch = [x for x in of_a if x in of_b and x in output]
    inner = [x for x in of_a if x in of_b and x not in output]
    rows = [x for x in of_a if x not in of_b]
    columns = [x for x in of_b if x not in of_a]

    def flat(x: Tensor, labels: str, order: tuple[list[str], ...]) -> Tensor:
        x = x.permute([labels.index(one) for part in order for one in part])
        return x.reshape([math.prod(size[one] for one in part) for part in order])

    product = torch.bmm(flat(a, of_a, (batch, rows, inner)), flat(b, of_b, (batch, inner, columns)))
    names = batch + rows + columns
    return _ordered(product.reshape([size[x] for x in names]), "".join(names), output)


def _summed(x: Tensor, labels: str, needed: str) -> tuple[Tensor, str]:
    axes = [i for i, label in enumerate(labels) if label not in needed]
    return (x.sum(axes), "".join(one for one in labels if one in needed)) if axes else (x, labels)


def _ordered(x: Tensor, labels: str, output: str) -> Tensor:
    x, labels = _summed(x, labels, output)
    return x.permute([labels.index(one) for one in output])


def keep_rank(program: ExportedProgram) -> int:
    """Put barriers around products whose operands or results are reshaped from many dimensions."""
    count = 0
    for node in list(program.graph.nodes):
        if node.target not in _PRODUCTS:
            continue
        value = node.meta.get("val")
        thin = isinstance(value, Tensor) and any(
            isinstance(size, int) and size == 1 for size in value.shape[-2:]
        )
        if (
            any(_many(arg, _MOST_DIMS) for arg in node.all_input_nodes)
            or _used_by_many(node, _MOST_DIMS)
            or (thin and _used_by_many(node, _MOST_DIMS_WHEN_THIN, value.shape[-1]))
        ):
            operands = list(node.all_input_nodes)
            for arg, kept in zip(operands, _barred(node, operands), strict=False):
                node.replace_input_with(arg, kept)
            # A barrier of one tensor alone cannot be lowered.
            (kept, _) = _barred(node.next, [node, operands[0]])
            tied = kept.args[0]
            node.replace_all_uses_with(
                kept, delete_user_cb=lambda user, tied=tied: user is not tied
            )
        elif _on_column(node):  # before it alone: FULLY_CONNECTED takes the bias that follows
            rows = node.args[_ROWS[node.target]]
            node.replace_input_with(rows, _barred(node, [rows])[0])
        else:
            continue
        count += 1
    if count:
        program.graph_module.recompile()
    return count


def _barred(before: Node, values: list[Node]) -> list[Node]:
    from litert_torch.backend.optimization_barrier import optimization_barrier_op

    if len(values) == 1:
        values = values * 2
    tied = graph.call(before, optimization_barrier_op, values, like=values[0])
    return [
        graph.call(before, operator.getitem, tied, index, like=value)
        for index, value in enumerate(values)
    ]


def _many(node: Node, most: int) -> bool:
    return any(len(shape) > most for shape in _reshaped_from(node))


def _on_column(node: Node) -> bool:
    """Whether a product of (1, n, c), or with more 1s before the c, ends as (1, n, 1, c)."""
    rows = node.args[_ROWS[node.target]] if node.target in _ROWS else None
    return (
        isinstance(rows, Node)
        and any(_is_column(shape, 3) for shape in _reshaped_from(rows))
        and any(_is_column(shape, 4) for shape in _reshaped_to(node, _leads_on))
    )


def _leads_on(user: Node) -> bool:
    """Whether ``user`` is a reshape once the converter has left out what does nothing."""
    if user.target in (aten.add.Tensor, aten.mul.Tensor):  # a bias of zeros, and the 1 of an addmm
        values = [arg.meta.get("val") for arg in user.all_input_nodes]
        return sum(isinstance(value, Tensor) and value.dim() > 1 for value in values) == 1
    return user.target is native.transpose or _is_reshape(user)  # a transpose may move 1s only


def _is_reshape(user: Node) -> bool:
    return user.target in _RESHAPES


def _is_column(shape: Sequence[Any], least: int) -> bool:
    sizes = [size if isinstance(size, int) else 0 for size in shape]
    return len(sizes) >= least and sizes[0] == 1 != sizes[1] and set(sizes[2:-1]) <= {1}


def _reshaped_from(node: Node) -> Iterator[Sequence[Any]]:
    """The shapes that ``node`` had before, its own first."""
    while True:
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            yield value.shape
        if node.target not in _RESHAPES:
            return
        node = node.args[0]  # type: ignore[assignment]


def _reshaped_to(
    node: Node, through: Callable[[Node], bool] = _is_reshape
) -> Iterator[Sequence[Any]]:
    """All shapes that ``node`` comes to, ``through`` such users."""
    for user in node.users:
        value = user.meta.get("val")
        if through(user) and isinstance(value, Tensor):
            yield value.shape
            yield from _reshaped_to(user, through)


def _used_by_many(node: Node, most: int, last: Any = None) -> bool:
    """Whether ``node`` is reshaped to more dimensions than ``most``, the last one of size ``last``."""
    return any(len(to) > most and last in (None, to[-1]) for to in _reshaped_to(node))


SPLICES: dict[Any, Any] = {aten.einsum.default: _einsum}
DECOMPOSITIONS: dict[Any, Any] = {
    aten.mm.default: _integers,
    aten.bmm.default: _integers,
    aten.addmm.default: _add,
    aten.baddbmm.default: _add,
    aten._trilinear.default: _trilinear,
}
