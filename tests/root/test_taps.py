"""What goes into a final softmax or sigmoid is compared as well: squashing hides faults."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import tpu2edge
from tpu2edge.export.program import trace_module
from tpu2edge.export.taps import tap_name


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


def test_logits_that_are_wrong_by_a_factor_fail_although_the_probabilities_pass(
    bundle: tpu2edge.Bundle, tmp_path: Path
) -> None:
    """The probabilities of doubled logits are the same; only what goes into the softmax tells."""
    from tpu2edge.pipeline import _taps_in
    from tpu2edge.runtime_check.budget import default_budget
    from tpu2edge.runtime_check.parity import check_model, check_taps

    torch.manual_seed(0)
    doubled = Saturated()
    with torch.no_grad():
        doubled.head.weight *= 2
        doubled.head.bias *= 2
    other = tpu2edge.export_model(doubled, torch.randn(3, 16), output=tmp_path / "other")
    traced = trace_module(doubled, (torch.randn(3, 16),))
    reference = bundle.reference()
    budget = default_budget("float32")
    report = check_model(other.model(), reference, budget)
    assert str(report.case("probs").verdict) == "PASS"
    taps = _taps_in(other.model().path, traced, {})
    (case,) = (
        case
        for case in check_taps(other.model(), reference, taps, budget)
        if case.output == tap_name("probs")
    ) if any(tap.name == tap_name("probs") for tap in taps) else (None,)
    if case is not None:
        assert str(case.verdict) == "FAIL"


def test_a_program_without_a_final_activation_has_no_taps() -> None:
    traced = trace_module(nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1), nn.Linear(4, 2)), (torch.ones(1, 4),))
    assert traced.taps == ()
    assert traced.tapped is traced.program
