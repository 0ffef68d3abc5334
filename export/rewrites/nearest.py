"""Nearest interpolation that takes the source pixels that PyTorch takes.

litert-torch gives RESIZE_NEAREST_NEIGHBOR for every 2-D resize, whose pixels are PyTorch's only
where the size grows by whole numbers; those stay. All others become one GATHER along each axis,
with the indices that PyTorch's own kernel computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.utils._python_dispatch import _disable_current_modes

from tpu2edge.export.rewrites import native
from tpu2edge.export.rewrites.graph import call
from tpu2edge.export.rewrites.indexing import static

__all__ = ["DECOMPOSITIONS", "apply"]

aten = torch.ops.aten


@torch.library.custom_op("tpu2edge::resize_nearest", mutates_args=())
def _resize_nearest(x: torch.Tensor, sizes: Sequence[int], places: Sequence[int]) -> torch.Tensor:
    for axis, plan in zip(range(x.dim() - len(sizes), x.dim()), _plans(sizes, places), strict=True):
        x = x.index_select(axis, torch.tensor(plan))
    return x.clone()


@_resize_nearest.register_fake
def _resize_shape(x: torch.Tensor, sizes: Sequence[int], places: Sequence[int]) -> torch.Tensor:
    return x.new_empty([*x.shape[: x.dim() - len(sizes)], *sizes])


def _plans(sizes: Sequence[int], places: Sequence[int]) -> list[list[int]]:
    """``places`` holds the source places of every axis, one axis after the other."""
    plans, start = [], 0
    for size in sizes:
        plans.append(list(places[start : start + size]))
        start += size
    return plans


_RESIZE: Any = torch.ops.tpu2edge.resize_nearest.default
_TARGETS = {
    getattr(getattr(aten, name), overload): (rank, name.startswith("_"))
    for rank in (1, 2, 3)
    for name in (f"upsample_nearest{rank}d", f"_upsample_nearest_exact{rank}d")
    for overload in ("vec", "default")
}


def apply(program: ExportedProgram) -> int:
    """Changes in place; gives the number of resizes changed."""
    count = 0
    for node in list(program.graph.nodes):
        if node.target in _TARGETS:
            count += _change(node, *_TARGETS[node.target])
    if count:
        program.graph.eliminate_dead_code()
        program.graph_module.recompile()
    return count


def _change(node: fx.Node, rank: int, exact: bool) -> int:
    x = node.args[0]
    assert isinstance(x, fx.Node)
    value = x.meta["val"]
    given, sizes = value.shape[value.dim() - rank :], node.meta["val"].shape[value.dim() - rank :]
    if not static(*given, *sizes):
        return 0
    plans = [
        _sources(source, size, scale, exact)
        for source, size, scale in zip(given, sizes, _scales(node, rank), strict=True)
    ]
    whole = all(
        size % source == 0 and plan == [i // (size // source) for i in range(size)]
        for source, size, plan in zip(given, sizes, plans, strict=True)
    )
    if rank == 2 and whole and value.dtype is torch.float32:
        if not exact:
            return 0
        node.target = aten.upsample_nearest2d.vec
        node.args, node.kwargs = (x, list(sizes), None), {}
        return 1
    flat = [place for plan in plans for place in plan]
    node.replace_all_uses_with(call(node, _RESIZE, x, list(sizes), flat))
    return 1


def _scales(node: fx.Node, rank: int) -> list[float | None]:
    schema: Any = node.target
    names = [argument.name for argument in schema._schema.arguments]
    named: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    if "scale_factors" in named:
        factors: Any = named["scale_factors"]
        return list(factors) if factors is not None else [None] * rank
    keys = ("scales",) if rank == 1 else ("scales_d", "scales_h", "scales_w")[3 - rank :]
    return [named.get(key) for key in keys]


def _sources(source: int, size: int, scale: float | None, exact: bool) -> list[int]:
    """The source place of each of ``size`` pixels, from PyTorch's kernel on a ramp."""
    op: Any = aten._upsample_nearest_exact1d if exact else aten.upsample_nearest1d
    with _disable_current_modes():
        ramp = torch.arange(source, dtype=torch.float32).reshape(1, 1, source)
        return [int(value) for value in op.default(ramp, [size], scale).flatten()]


def _gathers(x: torch.Tensor, sizes: Sequence[int], places: Sequence[int]) -> torch.Tensor:
    for axis, plan in zip(range(x.dim() - len(sizes), x.dim()), _plans(sizes, places), strict=True):
        step = max(1, plan[1] - plan[0]) if len(plan) > 1 else 1
        if plan == list(range(x.shape[axis])):
            continue
        if plan == list(range(plan[0], plan[0] + step * len(plan), step)):
            x = aten.slice.Tensor(x, axis, plan[0], plan[-1] + 1, step)
        else:
            x = native.gather(x, native.constant(plan), axis)
    return x.clone()


DECOMPOSITIONS: dict[Any, Any] = {_RESIZE: _gathers}
