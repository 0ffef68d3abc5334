"""Sizes that change from run to run: right at both ends and between, or refused in words."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tpu2edge.errors import LoweringError
from tpu2edge.export.lower import Loweree, lower_programs
from tpu2edge.export.program import TracedProgram, trace_module
from tpu2edge.runtime_check.devices.client import Session
from tpu2edge.runtime_check.samples import synthetic_samples
from tpu2edge.types import Dim

sys.path.insert(0, str(Path(__file__).parent))

from dynamic_cases import CASES, Case

# Run in every test run; the others are marked slow. One a kind of lowering.
CORE = {
    "mlp",
    "layer_norm",
    "mean_all",
    "mean_dynamic",
    "var_dynamic",
    "argmax_dynamic",
    "softmax_dynamic",
    "cumsum",
    "slice",
    "unflatten",
    "expand",
    "repeat",
    "bmm_4d",
    "einsum",
    "arange",
    "causal_mask",
    "padding_mask",
    "sdpa_causal",
    "position_slice",
    "flip_roll",
    "conv2d_sizes",
    "conv1d",
    "conv_transpose",
    "max_pool_pad",
    "group_norm",
    "interpolate",
    "interpolate_nearest",
    "weight_norm",
    "encoder_layer",
    "decoder",
    "residual",
    "repeat_interleave",
    "index_pair",
    "index_side_by_side",
    "index_apart",
    "index_mask",
    "sdpa_of_heads",
    "bert_eager_1",
    "bert_sdpa_2",
    "llama_sdpa_1",
}


def sizes_to_try(traced: TracedProgram) -> list[dict[str, int]]:
    """Both ends, the middle, and the ends crosswise."""
    dims = {d.name: d for spec in traced.signature.inputs for d in spec.shape if isinstance(d, Dim)}
    assert dims, "torch.export made all sizes fixed"
    return [
        {name: d.min for name, d in dims.items()},
        {name: d.max for name, d in dims.items()},
        {name: (d.min + d.max) // 2 for name, d in dims.items()},
        {name: (d.min, d.max)[i % 2] for i, (name, d) in enumerate(dims.items())},
        {name: (d.max, d.min)[i % 2] for i, (name, d) in enumerate(dims.items())},
    ]


def check(traced: TracedProgram, path: Path) -> None:
    with Session(path) as session:
        for number, sizes in enumerate(sizes_to_try(traced)):
            sample = synthetic_samples(
                traced.example, traced.signature.inputs, count=2, seed=number, sizes=sizes
            )[-1]
            want = traced.eager(sample.inputs)
            (got,) = session.run("serving_default", [sample.inputs])
            for name in (spec.name for spec in traced.signature.outputs):
                truth = want[name]
                assert got[name].shape == truth.shape, (sizes, name)
                spread = float(np.ptp(truth.astype(np.float64))) or 1.0
                np.testing.assert_allclose(
                    got[name].astype(np.float64),
                    truth.astype(np.float64),
                    rtol=0,
                    atol=2e-6 * spread,
                    err_msg=f"{sizes} {name}",
                )


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=() if case.name in CORE else pytest.mark.slow)
        for case in CASES
    ],
)
def test_a_dynamic_model_is_right_at_the_ends_and_between(case: Case, tmp_path: Path) -> None:
    module, args = case.make()
    traced = trace_module(module, args, dynamic=case.dynamic)
    lower_programs([Loweree(traced.program, traced.signature)], tmp_path / "m.tflite")
    check(traced, tmp_path / "m.tflite")


def test_every_core_case_is_in_the_table() -> None:
    assert {case.name for case in CASES} >= CORE
    assert len({case.name for case in CASES}) == len(CASES)


class Unsupported(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.linalg.qr(x)[0] @ y


def test_what_has_no_form_is_refused_with_the_shapes_to_type_instead(tmp_path: Path) -> None:
    dims = {0: Dim(name="b", min=2, max=6)}
    traced = trace_module(
        Unsupported(), (torch.randn(3, 4, 4), torch.randn(4, 2)), dynamic={"x": dims}
    )
    with pytest.raises(LoweringError) as caught:
        lower_programs([Loweree(traced.program, traced.signature)], tmp_path / "m.tflite")
    assert "linalg_qr" in str(caught.value)
    assert "--shapes x=2x4x4,6x4x4" in str(caught.value)
    assert caught.value.place is not None
    assert caught.value.place.line is not None


def test_a_dynamic_axis_that_the_model_fixes_is_refused_with_shapes(tmp_path: Path) -> None:
    class Fixed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.reshape(3, 8)

    from tpu2edge.errors import ExportError

    dims: Any = {"x": {0: Dim(name="b", min=2, max=6)}}
    with pytest.raises(ExportError, match="--shapes x=2x8,6x8"):
        trace_module(Fixed(), (torch.randn(3, 8),), dynamic=dims)
