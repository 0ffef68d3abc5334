"""Max unpooling, of windows side by side and overlapping."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

Check = Callable[[Any], list[str]]


def test_unpooling(converted: Check) -> None:
    torch.manual_seed(0)
    x1, x2, x3 = torch.randn(2, 3, 8), torch.randn(2, 3, 7, 7), torch.randn(1, 2, 4, 4, 4)
    pooled = {
        "1": (*F.max_pool1d(x1, 2, return_indices=True),),
        "2": (*F.max_pool2d(x2, 2, return_indices=True),),
        "2o": (*F.max_pool2d(x2, 3, 2, 1, return_indices=True),),
        "3": (*F.max_pool3d(x3, 2, return_indices=True),),
    }
    converted(
        {
            "one": (lambda x, i: F.max_unpool1d(x, i, 2), pooled["1"]),
            "two": (lambda x, i: F.max_unpool2d(x, i, 2, output_size=(7, 7)), pooled["2"]),
            "over": (lambda x, i: F.max_unpool2d(x, i, 3, 2, 1, (7, 7)), pooled["2o"]),
            "three": (lambda x, i: F.max_unpool3d(x, i, 2), pooled["3"]),
        }
    )
