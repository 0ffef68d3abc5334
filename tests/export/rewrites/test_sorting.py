"""Sorting and what rests on it, with ties and extreme numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Check = Callable[[Any], list[str]]


def test_sorts_of_every_type_and_axis(converted: Check) -> None:
    torch.manual_seed(0)
    ties = torch.randint(0, 4, (4, 9))
    ends = torch.tensor([5, -(2**31), 2**31 - 1, 0, -1, 2**24 + 1, 2**24], dtype=torch.int32)
    inf = float("inf")
    names = converted(
        {
            "last": (lambda x: torch.sort(x), (torch.randn(4, 9),)),
            "values": (lambda x: torch.sort(x, 1).values, (torch.randn(2, 5, 3, 4),)),
            "indices": (lambda x: torch.sort(x, 0, descending=True).indices, (torch.randn(4, 9),)),
            "ties": (lambda x: torch.sort(x, dim=1, stable=True), (ties.float(),)),
            "down": (lambda x: torch.sort(x, dim=1, stable=True, descending=True), (ties.float(),)),
            "int64": (lambda x: torch.sort(x, dim=0, stable=True), (ties,)),
            "bool": (lambda x: torch.sort(x, dim=1, stable=True), (ties > 1,)),
            "ends": (lambda x: torch.sort(x), (ends,)),
            "ends_down": (lambda x: torch.sort(x, descending=True), (ends,)),
            "infinite": (lambda x: torch.sort(x), (torch.tensor([1.0, inf, -inf, 0.0, 2.0]),)),
            "argsort": (lambda x: (x.argsort(), x.argsort(0, True)), (torch.randn(4, 9),)),
            "msort": (lambda x: torch.msort(x), (torch.randn(4, 9),)),
            "one": (lambda x: torch.sort(x), (torch.randn(1),)),
        }
    )
    assert "STABLEHLO_SORT" not in names


def test_top_k_and_order_statistics(converted: Check) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 9)
    whole = torch.randperm(36).reshape(4, 9)
    converted(
        {
            "top": (lambda x: torch.topk(x, 3), (x,)),
            "values": (lambda x: torch.topk(x, 3, dim=0).values, (x,)),
            "indices": (lambda x: torch.topk(x, 3).indices, (x,)),
            "small": (lambda x: torch.topk(x, 3, largest=False), (x,)),
            "unsorted": (lambda x: torch.topk(x, 3, sorted=False).values.sum(-1), (x,)),
            "int32": (lambda x: torch.topk(x, 3, largest=False), (whole.int(),)),
            "int64": (lambda x: torch.topk(x, 9), (whole,)),
            "kth": (lambda x: (*torch.kthvalue(x, 3), *torch.kthvalue(x, 2, 0, True)), (x,)),
            "kth_high": (lambda x: torch.kthvalue(x, 8), (x,)),
            "median": (lambda x: (torch.median(x), *torch.median(x, 0), *x.median(1, True)), (x,)),
            "nanmedian": (
                lambda x: (torch.nanmedian(x), torch.nanmedian(x, 1)[0]),
                (torch.where(x > 1, float("nan"), x),),
            ),
            "quantile": (lambda x: torch.quantile(x, 0.3, dim=1), (x,)),
            "mode": (lambda x: torch.mode(x, 1), (torch.randint(0, 4, (3, 9)).float(),)),
            "mode_int": (lambda x: torch.mode(x, 0, True), (torch.randint(-2, 2, (7, 3)),)),
        }
    )
