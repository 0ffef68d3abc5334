"""Pads from slices and concatenations, where LiteRT's PAD cannot do them.

LiteRT pads up to five dimensions of float32, int32, int64, uint8 or bool. Reflection, replication
and circular padding would be computed by index arithmetic and GATHER_ND; slices give the same and
run on every delegate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["DECOMPOSITIONS"]

aten = torch.ops.aten
Tensor = torch.Tensor

_MOST_DIMS = 5
_SMALL_INTEGERS = (torch.int8, torch.int16)
# Up to so many single rows a mirrored edge is put together from, instead of by one REVERSE_V2.
_FEW_ROWS = 4


def _constant(x: Tensor, pad: Sequence[int], value: Any = 0) -> Any:
    if x.dtype in _SMALL_INTEGERS:
        return aten.constant_pad_nd.default(x.to(torch.int32), pad, value).to(x.dtype)
    if x.dim() <= _MOST_DIMS:
        return NotImplemented
    for index in range(len(pad) // 2):
        axis = x.dim() - 1 - index
        low, high = pad[2 * index], pad[2 * index + 1]
        x = _cropped(x, axis, low, high)
        low, high = max(low, 0), max(high, 0)
        if low or high:
            shape = list(x.shape)
            outer, inner = _product(shape[:axis]), _product(shape[axis + 1 :])
            flat = x.reshape(outer, shape[axis] * inner)
            flat = aten.constant_pad_nd.default(flat, [low * inner, high * inner], value)
            x = flat.reshape(*shape[:axis], shape[axis] + low + high, *shape[axis + 1 :])
    return x


def _cropped(x: Tensor, axis: int, low: int, high: int) -> Tensor:
    low, high = max(-low, 0), max(-high, 0)
    return x.narrow(axis, low, x.shape[axis] - low - high) if low or high else x


def _product(sizes: Sequence[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


def _mirrored(x: Tensor, axis: int, start: int, length: int) -> list[Tensor]:
    if length <= _FEW_ROWS:
        return [x.narrow(axis, start + i, 1) for i in reversed(range(length))]
    return [x.narrow(axis, start, length).flip(axis)]


def _reflect(x: Tensor, pad: Sequence[int]) -> Tensor:
    for index in range(len(pad) // 2):
        axis, low, high = x.dim() - 1 - index, pad[2 * index], pad[2 * index + 1]
        before = _mirrored(x, axis, 1, low) if low > 0 else []
        after = _mirrored(x, axis, x.shape[axis] - 1 - high, high) if high > 0 else []
        x = _joined(before, _cropped(x, axis, low, high), after, axis)
    return x


def _replicate(x: Tensor, pad: Sequence[int]) -> Tensor:
    for index in range(len(pad) // 2):
        axis, low, high = x.dim() - 1 - index, pad[2 * index], pad[2 * index + 1]
        before = [x.narrow(axis, 0, 1)] * max(low, 0)
        after = [x.narrow(axis, x.shape[axis] - 1, 1)] * max(high, 0)
        x = _joined(before, _cropped(x, axis, low, high), after, axis)
    return x


def _circular(x: Tensor, pad: Sequence[int]) -> Tensor:
    for index in range(len(pad) // 2):
        axis, low, high = x.dim() - 1 - index, pad[2 * index], pad[2 * index + 1]
        x = _cropped(x, axis, low, high)
        size = x.shape[axis]
        before = [x.narrow(axis, size - low, low)] if low > 0 else []
        after = [x.narrow(axis, 0, high)] if high > 0 else []
        x = _joined(before, x, after, axis)
    return x


def _joined(before: list[Tensor], x: Tensor, after: list[Tensor], axis: int) -> Tensor:
    return torch.cat([*before, x, *after], axis) if before or after else x


_MODES = {"reflect": _reflect, "replicate": _replicate, "circular": _circular}


def _pad(x: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Any:
    if mode not in _MODES:
        return aten.constant_pad_nd.default(x, pad, 0 if value is None else value)
    plane = x.dim() == 4 and len(pad) == 4 and x.dtype is torch.float32
    if mode == "reflect" and plane and min(pad) >= 0:
        return aten.reflection_pad2d.default(x, pad)  # MIRROR_PAD
    return _MODES[mode](x, pad)


DECOMPOSITIONS: dict[Any, Any] = {
    aten.constant_pad_nd.default: _constant,
    aten.pad.default: _pad,
    aten._pad_circular.default: _circular,
    **dict.fromkeys(
        (
            aten.reflection_pad1d.default,
            aten.reflection_pad3d.default,
        ),
        _reflect,
    ),
    **dict.fromkeys(
        (
            aten.replication_pad1d.default,
            aten.replication_pad2d.default,
            aten.replication_pad3d.default,
        ),
        _replicate,
    ),
}
