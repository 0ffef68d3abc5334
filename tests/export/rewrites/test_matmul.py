"""Products of integers and of many dimensions, and elementwise operators of as many."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


def test_products_are_right(check: Callable[..., None]) -> None:
    torch.manual_seed(0)
    r = torch.randn
    a, b = torch.arange(12).reshape(3, 4), torch.arange(20).reshape(4, 5)
    einsum = torch.einsum
    check(
        {
            "seven": (torch.matmul, (r(2, 1, 2, 2, 2, 4, 5), r(5, 3))),
            "six": (torch.matmul, (r(2, 1, 2, 2, 4, 5), r(2, 3, 1, 2, 5, 3))),
            "windows": (
                lambda x, y: einsum("bijxyc,bijxzc->bijxyz", x, y),
                (r(2, 2, 2, 3, 4, 5), r(2, 2, 2, 3, 6, 5)),
            ),
            "bilinear": (nn.Bilinear(3, 4, 5), (r(2, 6, 3), r(2, 6, 4))),
            "integers": (torch.matmul, (a, b)),
            "beyond_float": (torch.matmul, (a * 7001 + 16777217, b % 7)),
            "bytes": (torch.matmul, (a.to(torch.int8), (b % 5).to(torch.int8))),
            "batch": (torch.bmm, (torch.arange(24).reshape(2, 3, 4), b.repeat(2, 1, 1))),
            "addmm": (
                lambda c, x, y: torch.addmm(c, x, y, beta=2, alpha=3),
                (torch.arange(5), a, b),
            ),
        }
    )


def test_a_linear_layer_on_a_map_of_one_pixel_is_right(check: Callable[..., None]) -> None:
    torch.manual_seed(0)
    two = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).eval()
    bare = nn.Linear(8, 5, bias=False)
    check(
        {
            "convnext": (
                lambda x: two(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) + x,
                torch.randn(1, 8, 1, 1),
            ),
            "four": (two, torch.randn(1, 1, 1, 8)),
            "five": (bare, torch.randn(1, 1, 1, 1, 8)),
            "pooled": (
                lambda x: bare(x.mean((2, 3), keepdim=True).permute(0, 2, 3, 1)),
                torch.randn(1, 8, 3, 3),
            ),
            "rows": (two, torch.randn(2, 1, 1, 8)),
        },
        5e-6,
    )


def test_products_with_a_vector_that_are_reshaped_to_four_dimensions_are_right(
    check: Callable[..., None],
) -> None:
    torch.manual_seed(0)

    def context(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        b, c, h, w = x.shape
        weights = y.reshape(b, 1, h * w).softmax(-1).unsqueeze(3)
        return x * (x.reshape(b, c, h * w).unsqueeze(1) @ weights).view(b, c, 1, 1)

    r = torch.randn
    check(
        {
            "context": (context, (r(1, 8, 3, 3), r(1, 1, 3, 3))),
            "of_two": (context, (r(2, 8, 3, 3), r(2, 1, 3, 3))),
            "of_a_pixel": (context, (r(1, 8, 1, 1), r(1, 1, 1, 1))),
            "row": (lambda x, y: (x @ y).view(1, 5, 1, 1) * 2, (r(1, 1, 1, 7), r(1, 1, 7, 5))),
        },
        5e-6,
    )


def test_elementwise_operators_of_many_dimensions_are_right(check: Callable[..., None]) -> None:
    torch.manual_seed(0)
    six, seven = torch.randn(2, 3, 2, 4, 3, 2), torch.randn(2, 3, 2, 2, 3, 2, 2)
    check(
        {
            "permuted": (lambda x: x.permute(5, 2, 0, 6, 4, 1, 3) * 2, seven),
            "broadcast": (lambda x: x[None] + x[:, None], six),
            "expanded": (lambda x: x[:, :, None].expand(2, 3, 4, 2, 4, 3, 2) + 1, six),
            "power": (lambda x: x.abs() ** 2.5, six),
            "compared": (lambda x: (x > 0).permute(6, 5, 4, 3, 2, 1, 0), seven),
            "chosen": (lambda x: torch.where(x > 0, x, x.mean()), six),
        }
    )
