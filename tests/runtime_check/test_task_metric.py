"""A metric of the user's own: found, called, and held to its bounds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tpu2edge.errors import DataError, ModelSourceError, OptionError
from tpu2edge.runtime_check.budget import Budget, TaskBound
from tpu2edge.runtime_check.task_metric import TaskMetric, load_task_metric

METRICS = """
def accuracy(outputs, ids):
    labels = [int(i.split(":")[1]) for i in ids]
    return sum(int(o["logits"].argmax()) == l for o, l in zip(outputs, labels)) / len(labels)

def everything(**known):
    return len(known)

def broken(outputs):
    return outputs[0]["no such output"]

def text(outputs):
    return "good"

def endless(outputs):
    return float("inf")

def wants(outputs, labels):
    return 0.0
"""


@pytest.fixture
def metric(tmp_path: Path):
    (tmp_path / "metrics.py").write_text(METRICS)

    def load(name: str) -> TaskMetric:
        return load_task_metric(f"{tmp_path / 'metrics.py'}:{name}")

    return load


def called(metric: TaskMetric, rows: list[int]):
    def one_hot(row: int):
        return {"logits": np.eye(3, dtype=np.float32)[row]}

    ids = [f"x:{label}" for label in (0, 1, 2, 2)]
    outputs = [one_hot(row) for row in rows]
    reference = [one_hot(row) for row in (0, 1, 2, 0)]
    return metric(outputs, inputs=[{}] * 4, ids=ids, reference=reference)


def test_a_metric_is_called_with_the_files_and_with_the_references_outputs(metric):
    value = called(metric("accuracy"), [0, 0, 2, 0])
    assert (value.value, value.reference) == (0.5, 0.75)


def test_a_metric_that_takes_everything_gets_everything(metric):
    assert called(metric("everything"), [0, 1, 2, 0]).value == 4


def test_a_metric_that_raises_is_told_with_its_line(metric):
    with pytest.raises(ModelSourceError) as caught:
        called(metric("broken"), [0, 1, 2, 0])
    assert caught.value.place is not None
    assert caught.value.place.code == 'return outputs[0]["no such output"]'


@pytest.mark.parametrize(("name", "words"), [("text", "str"), ("endless", "inf")])
def test_a_metric_that_gives_no_finite_number_is_refused(metric, name, words):
    with pytest.raises(DataError, match=words):
        called(metric(name), [0, 1, 2, 0])


def test_a_metric_that_wants_something_unknown_is_refused_with_what_there_is(metric):
    with pytest.raises(ModelSourceError, match="labels") as caught:
        metric("wants")
    assert "outputs, inputs, ids, reference" in caught.value.do


def test_a_metric_that_is_not_there_is_refused_with_the_closest(metric):
    with pytest.raises(ModelSourceError, match="the closest is accuracy"):
        metric("acuracy")


@pytest.mark.parametrize(
    ("text", "value", "reference", "holds"),
    [
        ("metric>=0.9", 0.9, 0.95, True),
        ("metric>=0.9", 0.89, 0.95, False),
        ("metric<=4.5", 4.4, 4.0, True),
        ("metric<=4.5", 4.6, 4.0, False),
        ("metric_drop<=0.01", 0.94, 0.95, True),
        ("metric_drop<=0.01", 0.93, 0.95, False),
        ("metric_drop<=1%", 0.95, 0.95, True),
        ("metric_drop<=1%", 0.97, 0.95, True),
        ("metric_drop<=1%", 0.94, 0.95, False),
        ("metric_rise<=10%", 4.4, 4.0, True),
        ("metric_rise<=10%", 4.5, 4.0, False),
        ("metric_drop<=1%", 0.0, 0.0, True),
        ("metric_drop<=1%", -0.1, 0.0, False),
    ],
)
def test_a_bound_on_the_task_metric_holds_or_says_why_not(text, value, reference, holds):
    (bound,) = Budget.parse(text).task
    said = bound.check(value, reference)
    assert (said is None) == holds
    assert (bound.margin_db(value, reference) >= 0) == holds
    if said is not None:
        assert f"wanted {'at least' if bound.op == '>=' else 'at most'}" in said


def test_task_bounds_stand_beside_the_others_and_survive_json():
    budget = Budget.parse("metric_drop<=1%,logits:sqnr>=30dB", "metric>=0.9")
    assert budget.task == (
        TaskBound(metric="metric_drop", op="<=", value=0.01, is_share=True),
        TaskBound(metric="metric", op=">=", value=0.9),
    )
    assert [str(b) for b in budget.outputs["logits"]] == ["sqnr>=30dB"]
    assert Budget.from_json(budget.to_json()) == budget


@pytest.mark.parametrize("text", ["metric_drop>=1%", "metric>=90%"])
def test_a_task_bound_that_makes_no_sense_is_refused(text):
    with pytest.raises(OptionError):
        Budget.parse(text)
