"""Bounded operators of six dimensions: MAXIMUM and MINIMUM of a number take five."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional


class _AfterLinear(nn.Module):
    """An activation of a linear layer, whose result is used twice."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 8)
        self.function = function

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        y = self.linear(x)
        z = self.function(y)
        return z, z * 2 + y, self.function(x)


def test_bounded_operators_of_six_dimensions_are_right(check: Callable[..., None]) -> None:
    torch.manual_seed(0)
    quarter = torch.tensor(0.25)
    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "relu": torch.relu,
        "relu6": functional.relu6,
        "hardtanh": lambda x: functional.hardtanh(x, -0.3, 0.4),
        "clamp": lambda x: x.clamp(-0.5, 0.5),
        "clamp_tensors": lambda x: torch.clamp(x, quarter - 1, quarter),
        "at_least": lambda x: x.clamp(min=0.1),
        "at_most": lambda x: x.clamp(max=0.1),
        "maximum": lambda x: torch.maximum(x, quarter),
        "minimum": lambda x: torch.minimum(x, quarter),
        "threshold": lambda x: functional.threshold(x, 0.1, -2.0),
    }
    for shape in ((1, 2, 3, 1, 1, 12), (2, 1, 3, 2, 2, 12)):
        x = torch.randn(shape)
        check({name: (_AfterLinear(function), x) for name, function in functions.items()})
