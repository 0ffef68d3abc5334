"""Elementwise operators, embedding_bag and grid_sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional


def test_elementwise_operators_are_right(check: Callable[..., None]) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 6)
    whole = (x * 9).int()
    zeros = torch.tensor([0.0, -0.0, 1.0, -1.0])
    check(
        {
            "erfc": (torch.erfc, x),
            "exp2": (torch.exp2, x),
            "hypot": (lambda x: torch.hypot(x, x.flip(0)), x),
            "hypot_large": (lambda x: torch.hypot(x * 1e20, x * 1e20), x),
            "signbit": (torch.signbit, zeros),
            "copysign": (lambda x: torch.copysign(x, x.flip(0)), x),
            "fmax": (lambda x: torch.fmax(torch.log(x), x), x),
            "and": (lambda i: i & 6, whole),
            "and_negative": (lambda i: i & -7, whole),
            "or": (lambda i: i | 5, whole),
            "not": (lambda i: ~i, whole),
            "logical": (lambda x: torch.logical_xor(x > 0, x > 0.5), x),
            "booleans": (lambda x: (x > 0) & (x < 1) | ~(x > -1) ^ (x > 0.3), x),
        }
    )


def test_bags_are_right(check: Callable[..., None]) -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, 10, (3, 5))
    check({mode: (nn.EmbeddingBag(10, 4, mode=mode), ids) for mode in ("sum", "mean", "max")})


def _sample(mode: str, padding: str, corners: bool) -> Callable[..., Any]:
    return lambda x, grid: functional.grid_sample(x, grid, mode, padding, corners)


def test_grids_are_sampled_right(check: Callable[..., None]) -> None:
    torch.manual_seed(0)
    plane, places = torch.randn(2, 3, 6, 8), torch.rand(2, 5, 4, 2) * 2.6 - 1.3
    room, points = torch.randn(1, 3, 4, 5, 6), torch.rand(1, 3, 4, 2, 3) * 2.6 - 1.3
    cases = {}
    for mode in ("bilinear", "nearest", "bicubic"):
        for padding in ("zeros", "border", "reflection"):
            corners = padding == "border"
            name = f"{mode}_{padding}"
            cases[name] = (_sample(mode, padding, corners), (plane, places))
            if mode != "bicubic":
                cases[f"{name}_3d"] = (_sample(mode, padding, not corners), (room, points))
    check(cases, most=1e-5)
