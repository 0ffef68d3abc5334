"""Operators of LiteRT that no core operator of torch becomes by itself, as torch operators.

``native.gather`` and ``native.scatter_nd`` stand in a graph for TFL GATHER and SCATTER_ND, where
litert-torch's lowerings through JAX give chains of GATHER_ND, SELECT and BROADCAST_TO. They can be
run, and traced, without litert-torch; ``register`` tells litert-torch how to lower them.
``native.top_k`` gives both results of TOPK_V2 even when one of them is not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = [
    "broadcast_to",
    "constant",
    "gather",
    "int32",
    "register",
    "scatter_nd",
    "top_k",
    "transpose",
]


@torch.library.custom_op("tpu2edge::gather", mutates_args=())
def _gather(x: torch.Tensor, index: torch.Tensor, axis: int, batch_dims: int) -> torch.Tensor:
    shape = [*x.shape[:axis], *index.shape[batch_dims:], *x.shape[axis + 1 :]]
    if batch_dims == 0:
        return x.index_select(axis, index.reshape(-1).long()).reshape(shape)
    rows = x.reshape(-1, *x.shape[batch_dims:])
    indices = index.reshape(rows.shape[0], -1).long()
    parts = [
        row.index_select(axis - batch_dims, one)
        for row, one in zip(rows.unbind(), indices.unbind(), strict=True)
    ]
    return torch.stack(parts).reshape(shape) if parts else x.new_zeros(shape)


@_gather.register_fake
def _gather_shape(x: torch.Tensor, index: torch.Tensor, axis: int, batch_dims: int) -> torch.Tensor:
    return x.new_empty([*x.shape[:axis], *index.shape[batch_dims:], *x.shape[axis + 1 :]])


@torch.library.custom_op("tpu2edge::scatter_nd", mutates_args=())
def _scatter_nd(index: torch.Tensor, updates: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    zeros = torch.zeros(list(shape), dtype=updates.dtype)
    return zeros.index_put(tuple(index.long().unbind(-1)), updates, accumulate=True)


@_scatter_nd.register_fake
def _scatter_nd_shape(
    index: torch.Tensor, updates: torch.Tensor, shape: Sequence[int]
) -> torch.Tensor:
    return updates.new_empty(list(shape))


@torch.library.custom_op("tpu2edge::top_k", mutates_args=())
def _top_k(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    values, indices = torch.sort(x, dim=-1, descending=True, stable=True)
    return values[..., :k].clone(), indices[..., :k].to(torch.int32)


@_top_k.register_fake
def _top_k_shape(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = [*x.shape[:-1], k]
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int32)


@torch.library.custom_op("tpu2edge::transpose", mutates_args=())
def _transpose(x: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    return x.permute(list(dims)).contiguous()


@_transpose.register_fake
def _transpose_shape(x: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    return x.new_empty([x.shape[dim] for dim in dims])


@torch.library.custom_op("tpu2edge::broadcast_to", mutates_args=())
def _broadcast_to(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    return x.expand(list(shape)).contiguous()


@_broadcast_to.register_fake
def _broadcast_to_shape(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    return x.new_empty(list(shape))


@torch.library.custom_op("tpu2edge::div", mutates_args=())
def _div(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.div(x, y, rounding_mode="trunc")


@torch.library.custom_op("tpu2edge::floor_div", mutates_args=())
def _floor_div(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.div(x, y, rounding_mode="floor")


@torch.library.custom_op("tpu2edge::floor_mod", mutates_args=())
def _floor_mod(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.remainder(x, y)


@_div.register_fake
@_floor_div.register_fake
@_floor_mod.register_fake
def _quotient_shape(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.new_empty(torch.broadcast_shapes(x.shape, y.shape))


@torch.library.custom_op("tpu2edge::constant", mutates_args=())
def _constant(unused: torch.Tensor, values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int32)


@_constant.register_fake
def _constant_shape(unused: torch.Tensor, values: Sequence[int]) -> torch.Tensor:
    return unused.new_empty([len(values)], dtype=torch.int32)


_OPS: Any = torch.ops.tpu2edge
transpose = _OPS.transpose.default
broadcast_to = _OPS.broadcast_to.default


def gather(x: torch.Tensor, index: torch.Tensor, axis: int, batch_dims: int = 0) -> torch.Tensor:
    """Slices of ``x`` along ``axis``, one for each (non-negative) entry of ``index``.

    Shape: x.shape[:axis] + index.shape[batch_dims:] + x.shape[axis + 1:]. The first ``batch_dims``
    axes of both are paired.
    """
    axis = axis % x.dim()
    result: torch.Tensor = _OPS.gather.default(x, index.to(torch.int32), axis, batch_dims)
    return result


def scatter_nd(index: torch.Tensor, updates: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Zeros of ``shape`` with ``updates`` added where the last axis of ``index`` points."""
    result: torch.Tensor = _OPS.scatter_nd.default(index.to(torch.int32), updates, list(shape))
    return result


def top_k(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``k`` largest along the last axis, the lower index first among equals; indices int32."""
    values, indices = _OPS.top_k.default(x, k)
    return values, indices


def int32(name: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """``div`` (towards zero), ``floor_div`` or ``floor_mod`` of tensors as int32."""
    return divide(name, x.to(torch.int32), y.to(torch.int32))


def divide(name: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The same of two int32 or two float32 tensors (``div``: int32 only)."""
    op = getattr(_OPS, name).default
    if max(x.dim(), y.dim()) <= 4:
        return op(x, y)
    x, y = torch.broadcast_tensors(x, y)  # the kernels broadcast up to rank 4
    result: torch.Tensor = op(x.reshape(-1), y.reshape(-1)).reshape(x.shape)
    return result


def constant(values: Sequence[int]) -> torch.Tensor:
    """An int32 vector. torch.tensor would make a constant of the program, outside of the graph."""
    # Dispatch wants a tensor to go by.
    result: torch.Tensor = _OPS.constant.default(torch.zeros(()), list(values))
    return result


def register() -> None:
    """Tell litert-torch how to lower the operators of this module."""
    import numpy as np
    from litert_converter.mlir import ir
    from litert_converter.mlir.dialects import stablehlo
    from litert_torch.backend.lowerings import registry, utils

    def call(lctx: Any, name: str, operands: list[Any], **attributes: Any) -> Any:
        # The form in which the converter takes TFL operators inside of a StableHLO module.
        return stablehlo.custom_call(
            result=utils.node_meta_to_ir_types(lctx.node),
            inputs=operands,
            call_target_name=ir.StringAttr.get(name),
            has_side_effect=ir.BoolAttr.get(False),
            backend_config=ir.StringAttr.get(str(ir.DictAttr.get(attributes))),
        )

    def numbers(values: Any) -> Any:
        return stablehlo.constant(ir.DenseElementsAttr.get(np.array(values, dtype=np.int32)))

    def attribute(value: int) -> Any:
        return ir.IntegerAttr.get(ir.IntegerType.get_signless(32), value)

    def lower_gather(lctx: Any, x: Any, index: Any, axis: int, batch_dims: int) -> Any:
        return call(
            lctx, "tfl.gather", [x, index], axis=attribute(axis), batch_dims=attribute(batch_dims)
        )

    def lower_scatter_nd(lctx: Any, index: Any, updates: Any, shape: Any) -> Any:
        return call(lctx, "tfl.scatter_nd", [index, updates, numbers(shape)])

    def lower_top_k(lctx: Any, x: Any, k: int) -> Any:
        return call(lctx, "tfl.topk_v2", [x, numbers(k)])

    def lower_transpose(lctx: Any, x: Any, dims: Any) -> Any:
        return call(lctx, "tfl.transpose", [x, numbers(dims)])

    def lower_broadcast_to(lctx: Any, x: Any, shape: Any) -> Any:
        return call(lctx, "tfl.broadcast_to", [x, numbers(shape)])

    def lower_constant(lctx: Any, unused: Any, values: Any) -> Any:
        return numbers(values)

    def binary(name: str) -> Any:
        def lower(lctx: Any, x: Any, y: Any) -> Any:
            if name != "div":
                return call(lctx, f"tfl.{name}", [x, y])
            none = ir.StringAttr.get("NONE")
            return call(lctx, "tfl.div", [x, y], fused_activation_function=none)

        return lower

    for name in ("div", "floor_div", "floor_mod"):
        registry.lower(getattr(_OPS, name).default)(binary(name))
    for name, function in {
        "constant": lower_constant,
        "gather": lower_gather,
        "scatter_nd": lower_scatter_nd,
        "top_k": lower_top_k,
        "transpose": lower_transpose,
        "broadcast_to": lower_broadcast_to,
    }.items():
        registry.lower(getattr(_OPS, name).default)(function)
