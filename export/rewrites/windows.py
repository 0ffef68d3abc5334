"""Sliding windows (``Tensor.unfold``, ``F.unfold``, ``F.fold``) and mirrored or repeated axes.

Windows are slices put side by side: what litert-torch makes of them gathers, and pads tensors of
more dimensions than LiteRT pads. ``F.fold`` is a transposed convolution with a kernel of ones and
zeros, instead of a scatter that LiteRT refuses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from tpu2edge.export.rewrites.splice import Const

__all__ = ["DECOMPOSITIONS", "SPLICES"]

aten = torch.ops.aten
Tensor = torch.Tensor

_MOST_SLICES = 512  # beyond, one gather is less than that many operators


def _unfold(x: Tensor, dim: int, size: int, step: int) -> Any:
    if x.dim() == 0:
        return NotImplemented
    axis = dim % x.dim()
    shape = list(x.shape)
    length = shape[axis]
    count = (length - size) // step + 1
    block = math.gcd(size, step)
    if size < 1 or min(count, size // block) > _MOST_SLICES:
        return NotImplemented
    outer, inner = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
    if count <= size // block:
        flat = x.reshape(outer, length, inner)
        windows = torch.stack([flat.narrow(1, i * step, size) for i in range(count)], 1)
    else:
        used = x.narrow(axis, 0, length // block * block)
        blocks = used.reshape(outer, length // block, block * inner)
        hop = step // block
        parts = [
            blocks[:, i : i + hop * (count - 1) + 1 : hop].reshape(outer, count, block, inner)
            for i in range(size // block)
        ]
        windows = torch.cat(parts, 2) if len(parts) > 1 else parts[0]
    return windows.transpose(2, 3).reshape(*shape[:axis], count, *shape[axis + 1 :], size)


def _im2col(
    x: Tensor,
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Any:
    (kh, kw), (dh, dw), (ph, pw), (sh, sw) = kernel_size, dilation, padding, stride
    if kh * kw > _MOST_SLICES:
        return NotImplemented
    if ph or pw:
        x = functional.pad(x, (pw, pw, ph, ph))
    h, w = x.shape[-2:]
    rows = (h - dh * (kh - 1) - 1) // sh + 1
    columns = (w - dw * (kw - 1) - 1) // sw + 1
    parts = []
    for i in range(kh):
        band = x[..., i * dh : i * dh + sh * (rows - 1) + 1 : sh, :]
        for j in range(kw):
            part = band[..., j * dw : j * dw + sw * (columns - 1) + 1 : sw]
            parts.append(part.reshape(*x.shape[:-2], 1, rows * columns))
    stacked = torch.cat(parts, -2)
    return stacked.reshape(*x.shape[:-3], x.shape[-3] * kh * kw, rows * columns)


def _col2im(
    const: Const,
    x: Tensor,
    output_size: Sequence[int],
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Any:
    (h, w), (kh, kw), (dh, dw), (ph, pw), (sh, sw) = (
        output_size,
        kernel_size,
        dilation,
        padding,
        stride,
    )
    rows = (h + 2 * ph - dh * (kh - 1) - 1) // sh + 1
    columns = (w + 2 * pw - dw * (kw - 1) - 1) // sw + 1
    lead = [*x.shape[:-2], x.shape[-2] // (kh * kw)]
    kernel = const(lambda: torch.eye(kh * kw).reshape(kh * kw, 1, kh, kw))
    folded = functional.conv_transpose2d(
        x.reshape(math.prod(lead), kh * kw, rows, columns),
        kernel,
        stride=(sh, sw),
        dilation=(dh, dw),
    )
    # Where the windows do not reach the end, the rest is zeros.
    missing = [w + 2 * pw - folded.shape[3], h + 2 * ph - folded.shape[2]]
    if any(missing):
        folded = functional.pad(folded, (0, missing[0], 0, missing[1]))
    return folded[:, :, ph : ph + h, pw : pw + w].reshape(*lead, h, w)


def _flip(x: Tensor, dims: Sequence[int]) -> Any:
    axes = sorted(dim % x.dim() for dim in dims) if x.dim() else []
    if not axes or axes[-1] - axes[0] == len(axes) - 1:
        return NotImplemented
    # LiteRT's REVERSE_V2 takes axes that lie side by side.
    run: list[int] = []
    for axis in axes:
        if run and axis != run[-1] + 1:
            x, run = x.flip(run), []
        run.append(axis)
    return x.flip(run)


def _repeat(x: Tensor, repeats: Sequence[int]) -> Any:
    dims = len(repeats)
    if dims <= 4 or max(repeats) > _MOST_SLICES or min(repeats) < 1:
        return NotImplemented
    shape = [1] * (dims - x.dim()) + list(x.shape)
    x = x.reshape(shape)
    for axis, times in enumerate(repeats):
        if times > 1:
            inner = math.prod(shape[axis:])
            flat = torch.cat([x.reshape(-1, inner)] * times, 1)
            shape[axis] *= times
            x = flat.reshape(shape)
    return x


DECOMPOSITIONS: dict[Any, Any] = {
    aten.unfold.default: _unfold,
    aten.im2col.default: _im2col,
    aten.flip.default: _flip,
    aten.repeat.default: _repeat,
}
SPLICES: dict[Any, Any] = {aten.col2im.default: _col2im}
