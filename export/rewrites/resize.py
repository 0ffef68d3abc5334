"""Resizing as products with fixed matrices, where RESIZE_BILINEAR is not the same.

Each of torch's resizing operators is linear and acts on one axis after the other, so what it does
to an axis is a matrix, which the operator itself gives when it resizes the identity.
RESIZE_BILINEAR stays where it is the same: it knows the sizes, but not a given scale factor.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from tpu2edge.export.rewrites.pooling import along
from tpu2edge.export.rewrites.splice import Const, arguments, is_dynamic, splice

__all__ = ["apply"]

aten = torch.ops.aten
Tensor = torch.Tensor

# A larger matrix would cost more than gathering: 4 million numbers, 16 MB.
_MOST_VALUES = 1 << 22


def apply(program: ExportedProgram) -> int:
    """Replace resizes that LiteRT does not have; gives their number."""
    count = 0
    for node in list(program.graph.nodes):
        if node.op == "call_function" and node.target in _RESIZES and not is_dynamic(node):
            count += splice(program, node, _function(node))
    if count:
        program.graph.eliminate_dead_code()
        program.graph_module.recompile()
    return count


def _function(node: Node) -> Callable[..., Any]:
    op, dims = node.target, _RESIZES[node.target]
    outs = list(node.meta["val"].shape[2:])

    def function(const: Const, *args: Any, **kwargs: Any) -> Any:
        given = arguments(op, args, kwargs)
        x = given["input"] if "input" in given else given["self"]
        sizes = list(x.shape[2:])
        scales = _scales(given, dims)
        corners = bool(given["align_corners"])
        exact = corners or all(
            scale is None or scale * size == out
            for scale, size, out in zip(scales, sizes, outs, strict=True)
        )
        if op in _BILINEAR and exact:
            return NotImplemented
        if any(size * out > _MOST_VALUES for size, out in zip(sizes, outs, strict=True)):
            return NotImplemented
        for axis in range(dims):
            if sizes[axis] != outs[axis] or not exact:
                make = partial(
                    _matrix, op, dims, axis, sizes[axis], outs[axis], corners, scales[axis]
                )
                x = along(x, axis + 2, const(make))
        return x

    return function


def _scales(given: dict[str, Any], dims: int) -> list[float | None]:
    if given.get("scale_factors") is not None:
        return list(given["scale_factors"])
    names = {1: ("scales",), 2: ("scales_h", "scales_w"), 3: ("scales_d", "scales_h", "scales_w")}
    return [given.get(name) for name in names[dims]]


def _matrix(
    op: Any, dims: int, axis: int, size: int, out: int, corners: bool, scale: float | None
) -> Tensor:
    """(outputs, inputs): what ``op`` does along one axis; computed in float64, rounded once."""
    # Two equal lines along the other axes: torch's antialiasing is wrong where there is only one.
    shape, sizes = [size, 1, *[1] * dims], [2] * dims
    shape[2 + axis], sizes[axis] = size, out
    lines = torch.eye(size, dtype=torch.float64).reshape(shape)
    lines = lines.expand(size, 1, *(size if i == axis else 2 for i in range(dims))).contiguous()
    scales: list[float | None] = [None] * dims
    scales[axis] = scale
    direct = getattr(aten, op._schema.name.split("::")[1]).default
    rows: Tensor = direct(lines, sizes, corners, *scales)
    for other in reversed(range(dims)):
        if other != axis:
            rows = rows.select(2 + other, 0)
    return rows.reshape(size, out).t().to(torch.float32)


_BILINEAR = (aten.upsample_bilinear2d.vec, aten.upsample_bilinear2d.default)

_RESIZES: dict[Any, int] = {
    op: dims
    for dims, packets in {
        1: (aten.upsample_linear1d,),
        2: (
            aten.upsample_bilinear2d,
            aten.upsample_bicubic2d,
            aten._upsample_bilinear2d_aa,
            aten._upsample_bicubic2d_aa,
        ),
        3: (aten.upsample_trilinear3d,),
    }.items()
    for packet in packets
    for op in (packet.vec, packet.default)
}
