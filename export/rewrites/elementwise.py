"""Elementwise operators that LiteRT lacks, and that a few of its own give to the last bits."""

from __future__ import annotations

import math
from typing import Any

import torch

__all__ = ["DECOMPOSITIONS"]

aten = torch.ops.aten
Tensor = torch.Tensor


def _erfc(x: Tensor) -> Tensor:
    return 1 - torch.erf(x)


def _exp2(x: Tensor) -> Tensor:
    return torch.exp(x * math.log(2))


def _hypot(a: Tensor, b: Tensor) -> Tensor:
    # Scaled, so that squares neither overflow nor vanish.
    a, b = torch.abs(a), torch.abs(b)
    large, small = torch.maximum(a, b), torch.minimum(a, b)
    ratio = small / torch.where(large == 0, 1.0, large)
    return large * torch.sqrt(1 + ratio * ratio)


def _signbit(x: Tensor) -> Tensor:
    if not x.is_floating_point():
        return x < 0
    return (x < 0) | ((x == 0) & (1 / x < 0))  # minus zero


def _copysign(a: Tensor, b: Any) -> Tensor:
    size = torch.abs(a)
    if not isinstance(b, Tensor):
        return size * math.copysign(1, b)
    return torch.where(_signbit(b), -size, size)


def _fmax(a: Tensor, b: Tensor) -> Tensor:
    return torch.where(a != a, b, torch.where(b != b, a, torch.maximum(a, b)))


def _fmin(a: Tensor, b: Tensor) -> Tensor:
    return torch.where(a != a, b, torch.where(b != b, a, torch.minimum(a, b)))


def _logical_xor(a: Tensor, b: Tensor) -> Tensor:
    return torch.ne(a if a.dtype is torch.bool else a != 0, b if b.dtype is torch.bool else b != 0)


def _bitwise_xor(a: Tensor, b: Any) -> Any:
    if a.dtype is not torch.bool:
        return NotImplemented
    return torch.ne(a, b)


def _bitwise_not(a: Tensor) -> Any:
    if a.dtype is torch.bool:
        return NotImplemented
    return -1 - a


def _and_number(a: Tensor, mask: Any) -> Any:
    """The bits that a number selects: each run of ones is a difference of two remainders."""
    if a.dtype is torch.bool or not isinstance(mask, int):
        return NotImplemented
    if mask < 0:
        return a - _and_number(a, ~mask) if mask != -1 else a
    if mask >= 1 << 30:
        return NotImplemented
    total: Any = None
    bit = 0
    while mask >> bit:
        if not mask >> bit & 1:
            bit += 1
            continue
        start = bit
        while mask >> bit & 1:
            bit += 1
        part = torch.remainder(a, 1 << bit)
        if start:
            part = part - torch.remainder(a, 1 << start)
        total = part if total is None else total + part
    return torch.zeros_like(a) if total is None else total


def _or_number(a: Tensor, mask: Any) -> Any:
    both = _and_number(a, mask)
    return both if both is NotImplemented else a + mask - both


def _bitwise_and(a: Tensor, b: Tensor) -> Any:
    return torch.logical_and(a, b) if a.dtype is torch.bool else NotImplemented


def _bitwise_or(a: Tensor, b: Tensor) -> Any:
    return torch.logical_or(a, b) if a.dtype is torch.bool else NotImplemented


DECOMPOSITIONS: dict[Any, Any] = {
    aten.erfc.default: _erfc,
    aten.exp2.default: _exp2,
    aten.hypot.default: _hypot,
    aten.signbit.default: _signbit,
    aten.copysign.Tensor: _copysign,
    aten.copysign.Scalar: _copysign,
    aten.fmax.default: _fmax,
    aten.fmin.default: _fmin,
    aten.logical_xor.default: _logical_xor,
    aten.bitwise_xor.Tensor: _bitwise_xor,
    aten.bitwise_xor.Scalar: _bitwise_xor,
    aten.bitwise_and.Tensor: _bitwise_and,
    aten.bitwise_or.Tensor: _bitwise_or,
    aten.bitwise_not.default: _bitwise_not,
    aten.bitwise_and.Scalar: _and_number,
    aten.__and__.Scalar: _and_number,
    aten.__or__.Scalar: _or_number,
    aten.bitwise_or.Scalar: _or_number,
}
