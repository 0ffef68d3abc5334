"""What goes into a final softmax or sigmoid is compared as well: squashing hides faults."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import tpu2edge
from tpu2edge.export.lower import Loweree, lower_programs
from tpu2edge.export.program import trace_module
from tpu2edge.export.taps import tap_name
from tpu2edge.places import taps_in
from tpu2edge.runtime_check.budget import default_budget
from tpu2edge.runtime_check.parity import check_model, check_taps


class Saturated(nn.Module):
    """Logits far apart: the probabilities are 0 and 1 to the last bit."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(16, 32)
        self.head = nn.Linear(32, 10)
        self.gate = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(torch.relu(self.hidden(x))) * 400
        return {
            "probs": torch.softmax(logits, -1),
            "flag": torch.sigmoid(self.gate(x)).squeeze(-1),
            "plain": logits.sum(-1),
            "log": torch.log_softmax(logits, -1).reshape(-1),
        }


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> tpu2edge.Bundle:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("taps")
    return tpu2edge.export_model(Saturated(), torch.randn(3, 16), output=folder / "out")


def test_the_values_before_each_activation_are_cases_of_their_own(bundle: tpu2edge.Bundle) -> None:
    assert str(bundle.verdict) == "PASS"
    outputs = [case.output for case in bundle.report.cases]
    taps = [tap_name(name) for name in ("probs", "flag", "log")]
    assert outputs == ["probs", "flag", "plain", "log", *taps]
    for name in taps:
        metrics = bundle.report.case(name).metrics
        assert metrics is not None
        assert metrics.sqnr_db_worst is not None
        assert metrics.sqnr_db_worst > 110


def test_the_oracle_and_the_eager_module_give_the_same_values_there() -> None:
    torch.manual_seed(0)
    module = Saturated().eval()
    traced = trace_module(module, (torch.randn(3, 16),))
    assert traced.tapped_outputs == ("probs", "flag", "log")
    x = torch.from_numpy(traced.example["x"])
    with torch.no_grad():
        logits = module.head(torch.relu(module.hidden(x))) * 400
    eager = traced.eager(traced.example)[tap_name("probs")]
    torch.testing.assert_close(torch.from_numpy(eager), logits, atol=1e-4, rtol=1e-6)
    oracle = traced.oracle(traced.example)[tap_name("probs")]
    torch.testing.assert_close(torch.from_numpy(oracle).float(), logits, atol=1e-4, rtol=1e-5)


def test_logits_that_are_all_too_large_fail_although_the_probabilities_pass(
    bundle: tpu2edge.Bundle, tmp_path: Path
) -> None:
    """Softmax takes the same constant in all logits away; only what goes into it tells."""
    torch.manual_seed(0)
    shifted = Saturated()
    with torch.no_grad():
        shifted.head.bias += 0.1  # 40 in every logit
    traced = trace_module(shifted, (torch.randn(3, 16),))
    lowered = lower_programs(
        [Loweree(traced.program, traced.signature)], tmp_path / "model.float32.tflite"
    )
    model = replace(bundle.model(), path=lowered.path)
    budget = default_budget("float32")
    report = check_model(model, bundle.reference(), budget)
    assert str(report.case("probs").verdict) == "PASS"
    taps = taps_in(lowered.path, traced, lowered.origins)
    cases = {case.output: case for case in check_taps(model, bundle.reference(), taps, budget)}
    assert str(cases[tap_name("probs")].verdict) == "FAIL"
    metrics = cases[tap_name("probs")].metrics
    assert metrics is not None
    assert metrics.max_abs == pytest.approx(40, abs=0.01)
    assert str(cases[tap_name("flag")].verdict) == "PASS"


def test_a_program_without_a_final_activation_has_no_taps() -> None:
    traced = trace_module(
        nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1), nn.Linear(4, 2)), (torch.ones(1, 4),)
    )
    assert traced.taps == ()
    assert traced.tapped is traced.program
