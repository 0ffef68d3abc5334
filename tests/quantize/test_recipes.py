"""Recipes by ai-edge-quantizer's own names; an unknown one is refused, never replaced."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tpu2edge.errors import OptionError
from tpu2edge.quantize.recipes import RECIPES, known_recipe


def test_every_recipe_is_known_by_its_own_name():
    for name, info in RECIPES.items():
        assert info.name == name
        assert known_recipe(name) is info
        assert info.about


def test_every_upstream_recipe_is_one_that_the_quantizer_has_and_needs_no_calibration():
    # In a process of its own: the quantizer brings jax and more along.
    names = [info.upstream for info in RECIPES.values() if info.upstream]
    script = (
        "import sys; from ai_edge_quantizer import recipe, quantizer\n"
        "for name in sys.argv[2:]:\n"
        "    q = quantizer.Quantizer(sys.argv[1], getattr(recipe, name)())\n"
        "    assert not q.need_calibration, name\n"
    )
    from pathlib import Path

    model = Path(__file__).parents[1] / "data" / "small.float32.tflite"
    done = subprocess.run(
        [sys.executable, "-c", script, str(model), *names], capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    assert len(names) == len(RECIPES) - 2  # float32 and float16 are our own


@pytest.mark.parametrize(
    ("name", "closest"),
    [
        ("dynamic_wi8_af32", "dynamic_wi8_afp32"),
        ("float-32", "float32"),
        ("fp16", "float16"),
        ("weight_only_int8", "weight_only_wi8_afp32"),
    ],
)
def test_an_unknown_recipe_is_refused_with_the_closest_and_all_known(name, closest):
    with pytest.raises(OptionError, match=f"unknown recipe '{name}'") as error:
        known_recipe(name)
    assert f"the closest is '{closest}'" in error.value.do
    for known in RECIPES:
        assert known in error.value.do


def test_a_name_that_is_close_to_none_gets_no_guess():
    with pytest.raises(OptionError) as error:
        known_recipe("zzz")
    assert "closest" not in error.value.do


@pytest.mark.parametrize("name", ["static_wi8_ai8", "static_wi8_ai16"])
def test_a_recipe_that_needs_calibration_is_refused_for_that_reason(name):
    with pytest.raises(OptionError, match="needs calibration"):
        known_recipe(name)


@pytest.mark.parametrize("name", ["FLOAT32", "Float16", " float32", ""])
def test_names_are_exact(name):
    with pytest.raises(OptionError):
        known_recipe(name)
