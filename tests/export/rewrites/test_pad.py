"""Pads of all modes, many dimensions and small integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional


def _pad(pads: tuple[int, ...], mode: str = "constant", value: Any = None) -> Callable[..., Any]:
    return lambda x: functional.pad(x, pads, mode, value)


def test_pads_are_right(check: Callable[..., None]) -> None:
    torch.manual_seed(0)
    line, plane, room = torch.randn(2, 3, 7), torch.randn(2, 3, 6, 7), torch.randn(2, 3, 4, 5, 6)
    six = torch.randn(2, 3, 2, 4, 3, 2)
    small = torch.arange(12).reshape(3, 4)
    cases = {
        "six": (_pad((1, 2, 0, 1, 2, 2), value=-1.0), six),
        "six_negative": (_pad((1, -1, 0, 0, -1, 1)), six),
        "six_all": (_pad((1, 2, 0, 1, 2, 2, 1, 1, 0, 1, 1, 0)), six),
        "int8": (_pad((1, 2, 1, 0), value=7), small.to(torch.int8)),
        "int16": (_pad((1, 2, 1, 0), value=7), small.to(torch.int16)),
        "bool": (_pad((1, -2, -1, 0), value=True), small > 5),
    }
    for mode in ("reflect", "replicate", "circular"):
        cases[f"{mode}1"] = (_pad((2, 3), mode), line)
        cases[f"{mode}2"] = (_pad((2, 3, 1, 2), mode), plane)
        cases[f"{mode}3"] = (_pad((2, 3, 1, 2, 1, 0), mode), room)
        cases[f"{mode}_negative"] = (_pad((-2, 3, 1, -2), mode), plane)
    check(cases)
