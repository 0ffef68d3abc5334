"""Resizes by sizes and by factors, antialiased or not, in one to three dimensions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional


def _resize(**options: Any) -> Callable[..., Any]:
    return lambda x: functional.interpolate(x, **options)


def test_resizes_are_right(check: Callable[..., None]) -> None:
    torch.manual_seed(0)
    line, plane, room = torch.randn(2, 3, 9), torch.randn(2, 3, 6, 8), torch.randn(1, 3, 4, 5, 6)
    cases = {
        "factor": (_resize(scale_factor=(1.7, 0.6), mode="bilinear"), plane),
        "size": (_resize(size=(9, 13), mode="bilinear", align_corners=True), plane),
        "line": (_resize(scale_factor=1.7, mode="linear"), line),
        "line_corners": (_resize(size=13, mode="linear", align_corners=True), line),
        "room": (_resize(scale_factor=1.7, mode="trilinear"), room),
        "room_corners": (_resize(size=(5, 7, 3), mode="trilinear", align_corners=True), room),
        "cubic": (_resize(scale_factor=1.3, mode="bicubic"), plane),
        "cubic_corners": (_resize(size=(9, 5), mode="bicubic", align_corners=True), plane),
        "area": (_resize(size=(2, 3, 5), mode="area"), room),
    }
    for mode in ("bilinear", "bicubic"):
        for name, sizes in {
            "down": {"size": (3, 5)},
            "up": {"size": (9, 17)},
            "by": {"scale_factor": 0.45},
        }.items():
            cases[f"{mode}_{name}"] = (_resize(mode=mode, antialias=True, **sizes), plane)
    check(cases)
