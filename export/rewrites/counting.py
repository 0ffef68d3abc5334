"""Counting and accumulating: one-hot, histograms, bins, cumulative operators, grouped products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tpu2edge.export.rewrites import native
from tpu2edge.export.rewrites.indexing import static

__all__ = ["DECOMPOSITIONS"]

aten = torch.ops.aten


def _one_hot(x: torch.Tensor, num_classes: int = -1) -> Any:
    if num_classes < 0:
        return NotImplemented
    classes = torch.arange(num_classes, dtype=torch.int32)
    return (x.to(torch.int32).unsqueeze(-1) == classes).to(torch.int64)


# ------------------------------------------------------------------------------------- histograms


def _histc(x: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Any:
    """Counts of equal bins; the last includes its right end, and what is outside does not count."""
    if not static(*x.shape):
        return NotImplemented
    flat = x.reshape(-1).to(torch.float32)
    low: Any = float(min)
    high: Any = float(max)
    if low == high:
        low, high = flat.amin(), flat.amax()
        same = low == high  # PyTorch then takes one to each side
        low, high = torch.where(same, low - 1, low), torch.where(same, high + 1, high)
    inside = (flat >= low) & (flat <= high)
    place = ((flat - low) / (high - low) * bins).floor().clamp(0, bins - 1).to(torch.int32)
    return _counts(torch.where(inside, place, -1), bins).to(x.dtype)


def _counts(place: torch.Tensor, bins: int) -> torch.Tensor:
    hits = place.to(torch.int32).unsqueeze(0) == torch.arange(bins, dtype=torch.int32).unsqueeze(1)
    return hits.to(torch.int32).sum(1, dtype=torch.int32)


# ------------------------------------------------------------------------------------------- bins


def _below(sorted_sequence: torch.Tensor, values: torch.Tensor, right: bool) -> torch.Tensor:
    """How many of the last axis of the sequence come before each value."""
    sequence, values = sorted_sequence.unsqueeze(-2), values.unsqueeze(-1)
    before = sequence <= values if right else sequence < values
    return before.to(torch.int32).sum(-1, dtype=torch.int32)


def _bucketize(
    x: torch.Tensor, boundaries: torch.Tensor, *, out_int32: bool = False, right: bool = False
) -> Any:
    if not static(*boundaries.shape):
        return NotImplemented
    found = _below(boundaries.reshape([1] * max(0, x.dim() - 1) + [-1]), x, right)
    return found.reshape(x.shape).to(torch.int32 if out_int32 else torch.int64)


def _bucketize_scalar(
    x: Any, boundaries: torch.Tensor, *, out_int32: bool = False, right: bool = False
) -> Any:
    return _bucketize(torch.full((), x), boundaries, out_int32=out_int32, right=right)


def _searchsorted(
    sorted_sequence: torch.Tensor,
    x: torch.Tensor,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: torch.Tensor | None = None,
) -> Any:
    if not static(*sorted_sequence.shape, *x.shape):
        return NotImplemented
    if sorter is not None:
        sorted_sequence = aten.gather.default(sorted_sequence, -1, sorter)
    right = right or side == "right"
    if sorted_sequence.dim() == 1:
        return _bucketize(x, sorted_sequence, out_int32=out_int32, right=right)
    return _below(sorted_sequence, x, right).to(torch.int32 if out_int32 else torch.int64)


def _searchsorted_scalar(sorted_sequence: torch.Tensor, x: Any, **options: Any) -> Any:
    return _searchsorted(sorted_sequence, torch.full((), x), **options)


# ------------------------------------------------------------------------------------- cumulative


def _scan(parts: tuple[torch.Tensor, ...], combine: Callable[..., Any], size: int) -> Any:
    """The inclusive scan along the last axis in log2(size) steps.

    ``combine(earlier, later)`` takes and gives tuples of tensors.
    """
    step = 1
    while step < size:
        earlier = tuple(part.narrow(-1, 0, size - step) for part in parts)
        later = tuple(part.narrow(-1, step, size - step) for part in parts)
        merged = combine(earlier, later)
        parts = tuple(
            torch.cat([part.narrow(-1, 0, step), new], -1)
            for part, new in zip(parts, merged, strict=True)
        )
        step *= 2
    return parts


def _cumulative_extreme(x: torch.Tensor, dim: int, largest: bool) -> Any:
    if x.dim() == 0:
        return x.clone(), torch.zeros((), dtype=torch.int64)
    if not static(*x.shape):
        return NotImplemented
    values = x.movedim(dim, -1)
    if x.dtype in (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int64):
        values = values.to(torch.int32)
    size = values.shape[-1]

    def combine(earlier: Any, later: Any) -> Any:
        # The later one of equals, and a NaN from where it first came, as PyTorch has them.
        (old, old_place), (new, new_place) = earlier, later
        takes = new >= old if largest else new <= old
        if new.is_floating_point():
            takes = takes | (new != new)
        return torch.where(takes, new, old), torch.where(takes, new_place, old_place)

    places = torch.arange(size, dtype=torch.int32) + torch.zeros_like(values, dtype=torch.int32)
    values, places = _scan((values, places), combine, size)
    return values.to(x.dtype).movedim(-1, dim), places.to(torch.int64).movedim(-1, dim)


def _cummax(x: torch.Tensor, dim: int) -> Any:
    return _cumulative_extreme(x, dim, True)


def _cummin(x: torch.Tensor, dim: int) -> Any:
    return _cumulative_extreme(x, dim, False)


def _cumprod(x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    kind = dtype or (x.dtype if x.is_floating_point() else torch.int64)
    if x.dim() == 0:
        return x.to(kind)
    if not static(*x.shape) or x.dtype.is_complex:
        return NotImplemented
    values = x.movedim(dim, -1)
    values = values.to(torch.int32 if kind is torch.int64 else kind)
    (values,) = _scan((values,), lambda a, b: (a[0] * b[0],), values.shape[-1])
    return values.to(kind).movedim(-1, dim)


def _logcumsumexp(x: torch.Tensor, dim: int) -> Any:
    if x.dim() == 0:
        return x.clone()
    if not static(*x.shape) or x.dtype.is_complex:
        return NotImplemented

    def combine(earlier: Any, later: Any) -> Any:
        high = torch.maximum(earlier[0], later[0])
        low = torch.minimum(earlier[0], later[0])
        # Of equal infinities the difference is NaN, and the sum is that infinity.
        gap = torch.where(high == low, torch.zeros_like(high), low - high)
        total = high + torch.log1p(torch.exp(gap))
        return (total,)

    (values,) = _scan((x.movedim(dim, -1),), combine, x.shape[dim])
    return values.movedim(-1, dim)


def _cumsum(x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    kind = dtype or (x.dtype if x.is_floating_point() else torch.int64)
    if x.dim() == 0:
        return x.to(kind)
    if kind is torch.float32 and x.dtype is torch.float32:
        return NotImplemented
    if kind.is_floating_point:
        return NotImplemented if x.dtype is kind else aten.cumsum.default(x.to(kind), dim)
    if x.dtype is torch.int32:
        return (
            NotImplemented
            if kind is torch.int32
            else (aten.cumsum.default(x, dim, dtype=torch.int32).to(kind))
        )
    return aten.cumsum.default(x.to(torch.int32), dim, dtype=torch.int32).to(kind)


# --------------------------------------------------------------------------------- grouped products


def _grouped_mm(
    x: torch.Tensor,
    weight: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    """Rows of ``x``, in groups that end at ``offs``, each by the matrix of its group."""
    if bias is not None or x.dim() != 2 or weight.dim() != 3 or offs is None:
        return NotImplemented
    if not static(*x.shape, *weight.shape):
        return NotImplemented
    rows, groups = x.shape[0], weight.shape[0]
    places = torch.arange(rows, dtype=torch.int32)
    group = (places.unsqueeze(1) >= offs.to(torch.int32)).to(torch.int32).sum(1, dtype=torch.int32)
    if rows <= groups:  # fewer rows than matrices: take each row's own
        own = native.gather(weight, group.clamp(max=groups - 1), 0)
        result = torch.bmm(x.unsqueeze(1), own).squeeze(1)
    else:  # all rows by all matrices; what is not a row's own does not count
        every = torch.matmul(x.unsqueeze(0), weight)
        own = group == torch.arange(groups, dtype=torch.int32).unsqueeze(1)
        zero = torch.zeros((), dtype=every.dtype)
        result = torch.where(own.unsqueeze(-1), every, zero).sum(0)
    return result if out_dtype is None else result.to(out_dtype)


def grouped_mm_decompositions() -> dict[Any, Any]:
    """The operators of grouped products that this torch, and a loaded transformers, have."""
    found: dict[Any, Any] = {}
    if hasattr(aten, "_grouped_mm"):
        found[aten._grouped_mm.default] = _grouped_mm
    return found


DECOMPOSITIONS: dict[Any, Any] = {
    aten.one_hot.default: _one_hot,
    aten.histc.default: _histc,
    aten.bucketize.Tensor: _bucketize,
    aten.bucketize.Scalar: _bucketize_scalar,
    aten.searchsorted.Tensor: _searchsorted,
    aten.searchsorted.Scalar: _searchsorted_scalar,
    aten.cummax.default: _cummax,
    aten.cummin.default: _cummin,
    aten.cumprod.default: _cumprod,
    aten.cumsum.default: _cumsum,
    aten.logcumsumexp.default: _logcumsumexp,
    **grouped_mm_decompositions(),
}
