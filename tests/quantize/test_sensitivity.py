"""Units, levels, their rules and noises, and the knapsack over them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tpu2edge.flatbuffer import read_tflite, summarize
from tpu2edge.quantize.apply import Quantizer
from tpu2edge.quantize.recipes import Recipe, recipe
from tpu2edge.quantize.sensitivity import (
    FLOAT,
    LEVELS,
    NoiseModel,
    Unit,
    between_of,
    cheapest,
    expected_bytes,
    producers_of,
    rules_of,
    shared_bytes,
    units_of,
)


@pytest.fixture(scope="module")
def remembering(mixed: Path) -> Iterator[Quantizer]:
    with Quantizer(mixed, remember=True) as quantizer:
        yield quantizer


def unit(name: str, elements: int = 4096, *, op: str = "FULLY_CONNECTED") -> Unit:
    return Unit(
        name=f"{name};",
        op=op,
        scopes=(f"{name};",),
        tensors=(f"{name}.weight",),
        elements=elements,
        channels=64,
        rotation=64,
        macs=elements,
        levels=tuple(level.name for level in LEVELS.values() if op in level.operations),
    )


def test_each_layer_with_weights_is_a_unit_with_the_levels_its_op_can_have(mixed: Path):
    units = {unit.op: unit for unit in units_of(read_tflite(mixed))}
    assert {"CONV_2D", "DEPTHWISE_CONV_2D", "EMBEDDING_LOOKUP", "FULLY_CONNECTED"} <= set(units)
    assert units["DEPTHWISE_CONV_2D"].levels == (FLOAT, "int8-dynamic", "int8-weights", "float16")
    assert "int4-dynamic-b32" not in units["CONV_2D"].levels
    assert units["EMBEDDING_LOOKUP"].macs == 0
    assert units["CONV_2D"].macs == 16 * 16 * 16 * 27  # 16x16 places, 16 channels, 3x3x3 weights


def test_blocks_are_offered_only_where_they_divide_the_width(mixed: Path):
    file = read_tflite(mixed)
    for one in units_of(file):
        weight = next(w for w in summarize(file).weights if w.name == one.tensors[0])
        if one.op in ("FULLY_CONNECTED", "EMBEDDING_LOOKUP"):
            assert ("int4-dynamic-b32" in one.levels) == (weight.shape[-1] % 32 == 0)


def test_static_levels_are_offered_with_ranges_and_where_there_are_kernels(mixed: Path):
    file = read_tflite(mixed)
    static = {level.name for level in LEVELS.values() if level.activations}
    assert not any(static & set(unit.levels) for unit in units_of(file))
    units = {unit.op: unit for unit in units_of(file, calibrated=True)}
    assert static <= set(units["FULLY_CONNECTED"].levels)
    assert not static & set(units["EMBEDDING_LOOKUP"].levels)
    assert static & set(units["DEPTHWISE_CONV_2D"].levels) == {"int8-static", "int16-static"}


def test_levels_that_need_moments_are_offered_with_them(mixed: Path):
    file = read_tflite(mixed)
    weighed = {level.name: level.moments for level in LEVELS.values() if level.moments}
    assert not any(set(weighed) & set(unit.levels) for unit in units_of(file))
    for algorithm in ("GPTQ", "OSCAR"):
        units = {unit.op: unit for unit in units_of(file, moments=(algorithm,))}
        offered = set(weighed) & set(units["FULLY_CONNECTED"].levels)
        assert offered
        assert {weighed[name] for name in offered} == {algorithm}
        assert not set(weighed) & set(units["CONV_2D"].levels)


def test_ops_without_weights_are_units_of_static_levels(mixed: Path):
    file = read_tflite(mixed)
    between = between_of(file, ("int8-static", "int16-static"))
    by_op = {unit.op: unit for unit in between}
    assert by_op["SOFTMAX"].levels == (FLOAT, "int8-static", "int16-static")
    assert by_op["SOFTMAX"].elements == 0
    assert not {unit.op for unit in between} & {"FULLY_CONNECTED", "CONV_2D", "EMBEDDING_LOOKUP"}
    graph = file.subgraphs[0]
    dtypes = {tensor.name: tensor.dtype for tensor in graph.tensors}
    assert {dtypes[name] for unit in between for name in unit.tensors} == {"float32"}


def test_producers_are_the_units_whose_outputs_are_read(mixed: Path):
    file = read_tflite(mixed)
    units = units_of(file) + between_of(file, ("int8-static",))
    producers = producers_of(file, units)
    (softmax,) = [i for i, unit in enumerate(units) if unit.op == "SOFTMAX"]
    (last,) = producers[softmax]
    assert last is not None
    assert units[last].op == "FULLY_CONNECTED"
    (embedding,) = [i for i, unit in enumerate(units) if unit.op == "EMBEDDING_LOOKUP"]
    assert producers[embedding] == {None}  # an input of the model
    (joined,) = [i for i, unit in enumerate(units) if unit.op == "CONCATENATION"]
    assert {units[i].op for i in producers[joined] if i is not None} == {"MEAN", "MUL"}


def test_ops_that_share_their_weights_are_one_unit(make_linear):
    weight = np.ones((64, 64), "float32")
    tied = make_linear(weight, weight)
    (shared,) = units_of(read_tflite(tied))
    assert shared.scopes == ("h1;", "h2;")
    assert shared.elements == 64 * 64


def test_rules_give_each_unit_its_level_and_the_rest_none(mixed: Path):
    units = units_of(read_tflite(mixed))
    rng = np.random.default_rng(0)
    for _ in range(50):
        wanted = tuple(str(rng.choice(unit.levels)) for unit in units)
        rules = rules_of(units, wanted)
        for one, level in zip(units, wanted, strict=True):
            for scope in one.scopes:
                last = None
                for rule in rules:
                    kind = next(k for k in LEVELS.values() if _same(k.rule(rule["regex"]), rule))
                    if re.search(rule["regex"], scope) and one.op in kind.operations:
                        last = kind.name
                assert (last or FLOAT) == level
        assert len(rules) <= len(set(wanted))


def _same(a, b) -> bool:
    return {k: v for k, v in a.items() if k != "regex"} == {
        k: v for k, v in b.items() if k != "regex"
    }


def test_nothing_to_do_is_no_rule():
    assert rules_of([unit("a"), unit("b")], (FLOAT, FLOAT)) == ()


def test_a_rule_for_all_and_an_exception_make_the_same_file_as_a_rule_for_each(
    mixed: Path, quantizer: Quantizer, tmp_path: Path
):
    units = units_of(read_tflite(mixed))
    levels = ["int8-dynamic"] * len(units)
    levels[-1] = "float16"
    short = rules_of(units, tuple(levels))
    assert len(short) == 2
    each = tuple(
        LEVELS[level].rule(f"^{re.escape(scope)}$")
        for one, level in zip(units, levels, strict=True)
        for scope in one.scopes
    )
    for name, rules in (("short", short), ("each", each)):
        quantizer.quantize(tmp_path / name, Recipe(name=name, rules=rules))
    assert (tmp_path / "short").read_bytes() == (tmp_path / "each").read_bytes()


def test_a_quantizer_that_remembers_makes_the_same_files(
    quantizer: Quantizer, remembering: Quantizer, mixed_ranges, tmp_path: Path
):
    wider = {name: (low * 2, high * 2) for name, (low, high) in mixed_ranges.items()}
    jobs = [
        ("dynamic_wi8_afp32", None),
        ("int8-static", mixed_ranges),
        ("int8-static", wider),
        ("dynamic_wi8_afp32-octav", None),
        ("dynamic_wi8c_hr_afp32", None),
        ("float16", None),
        ("dynamic_wi8_afp32", None),
    ]
    for name, ranges in jobs:
        quantizer.quantize(tmp_path / "plain", recipe(name), ranges)
        remembering.quantize(tmp_path / "remembering", recipe(name), ranges)
        assert (tmp_path / "plain").read_bytes() == (tmp_path / "remembering").read_bytes()


def test_the_expected_size_is_near_the_real_one(
    mixed: Path, remembering: Quantizer, tmp_path: Path
):
    units = units_of(read_tflite(mixed))
    index = max(range(len(units)), key=lambda i: units[i].elements)

    def size(level: str) -> int:
        levels = tuple(level if i == index else FLOAT for i in range(len(units)))
        rules = rules_of(units, levels) or (LEVELS[FLOAT].rule(".*"),)
        remembering.quantize(tmp_path / "x", Recipe(name="x", rules=rules))
        return (tmp_path / "x").stat().st_size

    base = size(FLOAT)
    for level in units[index].levels[1:]:
        levels = tuple(level if i == index else FLOAT for i in range(len(units)))
        expected = expected_bytes(units[index], level) + shared_bytes(units, levels)
        # Where it is off is names, tables and the alignment: some hundred bytes.
        assert size(level) - base == pytest.approx(expected, abs=1500)


def test_the_noise_at_another_level_follows_from_the_steps_seen_in_other_units():
    units = [unit(name) for name in "abcd"]
    model = NoiseModel(units)
    for index, noise in enumerate((1e-4, 2e-4, 4e-4)):
        model.measured[index, "int8-weights"] = noise
        model.measured[index, "int4-weights"] = 100 * noise
    model.measured[3, "int8-weights"] = 3e-4
    assert model.noise(3, "int4-weights") == pytest.approx(3e-2)
    assert model.noise(3, FLOAT) == 0


def test_without_a_measurement_the_noise_is_the_share_of_a_whole_recipe():
    model = NoiseModel([unit("a", 3000), unit("b", 1000)])
    model.totals["int8-weights"] = 4e-3
    assert model.noise(1, "int8-weights") == pytest.approx(1e-3)
    # Another level's, by what the levels are usually worth.
    assert model.noise(1, "int8-dynamic") == pytest.approx(1e-3 * LEVELS["int8-dynamic"].noise)


@pytest.mark.parametrize("seed", range(5))
def test_the_cheapest_choice_is_that_of_trying_all(seed: int):
    rng = np.random.default_rng(seed)
    # Whole parts of the capacity, so that rounding to parts loses nothing.
    noises = rng.integers(0, 60, (5, 4)) / 128.0
    costs = rng.integers(1, 1000, (5, 4)).astype(float)
    noises[:, 0] = 0
    best = min(
        sum(costs[i][k] for i, k in enumerate(picks))
        for picks in itertools.product(range(4), repeat=5)
        if sum(noises[i][k] for i, k in enumerate(picks)) <= 1.0
    )
    picks = cheapest(noises.tolist(), costs.tolist(), 1.0, steps=128)
    assert picks is not None
    assert sum(costs[i][k] for i, k in enumerate(picks)) == best
    assert sum(noises[i][k] for i, k in enumerate(picks)) <= 1.0


def test_there_is_no_choice_when_the_quietest_is_too_noisy():
    assert cheapest([[0.7, 0.9], [0.6]], [[1.0, 0.5], [1.0]], 1.0) is None
    assert cheapest([[1e-9, 0.0]], [[1.0, 2.0]], 0.0) == [1]
