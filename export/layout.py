"""Fewer TRANSPOSE operators where a network computes with channels last.

litert-torch's layout pass puts convolutions into NHWC and leaves transposes around what it knows
in NCHW only. A group norm needs none; and a transpose of a transpose that undoes it is taken out of
the converted module, which the converter leaves where the first one has other users, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

__all__ = ["fold_transposes", "group_norm_in_place"]

aten = torch.ops.aten


@contextlib.contextmanager
def group_norm_in_place() -> Iterator[None]:
    """litert-torch's layout pass with a group norm that computes where the channels are."""
    from litert_torch._convert.fx_passes.optimize_layout_transposes_pass import layout_rewrite

    def functional(node: torch.fx.Node) -> None:
        node.target = _group_norm

    def native(node: torch.fx.Node) -> None:
        node.target = _native_group_norm

    with mock.patch.dict(
        layout_rewrite.rewriters,
        {aten.group_norm.default: functional, aten.native_group_norm.default: native},
    ):
        yield


def _group_norm(
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    _cudnn: bool = True,
) -> torch.Tensor:
    """A group norm of N, …, C."""
    batch, *area, channels = x.shape
    count = 1
    for size in area:
        count = count * size
    split = x.reshape(batch, count, groups, channels // groups)
    far = split - split.mean((1, 3), keepdim=True)
    scale = torch.rsqrt((far * far).mean((1, 3), keepdim=True) + eps)
    value = (far * scale).reshape(batch, *area, channels)
    if weight is not None:
        value = value * weight
    if bias is not None:
        value = value + bias
    return value


def _native_group_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    _batch: Any,
    _channels: Any,
    _area: Any,
    groups: int,
    eps: float,
) -> tuple[torch.Tensor, None, None]:
    return _group_norm(x, groups, weight, bias, eps), None, None


def fold_transposes(ir: Any, module: Any) -> int:
    """Take transposes that undo the one before out of ``module`` (TFL dialect); how many."""
    count = 0
    for function in module.regions[0].blocks[0].operations:
        if function.operation.name != "func.func":
            continue
        for op in list(function.operation.regions[0].blocks[0].operations):
            operation = op.operation
            order = _order(ir, operation)
            if order is None:
                continue
            before = operation.operands[0].owner
            first = _order(ir, before)
            if first is None or [first[axis] for axis in order] != list(range(len(order))):
                continue
            result, source = operation.results[0], before.operands[0]
            if result.type != source.type:
                continue
            result.replace_all_uses_with(source)
            operation.erase()
            count += 1
            if not list(before.results[0].uses):
                before.erase()
    return count


def _order(ir: Any, operation: Any) -> list[int] | None:
    """The constant permutation of a transpose; None for anything else."""
    if getattr(operation, "name", None) != "tfl.transpose":
        return None
    constant = operation.operands[1].owner
    if getattr(constant, "name", None) not in ("arith.constant", "tfl.pseudo_const"):
        return None
    return [int(axis) for axis in ir.DenseIntElementsAttr(constant.attributes["value"])]
