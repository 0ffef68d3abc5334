"""Which recipes there are, by ai-edge-quantizer's own names and by plain ones, and what each does.

The names of ai-edge-quantizer give exactly its rules. Plain names (``int8``, ``int4``,
``int8-static`` …) are either another word for one of those, or rules of our own that do what the
name says where upstream's do not: static recipes that leave the model's inputs and outputs float
and quantize embeddings, int4 recipes that use int8 where LiteRT has no int4 kernel.
"""

from __future__ import annotations

import difflib
import fnmatch
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tpu2edge.errors import OptionError
from tpu2edge.quantize.rules import (
    ALGORITHMS,
    MOMENTS,
    OPERATIONS,
    Rule,
    checked_rules,
    dynamic,
    float16,
    is_static,
    keep,
    static,
    unused_regex,
    weight_only,
)
from tpu2edge.quantize.scopes import OpScope

__all__ = [
    "PLAIN_NAMES",
    "RECIPES",
    "Recipe",
    "RecipeInfo",
    "keep_float",
    "known_recipe",
    "recipe",
    "recipe_from_file",
    "recipe_from_rules",
    "with_float_io",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What to quantize and how; ``rules`` in ai-edge-quantizer's order, none for float32."""

    name: str
    rules: tuple[Rule, ...]

    @property
    def needs_ranges(self) -> bool:
        """Whether the ranges of activations have to be known."""
        return any(is_static(rule) for rule in self.rules)

    @property
    def needs_moments(self) -> tuple[str, ...]:
        """Algorithms among the rules that weigh errors by the activations (moments.py)."""
        keys = dict.fromkeys(rule["algorithm_key"] for rule in self.rules)
        return tuple(key for key in keys if key in MOMENTS)

    @property
    def needs_calibration(self) -> bool:
        """Whether samples have to be run before: for ranges, or for moments."""
        return self.needs_ranges or bool(self.needs_moments)

    def to_json(self) -> list[Rule]:
        """What ai-edge-quantizer loads as a recipe."""
        return list(self.rules)

    def to_text(self) -> str:
        """The same as the text of a recipe file; the same rules give the same text."""
        return json.dumps(self.to_json(), indent=2, allow_nan=False) + "\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeInfo:
    """One recipe: ``upstream`` is its name in ai-edge-quantizer, None for our own.

    ``expected_ratio`` is what the file's weights take up of what they took before, all of them
    quantized; scales come on top.
    """

    name: str
    about: str
    rules: tuple[Rule, ...]
    upstream: str | None = None
    expected_ratio: float = 1.0

    @property
    def needs_calibration(self) -> bool:
        """Whether samples have to be run before: for ranges of activations, or for moments."""
        return Recipe(name=self.name, rules=self.rules).needs_calibration


_DYNAMIC = "activations quantized while it runs"
_WEIGHTS = "computed in float32"
_HADAMARD = "DECOMPOSED_HADAMARD_ROTATION"


def _upstream(name: str, about: str, ratio: float, *rules: Rule) -> RecipeInfo:
    return RecipeInfo(name=name, about=about, rules=rules, upstream=name, expected_ratio=ratio)


def _mixed(rest: Rule, *small: tuple[Callable[..., Rule], Sequence[str]]) -> tuple[Rule, ...]:
    """``rest`` for all ops, and each of ``small`` for the ops that have kernels for it.

    Each has a regex of its own, since rules of one regex replace one another: an op of a shape that
    the last rule cannot do gets the one before.
    """
    rules = [rest]
    for make, operations in small:
        regex = unused_regex(rules, ".*")
        rules += [make(regex=regex, operation=operation) for operation in operations]
    return tuple(rules)


# The ops that LiteRT computes with int4 weights (ai_edge_quantizer.default_policy).
_INT4_OPS = ("FULLY_CONNECTED", "EMBEDDING_LOOKUP", "CONV_2D")
_INT4_WEIGHT_OPS = (*_INT4_OPS, "BATCH_MATMUL")
_BLOCK_OPS = ("FULLY_CONNECTED", "EMBEDDING_LOOKUP")


def _static(bits: int, *, io: bool) -> tuple[Rule, ...]:
    ends = () if io else (keep(operation="INPUT"), keep(operation="OUTPUT"))
    # The static rules do not reach embeddings: upstream's policy has none for EMBEDDING_LOOKUP.
    return (static(8, bits), dynamic(8, operation="EMBEDDING_LOOKUP"), *ends)


RECIPES: Mapping[str, RecipeInfo] = {
    info.name: info
    for info in (
        RecipeInfo(name="float32", about="nothing is quantized", rules=()),
        RecipeInfo(
            name="float16",
            about="weights stored in float16, computed in float32: half the size",
            rules=(float16(),),
            expected_ratio=1 / 2,
        ),
        _upstream(
            "dynamic_wi8_afp32",
            f"int8 weights per channel, {_DYNAMIC}: small and fast",
            1 / 4,
            dynamic(8),
        ),
        _upstream("dynamic_wi4_afp32", f"int4 weights per channel, {_DYNAMIC}", 1 / 8, dynamic(4)),
        _upstream(
            "dynamic_wi2c_afp32", f"int2 weights per channel, {_DYNAMIC}", 1 / 16, dynamic(2)
        ),
        _upstream(
            "dynamic_legacy_wi8_afp32",
            "as dynamic_wi8_afp32, for layers of at least 1024 weights",
            1 / 4,
            dynamic(8, min_weight_elements=1024),
        ),
        _upstream(
            "dynamic_wi8b32_afp32",
            "int8 weights in blocks of 32: ai-edge-quantizer 0.10 changes nothing",
            1 / 4,
            dynamic(8, block=32),
        ),
        _upstream(
            "dynamic_wi8b64_afp32",
            "int8 weights in blocks of 64: ai-edge-quantizer 0.10 changes nothing",
            1 / 4,
            dynamic(8, block=64),
        ),
        _upstream(
            "dynamic_wi4b32_afp32",
            f"int4 weights in blocks of 32, {_DYNAMIC}",
            4.5 / 32,
            dynamic(4, block=32),
        ),
        _upstream(
            "dynamic_wi4b64_afp32",
            f"int4 weights in blocks of 64, {_DYNAMIC}",
            4.25 / 32,
            dynamic(4, block=64),
        ),
        _upstream(
            "dynamic_wi2b32_afp32",
            f"int2 weights in blocks of 32, {_DYNAMIC}",
            2.5 / 32,
            dynamic(2, block=32),
        ),
        _upstream(
            "dynamic_wi2b64_afp32",
            f"int2 weights in blocks of 64, {_DYNAMIC}",
            2.25 / 32,
            dynamic(2, block=64),
        ),
        _upstream(
            "dynamic_wi8c_hr_afp32",
            f"int8 weights after a Hadamard rotation, {_DYNAMIC}",
            1 / 4,
            dynamic(8, algorithm=_HADAMARD),
        ),
        _upstream(
            "dynamic_wi4c_hr_afp32",
            f"int4 weights after a Hadamard rotation, {_DYNAMIC}",
            1 / 8,
            dynamic(4, algorithm=_HADAMARD),
        ),
        _upstream(
            "dynamic_wi2c_hr_afp32",
            f"int2 weights after a Hadamard rotation, {_DYNAMIC}",
            1 / 16,
            dynamic(2, algorithm=_HADAMARD),
        ),
        _upstream(
            "weight_only_wi8_afp32",
            f"int8 weights per channel, {_WEIGHTS}: small, not faster",
            1 / 4,
            weight_only(8),
        ),
        _upstream(
            "weight_only_wi4_afp32",
            f"int4 weights per channel, {_WEIGHTS}",
            1 / 8,
            weight_only(4),
        ),
        _upstream(
            "default_af32w8float",
            "as weight_only_wi8_afp32, with zero points",
            1 / 4,
            weight_only(8, symmetric=False),
        ),
        _upstream(
            "default_af32w4float",
            "as weight_only_wi4_afp32, with zero points",
            1 / 8,
            weight_only(4, symmetric=False),
        ),
        _upstream(
            "static_wi8_ai8",
            "int8 weights and activations, inputs and outputs int8 too; embeddings stay float32",
            1 / 4,
            static(8, 8),
        ),
        _upstream(
            "static_wi8_ai16",
            "int8 weights, int16 activations, inputs and outputs too; embeddings stay float32",
            1 / 4,
            static(8, 16),
        ),
        RecipeInfo(
            name="int8-static",
            about="int8 weights and activations; inputs and outputs stay float32",
            rules=_static(8, io=False),
            expected_ratio=1 / 4,
        ),
        RecipeInfo(
            name="int8-static-io",
            about="int8 weights and activations, inputs and outputs int8 too",
            rules=_static(8, io=True),
            expected_ratio=1 / 4,
        ),
        RecipeInfo(
            name="int16-static",
            about="int8 weights, int16 activations; inputs and outputs stay float32",
            rules=_static(16, io=False),
            expected_ratio=1 / 4,
        ),
        RecipeInfo(
            name="int16-static-io",
            about="int8 weights, int16 activations, inputs and outputs int16 too",
            rules=_static(16, io=True),
            expected_ratio=1 / 4,
        ),
        RecipeInfo(
            name="int4",
            about=f"int4 weights per channel, int8 where there is no int4 kernel; {_DYNAMIC}",
            rules=_mixed(dynamic(8), (partial(dynamic, 4), _INT4_OPS)),
            expected_ratio=1 / 8,
        ),
        RecipeInfo(
            name="int4-block32",
            about=f"int4 weights in blocks of 32, per channel or int8 where that does not go; {_DYNAMIC}",
            rules=_mixed(
                dynamic(8),
                (partial(dynamic, 4), _INT4_OPS),
                (partial(dynamic, 4, block=32), _BLOCK_OPS),
            ),
            expected_ratio=4.5 / 32,
        ),
        RecipeInfo(
            name="int4-weight-only",
            about=f"int4 weights per channel, int8 where there is no int4 kernel; {_WEIGHTS}",
            rules=_mixed(weight_only(8), (partial(weight_only, 4), _INT4_WEIGHT_OPS)),
            expected_ratio=1 / 8,
        ),
        RecipeInfo(
            name="int2",
            about=f"int2 weights per channel, int8 where there is no int2 kernel; {_DYNAMIC}",
            rules=_mixed(dynamic(8), (partial(dynamic, 2), _INT4_OPS)),
            expected_ratio=1 / 16,
        ),
    )
}

#: Other names of recipes: plain ones, and those that ai-edge-quantizer has twice.
PLAIN_NAMES: Mapping[str, str] = {
    "int8": "dynamic_wi8_afp32",
    "int8-weight-only": "weight_only_wi8_afp32",
    "int4-hadamard": "dynamic_wi4c_hr_afp32",
    "dynamic_wi8c_afp32": "dynamic_wi8_afp32",
    "dynamic_wi4c_afp32": "dynamic_wi4_afp32",
    "dynamic_wi8_afp32_hadamard": "dynamic_wi8c_hr_afp32",
    "dynamic_wi4_afp32_hadamard": "dynamic_wi4c_hr_afp32",
    "default_a8w8": "static_wi8_ai8",
    "default_a16w8": "static_wi8_ai16",
}

# Endings that change the algorithm of a recipe's rules: dynamic_wi4_afp32-octav.
_ENDINGS = {
    "octav": "OCTAV",
    "mse": "MSE",
    "recover": "dequantized_weight_recovery",
    "gptq": "GPTQ",
    "oscar": "OSCAR",
}

# What ai-edge-quantizer 0.10 has these algorithms for (algorithm_manager, mse).
_ALGORITHM_OPS = {
    "MSE": (*_INT4_OPS, "DEPTHWISE_CONV_2D", "CONV_2D_TRANSPOSE"),
    "dequantized_weight_recovery": _INT4_OPS,
}
_MSE_BITS = (4, 8)

_USUAL = "min_max_uniform_quantize"
_LINEAR = "FULLY_CONNECTED"

_LITERT_LM = re.compile(r"gemma4_mixed48(_\w+)?|dynamic_wi8_afp32_litertlm")


def known_recipe(name: str) -> RecipeInfo:
    """The recipe called ``name``, which may be a plain name or end in ``-octav``, ``-gptq`` ….

    Raises:
        OptionError: there is none; the message lists the known ones and the closest.
    """
    if name in RECIPES:
        return RECIPES[name]
    if name in PLAIN_NAMES:
        return RECIPES[PLAIN_NAMES[name]]
    base, _, ending = name.rpartition("-")
    if ending in _ENDINGS and (base in RECIPES or base in PLAIN_NAMES):
        return _with_algorithm(known_recipe(base), ending)
    known = (*RECIPES, *PLAIN_NAMES)
    if _LITERT_LM.fullmatch(name):
        raise OptionError(
            f"recipe '{name}' is for the parts of a LiteRT-LM bundle, not for one model",
            do=f"known: {', '.join(known)}",
        )
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    hint = f"the closest is '{close[0]}'; " if close else ""
    raise OptionError(
        f"unknown recipe '{name}'",
        do=f"{hint}known: auto, {', '.join(known)}; an integer recipe's name may end in "
        f"{' or '.join(f'-{ending}' for ending in _ENDINGS)}",
    )


def _with_algorithm(info: RecipeInfo, ending: str) -> RecipeInfo:
    algorithm = _ENDINGS[ending]
    if not any(rule["algorithm_key"] == _USUAL for rule in info.rules):
        raise OptionError(
            f"recipe '{info.name}' has no other algorithm: -{ending} does not go with it",
            do=f"use {info.name}",
        )
    if algorithm in MOMENTS:
        return _with_moments(info, ending)
    if ending != "octav" and (info.needs_calibration or "BLOCKWISE" in str(info.rules)):
        raise OptionError(
            f"recipe '{info.name}' does not go with -{ending}: {algorithm} is for weights per "
            "channel or tensor, activations apart",
            do=f"use {info.name} or {info.name}-octav",
        )
    if any(not _weights(rule).get("symmetric", True) for rule in info.rules):
        raise OptionError(
            f"recipe '{info.name}' does not go with -{ending}: {algorithm} has no zero points",
            do=f"use {info.name} or {info.name}-gptq",
        )
    if ending == "mse" and any(_weights(r).get("num_bits", 8) not in _MSE_BITS for r in info.rules):
        raise OptionError(
            f"recipe '{info.name}' does not go with -mse: ai-edge-quantizer has MSE for 4 and 8 bits",
            do=f"use {info.name} or {info.name}-octav",
        )
    known = ("*", *_ALGORITHM_OPS.get(algorithm, OPERATIONS))
    return RecipeInfo(
        name=f"{info.name}-{ending}",
        about=f"{info.about}; {ALGORITHMS[algorithm]}",
        rules=tuple(
            {**rule, "algorithm_key": algorithm} if rule["algorithm_key"] == _USUAL else rule
            for rule in info.rules
            if rule["algorithm_key"] != _USUAL or rule["operation"] in known
        ),
        upstream=info.upstream,
        expected_ratio=info.expected_ratio,
    )


def _with_moments(info: RecipeInfo, ending: str) -> RecipeInfo:
    """The same rules, each followed by one for linear layers, which alone have these algorithms.

    An op that such a rule cannot do gets the rule before it.
    """
    algorithm = _ENDINGS[ending]
    if ending == "oscar" and info.needs_calibration:
        raise OptionError(
            f"recipe '{info.name}' does not go with -oscar, which scales activations that are float",
            do=f"use {info.name}-gptq or {info.name}-octav",
        )
    if ending == "oscar" and any(not _weights(r).get("symmetric", True) for r in info.rules):
        raise OptionError(
            f"recipe '{info.name}' does not go with -oscar, which has no zero points",
            do=f"use {info.name}-gptq or {info.name}-octav",
        )
    rules: list[Rule] = []
    for rule in info.rules:
        rules.append(rule)
        if rule["algorithm_key"] == _USUAL and rule["operation"] in ("*", _LINEAR):
            regex = unused_regex((*info.rules, *rules), str(rule["regex"]))
            linear = {"regex": regex, "operation": _LINEAR, "algorithm_key": algorithm}
            rules.append({**rule, **linear})
    return RecipeInfo(
        name=f"{info.name}-{ending}",
        about=f"{info.about}; linear layers: {ALGORITHMS[algorithm]}",
        rules=tuple(rules),
        upstream=info.upstream,
        expected_ratio=info.expected_ratio,
    )


def _weights(rule: Rule) -> Mapping[str, Any]:
    config: Mapping[str, Any] = rule.get("op_config", {}).get("weight_tensor_config", {})
    return config


def recipe(name: str) -> Recipe:
    """The recipe called ``name``, under its main name.

    Raises:
        OptionError: there is none; the message lists the known ones and the closest.
    """
    info = known_recipe(name)
    return Recipe(name=info.name, rules=info.rules)


def recipe_from_file(path: Path) -> Recipe:
    """The recipe in a JSON file of ai-edge-quantizer's format, named after the file.

    Raises:
        OptionError: it cannot be read or is no recipe; the message says where and what is known.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as err:
        raise OptionError(
            f"recipe file '{path}' cannot be read: {err.strerror or err}", do="check the path"
        ) from err
    except json.JSONDecodeError as err:
        raise OptionError(
            f"recipe file '{path}' is no JSON: line {err.lineno}, column {err.colno}: {err.msg}",
            do="mend it there",
        ) from err
    except UnicodeDecodeError as err:
        raise OptionError(f"recipe file '{path}' is no text: {err}", do="give a JSON file") from err
    return recipe_from_rules(path.name, data)


def recipe_from_rules(name: str, data: object) -> Recipe:
    """The recipe that ``data``, parsed JSON of ai-edge-quantizer's format, holds.

    Raises:
        OptionError: it is no recipe; the message says where and what is known.
    """
    return Recipe(name=name, rules=checked_rules(data, where=f"'{name}'"))


def with_float_io(recipe: Recipe) -> Recipe:
    """The same recipe, the model's inputs and outputs left float32.

    Whoever runs the model then hands in and gets floats, as before; a QUANTIZE at the start and a
    DEQUANTIZE at the end do the rest.
    """
    if not recipe.needs_calibration:
        return recipe
    # A regex of its own: a rule with one that was there before would be moved to its place.
    regex = unused_regex(recipe.rules, "")
    ends = (keep(regex=regex, operation="INPUT"), keep(regex=regex, operation="OUTPUT"))
    return Recipe(name=recipe.name, rules=(*recipe.rules, *ends))


def keep_float(
    recipe: Recipe,
    patterns: Sequence[str],
    layers: Mapping[str, Sequence[str]],
    scopes: Sequence[OpScope],
) -> Recipe:
    """The same recipe, all ops of the torch modules that ``patterns`` name left float.

    Args:
        recipe: the recipe to start from.
        patterns: module paths, with the wildcards of fnmatch ("encoder.layers.*.norm1"); a module
            stands for all that is inside it.
        layers: LiteRT tensor name to the torch module paths that it was computed by.
        scopes: the ops of the file (:meth:`Quantizer.scopes`).

    Raises:
        OptionError: a pattern matches no module; the message lists the near ones.
    """
    modules_of = [(op, _modules(op, layers)) for op in scopes]
    known = dict.fromkeys(module for _, modules in modules_of for module in modules)
    rules = list(recipe.rules)
    for pattern in patterns:
        matching = {module for module in known if _inside(module, pattern)}
        if not matching:
            raise _no_module(pattern, list(known))
        names = dict.fromkeys(
            re.escape(op.scope) for op, modules in modules_of if matching.intersection(modules)
        )
        rules.append(keep(regex=unused_regex(rules, f"^(?:{'|'.join(names)})$")))
    return Recipe(name=recipe.name, rules=tuple(rules))


def _modules(op: OpScope, layers: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """The modules an op belongs to: those of its outputs, else those its own constants are named by.

    The op that gives an output of the model carries the output's name, which tells no module.
    """
    for tensors in (op.tensors[: op.outputs], op.tensors[op.outputs :]):
        found = dict.fromkeys(module for tensor in tensors for module in layers.get(tensor, ()))
        if found:
            return tuple(found)
    return ()


def _inside(module: str, pattern: str) -> bool:
    parts = module.split(".")
    return any(
        fnmatch.fnmatchcase(".".join(parts[:count]), pattern) for count in range(1, len(parts) + 1)
    )


def _no_module(pattern: str, known: Sequence[str]) -> OptionError:
    modules = dict.fromkeys(
        ".".join(module.split(".")[: count + 1])
        for module in known
        for count in range(len(module.split(".")))
    )
    named = [module for module in modules if module]
    if not named:
        return OptionError(
            f"no layer matches '{pattern}': the torch modules of this file are not known",
            do="export it with tpu2edge, or name ops by a regex in a recipe file",
        )
    plain = pattern.replace("*", "").strip(".")
    near = difflib.get_close_matches(plain, named, n=5, cutoff=0.5)
    near += [module for module in named if plain and plain in module and module not in near][:5]
    listed = near or named[:10]
    return OptionError(
        f"no layer matches '{pattern}'",
        do=f"{'near ones' if near else f'{len(named)} are known, among them'}: {', '.join(listed)}",
    )
