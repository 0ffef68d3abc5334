"""Pooling from LiteRT's two-dimensional pools, slices and matrices.

- Averages: zeros are padded explicitly, and a constant corrects the divisor where windows are cut
  by ``ceil_mode``, ``count_include_pad`` or ``divisor_override``. Three dimensions are two pools.
- Maxima: three dimensions and dilation are maxima of strided slices, one axis after the other.
- Adaptive pools of uneven sizes: averages are products with a matrix along each axis, maxima are
  maxima of slices.
- Indices of maxima, which LiteRT does not give, are followed through the slices of each window.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from tpu2edge.export.rewrites.splice import Const, arguments, is_dynamic, splice

__all__ = ["along", "apply"]

aten = torch.ops.aten
Tensor = torch.Tensor

_MOST_SLICES = 1024


def apply(program: ExportedProgram) -> int:
    """Replace pools that LiteRT does not have; gives their number."""
    count = 0
    for node in list(program.graph.nodes):
        if node.op != "call_function" or node.target not in _POOLS or is_dynamic(node):
            continue
        make, dims = _POOLS[node.target]
        indices = any(_is_item(user, 1) for user in node.users)
        count += splice(program, node, _function(make, node, dims, indices))
    if count:
        program.graph.eliminate_dead_code()
        program.graph_module.recompile()
    return count


def _is_item(user: Node, index: int) -> bool:
    return "getitem" in str(user.target) and bool(user.args[1] == index)


def _function(make: Callable[..., Any], node: Node, dims: int, indices: bool) -> Callable[..., Any]:
    def function(const: Const, *args: Any, **kwargs: Any) -> Any:
        given = {"op": node.target, **arguments(node.target, args, kwargs)}
        x = given["self"]
        batched = x.dim() == dims + 2
        result = make(const, x if batched else x.unsqueeze(0), given, dims, indices, batched)
        if batched or result is NotImplemented:
            return result
        if isinstance(result, tuple):
            return tuple(one.squeeze(0) for one in result)
        return result.squeeze(0)

    return function


def along(x: Tensor, axis: int, matrix: Tensor) -> Tensor:
    """The product with ``matrix`` (outputs, inputs) along one axis."""
    last = x.dim() - 1
    if axis % x.dim() == last:
        return torch.matmul(x, matrix.t())
    return torch.matmul(x.transpose(axis, last), matrix.t()).transpose(axis, last)


def _list(value: Any, dims: int, default: Sequence[int] | None = None) -> list[int]:
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    if not values and default is not None:
        return list(default)
    return values * dims if len(values) == 1 else values


def _output(size: int, k: int, s: int, p: int, d: int, ceil: bool) -> int:
    span = size + 2 * p - d * (k - 1) - 1
    count = (-(-span // s) if ceil else span // s) + 1
    # The last window starts inside the input or its left padding.
    if ceil and (count - 1) * s >= size + p:
        count -= 1
    return count


# ---------------------------------------------------------------------------------------- averages


def _average(
    const: Const, x: Tensor, given: dict[str, Any], dims: int, _: bool, batched: bool
) -> Any:
    k = _list(given["kernel_size"], dims)
    s = _list(given["stride"], dims, k)
    p = _list(given["padding"], dims)
    ceil, include = given["ceil_mode"], given["count_include_pad"]
    override = given.get("divisor_override")
    sizes = list(x.shape[2:])
    outs = [_output(sizes[i], k[i], s[i], p[i], 1, ceil) for i in range(dims)]
    # Beyond the padding at the end, where ceil_mode lets windows reach.
    extra = [max(0, (outs[i] - 1) * s[i] + k[i] - sizes[i] - 2 * p[i]) for i in range(dims)]
    counts = [_counts(sizes[i], outs[i], k[i], s[i], p[i], include) for i in range(dims)]
    cut = override is None and any(one != k[i] for i in range(dims) for one in counts[i])
    factor = 1.0 if override is None else math.prod(k) / override
    # Not with ceil_mode: the converter may make a negative pad of it.
    if factor == 1.0 and not cut and not ceil and dims < 3 and batched:
        return NotImplemented
    if any(p) or any(extra):
        pads: list[int] = []
        for axis in range(dims):
            pads = [p[axis], p[axis] + extra[axis], *pads]
        x = torch.nn.functional.pad(x, pads)
    y = _mean(x, k, s, outs)
    if cut:
        return y * const(lambda: _correction(k, counts).to(x.dtype))
    return y if factor == 1.0 else y * factor


def _correction(k: list[int], counts: list[list[int]]) -> Tensor:
    divisor = torch.ones((), dtype=torch.float64)
    for axis, one in enumerate(counts):
        shape = [1] * len(k)
        shape[axis] = -1
        divisor = divisor * torch.tensor(one, dtype=torch.float64).reshape(shape)
    return math.prod(k) / divisor


def _counts(size: int, outs: int, k: int, s: int, p: int, include: bool) -> list[int]:
    low, high = (-p, size + p) if include else (0, size)
    starts = [i * s - p for i in range(outs)]
    return [min(start + k, high) - max(start, low) for start in starts]


def _mean(x: Tensor, k: list[int], s: list[int], outs: list[int]) -> Tensor:
    """Averages of whole windows, without padding."""
    lead, sizes = list(x.shape[:2]), list(x.shape[2:])
    if len(k) == 1:
        flat = x.reshape(*lead, 1, sizes[0])
        return aten.avg_pool2d.default(flat, [1, k[0]], [1, s[0]]).reshape(*lead, *outs)
    if len(k) == 2:
        return aten.avg_pool2d.default(x, k, s)
    rows, columns = outs[1:]
    if k[1:] != [1, 1] or s[1:] != [1, 1]:
        frames = x.reshape(lead[0], lead[1] * sizes[0], *sizes[1:])
        x = aten.avg_pool2d.default(frames, k[1:], s[1:])
    flat = x.reshape(*lead, sizes[0], rows * columns)
    if k[0] != 1 or s[0] != 1:
        flat = aten.avg_pool2d.default(flat, [k[0], 1], [s[0], 1])
    return flat.reshape(*lead, *outs)


def _adaptive_average(
    const: Const, x: Tensor, given: dict[str, Any], dims: int, _: bool, batched: bool
) -> Any:
    outs = _list(given["output_size"], dims)
    sizes = list(x.shape[2:])
    if all(out == 1 for out in outs):
        return NotImplemented
    if all(size % out == 0 for size, out in zip(sizes, outs, strict=True)):
        k = [size // out for size, out in zip(sizes, outs, strict=True)]
        return _mean(x, k, k, outs)
    for axis, (size, out) in enumerate(zip(sizes, outs, strict=True)):
        if size != out:
            x = along(x, axis + 2, const(partial(_averages, size, out)))
    return x


def _averages(size: int, out: int) -> Tensor:
    matrix = torch.zeros(out, size, dtype=torch.float64)
    for row, (start, stop) in enumerate(_regions(size, out)):
        matrix[row, start:stop] = 1 / (stop - start)
    return matrix.to(torch.float32)


def _regions(size: int, out: int) -> list[tuple[int, int]]:
    return [(i * size // out, -(-(i + 1) * size // out)) for i in range(out)]


# ---------------------------------------------------------------------------------------- maxima


def _maximum(
    const: Const, x: Tensor, given: dict[str, Any], dims: int, indices: bool, batched: bool
) -> Any:
    k = _list(given["kernel_size"], dims)
    s = _list(given["stride"], dims, k)
    p = _list(given["padding"], dims)
    d = _list(given["dilation"], dims)
    ceil = given["ceil_mode"]
    sizes = list(x.shape[2:])
    if not indices and dims < 3 and all(one == 1 for one in d) and x.is_floating_point():
        return NotImplemented
    if (math.prod(k) if indices else sum(k)) > _MOST_SLICES:
        return NotImplemented
    outs = [_output(sizes[i], k[i], s[i], p[i], d[i], ceil) for i in range(dims)]
    ends = [(outs[i] - 1) * s[i] + d[i] * (k[i] - 1) + 1 - p[i] - sizes[i] for i in range(dims)]
    low: Any = float("-inf") if x.is_floating_point() else torch.iinfo(x.dtype).min
    pads: list[int] = []
    for axis in range(dims):
        pads = [p[axis], max(0, ends[axis]), *pads]
    wide = torch.nn.functional.pad(x, pads, value=low) if any(pads) else x
    if not indices:
        for axis in range(dims):
            wide = _axis_maximum(wide, axis + 2, k[axis], s[axis], d[axis], outs[axis])
        # Pools with indices give two results, of which the second is not used here.
        return (wide, _unused(wide)) if "with_indices" in str(given["op"]) else wide
    best: Any = None
    where: Any = None
    for offset in itertools.product(*(range(one) for one in k)):
        part = wide
        for axis in range(dims):
            part = _strided(part, axis + 2, offset[axis] * d[axis], s[axis], outs[axis])
        starts = [offset[axis] * d[axis] - p[axis] for axis in range(dims)]
        index = const(partial(_positions, starts, s, outs, sizes))
        if best is None:
            best, where = part, index.expand(part.shape)
        else:
            better = part > best
            where = torch.where(better, index, where)
            best = torch.maximum(best, part)
    return best, where.to(torch.int64)


def _positions(starts: list[int], s: list[int], outs: list[int], sizes: list[int]) -> Tensor:
    """The place in the flattened input of each window's value at one offset."""
    total = torch.zeros((), dtype=torch.int64)
    for axis, start in enumerate(starts):
        shape = [1] * len(outs)
        shape[axis] = -1
        place = (torch.arange(outs[axis]) * s[axis] + start).clamp(0, sizes[axis] - 1)
        total = total * sizes[axis] + place.reshape(shape)
    return total.expand(outs).to(torch.int32)


def _unused(like: Tensor) -> Tensor:
    return torch.zeros_like(like, dtype=torch.int64)


def _strided(x: Tensor, axis: int, start: int, step: int, count: int) -> Tensor:
    return aten.slice.Tensor(x, axis, start, start + step * (count - 1) + 1, step)


def _axis_maximum(x: Tensor, axis: int, k: int, s: int, d: int, out: int) -> Tensor:
    result: Any = None
    for i in range(k):
        part = _strided(x, axis, i * d, s, out)
        result = part if result is None else torch.maximum(result, part)
    return result


def _adaptive_maximum(
    const: Const, x: Tensor, given: dict[str, Any], dims: int, indices: bool, batched: bool
) -> Any:
    outs = _list(given["output_size"], dims)
    sizes = list(x.shape[2:])
    if indices:
        return _adaptive_indices(x, outs, dims)
    y = x
    if dims == 2 and all(size % out == 0 for size, out in zip(sizes, outs, strict=True)):
        k = [size // out for size, out in zip(sizes, outs, strict=True)]
        y = aten.max_pool2d.default(x, k, k)
    else:
        for axis, (size, out) in enumerate(zip(sizes, outs, strict=True)):
            if size == out:
                continue
            parts = [
                y.narrow(axis + 2, start, stop - start).amax(axis + 2, keepdim=True)
                for start, stop in _regions(size, out)
            ]
            y = torch.cat(parts, axis + 2) if len(parts) > 1 else parts[0]
    return y, _unused(y)


def _adaptive_indices(x: Tensor, outs: list[int], dims: int) -> Any:
    if math.prod(outs) > _MOST_SLICES:
        return NotImplemented
    sizes = list(x.shape[2:])
    regions = [_regions(size, out) for size, out in zip(sizes, outs, strict=True)]
    best, where = [], []
    for region in itertools.product(*regions):
        part = x
        for axis, (start, stop) in enumerate(region):
            part = part.narrow(axis + 2, start, stop - start)
        flat = part.flatten(2)
        best.append(flat.amax(2, keepdim=True))
        inner = flat.argmax(2, keepdim=True).to(torch.int32)
        # From a position in the region to one in the whole.
        position = torch.zeros_like(inner)
        weight = math.prod(stop - start for start, stop in region)
        for axis, (start, stop) in enumerate(region):
            weight //= stop - start
            local = torch.div(inner, weight, rounding_mode="floor")
            inner = inner - local * weight
            position = position * sizes[axis] + local + start
        where.append(position)
    shape = [*x.shape[:2], *outs]
    return torch.cat(best, 2).reshape(shape), torch.cat(where, 2).reshape(shape).to(torch.int64)


_POOLS: dict[Any, tuple[Callable[..., Any], int]] = {
    aten.avg_pool1d.default: (_average, 1),
    aten.avg_pool2d.default: (_average, 2),
    aten.avg_pool3d.default: (_average, 3),
    aten.adaptive_avg_pool1d.default: (_adaptive_average, 1),
    aten.adaptive_avg_pool2d.default: (_adaptive_average, 2),
    aten._adaptive_avg_pool2d.default: (_adaptive_average, 2),
    aten.adaptive_avg_pool3d.default: (_adaptive_average, 3),
    aten._adaptive_avg_pool3d.default: (_adaptive_average, 3),
    aten.max_pool1d.default: (_maximum, 1),
    aten.max_pool2d.default: (_maximum, 2),
    aten.max_pool3d.default: (_maximum, 3),
    aten.max_pool1d_with_indices.default: (_maximum, 1),
    aten.max_pool2d_with_indices.default: (_maximum, 2),
    aten.max_pool3d_with_indices.default: (_maximum, 3),
    aten.adaptive_max_pool1d.default: (_adaptive_maximum, 1),
    aten.adaptive_max_pool2d.default: (_adaptive_maximum, 2),
    aten.adaptive_max_pool3d.default: (_adaptive_maximum, 3),
}
