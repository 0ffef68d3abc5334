"""What a quantization really did, read from the two files: nothing is run, nothing is believed.

A quantizer can leave weights float without a word, write scales that are NaN, or connect floats to
integer ops: each loads and runs. So both files are read and every weight is followed from one to
the other.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tpu2edge.errors import QuantizationError
from tpu2edge.flatbuffer import Operator, Subgraph, Tensor, TfliteFile, read_tflite
from tpu2edge.quantize.rules import Rule, computed_as, in_order, stored_as_text
from tpu2edge.quantize.scopes import UPSTREAM_NAMES, WEIGHT_INPUT, OpScope, op_scopes, scope_of
from tpu2edge.types import Note

if TYPE_CHECKING:
    from tpu2edge.quantize.apply import Applied, Deviation
    from tpu2edge.quantize.recipes import Recipe
    from tpu2edge.types import Array

__all__ = ["MOST_FLOAT", "QuantizationScan", "WeightScan", "scan", "verified"]

#: A larger share of the weights' bytes that stayed float is worth a loud note, biases aside. With
#: them the few ops without a kernel come to 1 to 6 %; what is forgotten is more: 22 % and 52 % for embeddings
#: under upstream's static recipes, 31 % for weights that feed MUL, ADD or GATHER.
MOST_FLOAT = 0.2

# The file may be larger than its weights tell by this: inserted ops, names, alignment.
_SLACK_SHARE, _SLACK_BYTES = 0.1, 64 * 1024


_FLOAT = ("float32", "float16", "float64", "bfloat16")
_INTEGER = ("int8", "int16", "uint8")
# What ai-edge-quantizer calls the copies of a tensor whose readers want different things.
_DUPLICATE = re.compile(r"_duplicated_\d+$")
_BIAS = "a bias, which is float where the activations are"
# They are there to change from one to the other.
_CHANGERS = ("QUANTIZE", "DEQUANTIZE", "CAST")


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightScan:
    """One weight (a float constant of the base file) and what became of it.

    ``op`` and ``scope`` are of the first op that reads it, named as rules name them. ``why_float``
    is None for a weight that is stored otherwise than before.
    """

    tensor: str
    op: str
    scope: str
    bytes_before: int
    bytes_after: int
    kind: str  # "int8 per-channel axis 0", "int4 blocks of 32", "float32", or two of these
    why_float: str | None

    @property
    def changed(self) -> bool:
        """Whether any op reads it stored otherwise than before."""
        return self.why_float is None or " and " in self.kind


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizationScan:
    """All weights, the largest first, and what is wrong with the file (``problems``)."""

    weights: tuple[WeightScan, ...]
    float_bytes: int  # in the quantized file, of weights that stayed as they were
    quantized_bytes: int  # in the quantized file, of weights that are stored otherwise
    size_bytes: int
    size_ratio: float  # of the base file's size
    expected_bytes: int  # the base file's size less what the weights lost
    problems: tuple[str, ...]

    @property
    def float_share(self) -> float:
        """Which part of the weights' bytes before stayed float; 0 where there are no weights."""
        total = sum(weight.bytes_before for weight in self.weights)
        kept = sum(w.bytes_before for w in self.weights if w.why_float is not None)
        return kept / total if total else 0.0

    @property
    def bytes_by_kind(self) -> Mapping[str, int]:
        """Bytes in the quantized file by how they are stored, the most first."""
        counts: Counter[str] = Counter()
        for weight in self.weights:
            counts[weight.kind] += weight.bytes_after
        return dict(counts.most_common())


def scan(
    base: Path,
    quantized: Path,
    *,
    recipe: Recipe | None = None,
    deviations: Sequence[Deviation] = (),
) -> QuantizationScan:
    """What became of the weights of ``base`` in ``quantized``, and what is wrong there.

    Args:
        base: the float file.
        quantized: the file that was made of it.
        recipe: the rules it was made by, to tell why a weight stayed float, and which ops compute
            otherwise than they say.
        deviations: what the quantizer could not do, for the same.

    Raises:
        BundleError: one of them is damaged, or no ``.tflite`` file.
    """
    before, after = read_tflite(base), read_tflite(quantized)
    weights = tuple(_weights(before, after, recipe, deviations))
    change = sum(w.bytes_after - w.bytes_before for w in weights)
    return QuantizationScan(
        weights=weights,
        float_bytes=sum(w.bytes_after for w in weights if w.why_float is not None),
        quantized_bytes=sum(w.bytes_after for w in weights if w.why_float is None),
        size_bytes=after.size_bytes,
        size_ratio=after.size_bytes / before.size_bytes,
        expected_bytes=before.size_bytes + change,
        problems=(*_problems(before, after), *_computed_otherwise(before, after, recipe)),
    )


def verified(
    base: Path, quantized: Path, applied: Applied, *, most_float: float = MOST_FLOAT
) -> tuple[QuantizationScan, tuple[Note, ...]]:
    """The scan of what a Quantizer wrote, with notes on what the user should know.

    Raises:
        QuantizationError: the file is wrong, or the recipe changed no weight.
    """
    name = applied.recipe.name
    found = scan(base, quantized, recipe=applied.recipe, deviations=applied.deviations)
    if found.problems:
        raise QuantizationError(
            f"recipe '{name}' gave a broken file: {_listed(found.problems, 5)}",
            do="look for NaN or infinity in the model's weights and calibration data, or use another "
            "recipe",
            step="quantize",
        )
    if not any(weight.changed for weight in found.weights):
        reasons = Counter(w.why_float for w in found.weights if w.why_float)
        told = [f"{count} x {why}" for why, count in reasons.most_common()]
        raise QuantizationError(
            f"recipe '{name}' changed nothing: all weights are stored as before"
            + (f" ({_listed(told, 5)})" if told else ""),
            do="use another recipe",
            step="quantize",
        )
    return found, tuple(_notes(name, found, applied.deviations, most_float))


def _notes(
    name: str, found: QuantizationScan, deviations: Sequence[Deviation], most_float: float
) -> Iterator[Note]:
    if deviations:
        ops = "op" if len(deviations) == 1 else "ops"
        yield Note(
            code="quantize-deviations",
            text=f"recipe '{name}' could not be applied to {len(deviations)} {ops}: "
            f"{_listed([str(d) for d in deviations], 10)}",
        )
    # Biases are float by design wherever activations are: no news.
    kept = [w for w in found.weights if w.why_float not in (None, _BIAS)]
    share = sum(w.bytes_before for w in kept) / max(1, sum(w.bytes_before for w in found.weights))
    if share > most_float:
        listed = [f"'{w.tensor}' of {w.op} ({w.bytes_before:,} bytes): {w.why_float}" for w in kept]
        yield Note(
            code="float-weights",
            text=f"recipe '{name}' left {share:.0%} of the weights' bytes float: "
            f"{_listed(listed, 10)}",
        )
    if found.size_bytes > found.expected_bytes * (1 + _SLACK_SHARE) + _SLACK_BYTES:
        yield Note(
            code="quantized-size",
            text=f"recipe '{name}': the file has {found.size_bytes:,} bytes, where its weights tell "
            f"{found.expected_bytes:,}: inserted ops and repeated weights take the rest",
        )


def _listed(items: Sequence[str], most: int) -> str:
    more = f"; and {len(items) - most} more" if len(items) > most else ""
    return "; ".join(items[:most]) + more


# --------------------------------------------------------------------------------------- weights


@dataclass(frozen=True, kw_only=True, slots=True)
class _Use:
    op: str
    scope: str
    is_weight: bool


def _uses(graph: Subgraph) -> dict[int, _Use]:
    """Constant tensor to the op that reads it; one that takes it for its weight comes first."""
    uses: dict[int, _Use] = {}
    for op in graph.operators:
        name = UPSTREAM_NAMES.get(op.name, op.name)
        for at, index in enumerate(op.inputs):
            if index < 0 or not graph.tensors[index].is_constant:
                continue
            use = _Use(
                op=name,
                scope=scope_of(graph, op.inputs, op.outputs),
                is_weight=at in WEIGHT_INPUT.get(name, ()),
            )
            if index not in uses or (use.is_weight and not uses[index].is_weight):
                uses[index] = use
    return uses


def _weights(
    before: TfliteFile,
    after: TfliteFile,
    recipe: Recipe | None,
    deviations: Sequence[Deviation],
) -> list[WeightScan]:
    failed = {(d.op, d.scope): d.why for d in deviations if d.instead == "float32"}
    seen: set[int] = set()
    result: list[WeightScan] = []
    for graph in before.subgraphs:
        now = _by_name(after.subgraphs[graph.index])
        for index, use in _uses(graph).items():
            tensor = graph.tensors[index]
            if tensor.dtype not in _FLOAT or tensor.buffer in seen:
                continue
            seen.add(tensor.buffer)
            stored = now.get(tensor.name, [tensor])
            kinds = dict.fromkeys(t.stored_as for t in stored)
            sizes = {t.buffer: t.size_bytes + _scale_bytes(t, after, graph.index) for t in stored}
            if tensor.stored_as not in kinds:
                why = None
            elif len(kinds) > 1:
                why = "one of the ops that share it is kept float, so it is stored twice"
            else:
                why = _why_float(use, tensor, recipe, failed)
            result.append(
                WeightScan(
                    tensor=tensor.name,
                    op=use.op,
                    scope=use.scope,
                    bytes_before=tensor.size_bytes,
                    bytes_after=sum(sizes.values()),
                    kind=" and ".join(kinds),
                    why_float=why,
                )
            )
    return sorted(result, key=lambda weight: -weight.bytes_before)


def _by_name(graph: Subgraph) -> dict[str, list[Tensor]]:
    """Constants by the name they had before: one that several ops share may be there repeatedly."""
    found: dict[str, list[Tensor]] = {}
    for tensor in graph.tensors:
        if tensor.is_constant:
            found.setdefault(_DUPLICATE.sub("", tensor.name), []).append(tensor)
    return found


def _scale_bytes(tensor: Tensor, file: TfliteFile, subgraph: int) -> int:
    """What the scales take up beside the weights."""
    quantization = tensor.quantization
    if quantization is None:
        return 0
    if quantization.scales_tensor is not None:
        return file.tensor(quantization.scales_tensor, subgraph).size_bytes
    # A float and, as the quantizer writes them, a 64-bit zero point.
    return 12 * len(quantization.scales)


def _why_float(
    use: _Use, tensor: Tensor, recipe: Recipe | None, failed: Mapping[tuple[str, str], str]
) -> str:
    if use.op not in WEIGHT_INPUT:
        return f"ai-edge-quantizer takes no constant of {use.op} for a weight"
    if not use.is_weight:
        return _BIAS
    if (use.op, use.scope) in failed:
        return failed[use.op, use.scope]
    matching = [
        rule
        for rule in (recipe.rules if recipe is not None else ())
        if rule["operation"] in ("*", use.op) and re.search(rule["regex"], use.scope)
    ]
    if recipe is None:
        return "not quantized"
    if not matching:
        return "no rule of the recipe is for it"
    rule = matching[-1]
    if rule["algorithm_key"] == "no_quantize":
        return "the recipe keeps it float"
    config = rule["op_config"]
    least = config.get("min_weight_elements", 0)
    count = math.prod(tensor.shape)
    if count < least:
        return f"the recipe is for weights of at least {least} elements, it has {count}"
    kind = stored_as_text(config["weight_tensor_config"])
    static = " with static activations" if "activation_tensor_config" in config else ""
    usual = rule["algorithm_key"] in ("min_max_uniform_quantize", "float_casting")
    by = "" if usual else f" by {rule['algorithm_key']}"
    return f"ai-edge-quantizer has no {kind}{by}{static} for {use.op}"


# -------------------------------------------------------------------------------------- problems


def _problems(before: TfliteFile, after: TfliteFile) -> Iterator[str]:
    for graph in after.subgraphs:
        old = {t.name: t for t in before.subgraphs[graph.index].tensors}
        uses, old_uses = _uses(graph), _uses(before.subgraphs[graph.index])
        for tensor in graph.tensors:
            yield from _bad_scales(after, graph, tensor)
            if tensor.is_constant and tensor.dtype in _FLOAT:
                source = old.get(tensor.name)
                # Where weights are dequantized first, only the base file tells who uses them.
                use = uses.get(tensor.index) if source is None else old_uses.get(source.index)
                # Infinity or NaN may well be meant, in a mask or to fill in with; never in weights.
                meant = (
                    source is not None
                    and source.is_constant
                    and (use is None or use.op not in WEIGHT_INPUT)
                    and not _finite(before.constant(source.index, graph.index))
                )
                if not meant and not _finite(after.constant(tensor.index, graph.index)):
                    yield f"'{tensor.name}'{_of(use)} holds NaN or infinity"
        yield from _mixed_ops(graph)
    yield from _bad_signatures(before, after)


def _of(use: _Use | None) -> str:
    return "" if use is None else f" of {use.op}"


def _finite(values: Array) -> bool:
    import numpy as np

    if values.size == 0:
        return True
    # The extremes are NaN if any value is; no array as large as the weights is made.
    return bool(np.isfinite(values.min()) and np.isfinite(values.max()))


def _bad_scales(file: TfliteFile, graph: Subgraph, tensor: Tensor) -> Iterator[str]:
    import numpy as np

    quantization = tensor.quantization
    if quantization is None:
        return
    if quantization.scales_tensor is None:
        bad = [scale for scale in quantization.scales if not 0 < scale < math.inf]
        if bad:
            yield (
                f"'{tensor.name}' has {len(bad)} scales of {len(quantization.scales)} that are no "
                f"positive number, e.g. {bad[0]:g}"
            )
        return
    scales = file.constant(quantization.scales_tensor, graph.index).astype(np.float32)
    # Zero stands for a block of zeros: a scale of float16 goes no lower.
    if not _finite(scales) or bool((scales < 0).any()):
        yield f"'{tensor.name}' has scales of blocks that are no positive number"


def _mixed_ops(graph: Subgraph) -> Iterator[str]:
    """Ops that read computed floats and write integers, or the other way round."""
    for op in graph.operators:
        if op.name in _CHANGERS:
            continue
        inputs = [graph.tensors[i] for i in op.inputs if i >= 0]
        reads = {_number(t) for t in inputs if not t.is_constant} - {""}
        writes = {_number(graph.tensors[i]) for i in op.outputs if i >= 0} - {""}
        if len(reads) == 1 and len(writes) == 1 and reads != writes:
            name = graph.tensors[op.outputs[0]].name
            yield f"{op.name} '{name}' reads {reads.pop()} and writes {writes.pop()}"


def _number(tensor: Tensor) -> str:
    if tensor.dtype in _FLOAT:
        return "floats"
    if tensor.dtype in _INTEGER and tensor.quantization is not None:
        return "quantized integers"
    return ""


# How an op reads its weights, by computed_as.
_WAYS = {
    "static": "as integers, with integer activations",
    "dynamic": "as integers, with activations that are quantized while it runs",
    "weight-only": "dequantized",
}


def _computed_otherwise(
    before: TfliteFile, after: TfliteFile, recipe: Recipe | None
) -> Iterator[str]:
    """Ops that read their weights in a way that no rule for them says, for weights stored so."""
    if recipe is None:
        return
    rules = in_order(recipe.rules)
    now = [_by_outputs(graph) for graph in after.subgraphs]
    for op in op_scopes(before):
        old = before.subgraphs[op.subgraph]
        weight = None if op.weight is None else old.tensors[op.weight]
        same = now[op.subgraph].get((op.op, op.tensors[: op.outputs]))
        if weight is None or weight.dtype not in _FLOAT or not same:
            continue
        at = old.operators[op.index].inputs.index(weight.index)
        found = _reads(after.subgraphs[op.subgraph], same.pop(0), at)
        if found is None:
            continue
        way, kind = found
        fitting = _fitting(rules, op)
        ways = dict.fromkeys(computed_as(rule) for rule in fitting if _kind(rule) == kind)
        if ways and way not in ways:
            yield (
                f"{op.op} '{op.scope.rstrip(';')}' reads its {kind} weights {_WAYS[way]}, where the "
                f"recipe says {' or '.join(_WAYS[wanted] for wanted in ways)}"
            )


def _by_outputs(graph: Subgraph) -> dict[tuple[str, tuple[str, ...]], list[Operator]]:
    """Ops by their name and those of their outputs, which quantizing leaves as they are."""
    found: dict[tuple[str, tuple[str, ...]], list[Operator]] = {}
    for op in graph.operators:
        outputs = tuple(graph.tensors[i].name for i in op.outputs if i >= 0)
        found.setdefault((UPSTREAM_NAMES.get(op.name, op.name), outputs), []).append(op)
    return found


def _reads(graph: Subgraph, op: Operator, at: int) -> tuple[str, str] | None:
    """How it reads the weights at input ``at``, and what they are; None for floats."""
    weight = graph.tensors[op.inputs[at]]
    if not weight.is_constant:
        for other in graph.operators:
            if other.name == "DEQUANTIZE" and weight.index in other.outputs:
                stored = graph.tensors[other.inputs[0]]
                return ("weight-only", _kind(stored)) if stored.is_constant else None
        return None
    if weight.dtype in _FLOAT:
        return None
    others = (graph.tensors[i] for i in (*op.inputs, *op.outputs) if i >= 0)
    integer = any(_number(t) == "quantized integers" for t in others if not t.is_constant)
    return "static" if integer else "dynamic", _kind(weight)


def _kind(of: Tensor | Rule) -> str:
    """ "int8" or "int4 in blocks of 32": how a weight is stored, or a rule says so."""
    if isinstance(of, Tensor):
        block = None if of.quantization is None else of.quantization.block_size
        return of.dtype if block is None else f"{of.dtype} in blocks of {block}"
    return stored_as_text(of["op_config"]["weight_tensor_config"]).partition(" per ")[0]


def _fitting(rules: Sequence[Rule], op: OpScope) -> list[Rule]:
    """Those that may have decided on an op; the quantizer passes over what it cannot do."""
    found: list[Rule] = []
    for rule in rules:
        if rule["operation"] in ("*", op.op) and re.search(rule["regex"], op.scope):
            if rule["algorithm_key"] == "no_quantize":
                found.clear()
            else:
                found.append(rule)
    return found


def _bad_signatures(before: TfliteFile, after: TfliteFile) -> Iterator[str]:
    now = {entry.name: entry for entry in after.signatures}
    for entry in before.signatures:
        new = now.get(entry.name)
        if new is None:
            yield f"signature '{entry.name}' is gone"
            continue
        graph = after.subgraphs[new.subgraph]
        for side, old, names, ends in (
            ("input", entry.inputs, new.inputs, graph.inputs),
            ("output", entry.outputs, new.outputs, graph.outputs),
        ):
            for name in old:
                if name not in names:
                    yield f"{side} '{name}' of signature '{entry.name}' is gone"
                elif names[name] not in ends:
                    yield f"{side} '{name}' of signature '{entry.name}' is none of its graph"
