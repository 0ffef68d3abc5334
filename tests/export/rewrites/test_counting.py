"""Histograms, bins, cumulative operators, grouped products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

Check = Callable[[Any], list[str]]


def test_counts_and_bins(converted: Check) -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, 6, (20,))
    edges = torch.tensor([-1.0, -0.5, 0.0, 0.5, 2.0])
    rows = torch.randn(3, 7).sort(1).values
    on_edge = torch.tensor([-1.0, 0.0, 0.5, 3.0, -2.0])
    converted(
        {
            "one_hot": (lambda i: (F.one_hot(i, 6), F.one_hot(i, 6).float().T), (ids,)),
            "histc": (lambda x: torch.histc(x, 6, 0, 5), (ids.float(),)),
            "range": (lambda x: torch.histc(x, 5), (torch.randn(50),)),
            "narrow": (lambda x: torch.histc(x, 7, -1.0, 2.0), (torch.randn(50),)),
            "bincount": (
                lambda x, w: (torch.bincount(x, minlength=6), torch.bincount(x, w, 6)),
                (ids, torch.randn(20)),
            ),
            "bucket": (lambda x: torch.bucketize(x, edges), (on_edge,)),
            "right": (lambda x: torch.bucketize(x, edges, right=True), (on_edge,)),
            "whole": (lambda x: torch.bucketize(x, torch.tensor([1, 3, 5])), (torch.arange(8),)),
            "search": (lambda b, x: torch.searchsorted(b, x), (rows, torch.randn(3, 4))),
            "side": (
                lambda b, x: torch.searchsorted(b, x, side="right", out_int32=True),
                (rows[0].clone(), torch.randn(3, 4)),
            ),
        }
    )


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_cumulative_operators(dim: int, converted: Check) -> None:
    torch.manual_seed(0)
    x, whole = torch.randn(3, 4, 5), torch.randint(-2, 3, (3, 4, 5))
    converted(
        {
            "sum": (lambda x: x.cumsum(dim), (x,)),
            "prod": (lambda x: x.cumprod(dim), (x,)),
            "max": (lambda x: torch.cummax(x, dim), (x,)),
            "min": (lambda x: torch.cummin(x, dim), (x,)),
            "log": (lambda x: torch.logcumsumexp(x, dim), (x,)),
            "whole": (
                lambda x: (x.cumsum(dim), x.cumprod(dim), *torch.cummax(x, dim)),
                (whole,),
            ),
            "int32": (lambda x: (x.cumsum(dim), torch.cummin(x, dim)[1]), (whole.int(),)),
            "bool": (lambda x: x.cumsum(dim), (whole > 0,)),
            "cast": (lambda x: x.cumsum(dim, dtype=torch.float32), (whole,)),
        }
    )


def test_logarithms_of_sums_with_infinities(converted: Check) -> None:
    inf = float("inf")
    x = torch.tensor([-inf, -inf, 1.0, 2.0, -inf, 100.0, 3.0])
    converted({"log": (lambda x: torch.logcumsumexp(x, 0), (x,))})


@pytest.mark.parametrize("rows", [3, 10])
def test_grouped_products(rows: int, converted: Check) -> None:
    """The routing of mixtures of experts: rows in groups, a matrix for each group."""
    torch.manual_seed(0)
    ends = torch.tensor([0, 2, 2, rows], dtype=torch.int32)
    grouped = torch.ops.tpu2edge.grouped_mm
    converted(
        {
            "g": (
                lambda x, w, e: grouped(x, w, e),
                (torch.randn(rows, 8), torch.randn(4, 8, 6), ends),
            )
        }
    )
