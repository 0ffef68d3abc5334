"""Rounded weights put into the float file give what a file of the quantizer's gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tpu2edge.flatbuffer import read_tflite
from tpu2edge.quantize.apply import Quantizer
from tpu2edge.quantize.moments import Moments
from tpu2edge.quantize.recipes import Recipe
from tpu2edge.quantize.sensitivity import FLOAT, LEVELS, rules_of, units_of
from tpu2edge.quantize.splicing import Splicer

from .conftest import run_mixed

IN_FLOAT = [level.name for level in LEVELS.values() if level.dequantizes]


@pytest.fixture
def splicer(mixed: Path, quantizer: Quantizer, mixed_moments: Moments, tmp_path: Path) -> Splicer:
    file = read_tflite(mixed)
    units = units_of(file, moments=("GPTQ", "OSCAR"))

    def whole(level: str) -> Path:
        path = tmp_path / f"{level}.tflite"
        levels = tuple(level if level in unit.levels else FLOAT for unit in units)
        rules = rules_of(units, levels)
        quantizer.quantize(path, Recipe(name=level, rules=rules), moments=mixed_moments)
        return path

    return Splicer(file, tmp_path / "spliced.tflite", whole)


@pytest.mark.parametrize("level", IN_FLOAT)
def test_each_unit_alone_gives_what_the_quantizers_file_gives(
    mixed: Path,
    quantizer: Quantizer,
    mixed_moments: Moments,
    splicer: Splicer,
    truth,
    tmp_path: Path,
    level: str,
):
    units = units_of(read_tflite(mixed), moments=("GPTQ", "OSCAR"))
    tried = 0
    for index, unit in enumerate(units):
        if level not in unit.levels:
            continue
        assert splicer.possible(unit)
        alone = tuple(level if i == index else FLOAT for i in range(len(units)))
        one = Recipe(name="one", rules=rules_of(units, alone))
        quantizer.quantize(tmp_path / "real", one, moments=mixed_moments)
        real, spliced = run_mixed(tmp_path / "real"), run_mixed(splicer.put(unit, level))
        changed = 0.0
        for name, exact in truth.items():
            noise = np.abs(real[name] - exact).max()
            changed = max(changed, noise)
            # Other float kernels round otherwise; the weights are the same numbers.
            np.testing.assert_allclose(spliced[name], real[name], rtol=0, atol=0.01 * noise + 1e-6)
        assert changed > 0, unit
        tried += 1
    assert tried >= 2


def test_only_the_weights_of_the_last_unit_differ_from_the_float_file(
    mixed: Path, splicer: Splicer
):
    file = read_tflite(mixed)
    first, second = units_of(file)[:2]
    splicer.put(first, "int8-weights")
    spliced = np.frombuffer(splicer.put(second, "int8-weights").read_bytes(), np.uint8)
    changed = np.flatnonzero(spliced != np.frombuffer(mixed.read_bytes(), np.uint8))
    (tensor,) = [t for t in file.subgraphs[0].tensors if t.name == second.tensors[0]]
    place = file.buffers[tensor.buffer]
    assert len(changed)
    assert place.start <= changed[0]
    assert changed[-1] < place.start + place.size


def test_weights_that_another_op_reads_too_are_left_to_the_quantizer(mixed: Path):
    file = read_tflite(mixed)
    splicer = Splicer(file, mixed, lambda level: mixed)
    unit = units_of(file)[0]
    assert splicer.possible(unit)
    (tensor,) = [t for t in file.subgraphs[0].tensors if t.name == unit.tensors[0]]
    splicer._readers[tensor.buffer].add(None)  # what an ADD of the same constant would do
    assert not splicer.possible(unit)
