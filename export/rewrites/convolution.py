"""Convolutions that LiteRT has no operator for, from those it has.

- Transposed: LiteRT's TRANSPOSE_CONV knows stride and no padding at best, in two dimensions. The
  transposed convolution without padding is cropped (padding) and extended (output padding); a
  dilated kernel is one with zeros between its values; in three dimensions, and where many groups
  would become as many operators, zeros are put between the values of the input instead, and a plain
  convolution with the mirrored kernel follows.
- Grouped in three dimensions: LiteRT's CONV_3D has no groups (and the converter may crash on them).
  It is the sum, over the kernel's depth, of grouped two-dimensional convolutions of the frames.
- ``padding="same"`` with an even kernel pads one side more: written as a pad and a convolution.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

__all__ = ["DECOMPOSITIONS"]

aten = torch.ops.aten
Tensor = torch.Tensor

# Up to so many groups, one TRANSPOSE_CONV each is better than multiplying by zeros.
_FEW_GROUPS = 4


def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Any:
    dims = weight.dim() - 2
    s, p, d, o = (
        list(v) * dims if len(v) == 1 else list(v)
        for v in (stride, padding, dilation, output_padding)
    )
    if not transposed:
        if dims == 3 and groups > 1 and x.is_floating_point():
            return _grouped_3d(x, weight, bias, s, p, d, groups)
        return NotImplemented
    plain = not any(p) and not any(o) and all(v == 1 for v in d)
    if dims < 3 and plain and groups == 1:
        return NotImplemented
    if dims == 3 or groups > _FEW_GROUPS:
        full = _zeros_between(x, weight, s, p, d, o, groups)
    else:
        for axis, step in enumerate(d):
            weight = _spread(weight, axis + 2, step)
        ones, none = [1] * dims, [0] * dims
        if groups == 1:
            full = aten.convolution.default(x, weight, None, s, none, ones, True, none, 1)
        else:
            parts = [
                aten.convolution.default(xg, wg, None, s, none, ones, True, none, 1)
                for xg, wg in zip(x.chunk(groups, 1), weight.chunk(groups, 0), strict=True)
            ]
            full = torch.cat(parts, 1)
        for axis in range(dims):
            kept = full.shape[axis + 2] - 2 * p[axis] + o[axis]
            full = _window(full, axis + 2, p[axis], kept)
    if bias is not None:
        full = full + bias.reshape(-1, *([1] * dims))
    return full


def _window(x: Tensor, axis: int, start: int, length: int) -> Tensor:
    """``length`` values from ``start`` on, with zeros beyond the end."""
    size = x.shape[axis]
    stop = min(start + length, size)
    if start or stop < size:
        x = x.narrow(axis, start, stop - start)
    missing = start + length - stop
    if missing:
        pads = [0] * (2 * (x.dim() - axis))
        pads[-1] = missing
        x = functional.pad(x, pads)
    return x


def _spread(x: Tensor, axis: int, step: int) -> Tensor:
    """``x`` with ``step - 1`` zeros between its values along ``axis``."""
    if step == 1:
        return x
    shape = list(x.shape)
    inner = 1
    for size in shape[axis + 1 :]:
        inner *= size
    # Zeros after every value; in three dimensions, since LiteRT pads no more than five.
    flat = functional.pad(x.reshape(-1, shape[axis], inner), (0, inner * (step - 1)))
    wide = flat.reshape(*shape[:axis], shape[axis] * step, *shape[axis + 1 :])
    return wide.narrow(axis, 0, (shape[axis] - 1) * step + 1)


def _zeros_between(
    x: Tensor,
    weight: Tensor,
    s: list[int],
    p: list[int],
    d: list[int],
    o: list[int],
    groups: int,
) -> Tensor:
    dims = weight.dim() - 2
    for axis in range(dims):
        x = _spread(x, axis + 2, s[axis])
    # (in, out / groups, …) with the kernel mirrored becomes (out, in / groups, …).
    rows, columns = weight.shape[0] // groups, weight.shape[1]
    kernel = list(weight.shape[2:])
    weight = weight.flip(*range(2, dims + 2)) if any(k > 1 for k in kernel) else weight
    parts = [w.transpose(0, 1) for w in weight.chunk(groups, 0)] if groups > 1 else []
    if rows == 1:
        weight = weight.reshape(groups * columns, 1, *kernel)
    else:
        weight = torch.cat(parts, 0) if groups > 1 else weight.transpose(0, 1)
    pads: list[int] = []
    for axis in range(dims):
        low = d[axis] * (kernel[axis] - 1) - p[axis]
        pads = [low, low + o[axis], *pads]
    padding = [0] * dims
    if all(v >= 0 for v in pads) and not any(o):
        padding = [pads[2 * (dims - 1 - axis)] for axis in range(dims)]
    else:
        x = functional.pad(x, pads)
    return aten.convolution.default(
        x, weight, None, [1] * dims, padding, d, False, [0] * dims, groups
    )


def _grouped_3d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    s: list[int],
    p: list[int],
    d: list[int],
    groups: int,
) -> Tensor:
    if p[0]:
        x = functional.pad(x, (0, 0, 0, 0, p[0], p[0]))
    batch, channels, depth = x.shape[:3]
    kernel = weight.shape[2]
    frames = (depth - d[0] * (kernel - 1) - 1) // s[0] + 1
    x = x.transpose(1, 2)  # (batch, depth, channels, height, width)
    total: Any = None
    for k in range(kernel):
        start = k * d[0]
        part = x[:, start : start + s[0] * (frames - 1) + 1 : s[0]]
        part = part.reshape(batch * frames, channels, *x.shape[3:])
        last = bias if k == kernel - 1 else None
        part = aten.convolution.default(
            part, weight[:, :, k], last, s[1:], p[1:], d[1:], False, [0, 0], groups
        )
        total = part if total is None else total + part
    result: Tensor = total.reshape(batch, frames, *total.shape[1:]).transpose(1, 2)
    return result


def _same(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1,),
    padding: str = "valid",
    dilation: Sequence[int] = (1,),
    groups: int = 1,
) -> Any:
    dims = weight.dim() - 2
    s = list(stride) * dims if len(stride) == 1 else list(stride)
    d = list(dilation) * dims if len(dilation) == 1 else list(dilation)
    pads: list[int] = []
    even = [0] * dims
    for axis in range(dims):
        total = d[axis] * (weight.shape[axis + 2] - 1) if padding == "same" else 0
        even[axis] = total // 2
        pads = [total // 2, total - total // 2, *pads]
    if pads[::2] != pads[1::2]:
        x, even = functional.pad(x, pads), [0] * dims
    unbatched = x.dim() == dims + 1
    if unbatched:
        x = x.unsqueeze(0)
    y = aten.convolution.default(x, weight, bias, s, even, d, False, [0] * dims, groups)
    return y.squeeze(0) if unbatched else y


DECOMPOSITIONS: dict[Any, Any] = {
    aten.convolution.default: _convolution,
    aten.conv1d.padding: _same,
    aten.conv2d.padding: _same,
    aten.conv3d.padding: _same,
}
