"""Nearest interpolation by any ratio, on one to three axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

Check = Callable[[Any], list[str]]


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
def test_resizes_take_the_pixels_of_pytorch(mode: str, converted: Check) -> None:
    torch.manual_seed(0)
    shapes = {1: (2, 3, 10), 2: (1, 2, 7, 10), 3: (1, 2, 4, 6, 3)}
    options: list[tuple[int, dict[str, Any]]] = [
        (1, {"size": 7}),
        (1, {"scale_factor": 3}),
        (2, {"size": (49, 29)}),
        (2, {"size": (6, 9)}),
        (2, {"size": (3, 5)}),
        (2, {"scale_factor": 1.7}),
        (2, {"scale_factor": (2.0, 0.6)}),
        (2, {"scale_factor": 1.37, "recompute_scale_factor": True}),
        (3, {"size": (3, 7, 5)}),
        (3, {"scale_factor": 2}),
    ]
    names = converted(
        {
            f"c{index}": (
                lambda x, given=given: F.interpolate(x, mode=mode, **given),
                (torch.randn(shapes[rank]),),
            )
            for index, (rank, given) in enumerate(options)
        }
    )
    assert "GATHER_ND" not in names


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
def test_whole_ratios_stay_one_operator(mode: str, converted: Check) -> None:
    names = converted(
        {
            "scale": (
                lambda x: F.interpolate(x, scale_factor=2, mode=mode),
                (torch.randn(1, 3, 4, 5),),
            ),
            "size": (
                lambda x: F.interpolate(x, size=(12, 5), mode=mode),
                (torch.randn(1, 3, 4, 5),),
            ),
        }
    )
    assert names.count("RESIZE_NEAREST_NEIGHBOR") == 2


def test_small_integers_are_resized(converted: Check) -> None:
    x = torch.randint(0, 255, (1, 2, 4, 6), dtype=torch.int32)
    converted({"u8": (lambda x: F.interpolate(x.to(torch.uint8), size=(6, 9)).int(), (x,))})
