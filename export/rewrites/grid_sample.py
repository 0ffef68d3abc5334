"""``grid_sample`` in two and three dimensions, from floor, products and gathers."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch

__all__ = ["DECOMPOSITIONS"]

aten = torch.ops.aten
Tensor = torch.Tensor

_BILINEAR, _NEAREST = 0, 1  # torch's numbers of the modes; 2 is bicubic
_ZEROS, _BORDER, _REFLECTION = 0, 1, 2
_CUBIC = -0.75  # torch's coefficient of the cubic convolution


def _sample(x: Tensor, grid: Tensor, mode: int, padding: int, corners: bool) -> Any:
    dims = grid.shape[-1]
    sizes = list(x.shape[2:])
    # The last coordinate of the grid belongs to the first spatial axis.
    taps = [
        _taps(grid[..., dims - 1 - axis], size, mode, padding, corners)
        for axis, size in enumerate(sizes)
    ]
    batch, channels = x.shape[:2]
    points = list(grid.shape[1:-1])
    flat = x.reshape(batch, channels, math.prod(sizes))
    total: Any = None
    for corner in itertools.product(*taps):
        index = torch.zeros_like(grid[..., 0])
        weight: Any = None
        for (place, factor), size in zip(corner, sizes, strict=True):
            inside = place.clamp(0, size - 1)
            index = index * size + inside
            if padding == _ZEROS:
                within = ((place >= 0) & (place <= size - 1)).to(x.dtype)
                factor = within if factor is None else factor * within
            if factor is not None:
                weight = factor if weight is None else weight * factor
        chosen = index.to(torch.int64).reshape(batch, 1, -1).expand(batch, channels, -1)
        part = flat.gather(2, chosen)
        if weight is not None:
            part = part * weight.reshape(batch, 1, -1)
        total = part if total is None else total + part
    return total.reshape(batch, channels, *points)


def _taps(
    coordinate: Tensor, size: int, mode: int, padding: int, corners: bool
) -> list[tuple[Tensor, Tensor | None]]:
    """Along one axis: the places that are read, as whole floats, and their weights."""
    span = size - 1 if corners else size
    c = (coordinate + 1) * (span / 2) - (0 if corners else 0.5)
    if mode in (_BILINEAR, _NEAREST):
        c = _padded(c, size, padding, corners)
    if mode == _NEAREST:
        return [(torch.round(c), None)]
    low = torch.floor(c)
    t = c - low
    if mode == _BILINEAR:
        return [(low, 1 - t), (low + 1, t)]
    weights = [_outer(t + 1), _inner(t), _inner(1 - t), _outer(2 - t)]
    places = [_padded(low + i - 1, size, padding, corners) for i in range(4)]
    return [(torch.round(p), w) for p, w in zip(places, weights, strict=True)]


def _inner(t: Tensor) -> Tensor:
    return ((_CUBIC + 2) * t - (_CUBIC + 3)) * t * t + 1


def _outer(t: Tensor) -> Tensor:
    return ((_CUBIC * t - 5 * _CUBIC) * t + 8 * _CUBIC) * t - 4 * _CUBIC


def _padded(c: Tensor, size: int, padding: int, corners: bool) -> Tensor:
    if padding == _BORDER:
        return c.clamp(0, size - 1)
    if padding == _REFLECTION:
        low, span = (0.0, size - 1) if corners else (-0.5, size)
        if span == 0:
            return torch.zeros_like(c)
        t = c - low
        t = t - torch.floor(t / (2 * span)) * (2 * span)
        return (span - torch.abs(t - span) + low).clamp(0, size - 1)
    return c


DECOMPOSITIONS: dict[Any, Any] = {
    aten.grid_sampler_2d.default: _sample,
    aten.grid_sampler_3d.default: _sample,
}
