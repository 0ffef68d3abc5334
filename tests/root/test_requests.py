"""Requests cross to another process as JSON and arrive as they were."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tpu2edge.requests import (
    CaptureRequest,
    CheckRequest,
    ExportRequest,
    ImportRequest,
    Request,
    SurveyRequest,
)

FULL = ExportRequest(
    source="net.py:build",
    output=Path("out"),
    checkpoint=Path("/w/step-1"),
    inputs=(Path("a.npz"), Path("b")),
    dynamic=("x.0=1:8",),
    recipes=("float16", "float32"),
    threads=2,
    force=True,
    reference="ref",
)


@pytest.mark.parametrize(
    "request_",
    [
        FULL,
        ExportRequest(source="net.py", output=Path("out")),
        CheckRequest(target=Path("out"), reference=Path("ref"), budgets=("sqnr>=30dB",)),
        CheckRequest(target=Path("out")),
        CaptureRequest(source="net.py", output=Path("ref"), inputs=(Path("x"),), device="tpu"),
        ImportRequest(output=Path("r"), inputs=Path("x"), outputs=Path("y"), precision="f32"),
        SurveyRequest(source="net.py", generations=("v4", "v5e")),
    ],
)
def test_a_request_comes_back_from_json_as_it_was(request_: Request) -> None:
    back = type(request_).from_json(json.loads(json.dumps(request_.to_json())))
    assert back == request_
    assert repr(back) == repr(request_)  # a path equals no text, a tuple no list: all the way down


def test_a_request_is_plain_data() -> None:
    data = FULL.to_json()
    assert data["output"] == "out"
    assert data["checkpoint"] == "/w/step-1"
    assert data["inputs"] == ["a.npz", "b"]
    assert data["recipes"] == ["float16", "float32"]
    assert (data["num_samples"], data["threads"], data["force"]) == (None, 2, True)


def test_a_field_that_a_request_does_not_have_is_refused() -> None:
    with pytest.raises(TypeError, match="colour"):
        CheckRequest.from_json({"target": "out", "colour": "red"})
