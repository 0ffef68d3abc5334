"""Recipes by ai-edge-quantizer's own names and by plain ones, from files, and with layers kept."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from tpu2edge.errors import OptionError
from tpu2edge.quantize.recipes import (
    PLAIN_NAMES,
    RECIPES,
    Recipe,
    keep_float,
    known_recipe,
    recipe,
    recipe_from_file,
    recipe_from_rules,
    with_float_io,
)
from tpu2edge.quantize.rules import ALGORITHMS, OPERATIONS, in_order, static
from tpu2edge.quantize.scan import scan
from tpu2edge.quantize.scopes import op_scopes


def test_every_recipe_is_known_by_its_own_name():
    for name, info in RECIPES.items():
        assert info.name == name
        assert known_recipe(name) is info
        assert info.about


def test_all_recipes_of_the_quantizer_are_known_and_give_its_own_rules():
    # In a process of its own: the quantizer brings jax and more along.
    script = """if True:
        import inspect, json, sys
        from ai_edge_quantizer import algorithm_manager, qtyping, recipe, recipe_manager
        from ai_edge_quantizer.utils import recipe_utils
        recipe_utils.resolve_recipe("dynamic_wi8_afp32")
        names = {}
        for name, make in recipe_utils._NAMED_RECIPES.items():
            rules = recipe_utils.resolve_recipe(name)
            if isinstance(rules, list):
                manager = recipe_manager.RecipeManager()
                manager.load_quantization_recipe(rules)
                rules = manager.get_quantization_recipe()
            names[name] = rules
        ours = {}
        for name, rules in json.load(sys.stdin).items():
            manager = recipe_manager.RecipeManager()
            manager.load_quantization_recipe(rules)
            ours[name] = manager.get_quantization_recipe()
        print(json.dumps([
            names, ours,
            [a.value for a in algorithm_manager.AlgorithmName],
            [o.value for o in qtyping.TFLOperationName],
        ]))
    """
    given = {name: recipe(name).to_json() for name in (*RECIPES, *PLAIN_NAMES) if name != "float32"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        input=json.dumps(given).encode(),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    upstream, ours, algorithms, operations = json.loads(done.stdout)
    assert set(algorithms) == set(ALGORITHMS)
    assert set(operations) == set(OPERATIONS)
    refused = {name for name, rules in upstream.items() if isinstance(rules, dict)}
    assert {name for name, info in RECIPES.items() if info.upstream} <= set(upstream)
    for name, rules in upstream.items():
        if name in refused or name == "sample_advanced_usage":
            with pytest.raises(OptionError, match="LiteRT-LM|unknown"):
                known_recipe(name)
        else:
            assert ours[name] == rules, name
    assert len(upstream) - len(refused) > 20


@pytest.mark.parametrize(
    ("plain", "name"),
    [("int8", "dynamic_wi8_afp32"), ("int8-weight-only", "weight_only_wi8_afp32")],
)
def test_a_plain_name_is_another_word_for_upstreams(plain, name):
    assert recipe(plain) == recipe(name)
    assert recipe(plain).name == name


def test_an_ending_changes_the_algorithm_of_every_integer_rule():
    assert {r["algorithm_key"] for r in recipe("int4-octav").rules} == {"OCTAV"}
    assert recipe("int8-mse").name == "dynamic_wi8_afp32-mse"
    kept = recipe("int8-static-octav").rules
    assert [r["algorithm_key"] for r in kept] == ["OCTAV", "OCTAV", "no_quantize", "no_quantize"]


def test_rules_for_ops_that_an_algorithm_does_not_have_are_left_out():
    operations = {
        ending: [r["operation"] for r in recipe(f"int4-weight-only{ending}").rules]
        for ending in ("", "-octav", "-mse", "-recover")
    }
    assert operations[""] == operations["-octav"]
    for ending in ("-mse", "-recover"):
        assert operations[ending] == [op for op in operations[""] if op != "BATCH_MATMUL"]


def test_gptq_and_oscar_are_added_for_linear_layers_which_alone_have_them():
    plain, wanted = recipe("int4").rules, recipe("int4-gptq").rules
    assert [r for r in wanted if r["algorithm_key"] != "GPTQ"] == list(plain)
    added = [r for r in wanted if r["algorithm_key"] == "GPTQ"]
    assert {r["operation"] for r in added} == {"FULLY_CONNECTED"}
    assert [r["op_config"]["weight_tensor_config"]["num_bits"] for r in added] == [8, 4]
    assert len(in_order(wanted)) == len(wanted)  # no rule takes the place of another
    linear = [r for r in in_order(wanted) if r["operation"] in ("*", "FULLY_CONNECTED")]
    assert linear[-1] == added[1]
    assert added[1]["op_config"] == plain[1]["op_config"]
    assert recipe("int8-oscar").name == "dynamic_wi8_afp32-oscar"
    static = recipe("int8-static-gptq")
    assert static.needs_ranges
    assert static.needs_moments == ("GPTQ",)
    assert not recipe("int4-oscar").needs_ranges
    assert recipe("int4-oscar").needs_calibration


@pytest.mark.parametrize(
    "name",
    [
        "float16-mse",
        "int8-static-mse",
        "dynamic_wi4b32_afp32-mse",
        "float16-gptq",
        "float32-oscar",
        "int4-hadamard-gptq",
        "int8-static-oscar",
        "default_af32w8float-oscar",
        "default_af32w8float-octav",
        "default_af32w4float-mse",
        "default_af32w8float-recover",
        "dynamic_wi2c_afp32-mse",
        "int2-mse",
    ],
)
def test_an_ending_that_a_recipe_cannot_have_is_refused(name):
    with pytest.raises(OptionError, match="does not go"):
        known_recipe(name)


def test_of_the_recipes_without_ending_only_static_ones_need_calibration():
    static = {name for name in RECIPES if recipe(name).needs_calibration}
    assert static == {n for n in RECIPES if "static" in n}
    assert not recipe("float32").rules


@pytest.mark.parametrize(
    ("name", "closest"),
    [
        ("dynamic_wi8_af32", "dynamic_wi8_afp32"),
        ("float-32", "float32"),
        ("fp16", "float16"),
        ("int8-static-i", "int8-static-io"),
    ],
)
def test_an_unknown_recipe_is_refused_with_the_closest_and_all_known(name, closest):
    with pytest.raises(OptionError, match=f"unknown recipe '{name}'") as error:
        known_recipe(name)
    assert f"the closest is '{closest}'" in error.value.do
    for known in (*RECIPES, *PLAIN_NAMES):
        assert known in error.value.do


def test_a_name_that_is_close_to_none_gets_no_guess():
    with pytest.raises(OptionError) as error:
        known_recipe("zzz")
    assert "closest" not in error.value.do


@pytest.mark.parametrize("name", ["FLOAT32", "Float16", " float32", "", "-mse", "octav"])
def test_names_are_exact(name):
    with pytest.raises(OptionError):
        known_recipe(name)


# ---------------------------------------------------------------------------------- recipe files

GOOD = {
    "regex": ".*",
    "operation": "*",
    "algorithm_key": "min_max_uniform_quantize",
    "op_config": {
        "weight_tensor_config": {"num_bits": 8, "granularity": "CHANNELWISE"},
        "compute_precision": "INTEGER",
    },
}


def changed(path: str, value: object) -> dict:
    """GOOD with one value replaced; "DELETE" takes the key away."""
    rule = json.loads(json.dumps(GOOD))
    at = rule
    *parents, last = path.split("/")
    for key in parents:
        at = at[key]
    if value == "DELETE":
        del at[last]
    else:
        at[last] = value
    return rule


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (changed("regx", 1), "unknown key 'regx'.*the closest is 'regex'"),
        (changed("regex", "DELETE"), "'regex' is missing"),
        (changed("regex", "("), "regex '\\(' is none"),
        (changed("regex", 3), "regex is a number"),
        (changed("operation", "FULLY_CONECTED"), "FULLY_CONECTED.*closest is 'FULLY_CONNECTED'"),
        (changed("algorithm_key", "octav"), "algorithm_key 'octav' is unknown.*known: .*OCTAV"),
        (changed("op_config", "DELETE"), "'op_config' is missing"),
        (changed("op_config/bits", 1), "op_config: unknown key 'bits'"),
        (changed("op_config/compute_precision", "INT"), "compute_precision 'INT' is unknown"),
        (changed("op_config/explicit_dequantize", "no"), "explicit_dequantize is text"),
        (changed("op_config/min_weight_elements", -1), "min_weight_elements is -1"),
        (changed("op_config/weight_tensor_config", None), "weight_tensor_config is null"),
        (changed("op_config/weight_tensor_config/num_bits", 3), "num_bits is 3.*2, 4, 8, 16"),
        (changed("op_config/weight_tensor_config/num_bits", True), "num_bits is true or false"),
        (changed("op_config/weight_tensor_config/granularity", "BLOCK"), "granularity 'BLOCK'"),
        (changed("op_config/weight_tensor_config/block_size", 48), "block_size is 48"),
        (changed("op_config/weight_tensor_config/symetric", True), "closest is 'symmetric'"),
        (
            {**static(8, 8), "algorithm_key": "OSCAR"},
            "OSCAR changes activations that are float, and activation_tensor_config makes them",
        ),
        ({**static(8, 8), "algorithm_key": "DECOMPOSED_HADAMARD_ROTATION"}, "are float, and"),
        ("text", "text, not an object"),
    ],
)
def test_a_bad_entry_of_a_recipe_file_is_named_by_its_position_with_what_is_known(
    tmp_path, rule, words
):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps([GOOD, rule]))
    with pytest.raises(OptionError) as error:
        recipe_from_file(file)
    text = str(error.value)
    assert "'mine.json', rule 2 of 2" in text
    assert re.search(words, text, re.DOTALL), text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[{]", "no JSON: line 1, column 3"),
        ("[]", "holds no rule"),
        ('"int8"', "holds text, not a list"),
        ('{"regex": ".*", "op_config": {}}', "one object, not a list"),
        ('{"tf_lite_embedder": [], "default": "x.json"}', "LiteRT-LM bundle"),
    ],
)
def test_a_file_that_is_no_recipe_says_what_it_is(tmp_path, text, words):
    file = tmp_path / "mine.json"
    file.write_text(text)
    with pytest.raises(OptionError, match=words):
        recipe_from_file(file)


def test_a_recipe_file_that_is_missing_is_an_error_of_the_users(tmp_path):
    with pytest.raises(OptionError, match="cannot be read: No such file"):
        recipe_from_file(tmp_path / "none.json")


def test_a_recipe_survives_being_written_and_read(tmp_path):
    file = tmp_path / "int4.json"
    file.write_text(recipe("int4").to_text())
    assert recipe_from_file(file) == Recipe(name="int4.json", rules=recipe("int4").rules)


def test_a_rule_that_quantizes_nothing_needs_no_config():
    rule = {"regex": "x", "operation": "CONV_2D", "algorithm_key": "no_quantize"}
    assert recipe_from_rules("r", [rule]).rules == (rule,)


# ------------------------------------------------------------------------------ layers kept float


def float_layers(base, file, recipe) -> set[str]:
    return {
        w.tensor
        for w in scan(base, file, recipe=recipe).weights
        if w.why_float == "the recipe keeps it float"
    }


@pytest.mark.parametrize("name", ["int8", "int8-static", "int4"])
@pytest.mark.parametrize(
    ("patterns", "kept"),
    [
        (["odd"], {"odd/mm_5;"}),
        (["out", "conv"], {"out/mm_6;", "conv/convolution;"}),  # out gives an output of the model
        (["o*"], {"odd/mm_5;", "out/mm_6;"}),
    ],
)
def test_exactly_the_named_layers_stay_float(
    tmp_path, mixed, mixed_layers, mixed_ranges, quantizer, name, patterns, kept
):
    wanted = keep_float(recipe(name), patterns, mixed_layers, quantizer.scopes())
    quantizer.quantize(tmp_path / "q.tflite", wanted, mixed_ranges)
    assert float_layers(mixed, tmp_path / "q.tflite", wanted) == kept


def test_a_module_stands_for_all_that_is_inside_it(mixed):
    scopes = op_scopes(mixed)
    layers = {"odd/mm_5;;odd/add_12;": ["encoder.layers.0.odd"], "forward/tanh;": ["encoder"]}
    for pattern in ("encoder.layers.0", "encoder.layers.*", "*.odd", "encoder.layers.0.odd"):
        (rule,) = keep_float(recipe("float32"), [pattern], layers, scopes).rules
        assert re.search(rule["regex"], "odd/mm_5;;odd/add_12;;")
        assert not re.search(rule["regex"], "odd/mm_5;;odd/add_12;2;")
    rules = keep_float(recipe("int8"), ["*.odd", "encoder.layers.0.odd"], layers, scopes).rules
    assert len({rule["regex"] for rule in rules}) == 3  # one regex twice would be one rule


def test_a_pattern_that_matches_nothing_is_refused_with_near_ones(mixed_layers, quantizer):
    with pytest.raises(OptionError, match="no layer matches 'lstn.\\*'") as error:
        keep_float(recipe("int8"), ["lstn.*"], mixed_layers, quantizer.scopes())
    assert "near ones: lstm" in error.value.do
    with pytest.raises(OptionError, match="modules of this file are not known"):
        keep_float(recipe("int8"), ["lstm"], {}, quantizer.scopes())


def test_float_ends_are_for_static_recipes_only():
    assert with_float_io(recipe("int8")) == recipe("int8")
    assert [r["operation"] for r in with_float_io(recipe("static_wi8_ai8")).rules] == [
        "*",
        "INPUT",
        "OUTPUT",
    ]
