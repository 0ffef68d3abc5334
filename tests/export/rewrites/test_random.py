"""Random numbers are refused with their line; checks and allocations are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from tpu2edge.errors import LoweringError

NOISY: dict[str, Callable[..., Any]] = {
    "randn_like": lambda x: x + torch.randn_like(x),
    "rand": lambda x: x + torch.rand(4),
    "normal_": lambda x: x + torch.empty_like(x).normal_(),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "multinomial": lambda x: torch.multinomial(x.softmax(-1), 1),
    "dropout": lambda x: functional.dropout(x, 0.5, True),
    "randint": lambda x: x + torch.randint(0, 5, (4,)),
    "exponential": lambda x: functional.gumbel_softmax(x),
    "attention": lambda x: functional.scaled_dot_product_attention(
        x[None], x[None], x[None], dropout_p=0.5
    ),
}


@pytest.mark.parametrize("name", NOISY)
def test_random_numbers_are_refused(convert_one: Callable[..., None], name: str) -> None:
    with pytest.raises(LoweringError, match=name) as caught:
        convert_one(NOISY[name], torch.randn(3, 4))
    assert "as an input" in str(caught.value)
    assert caught.value.place is not None
    assert caught.value.place.line is not None


def test_uninitialised_memory_is_refused(convert_one: Callable[..., None]) -> None:
    with pytest.raises(LoweringError, match="without being written"):
        convert_one(lambda x: x + torch.empty_like(x), torch.randn(3, 4))


def _filled(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty(2, 3, 4)
    y[0] = x
    y[1] = x * 2
    return y


def _checked(x: torch.Tensor) -> torch.Tensor:
    torch._assert_async((x < 100).all(), "too large")
    return x * 2


def test_what_is_not_random_is_kept(check: Callable[..., None]) -> None:
    x = torch.randn(3, 4)
    check(
        {
            "dropout_off": (lambda x: functional.dropout(x, 0.5, False), x),
            "dropout_of_nothing": (lambda x: functional.dropout(x, 0.0, True), x),
            "unused": (lambda x: (torch.rand(3), x * 2)[1], x),
            "filled": (_filled, x),
            "copied": (lambda x: torch.empty(3, 4).copy_(x), x),
            "checked": (_checked, x),
        }
    )
