"""One model of many small cases: converting takes seconds, a case more takes little."""

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
