"""Indices of max pooling, and what is read back with them.

litert-torch's lowering of max_pool2d_with_indices gives zeros as indices. Here every axis is
reduced by itself, the last one first: a running maximum over the places of a window that carries the
position along. Positions are compared in the order of PyTorch's kernel, so the first of equals wins;
where a NaN stands is not looked at.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from tpu2edge.export.rewrites import native
from tpu2edge.export.rewrites.graph import call
from tpu2edge.export.rewrites.indexing import static

__all__ = ["DECOMPOSITIONS", "apply"]

aten = torch.ops.aten

Windows = list[list[int]]  # for each output place along an axis, the input places it looks at


@torch.library.custom_op("tpu2edge::max_pool_indices", mutates_args=())
def _max_pool_indices(
    x: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> torch.Tensor:
    return _pool(x, kernel, stride, padding, dilation, ceil_mode)[1].clone()


@_max_pool_indices.register_fake
def _max_pool_indices_shape(
    x: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> torch.Tensor:
    sizes = _sizes(x, kernel, stride, padding, dilation, ceil_mode)
    return x.new_empty([*x.shape[: x.dim() - len(sizes)], *sizes], dtype=torch.int64)


def _sizes(
    x: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> list[int]:
    sizes = []
    axes = range(x.dim() - len(kernel), x.dim())
    for axis, k, s, p, d in zip(axes, kernel, stride, padding, dilation, strict=True):
        size = x.shape[axis]
        room = size + 2 * p - d * (k - 1) - 1
        count = -(-room // s) + 1 if ceil_mode else room // s + 1
        if ceil_mode and (count - 1) * s >= size + p:  # no window may start in the padding behind
            count -= 1
        sizes.append(count)
    return sizes


def _pool(x: torch.Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: Any) -> Any:
    rank = len(kernel)
    functions = (
        torch.nn.functional.max_pool1d,
        torch.nn.functional.max_pool2d,
        torch.nn.functional.max_pool3d,
    )
    return functions[rank - 1](
        x,
        list(kernel),
        list(stride) or None,
        list(padding),
        list(dilation),
        ceil_mode=ceil,
        return_indices=True,
    )


_INDICES: Any = torch.ops.tpu2edge.max_pool_indices.default
_RANKS = {
    aten.max_pool2d_with_indices.default: 2,
    aten.max_pool3d_with_indices.default: 3,
    aten.max_pool1d_with_indices.default: 1,
}


def apply(program: ExportedProgram) -> int:
    """Take the indices of max pooling that are used from an operator of our own."""
    count = 0
    for node in list(program.graph.nodes):
        if node.target in _RANKS:
            count += _split(node, _RANKS[node.target])
    if count:
        program.graph.eliminate_dead_code()
        program.graph_module.recompile()
    return count


def _split(node: fx.Node, rank: int) -> int:
    names = ("x", "kernel_size", "stride", "padding", "dilation", "ceil_mode")
    given = dict(zip(names[1:], node.args[1:], strict=False))
    given.update({key: value for key, value in node.kwargs.items() if key in names})
    x = node.args[0]
    assert isinstance(x, fx.Node)
    if not static(*x.meta["val"].shape):
        return 0
    kernel = _each(given["kernel_size"], rank)
    options = (
        kernel,
        _each(given.get("stride") or kernel, rank),
        _each(given.get("padding", 0), rank),
        _each(given.get("dilation", 1), rank),
    )
    count = 0
    for user in list(node.users):
        if user.target is not operator.getitem or not user.users:
            continue
        if user.args[1] == 1:
            new = call(user, _INDICES, x, *options, bool(given.get("ceil_mode", False)))
            user.replace_all_uses_with(new)
            count += 1
    return count


def _each(value: Any, rank: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * rank if len(values) == 1 else values


# -------------------------------------------------------------------------------------- reductions


def _best(x: torch.Tensor, windows: Sequence[Windows]) -> tuple[torch.Tensor, torch.Tensor]:
    """The maxima of the windows over the last axes, and their positions in the flattened axes."""
    rank = len(windows)
    sizes = x.shape[x.dim() - rank :]
    best, index = x, None
    scale = 1
    for back in range(1, rank + 1):
        axis = x.dim() - back
        best, index = _along(best, index, axis, windows[rank - back], scale)
        scale *= sizes[rank - back]
    assert index is not None
    return best, index.to(torch.int64)


def _along(
    x: torch.Tensor, index: torch.Tensor | None, axis: int, windows: Windows, scale: int
) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(len(window) for window in windows)
    shape = [1] * x.dim()
    shape[axis] = len(windows)
    best = place = None
    for tap in range(width):
        # Shorter windows look at their last place again, which changes nothing.
        places = [window[min(tap, len(window) - 1)] for window in windows]
        here = _pick(x, places, axis)
        position = native.constant([scale * number for number in places]).reshape(shape)
        if index is not None:
            position = position + _pick(index, places, axis)
        if best is None or place is None:
            best = here
            place = position + torch.zeros_like(here, dtype=torch.int32)
        else:
            takes = here > best
            place = torch.where(takes, position, place)
            best = torch.where(takes, here, best)
    assert best is not None
    assert place is not None
    return best, place


def _pick(x: torch.Tensor, places: Sequence[int], axis: int) -> torch.Tensor:
    """``x`` at ``places`` of ``axis``: a slice where they are evenly spaced."""
    step = max(1, places[1] - places[0]) if len(places) > 1 else 1
    if list(places) == list(range(places[0], places[0] + step * len(places), step)):
        if step == 1 and len(places) == x.shape[axis]:
            return x
        sliced: torch.Tensor = aten.slice.Tensor(x, axis, places[0], places[-1] + 1, step)
        return sliced
    return native.gather(x, native.constant(places), axis)


def _pool_windows(
    size: int, count: int, kernel: int, stride: int, padding: int, dilation: int
) -> Windows:
    found = []
    for start in range(-padding, -padding + count * stride, stride):
        taps = range(start, start + kernel * dilation, dilation)
        found.append([place for place in taps if 0 <= place < size])
    return found


def _indices(
    x: torch.Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool
) -> torch.Tensor:
    rank = len(kernel)
    sizes = _sizes(x, kernel, stride, padding, dilation, ceil_mode)
    windows = [
        _pool_windows(x.shape[axis], count, *options)
        for axis, count, *options in zip(
            range(x.dim() - rank, x.dim()), sizes, kernel, stride, padding, dilation, strict=True
        )
    ]
    return _best(x, windows)[1]


# ------------------------------------------------------------------------------------ adaptive pools


def _adaptive(x: torch.Tensor, sizes: Any) -> Any:
    sizes = [sizes] if isinstance(sizes, int) else list(sizes)
    rank = len(sizes)
    if not static(*x.shape, *sizes):
        return NotImplemented
    windows = [
        [list(range(i * size // count, -((-(i + 1) * size) // count))) for i in range(count)]
        for size, count in zip(x.shape[x.dim() - rank :], sizes, strict=True)
    ]
    best, index = _best(x, windows)
    given = x.shape[x.dim() - rank :]
    if rank == 2 and all(size % count == 0 for size, count in zip(given, sizes, strict=True)):
        kernel = [size // count for size, count in zip(given, sizes, strict=True)]
        best = torch.nn.functional.max_pool2d(x, kernel, kernel)
    return best, index


def _dilated_pool(
    x: torch.Tensor,
    kernel: Any,
    stride: Any = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    *,
    rank: int,
) -> Any:
    dilation = _each(dilation, rank)
    if max(dilation) == 1 or not static(*x.shape):
        return NotImplemented
    kernel = _each(kernel, rank)
    stride = _each(stride or kernel, rank)
    padding = _each(padding, rank)
    sizes = _sizes(x, kernel, stride, padding, dilation, ceil_mode)
    best = x
    for axis, count, *options in zip(
        range(x.dim() - rank, x.dim()), sizes, kernel, stride, padding, dilation, strict=True
    ):
        windows = _pool_windows(x.shape[axis], count, *options)
        best = _maximum(best, axis, windows)
    return best, torch.zeros_like(best, dtype=torch.int64)


def _maximum(x: torch.Tensor, axis: int, windows: Windows) -> torch.Tensor:
    best = None
    for tap in range(max(len(window) for window in windows)):
        here = _pick(x, [window[min(tap, len(window) - 1)] for window in windows], axis)
        best = here if best is None else torch.maximum(best, here)
    assert best is not None
    return best


def _pool2d(*args: Any, **kwargs: Any) -> Any:
    return _dilated_pool(*args, rank=2, **kwargs)


def _pool3d(*args: Any, **kwargs: Any) -> Any:
    return _dilated_pool(*args, rank=3, **kwargs)


# ------------------------------------------------------------------------------------------ unpooling


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
    _INDICES: _indices,
    aten.max_pool2d_with_indices.default: _pool2d,
    aten.max_pool3d_with_indices.default: _pool3d,
    aten.adaptive_max_pool1d.default: _adaptive,
    aten.adaptive_max_pool2d.default: _adaptive,
    aten.adaptive_max_pool3d.default: _adaptive,
    aten.max_unpool2d.default: _unpool2d,
    aten.max_unpool3d.default: _unpool3d,
}
