"""Reads by index as plain GATHER or SLICE, where JAX's lowering gives GATHER_ND, SELECT and more.

An index along one axis is one GATHER. Several index tensors side by side become one number over the
flattened axes, so they are one GATHER too. Negative entries count from the end, as in PyTorch; an
index out of range is an error in LiteRT, as in PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from tpu2edge.export.rewrites import native

__all__ = ["DECOMPOSITIONS", "flat_index", "from_the_end", "selected", "static"]

aten = torch.ops.aten
Index = torch.Tensor | None


def from_the_end(index: torch.Tensor, size: int) -> torch.Tensor:
    """``index`` as int32, its negative entries counted from the end."""
    if index.dtype is torch.uint8 or index.dtype is torch.bool:
        return index.to(torch.int32)
    index = index.to(torch.int32)
    return torch.where(index < 0, index + size, index)


def flat_index(indices: Sequence[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
    """Row-major position in an array of ``sizes`` of what the broadcast ``indices`` point at."""
    flat: torch.Tensor | None = None
    for index, size in zip(indices, sizes, strict=True):
        index = from_the_end(index, size)
        flat = index if flat is None else flat * size + index
    assert flat is not None
    return flat


def static(*sizes: Any) -> bool:
    """Whether all are plain numbers."""
    return all(isinstance(size, int) for size in sizes)


def _index(x: torch.Tensor, indices: Sequence[Index]) -> Any:
    where = [axis for axis, index in enumerate(indices) if index is not None]
    given = [index for index in indices if index is not None]
    if not given:
        return x.clone()
    # In torch 2.x, uint8 indices are masks too.
    if any(index.dtype in (torch.bool, torch.uint8) for index in given):
        return NotImplemented
    if not static(*x.shape) or x.dtype.is_complex or any(not static(*i.shape) for i in given):
        return NotImplemented
    first, last = where[0], where[-1]
    together = last - first + 1 == len(where)
    if not together:  # PyTorch then puts the indexed axes first
        rest = [axis for axis in range(x.dim()) if axis not in where]
        x = x.permute(*where, *rest)
        first = 0
    sizes = x.shape[first : first + len(where)]
    if len(where) > 1:
        shape = [*x.shape[:first], -1, *x.shape[first + len(where) :]]
        x = x.reshape([s if s != -1 else _product(sizes) for s in shape])
    return native.gather(x, flat_index(given, sizes), first)


def _product(sizes: Sequence[int]) -> int:
    result = 1
    for size in sizes:
        result *= size
    return result


def _index_select(x: torch.Tensor, dim: int, index: torch.Tensor) -> Any:
    if x.dim() == 0:
        return x.clone()
    if x.dtype.is_complex:
        return NotImplemented
    return native.gather(x, index.reshape(-1), dim)


def _gather(x: torch.Tensor, dim: int, index: torch.Tensor, *, sparse_grad: bool = False) -> Any:
    if x.dim() == 0 or index.dim() == 0:
        return x.reshape(index.shape).clone() if x.numel() == 1 else NotImplemented
    if not static(*x.shape, *index.shape) or x.dtype.is_complex:
        return NotImplemented
    if index.numel() == 0:
        return x.new_zeros(index.shape)
    dim = dim % x.dim()
    for axis, size in enumerate(index.shape):
        if axis != dim and x.shape[axis] != size:
            x = x.narrow(axis, 0, size)
    if dim != x.dim() - 1:
        x, index = x.movedim(dim, -1), index.movedim(dim, -1)
    batch = _product(x.shape[:-1])
    rows, size = index.reshape(batch, index.shape[-1]), x.shape[-1]
    if batch == 1:
        result = native.gather(x.reshape(size), rows.reshape(-1), 0)
    else:
        result = native.gather(x.reshape(batch, size), rows, 1, 1)
    return result.reshape(index.shape).movedim(-1, dim)


def _take(x: torch.Tensor, index: torch.Tensor) -> Any:
    if not static(*x.shape):
        return NotImplemented
    return native.gather(x.reshape(-1), from_the_end(index, _product(x.shape)), 0)


def _triangle(kind: str) -> Any:
    def indices(rows: int, columns: int, offset: int = 0, **options: Any) -> Any:
        if not static(rows, columns, offset):
            return NotImplemented
        below = kind == "tril"
        pairs = [
            (row, column)
            for row in range(rows)
            for column in range(columns)
            if (column - row <= offset if below else column - row >= offset)
        ]
        flat = [row for row, _ in pairs] + [column for _, column in pairs]
        dtype = options.get("dtype") or torch.int64
        return native.constant(flat).reshape(2, len(pairs)).to(dtype)

    return indices


def _eye(rows: Any, columns: Any = None, **options: Any) -> Any:
    """Of int32 ranges: the converter leaves an int64 one as STABLEHLO_IOTA, which has no kernel."""
    columns = rows if columns is None else columns
    if not static(rows, columns):
        return NotImplemented
    below, beside = (torch.arange(size, dtype=torch.int32) for size in (rows, columns))
    return torch.eq(below[:, None], beside).to(options.get("dtype") or torch.get_default_dtype())


def _as_strided_scatter(
    x: torch.Tensor,
    source: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> Any:
    """For contiguous ``x``, whose places in memory are known: fill_diagonal_ and the like."""
    if not static(*x.shape, *size, *stride, storage_offset or 0) or not x.is_contiguous():
        return NotImplemented
    places = [storage_offset or 0]
    for length, step in zip(size, stride, strict=True):
        places = [place + step * i for place in places for i in range(length)]
    count = x.numel()
    if not places or max(places) >= count or len(set(places)) != len(places):
        return NotImplemented
    reads = list(range(count))
    for i, place in enumerate(places):
        reads[place] = count + i
    both = torch.cat([x.reshape(-1), source.to(x.dtype).expand(list(size)).reshape(-1)])
    return native.gather(both, native.constant(reads), 0).reshape(x.shape)


def selected(program: ExportedProgram) -> int:
    """x[i] with i a tensor of one integer, which torch.export takes out of its tensor first."""
    count = 0
    for node in list(program.graph.nodes):
        if node.target is not aten.select.int or not isinstance(node.args[2], fx.Node):
            continue
        item = node.args[2]
        if item.target not in (aten.item.default, aten._local_scalar_dense.default):
            continue
        x, dim, index = node.args[0], node.args[1], item.args[0]
        with node.graph.inserting_before(node):
            new = node.graph.call_function(_at, (x, index, dim))
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        node.graph.erase_node(node)
        for check in [user for user in item.users if user.op == "call_function"]:
            for assertion in list(check.users):
                if assertion.target is aten._assert_scalar.default:
                    node.graph.erase_node(assertion)
            if not check.users and not check.is_impure():
                node.graph.erase_node(check)
        if not item.users:
            node.graph.erase_node(item)
        count += 1
    if count:
        program.graph_module.recompile()
    return count


@torch.library.custom_op("tpu2edge::at", mutates_args=())
def _at_op(x: torch.Tensor, index: torch.Tensor, dim: int) -> torch.Tensor:
    return x.select(dim, int(index)).clone()


@_at_op.register_fake
def _at_shape(x: torch.Tensor, index: torch.Tensor, dim: int) -> torch.Tensor:
    shape = list(x.shape)
    del shape[dim]
    return x.new_empty(shape)


_at: Any = torch.ops.tpu2edge.at.default


def _gather_at(x: torch.Tensor, index: torch.Tensor, dim: int) -> torch.Tensor:
    place = from_the_end(index.reshape(()), x.shape[dim])
    return native.gather(x, place, dim)


DECOMPOSITIONS: dict[Any, Any] = {
    aten.index.Tensor: _index,
    aten._unsafe_index.Tensor: _index,
    aten.index_select.default: _index_select,
    aten.gather.default: _gather,
    aten.take.default: _take,
    _at: _gather_at,
    aten.tril_indices.default: _triangle("tril"),
    aten.triu_indices.default: _triangle("triu"),
    aten.eye.default: _eye,
    aten.eye.m: _eye,
    aten.as_strided_scatter.default: _as_strided_scatter,
}
