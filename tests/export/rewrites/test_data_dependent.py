"""Sizes that hang on values: fixed, or refused with the line and a way out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

Check = Callable[[Any], list[str]]


class Ends(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.function(*tensors)


@pytest.mark.parametrize(
    ("function", "op"),
    [
        (lambda x: x[x > 0], "aten.index"),
        (lambda x: torch.nonzero(x).sum(), "aten.nonzero"),
        (lambda x: x[torch.where(x > 0)], "aten.where"),
        (lambda x: x.masked_select(x > 0), "aten.masked_select"),
        (lambda x: torch.unique(x), "aten._unique2"),
        (lambda x: torch.bincount(x.int()), "aten.bincount"),
    ],
    ids=["mask", "nonzero", "where", "select", "unique", "bincount"],
)
def test_a_size_that_hangs_on_values_is_refused(
    function: Callable[..., Any], op: str, tmp_path: Path
) -> None:
    from tpu2edge.errors import LoweringError
    from tpu2edge.export.lower import Loweree, lower_programs
    from tpu2edge.export.program import trace_module

    traced = trace_module(Ends(function), (torch.tensor([0.0, 3.0, 1.0]),))
    with pytest.raises(LoweringError, match=op) as caught:
        lower_programs([Loweree(traced.program, traced.signature)], tmp_path / "m.tflite")
    place = caught.value.place
    assert place is not None
    assert place.code == "return self.function(*tensors)" or "lambda" in str(place.code)
    assert "use " in caught.value.do


def test_values_under_a_mask_keep_the_size_of_the_whole(converted: Check) -> None:
    torch.manual_seed(0)
    x, mask = torch.randn(3, 5), torch.rand(3, 5) > 0.5
    converted(
        {
            "mean": (lambda x, m: x[m].mean(), (x, mask)),
            "sum": (lambda x, m: (x[m] ** 2 + 1).sum(), (x, mask)),
            "constant": (lambda x: x[torch.eye(3, 5) > 0] * 2, (x,)),
        }
    )
