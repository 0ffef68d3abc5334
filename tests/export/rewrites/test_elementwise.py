"""Elementwise operators, embedding_bag and grid_sample."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from tpu2edge.export.lower import Loweree, lower_programs
from tpu2edge.export.program import trace_module
from tpu2edge.runtime_check.devices.client import Session
from tpu2edge.types import Dim


def test_elementwise_operators_are_right(check: Callable[..., None]) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 6)
    whole = (x * 9).int()
    zeros = torch.tensor([0.0, -0.0, 1.0, -1.0])
    check(
        {
            "erfc": (torch.erfc, x),
            "exp2": (torch.exp2, x),
            "hypot": (lambda x: torch.hypot(x, x.flip(0)), x),
            "hypot_large": (lambda x: torch.hypot(x * 1e20, x * 1e20), x),
            "signbit": (torch.signbit, zeros),
            "copysign": (lambda x: torch.copysign(x, x.flip(0)), x),
            "fmax": (lambda x: torch.fmax(torch.log(x), x), x),
            "and": (lambda i: i & 6, whole),
            "and_negative": (lambda i: i & -7, whole),
            "or": (lambda i: i | 5, whole),
            "not": (lambda i: ~i, whole),
            "logical": (lambda x: torch.logical_xor(x > 0, x > 0.5), x),
            "booleans": (lambda x: (x > 0) & (x < 1) | ~(x > -1) ^ (x > 0.3), x),
        }
    )


@pytest.mark.parametrize("dynamic", [False, True])
def test_log1p_and_expm1_keep_their_digits_near_zero(dynamic: bool, tmp_path: Path) -> None:
    small = np.logspace(-30, -1, 200)
    ends = [0.0, -1.0, math.inf, -math.inf, math.nan, 1e30, 88.0, 100.0, -0.9999999, -100.0]
    x = np.concatenate([small, -small, np.linspace(-0.999, 20, 500), ends]).astype(np.float32)
    dims = {"x": {0: Dim(name="n", min=2, max=2000)}} if dynamic else None
    traced = trace_module(_Logs(), (torch.from_numpy(x),), dynamic=dims)
    lower_programs([Loweree(traced.program, traced.signature)], tmp_path / "m.tflite")
    with Session(tmp_path / "m.tflite") as session:
        (got,) = session.run("serving_default", [{"x": x}])
    with np.errstate(all="ignore"):
        for name, true in (("log1p", np.log1p), ("expm1", np.expm1)):
            want = true(x.astype(np.float64)).astype(np.float32)
            # LOG and EXP of XNNPACK are themselves off by some 1e-7 and 2e-6 (at 88).
            np.testing.assert_allclose(got[name], want, rtol=1e-6 if name == "log1p" else 2e-6)
            near = slice(0, 400)
            np.testing.assert_allclose(got[name][near], want[near], rtol=3e-7, err_msg=name)


class _Logs(nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"log1p": torch.log1p(x), "expm1": torch.expm1(x)}


def test_activations_made_of_log1p_are_right(check: Callable[..., None]) -> None:
    x = torch.linspace(-30, 30, 400)
    check(
        {
            "softplus": (nn.Softplus(), x),
            "softplus_beta": (nn.Softplus(0.5, 4), x),
            "mish": (nn.Mish(), x),
            "log_sigmoid": (nn.LogSigmoid(), x),
            "log1p_of_integers": (torch.log1p, torch.arange(20)),
            "expm1_of_integers": (torch.expm1, torch.arange(-9, 9).int()),
        }
    )


def test_bags_are_right(check: Callable[..., None]) -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, 10, (3, 5))
    check({mode: (nn.EmbeddingBag(10, 4, mode=mode), ids) for mode in ("sum", "mean", "max")})


def _sample(mode: str, padding: str, corners: bool) -> Callable[..., Any]:
    return lambda x, grid: functional.grid_sample(x, grid, mode, padding, corners)


def test_grids_are_sampled_right(check: Callable[..., None]) -> None:
    torch.manual_seed(0)
    plane, places = torch.randn(2, 3, 6, 8), torch.rand(2, 5, 4, 2) * 2.6 - 1.3
    room, points = torch.randn(1, 3, 4, 5, 6), torch.rand(1, 3, 4, 2, 3) * 2.6 - 1.3
    cases = {}
    for mode in ("bilinear", "nearest", "bicubic"):
        for padding in ("zeros", "border", "reflection"):
            corners = padding == "border"
            name = f"{mode}_{padding}"
            cases[name] = (_sample(mode, padding, corners), (plane, places))
            if mode != "bicubic":
                cases[f"{name}_3d"] = (_sample(mode, padding, not corners), (room, points))
    check(cases, most=1e-5)
