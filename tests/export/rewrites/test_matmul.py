"""Products of integers and of many dimensions, and elementwise operators of as many."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from tpu2edge.export.lower import Loweree, lower_programs
from tpu2edge.export.program import trace_module
from tpu2edge.flatbuffer import read_tflite


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


def test_a_linear_layer_on_a_column_is_right_and_one_operator(
    check: Callable[..., None], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    layer, bare = nn.Linear(8, 6), nn.Linear(8, 6, bias=False)
    two = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).eval()
    norm = nn.LayerNorm(6)
    nn.init.normal_(norm.weight)

    def merged(x: torch.Tensor) -> torch.Tensor:  # as between stages of Swin: used in two shapes
        y = bare(x)
        return y + norm(y).reshape(1, 5, 6).softmax(1).reshape(y.shape)

    def windows(x: torch.Tensor) -> torch.Tensor:  # of one pixel each, in as many dimensions
        y = bare(x.reshape(1, 4, 5, 2).transpose(1, 2).reshape(1, 5, 8)).view(
            1, 1, 1, 1, 5, 1, 1, 6
        )
        return y.permute(0, 1, 4, 2, 5, 3, 6, 7).reshape(1, 5, 1, 1, 6)

    zero = nn.Linear(8, 6)
    nn.init.zeros_(zero.bias)
    r = torch.randn
    check(
        {
            "windows": (windows, r(1, 5, 1, 1, 8)),
            "no_bias": (zero, r(1, 5, 1, 8)),
            "column": (layer, r(1, 5, 1, 8)),
            "bare": (bare, r(1, 5, 1, 8)),
            "two_ones": (layer, r(1, 5, 1, 1, 8)),
            "three_ones": (layer, r(1, 5, 1, 1, 1, 8)),
            "one_feature": (nn.Linear(8, 1), r(1, 5, 1, 8)),
            "of_a_map": (lambda x: two(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2), r(1, 8, 5, 1)),
            "merged": (merged, r(1, 5, 1, 1, 8)),
            "to_another": (lambda x: layer(x).reshape(1, 5, 1, 1, 6).exp(), r(1, 5, 1, 8)),
        },
        5e-6,
    )
    for shape in ((1, 5, 1, 8), (1, 5, 8)):
        traced = trace_module(layer, (r(shape),))
        lower_programs([Loweree(traced.program, traced.signature)], tmp_path / "m.tflite")
        histogram = read_tflite(tmp_path / "m.tflite").op_histogram
        assert histogram.get("FULLY_CONNECTED") == 1
        assert set(histogram) <= {"FULLY_CONNECTED", "RESHAPE"}


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
