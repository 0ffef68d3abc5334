"""Max unpooling: the pooled numbers at the places that the indices name, zeros elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tpu2edge.export.rewrites import native
from tpu2edge.export.rewrites.indexing import static

__all__ = ["DECOMPOSITIONS"]

aten = torch.ops.aten


def _unpool(x: torch.Tensor, indices: torch.Tensor, sizes: Sequence[int], rank: int) -> Any:
    if not static(*x.shape, *sizes):
        return NotImplemented
    lead = list(x.shape[: x.dim() - rank])
    planes, length, area = 1, 1, 1
    for size in lead:
        planes *= size
    for size in x.shape[x.dim() - rank :]:
        length *= size
    for size in sizes:
        area *= size
    offset = torch.arange(planes, dtype=torch.int32).reshape(planes, 1) * area
    flat = (indices.reshape(planes, length).to(torch.int32) + offset).reshape(-1, 1)
    # Windows that overlap bring the same number to a place several times: their mean is the number.
    total = native.scatter_nd(flat, x.reshape(-1), [planes * area])
    count = native.scatter_nd(flat, torch.ones_like(x).reshape(-1), [planes * area])
    return (total / count.clamp(min=1)).reshape([*lead, *sizes])


def _unpool2d(x: torch.Tensor, indices: torch.Tensor, sizes: Sequence[int]) -> Any:
    return _unpool(x, indices, sizes, len(sizes))


def _unpool3d(
    x: torch.Tensor,
    indices: torch.Tensor,
    sizes: Sequence[int],
    stride: Any = (),
    padding: Any = (),
) -> Any:
    return _unpool(x, indices, sizes, 3)


DECOMPOSITIONS: dict[Any, Any] = {
    aten.max_unpool2d.default: _unpool2d,
    aten.max_unpool3d.default: _unpool3d,
}
