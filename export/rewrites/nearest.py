"""Nearest interpolation that takes the source pixels that PyTorch takes.

litert-torch gives RESIZE_NEAREST_NEIGHBOR for every 2-D resize, whose pixels are PyTorch's only
where the size grows by whole numbers; those stay. All others become one GATHER along each axis,
with the indices that PyTorch's own kernel computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tpu2edge.export.rewrites import native

__all__ = ["DECOMPOSITIONS"]

aten = torch.ops.aten


def _sources(source: int, size: int, scale: float | None, exact: bool) -> list[int]:
    """The source index of each of ``size`` pixels, from PyTorch's kernel on a ramp."""
    op: Any = aten._upsample_nearest_exact1d if exact else aten.upsample_nearest1d
    with _disable_current_modes():
        ramp = torch.arange(source, dtype=torch.float32).reshape(1, 1, source)
        # The kernel itself: while a program is decomposed, a call would lead back here.
        result = op.default._op_dk(torch._C.DispatchKey.CPU, ramp, [size], scale)
        return [int(value) for value in result.flatten()]


def _resize(
    x: torch.Tensor, sizes: Sequence[int], scales: Sequence[float | None], exact: bool
) -> Any:
    rank = len(sizes)
    known = [*x.shape[-rank:], *sizes]
    if not all(isinstance(size, int) for size in known):
        return NotImplemented
    plans = [
        _sources(source, size, scale, exact)
        for source, size, scale in zip(x.shape[-rank:], sizes, scales, strict=True)
    ]
    whole = all(
        size % source == 0 and plan == [i // (size // source) for i in range(size)]
        for source, size, plan in zip(x.shape[-rank:], sizes, plans, strict=True)
    )
    if rank == 2 and whole and x.dtype is torch.float32:
        # The layout pass of litert-torch and the converter know this one.
        return aten.upsample_nearest2d.vec(x, list(sizes), None) if exact else NotImplemented
    for axis, plan in zip(range(x.dim() - rank, x.dim()), plans, strict=True):
        if plan == list(range(x.shape[axis])):
            continue
        step = max(1, plan[1]) if len(plan) > 1 else 1
        if plan == list(range(plan[0], plan[0] + step * len(plan), step)):
            x = aten.slice.Tensor(x, axis, plan[0], plan[-1] + 1, step)
        else:
            x = native.gather(x, native.constant(plan), axis)
    return x.clone()


def _packets(rank: int, exact: bool) -> tuple[Any, Any]:
    name = f"_upsample_nearest_exact{rank}d" if exact else f"upsample_nearest{rank}d"
    packet = getattr(aten, name)

    def vec(x: torch.Tensor, sizes: Sequence[int] | None, factors: Sequence[float] | None) -> Any:
        if sizes is None:
            assert factors is not None
            given = x.shape[-rank:]
            sizes = [int(size * factor) for size, factor in zip(given, factors, strict=True)]
        return _resize(x, sizes, factors or [None] * rank, exact)

    def default(x: torch.Tensor, sizes: Sequence[int], *scales: float | None, **named: Any) -> Any:
        names = ("scales",) if rank == 1 else ("scales_d", "scales_h", "scales_w")[3 - rank :]
        every = [*scales, *(named.get(name) for name in names[len(scales) :])]
        return _resize(x, sizes, every, exact)

    return (packet.vec, vec), (packet.default, default)


DECOMPOSITIONS: dict[Any, Any] = {
    op: function
    for rank in (1, 2, 3)
    for exact in (False, True)
    for op, function in _packets(rank, exact)
}
