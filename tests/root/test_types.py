"""The shared types: plain, frozen, and the same after JSON."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from pathlib import Path

import pytest

from tpu2edge import types
from tpu2edge.types import (
    Dim,
    EdgeModel,
    LayerSource,
    Note,
    Signature,
    TensorSpec,
    Verdict,
    no_progress,
)

BATCH = Dim(name="n", min=1, max=8)
SPECS = [
    TensorSpec(name="x", shape=(1, 3), dtype="float32"),
    TensorSpec(name="scalar", shape=(), dtype="bool"),
    TensorSpec(name="a.b/c", shape=(BATCH, 0), dtype="int32"),
    TensorSpec(name="q", shape=(4,), dtype="int8", scale=0.1, zero_point=-3),
]
SIGNATURE = Signature(name="serving_default", inputs=tuple(SPECS[:2]), outputs=tuple(SPECS[2:]))


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_tensor_spec_survives_json(spec):
    assert TensorSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


def test_a_signature_survives_json_and_keeps_its_order():
    again = Signature.from_json(json.loads(json.dumps(SIGNATURE.to_json())))
    assert again == SIGNATURE
    assert [spec.name for spec in again.outputs] == ["a.b/c", "q"]


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (SPECS[0], "x: float32[1x3]"),
        (SPECS[1], "scalar: bool[scalar]"),
        (SPECS[2], "a.b/c: int32[1..8x0]"),
    ],
)
def test_a_spec_is_one_word_of_text(spec, text):
    assert str(spec) == text


def test_a_spec_knows_whether_it_is_dynamic():
    assert [spec.is_dynamic for spec in SPECS] == [False, False, True, False]


def test_tensors_are_found_by_name_and_a_missing_one_is_a_key_error():
    assert SIGNATURE.input("scalar") is SPECS[1]
    assert SIGNATURE.output("q") is SPECS[3]
    with pytest.raises(KeyError, match="q"):
        SIGNATURE.input("q")


def test_types_are_frozen_and_hashable_where_they_are_keys():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SPECS[0].name = "y"
    source = LayerSource(module="m", op="o", file="f", line=1)
    assert {source, dataclasses.replace(source), BATCH, SPECS[0]} >= {source}
    assert pickle.loads(pickle.dumps(SIGNATURE)) == SIGNATURE
    assert copy.deepcopy(SIGNATURE) == SIGNATURE


def test_a_layer_source_says_only_what_is_known():
    assert LayerSource(module="m", op="o").to_json() == {"module": "m", "op": "o"}
    full = LayerSource(module="m", op="o", file="f.py", line=3)
    assert LayerSource(**full.to_json()) == full


def model(*names: str) -> EdgeModel:
    return EdgeModel(
        path=Path("m.tflite"),
        signatures=tuple(dataclasses.replace(SIGNATURE, name=name) for name in names),
        recipe="float32",
        sha256="0",
        size_bytes=0,
    )


def test_the_only_signature_needs_no_name_and_one_of_several_does():
    assert model("a").signature().name == "a"
    assert model("a", "b").signature("b").name == "b"
    with pytest.raises(KeyError, match="must be named"):
        model("a", "b").signature()
    with pytest.raises(KeyError, match="c"):
        model("a").signature("c")


def test_a_verdict_is_its_own_word_and_a_note_its_text():
    assert str(Verdict.PASS) == "PASS"
    assert Verdict("FAIL") is Verdict.FAIL
    assert str(Note(code="c", text="a line")) == "a line"
    assert no_progress("stage", 1, 2) is None


def test_all_lists_what_is_there():
    assert all(hasattr(types, name) for name in types.__all__)
