"""Integers: negative numbers, large numbers, powers, bits and shifts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Check = Callable[[Any], list[str]]


_X = torch.tensor([-7, -3, -2, -1, 0, 1, 2, 3, 7], dtype=torch.int32)
_Y = torch.tensor([2, -2, 3, 5, -4, 3, -2, -5, 4], dtype=torch.int32)


def test_powers(converted: Check) -> None:
    e = torch.tensor([0, 1, 2, 3, 4, 31, 30, 6, 7], dtype=torch.int32)
    negative = torch.tensor([-1, 0, -2, -3, 2, -4, -1, 1, 3], dtype=torch.int32)
    ones = torch.tensor([1, -1, 1, -1, -1, 1, -1, 3, -3], dtype=torch.int32)
    b = torch.tensor([-1.5, 2.0, -3.0, 0.5, 0.0, 0.0, -2.0, 1.1, 4.0])
    far = torch.tensor([-40, -41, 32, 33, 101, 100, 0, -2, -1], dtype=torch.int32)
    converted(
        {
            "scalar": (lambda x: (x**0, x**1, x**2, x**3, x**10, (x * 0 - 1) ** 33), (_X,)),
            "int64": (lambda x: (x**2, x**5), (_X.long(),)),
            "base": (lambda x: (2 ** x.abs(), (-3) ** x.abs()), (_X,)),
            "tensors": (lambda x, y: x**y, (_X.clamp(-4, 4), e.clamp(max=12))),
            "negative": (lambda x, y: x**y, (ones, negative)),
            "far": (lambda x, y: x**y, (ones.clamp(-1, 1), far)),
            "float": (lambda x, y: x**y, (b, torch.tensor([2, 3, 3, -2, 0, 2, -3, 30, 1]))),
            "root": (lambda x: (x.abs() ** 0.5, x.abs() ** 0.37, torch.exp2(x)), (_X,)),
            "floats": (lambda x: (x**2, x**3, x**4, x**-1, x.abs() ** 2.5), (b + 0.25,)),
        }
    )


def test_divisions_and_remainders(converted: Check) -> None:
    large = torch.tensor([2**31 - 1, -(2**31), 2**24 + 3, -(2**30) - 1], dtype=torch.int32)
    by = torch.tensor([7, 3, -(2**20) - 1, 10], dtype=torch.int32)
    torch.manual_seed(0)
    x, y = torch.randn(9) * 5, torch.randn(9)

    def all_of(x: Any, y: Any) -> tuple[torch.Tensor, ...]:
        return (
            x // y,
            x % y,
            torch.fmod(x, y),
            torch.div(x, y, rounding_mode="trunc"),
            torch.div(x, y, rounding_mode="floor"),
        )

    converted(
        {
            "tensors": (all_of, (_X, _Y)),
            "int64": (all_of, (_X.long(), _Y.long())),
            "large": (all_of, (large, by)),
            "scalar": (lambda x: (*all_of(x, 3), *all_of(x, -2)), (_X,)),
            "first": (lambda y: (5 // y, -5 // y, 5 % y), (_Y,)),
            "int8": (lambda x: (x.to(torch.int8) // 2).int(), (_X,)),
            "uint8": (lambda x: (x.to(torch.uint8) % 3).int(), (_X.abs(),)),
            "rank5": (lambda x, y: x // y, (_X.reshape(1, 3, 1, 3, 1), _Y.reshape(3, 1, 1, 3, 1))),
            "float": (lambda x, y: (x // y, x % y, torch.fmod(x, y), x // 0.7), (x, y)),
            "true": (lambda x, y: x / y, (_X, _Y)),
        }
    )


def test_bits_shifts_and_products(converted: Check) -> None:
    ends = torch.tensor(
        [2**31 - 1, -(2**31), -1, 0, 1, 2**30, -(2**30), 77, -78], dtype=torch.int32
    )
    places = torch.tensor([0, 1, 2, 3, 31, 30, 5, 7, 4], dtype=torch.int32)

    def bits(x: Any, y: Any) -> tuple[torch.Tensor, ...]:
        return x & y, x | y, x ^ y, ~x

    converted(
        {
            "int32": (bits, (ends, ends.flip(0))),
            "int64": (bits, (_X.long(), _Y.long())),
            "bool": (bits, (_X > 0, _Y > 0)),
            "scalar": (lambda x: (x & 3, x & 12, x | 8, x ^ -1), (ends,)),
            "shifts": (lambda x, n: (x << n, x >> n), (ends, places)),
            "fixed": (lambda x: (x << 2, x >> 1, x >> 31, 1 << x.clamp(0, 9)), (ends,)),
            "product": (lambda x, y: x.reshape(3, 3) @ y.reshape(3, 3), (_X, _Y)),
        }
    )
