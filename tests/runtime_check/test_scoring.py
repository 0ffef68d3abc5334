"""Many files scored on the same samples, in one worker that outlives a bad file."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from tpu2edge.runtime_check.budget import Budget
from tpu2edge.runtime_check.reference import Reference, ReferenceWriter
from tpu2edge.runtime_check.scoring import Scorer
from tpu2edge.runtime_check.task_metric import load_task_metric
from tpu2edge.types import Sample, Signature, TensorSpec

RNG = np.random.default_rng(0)
WEIGHT, SHIFT = RNG.standard_normal((2, 3, 3)).astype("float32")
SAMPLES = RNG.standard_normal((6, 3, 3)).astype("float32")


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> Reference:
    def spec(name: str) -> TensorSpec:
        return TensorSpec(name=name, shape=(3, 3), dtype="float32")

    signature = Signature(
        name="serving_default", inputs=(spec("x"),), outputs=(spec("scaled"), spec("shifted"))
    )
    folder = tmp_path_factory.mktemp("reference")
    with ReferenceWriter(
        folder, signature, provider="eager", precision="f32", data={"kind": "given"}
    ) as writer:
        for index, x in enumerate(SAMPLES):
            outputs = {"scaled": x * WEIGHT, "shifted": x + SHIFT}
            writer.add(Sample(id=f"s{index}", inputs={"x": x}), outputs)
    return Reference.load(folder)


def test_a_right_file_has_room_and_a_wrong_one_has_none(reference, make_affine):
    right, wrong = make_affine(WEIGHT, SHIFT), make_affine(WEIGHT * np.float32(1.1), SHIFT)
    with Scorer([reference], Budget.parse("sqnr>=30dB")) as scorer:
        good, bad, again = scorer.score(right), scorer.score(wrong), scorer.score(right)
    assert good.margin_db > 50
    assert bad.sqnr_db == pytest.approx(20.0, abs=0.01)
    assert bad.margin_db == pytest.approx(-10.0, abs=0.01)
    assert bad.worst == "scaled: sqnr>=30dB"
    assert again.margin_db == good.margin_db
    assert 0 < good.latency_ms < 100
    assert good.size_bytes == right.stat().st_size


def test_only_the_picked_samples_are_scored(reference, make_affine, tmp_path):
    (tmp_path / "m.py").write_text(
        "def which(ids):\n    return float(sum(int(i[1:]) for i in ids))\n"
    )
    metric = load_task_metric(f"{tmp_path / 'm.py'}:which")
    budget = Budget.parse("metric<=8", "sqnr>=30dB")
    with Scorer([reference], budget, picks=[[1, 3, 5]], metric=metric) as scorer:
        score = scorer.score(make_affine(WEIGHT, SHIFT))
    assert score.task is not None
    assert score.task.value == 9
    assert score.margin_db < 0
    assert score.worst == "which: metric<=8"
    assert score.outputs["serving_default:scaled"].samples == 3


def test_a_file_that_is_refused_scores_nothing_and_the_next_one_is_scored(
    reference, make_affine, tmp_path: Path
):
    right = make_affine(WEIGHT, SHIFT)
    broken = tmp_path / "broken.tflite"
    broken.write_bytes(right.read_bytes()[:100])
    with Scorer([reference], Budget.parse("sqnr>=30dB")) as scorer:
        bad, good = scorer.score(broken), scorer.score(right)
    assert bad.margin_db == -math.inf
    assert "broken.tflite" in bad.error
    assert good.margin_db > 50


def test_the_outputs_of_a_file_are_given_as_real_numbers(reference, make_affine):
    with Scorer([reference], Budget()) as scorer:
        (found,) = scorer.outputs(make_affine(WEIGHT, SHIFT))
    np.testing.assert_allclose(found[2]["shifted"], SAMPLES[2] + SHIFT, rtol=1e-6)
