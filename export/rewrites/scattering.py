"""Writes by index: SCATTER_ND for sums, WHERE for masks, and the last of several for overwriting.

LiteRT's SCATTER_ND adds what goes to the same place. An overwriting scatter therefore drops all but
the last write to a place first (PyTorch leaves open which one wins; on the CPU it is the last).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tpu2edge.export.rewrites import native
from tpu2edge.export.rewrites.indexing import flat_index, from_the_end, static
from tpu2edge.export.rewrites.sorting import ordered

__all__ = ["DECOMPOSITIONS"]

aten = torch.ops.aten
Index = torch.Tensor | None

# Up to this many pairs of place and write, all are compared; above, writes are sorted by place.
_PAIRS = 1 << 22


# Everything below comes down to writes of `rows` (K, …) to the places `index` (K,) of `x` (N, …).


def _add(x: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return x + _sum(x, index, rows)


def _sum(x: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    if x.dtype in (torch.int64, torch.int16, torch.int8, torch.uint8, torch.bool):
        return native.scatter_nd(index.unsqueeze(-1), rows.to(torch.int32), x.shape).to(x.dtype)
    return native.scatter_nd(index.unsqueeze(-1), rows.to(x.dtype), x.shape)


def _set(x: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    count, size = index.shape[0], x.shape[0]
    rest = [1] * (x.dim() - 1)
    if count == 0:
        return x.clone()
    if count == 1:
        hit = torch.arange(size, dtype=torch.int32) == index.to(torch.int32)
        return torch.where(hit.reshape(size, *rest), rows.to(x.dtype), x)
    index = index.to(torch.int32)
    order = torch.arange(count, dtype=torch.int32)
    if size <= count and size * count <= _PAIRS:
        # The last write to each place, by looking at all pairs of place and write.
        hits = torch.arange(size, dtype=torch.int32).unsqueeze(1) == index
        last = torch.where(hits, order, -1).amax(1)
        picked = native.gather(rows, last.clamp(min=0), 0)
        return torch.where((last >= 0).reshape(size, *rest), picked.to(x.dtype), x)
    if count * count > _PAIRS:  # too many pairs: sorted, equal places stand together, in order
        index, by = ordered(index, count, 0, False)
        rows = native.gather(rows, by, 0)
        ends = torch.ones([1], dtype=torch.bool)
        stays = torch.cat([index.narrow(0, 0, count - 1) != index.narrow(0, 1, count - 1), ends])
    else:
        later = (index.unsqueeze(1) == index) & (order > order.unsqueeze(1))
        stays = ~later.any(1)
    # A write that is overwritten goes to a row of its own, after the others, which is cut off.
    place = torch.where(stays, index, size)
    wide = x.new_empty([size + 1, *x.shape[1:]])
    written = _sum(wide, place, rows).narrow(0, 0, size)
    ones = torch.ones([count], dtype=torch.int32)
    hit = native.scatter_nd(place.unsqueeze(-1), ones, [size + 1]).narrow(0, 0, size) > 0
    return torch.where(hit.reshape(size, *rest), written, x)


def _reduce(
    x: torch.Tensor, index: torch.Tensor, rows: torch.Tensor, how: str, include_self: bool
) -> torch.Tensor:
    size, rest = x.shape[0], [1] * (x.dim() - 1)
    hits = torch.arange(size, dtype=torch.int32).unsqueeze(1) == index.to(torch.int32)  # (N, K)
    any_hit = hits.any(1).reshape(size, *rest)
    if how in ("sum", "mean", "add"):
        base = x if include_self else torch.where(any_hit, torch.zeros_like(x), x)
        total = base + _sum(x, index, rows)
        if how != "mean":
            return total
        count = hits.to(torch.int32).sum(1, dtype=torch.int32)
        count = (count + 1 if include_self else count.clamp(min=1)).reshape(size, *rest)
        if x.is_floating_point():
            return total / count.to(x.dtype)
        return native.int32("floor_div", total, count).to(x.dtype)
    shaped = hits.reshape(*hits.shape, *rest)
    if how in ("prod", "multiply"):
        reduced = _product_over_1(torch.where(shaped, rows, torch.ones_like(rows)))
        both = x * reduced
    elif how == "amax":
        reduced = torch.where(shaped, rows, _extreme(x, low=True)).amax(1)
        both = torch.maximum(x, reduced)
    elif how == "amin":
        reduced = torch.where(shaped, rows, _extreme(x, low=False)).amin(1)
        both = torch.minimum(x, reduced)
    else:
        raise NotImplementedError(how)
    return torch.where(any_hit, both if include_self else reduced, x)


def _product_over_1(x: torch.Tensor) -> torch.Tensor:
    """The product over axis 1 in halves, which needs no reduction operator."""
    while x.shape[1] > 1:
        half = x.shape[1] // 2
        pairs = x.narrow(1, 0, half) * x.narrow(1, half, half)
        tail = x.shape[1] - 2 * half
        x = torch.cat([pairs, x.narrow(1, 2 * half, tail)], 1) if tail else pairs
    return x.squeeze(1)


def _extreme(x: torch.Tensor, *, low: bool) -> torch.Tensor:
    if x.is_floating_point():
        return torch.full((), float("-inf") if low else float("inf"), dtype=x.dtype)
    info = torch.iinfo(torch.int32 if x.dtype is torch.int64 else x.dtype)
    return torch.full((), info.min if low else info.max, dtype=x.dtype)


Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


# ----------------------------------------------------------------------------- index along one axis


def _along(x: torch.Tensor, dim: int, index: torch.Tensor, source: Any, write: Write) -> Any:
    """index_add and its like: slices of ``source`` go to slices of ``x``."""
    if not static(*x.shape, *index.shape):
        return NotImplemented
    if x.dim() == 0:
        return _along(x.reshape(1), 0, index.reshape(-1), source.reshape(-1), write).reshape(())
    index = from_the_end(index.reshape(-1), x.shape[dim])
    moved, rows = x.movedim(dim, 0), source.movedim(dim, 0)
    return write(moved, index, rows).movedim(0, dim)


def _index_add(
    x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, *, alpha: Any = 1
) -> Any:
    return _along(x, dim, index, source if alpha == 1 else source * alpha, _add)


def _index_copy(x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> Any:
    return _along(x, dim, index, source, _set)


def _index_fill(x: torch.Tensor, dim: int, index: torch.Tensor, value: Any) -> Any:
    if x.dim() == 0 or not static(*x.shape, *index.shape):
        return NotImplemented
    index = from_the_end(index.reshape(-1), x.shape[dim])
    places = torch.arange(x.shape[dim], dtype=torch.int32).unsqueeze(1)
    hit = (places == index).any(1)
    shape = [1] * x.dim()
    shape[dim] = x.shape[dim]
    return torch.where(hit.reshape(shape), value, x).to(x.dtype)


def _index_reduce(
    x: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    source: torch.Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> Any:
    def write(x: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return _reduce(x, index, rows, reduce, include_self)

    return _along(x, dim, index, source, write)


# ------------------------------------------------------------------------------ index of each number


def _flat(
    x: torch.Tensor, dim: int, index: torch.Tensor
) -> tuple[torch.Tensor, tuple[int, ...]] | None:
    """The positions in flattened ``x`` of what ``scatter`` along ``dim`` writes to."""
    if not static(*x.shape, *index.shape) or x.dim() != index.dim():
        return None
    dim = dim % x.dim()
    parts: list[torch.Tensor] = []
    for axis, size in enumerate(index.shape):
        if axis == dim:
            parts.append(index.to(torch.int32))
        else:
            shape = [1] * x.dim()
            shape[axis] = size
            parts.append(torch.arange(size, dtype=torch.int32).reshape(shape))
    flat: torch.Tensor | None = None
    for part, size in zip(parts, x.shape, strict=True):
        flat = part if flat is None else flat * size + part
    assert flat is not None
    return flat.expand(index.shape).reshape(-1), tuple(index.shape)


def _each(x: torch.Tensor, dim: int, index: torch.Tensor, source: Any, write: Write) -> Any:
    if x.dim() == 0 and static(*index.shape):
        if isinstance(source, torch.Tensor):
            source = source.reshape(-1)
        return _each(x.reshape(1), 0, index.reshape(-1), source, write).reshape(())
    found = _flat(x, dim, index)
    if found is None or x.dtype.is_complex:
        return NotImplemented
    flat, shape = found
    if flat.shape[0] == 0:
        return x.clone()
    if isinstance(source, torch.Tensor):
        for axis, size in enumerate(shape):
            if source.shape[axis] != size:
                source = source.narrow(axis, 0, size)
        rows = source.reshape(-1)
    else:
        rows = torch.full([flat.shape[0]], source, dtype=x.dtype)
    return write(x.reshape(-1), flat, rows).reshape(x.shape)


def _scatter_set(x: torch.Tensor, dim: int, index: torch.Tensor, source: Any) -> Any:
    """Overwriting, pairing writes with places only along ``dim``."""
    if x.dim() == 0 or not static(*x.shape, *index.shape) or x.dtype.is_complex:
        return NotImplemented
    if 0 in index.shape:
        return x.clone()
    dim = dim % x.dim()
    whole = x
    for axis, size in enumerate(index.shape):  # the part of x that can be written to
        if axis != dim and x.shape[axis] != size:
            x = x.narrow(axis, 0, size)
    part = x.movedim(dim, -1)
    index = index.to(torch.int32).movedim(dim, -1)
    size, count = part.shape[-1], index.shape[-1]
    places = torch.arange(size, dtype=torch.int32).unsqueeze(-1)
    hits = places == index.unsqueeze(-2)  # (…, N, K)
    if isinstance(source, torch.Tensor):
        for axis, length in enumerate(index.movedim(-1, dim).shape):
            if source.shape[axis] != length:
                source = source.narrow(axis, 0, length)
        rows = source.to(x.dtype).movedim(dim, -1)
        if count == 1:
            picked = rows
            any_hit = hits.squeeze(-1)
        else:
            order = torch.arange(count, dtype=torch.int32)
            last = torch.where(hits, order, -1).amax(-1)
            picked = aten.gather.default(rows, -1, last.clamp(min=0).to(torch.int64))
            any_hit = last >= 0
        part = torch.where(any_hit, picked, part)
    else:
        part = torch.where(hits.any(-1), torch.full((), source, dtype=x.dtype), part)
    part = part.movedim(-1, dim)
    for axis in range(whole.dim()):
        length = part.shape[axis]
        if length != whole.shape[axis]:
            # What lies behind the part along this axis, as long as the part along the later ones.
            behind = whole.narrow(axis, length, whole.shape[axis] - length)
            for later in range(axis + 1, whole.dim()):
                behind = behind.narrow(later, 0, part.shape[later])
            part = torch.cat([part, behind], axis)
    return part


def _scatter(x: torch.Tensor, dim: int, index: torch.Tensor, source: Any) -> Any:
    if x.dim() and static(*x.shape, *index.shape) and x.shape[dim] * index.numel() > _PAIRS:
        return _each(x, dim, index, source, _set)
    if x.dim() == 0:
        return _each(x, dim, index, source, _set)
    return _scatter_set(x, dim, index, source)


def _scatter_named(
    x: torch.Tensor, dim: int, index: torch.Tensor, source: Any, *, reduce: str
) -> Any:
    if reduce == "add":
        return _each(x, dim, index, source, _add)
    return _scatter_reduce_any(x, dim, index, source, "prod", True)


def _scatter_add(x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> Any:
    return _each(x, dim, index, source, _add)


def _scatter_reduce(
    x: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    source: torch.Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> Any:
    return _scatter_reduce_any(x, dim, index, source, reduce, include_self)


def _scatter_reduce_any(
    x: torch.Tensor, dim: int, index: torch.Tensor, source: Any, how: str, include_self: bool
) -> Any:
    def write(x: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return _reduce(x, index, rows, how, include_self)

    return _each(x, dim, index, source, write)


# ---------------------------------------------------------------------------------------- index_put


def _index_put(
    x: torch.Tensor, indices: Sequence[Index], values: torch.Tensor, accumulate: bool = False
) -> Any:
    given = [index for index in indices if index is not None]
    if not static(*x.shape, *values.shape) or x.dtype.is_complex or not given:
        return NotImplemented
    if any(index.dtype in (torch.bool, torch.uint8) for index in given):
        return _masked_put(x, indices, values, accumulate)
    if any(not static(*index.shape) for index in given):
        return NotImplemented
    where = [axis for axis, index in enumerate(indices) if index is not None]
    rest = [axis for axis in range(x.dim()) if axis not in where]
    together = where[-1] - where[0] + 1 == len(where)
    lead = where[0] if together else 0  # axes before the indexed ones, in the shape of the values
    shape = torch.broadcast_shapes(*(index.shape for index in given))
    rest_shape = [x.shape[axis] for axis in rest]
    full = [*rest_shape[:lead], *shape, *rest_shape[lead:]]
    rows = values.to(x.dtype).expand(full)
    spans = range(lead, lead + len(shape))
    rows = rows.permute(*spans, *(axis for axis in range(len(full)) if axis not in spans))
    sizes = [x.shape[axis] for axis in where]
    flat = flat_index(given, sizes).expand(shape).reshape(-1)
    order = [*where, *rest]
    places = 1
    for size in sizes:
        places *= size
    moved = x.permute(order).reshape(places, *rest_shape)
    rows = rows.reshape(flat.shape[0], *rest_shape)
    moved = (_add if accumulate else _set)(moved, flat, rows)
    back = [order.index(axis) for axis in range(x.dim())]
    return moved.reshape([x.shape[axis] for axis in order]).permute(back)


def _masked_put(
    x: torch.Tensor, indices: Sequence[Index], values: torch.Tensor, accumulate: bool
) -> Any:
    """One mask, and one value for all of its hits, or one for each."""
    given = [(axis, index) for axis, index in enumerate(indices) if index is not None]
    if len(given) != 1:
        return _masks_and_numbers(x, indices, values, accumulate)
    lead, mask = given[0]
    mask = mask.to(torch.bool)
    behind = x.dim() - lead - mask.dim()  # axes of x after those of the mask
    # The values have the shape (…, number of hits, behind…): only one for all hits will do.
    if values.dim() > behind:
        if values.shape[values.dim() - 1 - behind] != 1:
            return _in_turn(x, lead, mask, values, accumulate)
        front = values.shape[: values.dim() - 1 - behind]
        tail = values.shape[values.dim() - behind :]
        values = values.reshape([*front, *([1] * mask.dim()), *tail])
    mask = mask.reshape([*mask.shape, *([1] * behind)])
    values = values.to(x.dtype)
    return torch.where(mask, x + values if accumulate else values, x)


def _in_turn(
    x: torch.Tensor, lead: int, mask: torch.Tensor, values: torch.Tensor, accumulate: bool
) -> torch.Tensor:
    """The n-th hit of the mask takes the n-th slice of the values."""
    behind = x.dim() - lead - mask.dim()
    axis = values.dim() - 1 - behind
    turn = mask.reshape(-1).to(torch.int32).cumsum(0, dtype=torch.int32) - 1
    turn = turn.clamp(0, values.shape[axis] - 1)
    picked = native.gather(values.to(x.dtype), turn, axis)
    picked = picked.reshape([*picked.shape[:axis], *mask.shape, *picked.shape[axis + 1 :]])
    mask = mask.reshape([*mask.shape, *([1] * behind)])
    return torch.where(mask, x + picked if accumulate else picked, x)


def _masks_and_numbers(
    x: torch.Tensor, indices: Sequence[Index], values: torch.Tensor, accumulate: bool
) -> Any:
    """Masks beside single positions, ``x[mask, 0] = value``: one value for all of them."""
    if values.numel() != 1:
        return NotImplemented
    hit: torch.Tensor | None = None
    axis = 0
    for index in indices:
        if index is None:
            axis += 1
            continue
        if index.dtype in (torch.bool, torch.uint8):
            here, width = index.to(torch.bool), index.dim()
        elif index.numel() == 1:
            places = torch.arange(x.shape[axis], dtype=torch.int32)
            here, width = places == from_the_end(index, x.shape[axis]).reshape(()), 1
        else:
            return NotImplemented
        here = here.reshape([*here.shape, *([1] * (x.dim() - axis - width))])
        hit = here if hit is None else hit & here
        axis += width
    assert hit is not None
    value = values.reshape(()).to(x.dtype)
    return torch.where(hit, x + value if accumulate else value, x)


def _put(
    x: torch.Tensor, index: torch.Tensor, source: torch.Tensor, accumulate: bool = False
) -> Any:
    if not static(*x.shape, *index.shape):
        return NotImplemented
    flat = from_the_end(index.reshape(-1), x.numel())
    write = _add if accumulate else _set
    return write(x.reshape(-1), flat, source.reshape(-1)).reshape(x.shape)


def _masked_scatter(x: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> Any:
    """The n-th hit of the mask takes the n-th number of the source."""
    if not static(*x.shape, *mask.shape, *source.shape):
        return NotImplemented
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    x, mask = x.expand(shape), mask.expand(shape)
    turn = mask.reshape(-1).to(torch.int32).cumsum(0, dtype=torch.int32) - 1
    turn = turn.clamp(0, source.numel() - 1)
    picked = native.gather(source.reshape(-1), turn, 0).reshape(shape)
    return torch.where(mask, picked, x)


def _slice_scatter(
    x: torch.Tensor,
    source: torch.Tensor,
    dim: int = 0,
    start: Any = None,
    end: Any = None,
    step: int = 1,
) -> Any:
    size = x.shape[dim]
    if not static(size, start or 0, end or 0, step):
        return NotImplemented
    start, end, step = slice(start, end, step).indices(size)
    count = len(range(start, end, step))
    if count == 0:
        return x.clone()
    if step == 1:
        parts = [x.narrow(dim, 0, start), source.to(x.dtype), x.narrow(dim, end, size - end)]
        parts = [part for part in parts if part.shape[dim]]
        return torch.cat(parts, dim) if len(parts) > 1 else parts[0].expand(x.shape).clone()
    # One after the other, each write followed by what stays up to the next one.
    parts = [x.narrow(dim, 0, start)] if start else []
    kept_end = min(start + (count - 1) * step + step, size)
    whole = kept_end - start == count * step
    blocks = count if whole else count - 1
    if blocks:
        dim = dim % x.dim()
        kept = x.narrow(dim, start, blocks * step)
        split = [*x.shape[:dim], blocks, step, *x.shape[dim + 1 :]]
        kept = kept.reshape(split).narrow(dim + 1, 1, step - 1)
        new = source.to(x.dtype).narrow(dim, 0, blocks).unsqueeze(dim + 1)
        merged = torch.cat([new, kept], dim + 1)
        parts.append(merged.reshape([*x.shape[:dim], blocks * step, *x.shape[dim + 1 :]]))
    if not whole:
        parts.append(source.to(x.dtype).narrow(dim, count - 1, 1))
        after = start + (count - 1) * step + 1
        parts.append(x.narrow(dim, after, kept_end - after))
    parts.append(x.narrow(dim, kept_end, size - kept_end))
    parts = [part for part in parts if part.shape[dim]]
    return torch.cat(parts, dim)


def _select_scatter(x: torch.Tensor, source: torch.Tensor, dim: int, index: Any) -> Any:
    if not static(x.shape[dim], index):
        return NotImplemented
    start = index % x.shape[dim]
    return _slice_scatter(x, source.unsqueeze(dim), dim, start, start + 1)


def _diagonal(x: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    if not static(*x.shape, offset):
        return NotImplemented
    dim1, dim2 = dim1 % x.dim(), dim2 % x.dim()
    rest = [axis for axis in range(x.dim()) if axis not in (dim1, dim2)]
    moved = x.permute(*rest, dim1, dim2)
    rows, columns = moved.shape[-2:]
    first = max(-offset, 0) * columns + max(offset, 0)
    count = max(0, min(rows - max(-offset, 0), columns - max(offset, 0)))
    flat = moved.reshape([*moved.shape[:-2], rows * columns])
    if count == 0:
        return flat.narrow(-1, 0, 0)
    return aten.slice.Tensor(flat, -1, first, first + (count - 1) * (columns + 1) + 1, columns + 1)


def _diagonal_scatter(
    x: torch.Tensor, source: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Any:
    if not static(*x.shape, offset):
        return NotImplemented
    dim1, dim2 = dim1 % x.dim(), dim2 % x.dim()
    rest = [axis for axis in range(x.dim()) if axis not in (dim1, dim2)]
    order = [*rest, dim1, dim2]
    moved = x.permute(order)
    rows, columns = moved.shape[-2:]
    # Every row takes "its" number of the source; the mask keeps it on the diagonal only.
    down, right = max(-offset, 0), max(offset, 0)
    count = source.shape[-1]
    column = aten.constant_pad_nd.default(source.to(x.dtype), [down, rows - down - count], 0)
    places = torch.arange(rows, dtype=torch.int32).unsqueeze(1) + (right - down)
    hit = places == torch.arange(columns, dtype=torch.int32)
    moved = torch.where(hit, column.unsqueeze(-1), moved)
    return moved.permute([order.index(axis) for axis in range(x.dim())])


def _diag_embed(x: torch.Tensor, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Any:
    if not static(*x.shape, offset):
        return NotImplemented
    size = x.shape[-1] + abs(offset)
    rank = x.dim() + 1
    dim1, dim2 = dim1 % rank, dim2 % rank
    rest = [axis for axis in range(rank) if axis not in (dim1, dim2)]
    order = [*rest, dim1, dim2]
    zeros = torch.zeros([*x.shape[:-1], size, size], dtype=x.dtype)
    full = _diagonal_scatter(zeros, x, offset, -2, -1)
    return full.permute([order.index(axis) for axis in range(rank)])


DECOMPOSITIONS: dict[Any, Any] = {
    aten.scatter.src: _scatter,
    aten.scatter.value: _scatter,
    aten.scatter.reduce: _scatter_named,
    aten.scatter.value_reduce: _scatter_named,
    aten.scatter_add.default: _scatter_add,
    aten.scatter_reduce.two: _scatter_reduce,
    aten.index_add.default: _index_add,
    aten.index_copy.default: _index_copy,
    aten.index_fill.int_Scalar: _index_fill,
    aten.index_fill.int_Tensor: _index_fill,
    aten.index_reduce.default: _index_reduce,
    aten.index_put.default: _index_put,
    aten._unsafe_index_put.default: _index_put,
    aten.put.default: _put,
    aten.masked_scatter.default: _masked_scatter,
    aten.slice_scatter.default: _slice_scatter,
    aten.select_scatter.default: _select_scatter,
    aten.diagonal.default: _diagonal,
    aten.diagonal_scatter.default: _diagonal_scatter,
    aten.diag_embed.default: _diag_embed,
}
