"""Many small cases converted as one model, run by the real LiteRT worker, compared with PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tpu2edge.export.lower import Loweree, lower_programs
from tpu2edge.export.program import trace_module
from tpu2edge.flatbuffer import read_tflite
from tpu2edge.runtime_check.devices.client import Session

Case = tuple[Callable[..., Any], Any]


class _Call(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: torch.Tensor) -> Any:
        return self.function(*args)


class _Many(nn.Module):
    """Every case as a submodule, so that an error names the one it is about."""

    def __init__(self, cases: Mapping[str, Case]) -> None:
        super().__init__()
        self.cases = nn.ModuleDict(
            {
                name: function if isinstance(function, nn.Module) else _Call(function)
                for name, (function, _) in cases.items()
            }
        )

    def forward(self, inputs: dict[str, list[torch.Tensor]]) -> dict[str, Any]:
        return {name: case(*inputs[name]) for name, case in self.cases.items()}


@pytest.fixture
def check(tmp_path: Path) -> Callable[..., None]:
    def run(cases: Mapping[str, Case], most: float = 2e-6) -> None:
        inputs = {
            name: list(args) if isinstance(args, (tuple, list)) else [args]
            for name, (_, args) in cases.items()
        }
        module = _Many(cases).eval()
        traced = trace_module(module, (inputs,))
        path = tmp_path / "m.tflite"
        lower_programs([Loweree(traced.program, traced.signature)], path)
        with Session(path) as session:
            got = next(iter(session.run("serving_default", [traced.example])))
        want = traced.eager(traced.example)
        assert set(got) == set(want)
        wrong = {}
        for name, truth in want.items():
            assert got[name].shape == truth.shape, name
            wide, given = truth.astype(np.float64), got[name].astype(np.float64)
            finite = wide[np.isfinite(wide)]
            spread = float(np.ptp(finite)) if finite.size else 1.0
            if not np.allclose(given, wide, rtol=0, atol=most * (spread or 1.0), equal_nan=True):
                wrong[name] = float(np.abs(given - wide).max())
        assert not wrong

    return run


@pytest.fixture
def convert_one(tmp_path: Path) -> Callable[..., None]:
    def run(function: Callable[..., Any], *args: torch.Tensor) -> None:
        traced = trace_module(_Call(function), args)
        lower_programs([Loweree(traced.program, traced.signature)], tmp_path / "m.tflite")

    return run


Cases = Mapping[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]]


class Together(nn.Module):
    """Every case on inputs of its own; its results are outputs named after it."""

    def __init__(self, cases: Cases) -> None:
        super().__init__()
        self.cases = cases

    def forward(self, *tensors: torch.Tensor) -> dict[str, torch.Tensor]:
        found, start = {}, 0
        for name, (function, args) in self.cases.items():
            result = function(*tensors[start : start + len(args)])
            start += len(args)
            results = result if isinstance(result, (tuple, list)) else (result,)
            found.update({f"{name}.{index}": one for index, one in enumerate(results)})
        return found


@pytest.fixture
def converted(tmp_path: Path) -> Callable[[Cases], list[str]]:
    """A function that checks every case in LiteRT against PyTorch and gives the LiteRT operators."""

    def check(cases: Cases) -> list[str]:
        inputs = tuple(tensor for _, args in cases.values() for tensor in args)
        traced = trace_module(Together(cases), inputs)
        path = tmp_path / "m.tflite"
        lower_programs([Loweree(traced.program, traced.signature)], path)
        with Session(path) as session:
            got = next(iter(session.run("serving_default", [traced.example])))
        want = traced.eager(traced.example)
        assert set(got) == set(want)
        for name, truth in want.items():
            if truth.dtype.kind in "iub":
                np.testing.assert_array_equal(got[name], truth, err_msg=name)
            else:
                finite = truth[np.isfinite(truth)]
                scale = float(np.abs(finite).max(initial=0.0)) or 1.0
                np.testing.assert_allclose(
                    got[name], truth, rtol=1e-5, atol=2e-6 * scale, err_msg=name
                )
        return [op.name for op in read_tflite(path).subgraphs[0].operators]

    return check
