"""Sorting, and what rests on it, by TOPK_V2: the k largest of the last axis.

litert-torch lowers a sort, and a top-k of which only the values are used, to STABLEHLO_SORT, which
LiteRT cannot run. TOPK_V2 puts the lower index first among equals, so an order made with it is the
stable one; ascending order is that of the negated (integers: inverted) numbers. NaN has no place in
TOPK_V2's order, where PyTorch puts it last: such inputs are sorted in no defined order.
"""

from __future__ import annotations

from typing import Any

import torch

from tpu2edge.export.rewrites import native

__all__ = ["DECOMPOSITIONS", "ordered"]

aten = torch.ops.aten
Pair = tuple[torch.Tensor, torch.Tensor]


def ordered(x: torch.Tensor, count: int, dim: int, descending: bool) -> Pair:
    """The first ``count`` of ``x`` sorted along ``dim``, and their indices (int64)."""
    dim = dim % x.dim()
    last = x.movedim(dim, -1)
    keys = last
    if x.dtype in (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int64):
        keys = keys.to(torch.int32)  # int64 is int32 in the file anyway
    if not descending:
        # The complement, -1 - x, has no overflow, unlike -x.
        keys = -keys if keys.is_floating_point() else -1 - keys
    values, indices = native.top_k(keys, count)
    if not descending:
        values = -values if values.is_floating_point() else -1 - values
    return values.to(x.dtype).movedim(-1, dim), indices.to(torch.int64).movedim(-1, dim)


def _sort(x: torch.Tensor, dim: int = -1, descending: bool = False) -> Any:
    if x.dim() == 0:
        return x.clone(), torch.zeros((), dtype=torch.int64)
    size = x.shape[dim]
    if not isinstance(size, int) or x.is_complex():
        return NotImplemented
    return ordered(x, size, dim, descending)


def _sort_stable(
    x: torch.Tensor, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> Any:
    return _sort(x, dim, descending)


def _topk(x: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    if x.dim() == 0:
        return x.clone(), torch.zeros((), dtype=torch.int64)
    if not isinstance(k, int):
        return NotImplemented
    return ordered(x, k, dim, largest)


def _argsort(x: torch.Tensor, dim: int = -1, descending: bool = False) -> Any:
    found = _sort(x, dim, descending)
    return found if found is NotImplemented else found[1]


def _argsort_stable(
    x: torch.Tensor, *, stable: bool, dim: int = -1, descending: bool = False
) -> Any:
    return _argsort(x, dim, descending)


def _msort(x: torch.Tensor) -> Any:
    found = _sort(x, 0)
    return found if found is NotImplemented else found[0]


def _kthvalue(x: torch.Tensor, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    if x.dim() == 0:
        return x.clone(), torch.zeros((), dtype=torch.int64)
    if not isinstance(k, int) or not isinstance(x.shape[dim], int):
        return NotImplemented
    size = x.shape[dim]
    largest = k > (size + 1) // 2  # the shorter way; among equals any index is right
    count = size + 1 - k if largest else k
    values, indices = ordered(x, count, dim, largest)
    values, indices = (t.narrow(dim, count - 1, 1) for t in (values, indices))
    return (values, indices) if keepdim else (values.squeeze(dim), indices.squeeze(dim))


def _median_dim(x: torch.Tensor, dim: int = -1, keepdim: bool = False) -> Any:
    if x.dim() == 0:
        return x.clone(), torch.zeros((), dtype=torch.int64)
    if not isinstance(x.shape[dim], int):
        return NotImplemented
    return _kthvalue(x, (x.shape[dim] + 1) // 2, dim, keepdim)


def _median(x: torch.Tensor) -> Any:
    found = _median_dim(x.reshape(-1), 0)
    return found if found is NotImplemented else found[0]


def _mode(x: torch.Tensor, dim: int = -1, keepdim: bool = False) -> Any:
    """The smallest of the most frequent values, and its last index."""
    if x.dim() == 0:
        return x.clone(), torch.zeros((), dtype=torch.int64)
    if not isinstance(x.shape[dim], int):
        return NotImplemented
    last = x.movedim(dim, -1)
    if not last.is_floating_point():
        last = last.to(torch.int32)
    counts = (last.unsqueeze(-1) == last.unsqueeze(-2)).to(torch.int32).sum(-1, dtype=torch.int32)
    most = counts == counts.amax(-1, keepdim=True)
    top = last.amax(-1, keepdim=True)
    value = torch.where(most, last, top).amin(-1, keepdim=True)
    places = torch.arange(last.shape[-1], dtype=torch.int32)
    index = torch.where(last == value, places, -1).amax(-1, keepdim=True)
    value, index = value.to(x.dtype).movedim(-1, dim), index.to(torch.int64).movedim(-1, dim)
    return (value, index) if keepdim else (value.squeeze(dim), index.squeeze(dim))


DECOMPOSITIONS: dict[Any, Any] = {
    aten.sort.default: _sort,
    aten.sort.stable: _sort_stable,
    aten.argsort.default: _argsort,
    aten.argsort.stable: _argsort_stable,
    aten.msort.default: _msort,
    aten.topk.default: _topk,
    aten.kthvalue.default: _kthvalue,
    aten.median.default: _median,
    aten.median.dim: _median_dim,
    aten.mode.default: _mode,
}
