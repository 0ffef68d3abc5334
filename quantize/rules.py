"""Entries of ai-edge-quantizer's recipes: how one is made, and whether a given one is sound.

A recipe is a list of rules ``{regex, operation, algorithm_key, op_config}``. Of the rules whose
``regex`` is found in an op's scope (scopes.py) and whose ``operation`` is the op's name or "*", the
last one that the quantizer supports for that op decides. Two things differ from a plain list: rules
of one ``regex`` are kept where that ``regex`` came first, and a rule for "*" drops all earlier ones
of its ``regex``.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tpu2edge.errors import OptionError

__all__ = [
    "ALGORITHMS",
    "MOMENTS",
    "OPERATIONS",
    "Rule",
    "checked_rules",
    "computed_as",
    "dynamic",
    "float16",
    "in_order",
    "is_static",
    "keep",
    "static",
    "stored_as_text",
    "unused_regex",
    "weight_only",
]

#: One entry of a recipe, plain JSON data.
Rule = Mapping[str, Any]

#: ``algorithm_key`` to what it does (ai_edge_quantizer.algorithm_manager.AlgorithmName).
ALGORITHMS: Mapping[str, str] = {
    "no_quantize": "leave it float",
    "min_max_uniform_quantize": "scales from the smallest and the largest value",
    "float_casting": "round to float16",
    "dequantized_weight_recovery": "find the scales that already quantized weights came from",
    "OCTAV": "clip where clipping and rounding errors balance",
    "MSE": "scales as a fixed multiple of the root mean square",
    "HADAMARD_ROTATION": "rotate weights and activations first; needs a custom op at run time",
    "DECOMPOSED_HADAMARD_ROTATION": "rotate weights and activations first, by ordinary ops",
    "GPTQ": "each column makes up for the rounding errors of those before",
    "OSCAR": "clipped and scaled by the squares of the activations",
}

#: Those that need second moments of an op's input (moments.py): E[x xᵀ] or E[x²].
MOMENTS = ("GPTQ", "OSCAR")

# Those that change float activations by an op before the layer: not for static ones.
_SCALING = ("OSCAR", "HADAMARD_ROTATION", "DECOMPOSED_HADAMARD_ROTATION")

#: ``operation`` (ai_edge_quantizer.qtyping.TFLOperationName).
OPERATIONS = (
    "*",
    "INPUT",
    "OUTPUT",
    "FULLY_CONNECTED",
    "BATCH_MATMUL",
    "DEPTHWISE_CONV_2D",
    "CONV_2D",
    "CONV_2D_TRANSPOSE",
    "AVERAGE_POOL_2D",
    "RESHAPE",
    "CUSTOM_OP",
    "EMBEDDING_LOOKUP",
    "SOFTMAX",
    "TANH",
    "TRANSPOSE",
    "GELU",
    "ADD",
    "SUB",
    "MUL",
    "MEAN",
    "RSQRT",
    "CONCATENATION",
    "STRIDED_SLICE",
    "SPLIT",
    "LOGISTIC",
    "SLICE",
    "SUM",
    "SELECT",
    "SELECT_V2",
    "DYNAMIC_UPDATE_SLICE",
    "STABLEHLO_COMPOSITE",
    "PAD",
    "SQUARED_DIFFERENCE",
    "MAX_POOL_2D",
    "RESIZE_BILINEAR",
    "RESIZE_NEAREST_NEIGHBOR",
    "GATHER_ND",
    "PACK",
    "UNPACK",
    "DIV",
    "BROADCAST_TO",
    "SQRT",
    "GATHER",
    "HARD_SWISH",
    "MAXIMUM",
    "PADV2",
    "REDUCE_MIN",
    "EQUAL",
    "NOT_EQUAL",
    "MIRROR_PAD",
    "SPACE_TO_DEPTH",
    "RELU",
)

_GRANULARITIES = (
    "TENSORWISE",
    "CHANNELWISE",
    "BLOCKWISE_32",
    "BLOCKWISE_64",
    "BLOCKWISE_128",
    "BLOCKWISE_256",
)

# --------------------------------------------------------------------------------------- making


def dynamic(
    bits: int,
    *,
    regex: str = ".*",
    operation: str = "*",
    block: int = 0,
    algorithm: str = "min_max_uniform_quantize",
    min_weight_elements: int = 0,
) -> Rule:
    """Integer weights; activations are quantized while it runs (``add_dynamic_config``)."""
    return _rule(
        regex,
        operation,
        algorithm,
        weight_tensor_config=_weight(bits, block),
        compute_precision="INTEGER",
        explicit_dequantize=False,
        min_weight_elements=min_weight_elements,
    )


def weight_only(
    bits: int,
    *,
    regex: str = ".*",
    operation: str = "*",
    symmetric: bool = True,
    algorithm: str = "min_max_uniform_quantize",
) -> Rule:
    """Integer weights, dequantized before they are used (``add_weight_only_config``)."""
    return _rule(
        regex,
        operation,
        algorithm,
        weight_tensor_config={**_weight(bits, 0), "symmetric": symmetric},
        compute_precision="FLOAT",
        explicit_dequantize=True,
    )


def static(
    weight_bits: int,
    activation_bits: int,
    *,
    regex: str = ".*",
    operation: str = "*",
    algorithm: str = "min_max_uniform_quantize",
) -> Rule:
    """Integer weights and activations, ranges known beforehand (``add_static_config``)."""
    return _rule(
        regex,
        operation,
        algorithm,
        activation_tensor_config={
            "num_bits": activation_bits,
            # LiteRT's kernels: 16-bit activations have no zero point, 8-bit ones have.
            "symmetric": activation_bits == 16,
            "granularity": "TENSORWISE",
            "dtype": "INT",
        },
        weight_tensor_config=_weight(weight_bits, 0),
        compute_precision="INTEGER",
        explicit_dequantize=False,
    )


def float16(*, regex: str = ".*", operation: str = "*") -> Rule:
    """Weights as float16, widened before they are used."""
    return _rule(
        regex,
        operation,
        "float_casting",
        weight_tensor_config={
            "num_bits": 16,
            "symmetric": True,
            "granularity": "TENSORWISE",
            "dtype": "FLOAT",
        },
        compute_precision="FLOAT",
        explicit_dequantize=True,
    )


def keep(*, regex: str = ".*", operation: str = "*") -> Rule:
    """Leave it as it is."""
    return {"regex": regex, "operation": operation, "algorithm_key": "no_quantize"}


def _weight(bits: int, block: int) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "symmetric": True,  # the only kind that LiteRT's kernels compute with
        "granularity": f"BLOCKWISE_{block}" if block else "CHANNELWISE",
        "dtype": "INT",
    }


def _rule(regex: str, operation: str, algorithm: str, **config: Any) -> Rule:
    return {
        "regex": regex,
        "operation": operation,
        "algorithm_key": algorithm,
        "op_config": {
            **config,
            "skip_checks": False,
            "min_weight_elements": config.get("min_weight_elements", 0),
        },
    }


def is_static(rule: Rule) -> bool:
    """Whether the rule needs the ranges of activations."""
    if rule["algorithm_key"] == "no_quantize":
        return False
    config = rule["op_config"]
    return (
        config.get("compute_precision", "FLOAT") == "INTEGER"
        and config.get("activation_tensor_config") is not None
    )


def computed_as(rule: Rule) -> str:
    """How an op with weights computes by the rule: "static", "dynamic" or "weight-only"."""
    if rule["op_config"].get("compute_precision", "FLOAT") == "FLOAT":
        return "weight-only"
    return "static" if is_static(rule) else "dynamic"


def in_order(rules: Iterable[Rule]) -> list[Rule]:
    """The rules that count, the last of those that fit an op first to be used: see above."""
    kept: dict[str, dict[str, Rule]] = {}
    for rule in rules:
        of_regex = kept.setdefault(rule["regex"], {})
        if rule["operation"] == "*":
            of_regex.clear()
        of_regex[rule["operation"]] = rule
    return [rule for of_regex in kept.values() for rule in of_regex.values()]


def unused_regex(rules: Iterable[Rule], regex: str) -> str:
    """``regex``, or another that matches the same and that none of the rules has."""
    used = {rule["regex"] for rule in rules}
    while regex in used:
        regex = f"(?:{regex})"
    return regex


def stored_as_text(config: Mapping[str, Any]) -> str:
    """What a ``weight_tensor_config`` says, in words: "int8 per channel", "int4 in blocks of 32"."""
    kind = {"INT": "int", "UINT": "uint", "FLOAT": "float"}[config.get("dtype", "INT")]
    name = f"{kind}{config['num_bits']}"
    if kind == "float":
        return name
    granularity = str(config.get("granularity", "TENSORWISE"))
    if config.get("block_size", 0):
        granularity = f"BLOCKWISE_{config['block_size']}"
    if granularity.startswith("BLOCKWISE_"):
        return f"{name} in blocks of {granularity.removeprefix('BLOCKWISE_')}"
    return f"{name} per {'channel' if granularity == 'CHANNELWISE' else 'tensor'}"


# ------------------------------------------------------------------------------------- checking

_RULE_KEYS = ("regex", "operation", "algorithm_key", "op_config")
_CONFIG_KEYS = (
    "weight_tensor_config",
    "activation_tensor_config",
    "compute_precision",
    "explicit_dequantize",
    "skip_checks",
    "min_weight_elements",
)
_TENSOR_KEYS = ("num_bits", "symmetric", "granularity", "dtype", "block_size", "algorithm_params")
# The quantizer takes any further key of a tensor's config, without a word, for a parameter of the
# algorithm; this is the only one that its algorithms look at.
_ALGORITHM_PARAMS = ("max_hadamard_size",)


def checked_rules(data: object, *, where: str) -> tuple[Rule, ...]:
    """The rules that ``data`` (parsed JSON) holds, as they are.

    Args:
        data: what the quantizer's own loader would be given.
        where: what to call it in messages, e.g. the file's name.

    Raises:
        OptionError: it is no recipe; the message names the entry by its position, and what is known.
    """
    if isinstance(data, Mapping):
        if all(isinstance(value, (list, str)) for value in data.values()) and data:
            raise OptionError(
                f"{where} is a recipe for a LiteRT-LM bundle: one recipe for each of "
                f"{', '.join(map(str, data))}",
                do="give the list of rules of the one model as a file of its own",
            )
        raise OptionError(
            f"{where} holds one object, not a list of rules", do="put [ and ] around the rule"
        )
    if not isinstance(data, list):
        raise OptionError(
            f"{where} holds {_kind(data)}, not a list of rules",
            do='write [{"regex": ".*", "operation": "*", "algorithm_key": …, "op_config": {…}}]',
        )
    if not data:
        raise OptionError(f"{where} holds no rule", do="use the recipe float32 to quantize nothing")
    for number, rule in enumerate(data):
        _check_rule(rule, f"{where}, rule {number + 1} of {len(data)}")
    return tuple(data)


def _check_rule(rule: object, at: str) -> None:
    if not isinstance(rule, Mapping):
        raise OptionError(f"{at}: {_kind(rule)}, not an object", do=f"keys: {_list(_RULE_KEYS)}")
    _known_keys(rule, _RULE_KEYS, at)
    _required(rule, ("regex", "operation", "algorithm_key"), at)
    regex = rule["regex"]
    if not isinstance(regex, str):
        raise OptionError(f"{at}: regex is {_kind(regex)}, not text", do='".*" matches every op')
    try:
        re.compile(regex)
    except re.error as err:
        raise OptionError(
            f"{at}: regex {regex!r} is none: {err}", do='".*" matches every op'
        ) from err
    _one_of(rule["operation"], OPERATIONS, f"{at}: operation")
    _one_of(rule["algorithm_key"], tuple(ALGORITHMS), f"{at}: algorithm_key")
    if rule["algorithm_key"] == "no_quantize":
        return
    _required(rule, ("op_config",), at)
    _check_config(rule["op_config"], f"{at}: op_config")
    if rule["algorithm_key"] in _SCALING and "activation_tensor_config" in rule["op_config"]:
        raise OptionError(
            f"{at}: {rule['algorithm_key']} changes activations that are float, and "
            "activation_tensor_config makes them integers",
            do="take activation_tensor_config out, or use another algorithm, e.g. GPTQ or OCTAV",
        )


def _check_config(config: object, at: str) -> None:
    if not isinstance(config, Mapping):
        raise OptionError(
            f"{at} is {_kind(config)}, not an object", do=f"keys: {_list(_CONFIG_KEYS)}"
        )
    _known_keys(config, _CONFIG_KEYS, at)
    _required(config, ("weight_tensor_config",), at)
    _check_tensor(config["weight_tensor_config"], f"{at}.weight_tensor_config")
    if "activation_tensor_config" in config:
        _check_tensor(config["activation_tensor_config"], f"{at}.activation_tensor_config")
    precision = config.get("compute_precision", "FLOAT")
    _one_of(precision, ("INTEGER", "FLOAT"), f"{at}.compute_precision")
    for key in ("explicit_dequantize", "skip_checks"):
        if key in config and not isinstance(config[key], bool):
            raise OptionError(f"{at}.{key} is {_kind(config[key])}", do="it is one of: true, false")
    least = config.get("min_weight_elements", 0)
    if not _is_count(least):
        raise OptionError(
            f"{at}.min_weight_elements is {_value(least)}", do="it is a number, 0 or more"
        )
    if "activation_tensor_config" in config:
        dtypes = [
            config[key].get("dtype", "INT")
            for key in ("activation_tensor_config", "weight_tensor_config")
        ]
        if dtypes == ["INT", "FLOAT"]:
            raise OptionError(
                f"{at}: integer activations and float weights",
                do="take activation_tensor_config out, or make the weights INT",
            )
        if dtypes == ["INT", "INT"] and precision != "INTEGER":
            raise OptionError(
                f"{at}: integer activations and weights with compute_precision FLOAT",
                do="write compute_precision INTEGER, or take activation_tensor_config out",
            )


def _check_tensor(config: object, at: str) -> None:
    if not isinstance(config, Mapping):
        raise OptionError(
            f"{at} is {_kind(config)}, not an object", do=f"keys: {_list(_TENSOR_KEYS)}"
        )
    _known_keys(config, (*_TENSOR_KEYS, *_ALGORITHM_PARAMS), at)
    _required(config, ("num_bits",), at)
    bits = config["num_bits"]
    if not _is_count(bits) or bits not in (2, 4, 8, 16):
        raise OptionError(f"{at}.num_bits is {_value(bits)}", do="it is one of: 2, 4, 8, 16")
    if not isinstance(config.get("symmetric", True), bool):
        raise OptionError(
            f"{at}.symmetric is {_kind(config['symmetric'])}", do="it is one of: true, false"
        )
    _one_of(config.get("granularity", "TENSORWISE"), _GRANULARITIES, f"{at}.granularity")
    _one_of(config.get("dtype", "INT"), ("INT", "UINT", "FLOAT"), f"{at}.dtype")
    block = config.get("block_size", 0)
    if not _is_count(block) or block not in (0, 32, 64, 128, 256):
        raise OptionError(
            f"{at}.block_size is {_value(block)}",
            do="it is one of: 0 (no blocks), 32, 64, 128, 256",
        )
    if not isinstance(config.get("algorithm_params", {}), Mapping):
        raise OptionError(f"{at}.algorithm_params is no object", do="write {} or leave it away")


def _known_keys(data: Mapping[Any, Any], known: Sequence[str], at: str) -> None:
    for key in data:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"the closest is '{close[0]}'; " if close else ""
            raise OptionError(f"{at}: unknown key '{key}'", do=f"{hint}known: {_list(known)}")


def _required(data: Mapping[Any, Any], keys: Iterable[str], at: str) -> None:
    missing = [key for key in keys if key not in data]
    if missing:
        raise OptionError(f"{at}: '{missing[0]}' is missing", do=f"it has {_list(data) or 'none'}")


def _one_of(value: object, known: Sequence[str], at: str) -> None:
    if isinstance(value, str) and value in known:
        return
    close = difflib.get_close_matches(str(value), known, n=1)
    hint = f"the closest is '{close[0]}'; " if close else ""
    raise OptionError(f"{at} {_value(value)} is unknown", do=f"{hint}known: {_list(known)}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _kind(value: object) -> str:
    names = {type(None): "null", bool: "true or false", str: "text", list: "a list"}
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return "a number"
    return names.get(type(value), type(value).__name__)


def _value(value: object) -> str:
    if isinstance(value, str):
        return f"'{value}'"
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return str(value)
    return _kind(value)


def _list(names: Iterable[Any]) -> str:
    return ", ".join(str(name) for name in names)
