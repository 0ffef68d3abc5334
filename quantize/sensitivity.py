"""Which parts of a model can be stored at which level, and how much noise each adds.

A *unit* is one choice: an op with weights, or all ops that share one weight buffer (the steps of an
unrolled loop, tied embeddings), since giving them different levels would store the weights twice;
for static recipes an op without weights too.
A *level* is one way to store a unit's weights and to compute with them.

Noise is the power of the error over the power of the signal, 10^(-SQNR/10). Errors of different
units have little to do with each other, so that their noises add up (within about 1 dB on the
networks measured); :class:`NoiseModel` holds what was measured of single units, on the real LiteRT
result, and says what the rest is likely to be.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tpu2edge.quantize.rules import Rule, dynamic, float16, keep, static, weight_only
from tpu2edge.quantize.scopes import OpScope, op_scopes

if TYPE_CHECKING:
    from tpu2edge.flatbuffer import TfliteFile

__all__ = [
    "FLOAT",
    "LEVELS",
    "STATIC_OPERATIONS",
    "Assignment",
    "Level",
    "NoiseModel",
    "Unit",
    "any_of",
    "between_of",
    "cheapest",
    "expected_bytes",
    "producers_of",
    "rules_of",
    "shared_bytes",
    "units_of",
]

#: Level of each unit, in the units' order.
Assignment = tuple[str, ...]

FLOAT = "float32"


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """One way to store weights; ``operations`` are the ops that upstream does it for.

    ``noise`` is what its error is usually worth, in units of int8-weights'; ``time`` what its ops
    take of float32's, and ``slow`` those that XNNPACK leaves to LiteRT's own kernels; ``like`` a level
    that is computed with the same kernels.
    """

    name: str
    about: str
    rule: Callable[[str], Rule] = field(repr=False, compare=False)
    bits: float
    operations: frozenset[str]
    noise: float
    time: float
    dequantizes: bool = False  # an op is added before the unit
    rotates: bool = False  # ops are added, and a matrix that others of the same width share
    block: int = 0
    activations: int = 0  # bits of activations whose ranges are known beforehand; 0: not static
    moments: str = ""  # the algorithm, if it needs moments of what layers read (moments.py)
    like: str = ""
    slow: Mapping[str, float] = field(default_factory=dict, compare=False)

    def time_of(self, op: str) -> float:
        """What this op takes of float32's time."""
        return self.slow.get(op, self.time)


def _keep(regex: str) -> Rule:
    return keep(regex=regex)


_ALL = "BATCH_MATMUL CONV_2D CONV_2D_TRANSPOSE DEPTHWISE_CONV_2D EMBEDDING_LOOKUP FULLY_CONNECTED"
_LINEAR = "FULLY_CONNECTED"
_HADAMARD = "DECOMPOSED_HADAMARD_ROTATION"

# Levels of rows that are looked up, where all else is at a static one.
_ROWS = {"int8-static": "int8-dynamic", "int4-static": "int4-dynamic"}

#: Ops that can compute with int8 activations (ai_edge_quantizer.default_policy, static_wi8_ai8).
STATIC_OPERATIONS = frozenset(
    """
    ADD AVERAGE_POOL_2D BATCH_MATMUL BROADCAST_TO CONCATENATION CONV_2D CONV_2D_TRANSPOSE
    DEPTHWISE_CONV_2D DIV DYNAMIC_UPDATE_SLICE EQUAL FULLY_CONNECTED GATHER GATHER_ND GELU
    HARD_SWISH LOGISTIC MAXIMUM MAX_POOL_2D MEAN MIRROR_PAD MUL NOT_EQUAL PACK PAD PADV2
    REDUCE_MIN RELU RESHAPE RESIZE_BILINEAR RESIZE_NEAREST_NEIGHBOR RSQRT SELECT SELECT_V2 SLICE
    SOFTMAX SPACE_TO_DEPTH SPLIT SQRT SQUARED_DIFFERENCE STRIDED_SLICE SUB SUM TANH TRANSPOSE UNPACK
    """.split()  # noqa: SIM905 - one a line would be a page
)

# What of these static_wi8_ai16 has not.
_NOT_16 = frozenset({"HARD_SWISH", "SPACE_TO_DEPTH", "SQUARED_DIFFERENCE"})

#: All levels by name, in the order in which a tie is decided. For which ops: the policies of
#: ai_edge_quantizer 0.10. Noise and time: medians over MiniLM, Resemblyzer, Silero, MTCNN's O-net.
LEVELS: Mapping[str, Level] = {
    level.name: level
    for level in (
        Level(
            name=FLOAT,
            about="float32 weights",
            rule=_keep,
            bits=32,
            operations=frozenset(_ALL.split()),
            noise=0.0,
            time=1.0,
        ),
        Level(
            name="int8-dynamic",
            about="int8 weights, activations quantized at run time",
            rule=lambda regex: dynamic(8, regex=regex),
            bits=8,
            operations=frozenset(_ALL.split()),
            noise=3.0,
            time=0.3,
            slow={"DEPTHWISE_CONV_2D": 12.0},
        ),
        Level(
            name="int8-weights",
            about="int8 weights with zero points, computed in float32",
            # With symmetric weights the noise is 1 to 5 dB higher, at the same size and speed.
            rule=lambda regex: weight_only(8, regex=regex, symmetric=False),
            bits=8,
            operations=frozenset(_ALL.split()),
            noise=1.0,
            time=1.05,
            dequantizes=True,
        ),
        Level(
            name="int8-weights-gptq",
            about="int8 weights with zero points, rounded by what they read, computed in float32",
            rule=lambda regex: weight_only(
                8, regex=regex, operation=_LINEAR, symmetric=False, algorithm="GPTQ"
            ),
            bits=8,
            operations=frozenset({_LINEAR}),
            noise=0.5,
            time=1.05,
            dequantizes=True,
            moments="GPTQ",
            like="int8-weights",
        ),
        Level(
            name="int8-dynamic-hadamard",
            about="int8 weights, rotated activations quantized at run time",
            rule=lambda regex: dynamic(8, regex=regex, algorithm=_HADAMARD),
            bits=8,
            operations=frozenset({"FULLY_CONNECTED"}),
            noise=1.2,
            time=0.65,
            rotates=True,
        ),
        Level(
            name="int8-dynamic-oscar",
            about="int8 weights scaled by what they read, activations quantized at run time",
            rule=lambda regex: dynamic(8, regex=regex, operation=_LINEAR, algorithm="OSCAR"),
            bits=8,
            operations=frozenset({_LINEAR}),
            noise=1.4,
            time=0.32,
            moments="OSCAR",
        ),
        Level(
            name="float16",
            about="float16 weights, computed in float32",
            rule=lambda regex: float16(regex=regex),
            bits=16,
            operations=frozenset(_ALL.split()) - {"BATCH_MATMUL"},
            noise=3e-4,
            time=1.0,
            dequantizes=True,
        ),
        Level(
            name="int4-dynamic",
            about="int4 weights, activations quantized at run time",
            rule=lambda regex: dynamic(4, regex=regex),
            bits=4,
            operations=frozenset({"FULLY_CONNECTED", "EMBEDDING_LOOKUP", "CONV_2D"}),
            noise=450.0,
            time=0.3,
            slow={"CONV_2D": 1.5},
        ),
        Level(
            name="int4-dynamic-octav",
            about="int4 weights with clipping, activations quantized at run time",
            rule=lambda regex: dynamic(4, regex=regex, algorithm="OCTAV"),
            bits=4,
            operations=frozenset({"FULLY_CONNECTED", "EMBEDDING_LOOKUP", "CONV_2D"}),
            noise=380.0,
            time=0.3,
            like="int4-dynamic",
            slow={"CONV_2D": 1.5},
        ),
        Level(
            name="int4-weights",
            about="int4 weights with zero points, computed in float32",
            rule=lambda regex: weight_only(4, regex=regex, symmetric=False),
            bits=4,
            operations=frozenset(
                {"BATCH_MATMUL", "FULLY_CONNECTED", "EMBEDDING_LOOKUP", "CONV_2D"}
            ),
            noise=330.0,
            time=3.0,
            dequantizes=True,
            like="int8-weights",
        ),
        Level(
            name="int4-dynamic-b32",
            about="int4 weights in blocks of 32, activations quantized at run time",
            rule=lambda regex: dynamic(4, regex=regex, block=32),
            bits=4.5,
            operations=frozenset({"FULLY_CONNECTED", "EMBEDDING_LOOKUP"}),
            noise=200.0,
            time=0.5,
            block=32,
            like="int4-dynamic",
        ),
        Level(
            name="int4-dynamic-gptq",
            about="int4 weights rounded by what they read, activations quantized at run time",
            rule=lambda regex: dynamic(4, regex=regex, operation=_LINEAR, algorithm="GPTQ"),
            bits=4,
            operations=frozenset({_LINEAR}),
            noise=220.0,
            time=0.3,
            moments="GPTQ",
            like="int4-dynamic",
        ),
        Level(
            name="int4-weights-gptq",
            about="int4 weights with zero points, rounded by what they read, computed in float32",
            rule=lambda regex: weight_only(
                4, regex=regex, operation=_LINEAR, symmetric=False, algorithm="GPTQ"
            ),
            bits=4,
            operations=frozenset({_LINEAR}),
            noise=110.0,
            time=3.0,
            dequantizes=True,
            moments="GPTQ",
            like="int8-weights",
        ),
        Level(
            name="int4-dynamic-b32-gptq",
            about="int4 weights in blocks of 32, rounded by what they read, activations as above",
            rule=lambda regex: dynamic(
                4, regex=regex, operation=_LINEAR, block=32, algorithm="GPTQ"
            ),
            bits=4.5,
            operations=frozenset({_LINEAR}),
            noise=90.0,
            time=0.5,
            block=32,
            moments="GPTQ",
        ),
        Level(
            name="int4-dynamic-b128",
            about="int4 weights in blocks of 128, activations quantized at run time",
            rule=lambda regex: dynamic(4, regex=regex, block=128),
            bits=4.125,
            operations=frozenset({"FULLY_CONNECTED", "EMBEDDING_LOOKUP"}),
            noise=330.0,
            time=0.5,
            block=128,
            like="int4-dynamic",
        ),
        Level(
            name="int4-dynamic-hadamard",
            about="int4 weights, rotated activations quantized at run time",
            rule=lambda regex: dynamic(4, regex=regex, algorithm=_HADAMARD),
            bits=4,
            operations=frozenset({"FULLY_CONNECTED"}),
            noise=200.0,
            time=0.65,
            rotates=True,
            like="int8-dynamic-hadamard",
        ),
        Level(
            name="int8-static",
            about="int8 weights and activations, whose ranges are known beforehand",
            rule=lambda regex: static(8, 8, regex=regex),
            bits=8,
            operations=STATIC_OPERATIONS,
            noise=20.0,
            time=0.35,
            activations=8,
        ),
        Level(
            name="int16-static",
            about="int8 weights, int16 activations, whose ranges are known beforehand",
            rule=lambda regex: static(8, 16, regex=regex),
            bits=8,
            operations=STATIC_OPERATIONS - _NOT_16,
            noise=1.5,
            time=25.0,  # LiteRT has no fast kernels for it; other runtimes may
            activations=16,
        ),
        Level(
            name="int4-static",
            about="int4 weights, int8 activations, whose ranges are known beforehand",
            rule=lambda regex: static(4, 8, regex=regex),
            bits=4,
            operations=frozenset({"FULLY_CONNECTED", "CONV_2D"}),
            noise=470.0,
            time=0.35,
            activations=8,
            like="int8-static",
        ),
        Level(
            name="int4-static-a16",
            about="int4 weights, int16 activations, whose ranges are known beforehand",
            rule=lambda regex: static(4, 16, regex=regex),
            bits=4,
            operations=frozenset({"FULLY_CONNECTED", "CONV_2D"}),
            noise=450.0,
            time=25.0,
            activations=16,
        ),
    )
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """One op with weights, or all that share its weights; or one that has none (between_of)."""

    name: str  # the first op's scope
    op: str
    scopes: tuple[str, ...]
    tensors: tuple[str, ...]  # names of the weights
    elements: int
    channels: int
    rotation: int  # rows of the matrix that its activations would be rotated by
    macs: int  # multiplications of one run, of one turn for an op inside a loop
    levels: tuple[str, ...]  # what its ops can be, FLOAT first


def units_of(
    file: TfliteFile,
    levels: Iterable[str] | None = None,
    *,
    calibrated: bool = False,
    moments: Collection[str] = (),
) -> tuple[Unit, ...]:
    """The units of a float file that have weights, in its order.

    Args:
        file: the float file.
        levels: which levels to offer besides float32; all if None.
        calibrated: offer the static levels, too.
        moments: offer the levels of these algorithms, too.
    """
    wanted = set(LEVELS if levels is None else levels)
    offered = [
        level
        for level in LEVELS.values()
        if level.name in wanted
        and (calibrated or not level.activations)
        and (not level.moments or level.moments in moments)
    ]
    inner = _inner(file)
    groups: dict[int, list[OpScope]] = {}
    for op in op_scopes(file):
        if op.op not in LEVELS[FLOAT].operations or op.weight is None:
            continue
        weight = file.subgraphs[op.subgraph].tensors[op.weight]
        if weight.dtype == "float32" and weight.quantization is None:
            groups.setdefault(weight.buffer, []).append(op)
    units: list[Unit] = []
    for ops in groups.values():
        weights = [file.subgraphs[op.subgraph].tensors[op.weight or 0] for op in ops]
        first = weights[0]
        elements = math.prod(first.shape)
        kinds = {op.op for op in ops}
        width = first.shape[-1] if first.shape else 0
        # What static recipes do to embeddings, for which there is no static kernel.
        instead = [LEVELS[_ROWS[one.name]] for one in offered if one.name in _ROWS]
        if kinds != {"EMBEDDING_LOOKUP"}:
            instead = []
        possible = [FLOAT] + [
            level.name
            for level in dict.fromkeys([*offered, *instead])
            if level.name != FLOAT
            and kinds <= level.operations
            and (not level.activations or not any(op.subgraph in inner for op in ops))
            and (not level.block or width % level.block == 0)
            and (not level.rotates or (width & -width) >= 4)
        ]
        units.append(
            Unit(
                name=ops[0].scope,
                op=ops[0].op,
                scopes=tuple(dict.fromkeys(op.scope for op in ops)),
                tensors=tuple(dict.fromkeys(weight.name for weight in weights)),
                elements=elements,
                channels=_channels(ops[0].op, first.shape),
                rotation=width & -width,  # the largest power of two that divides the width
                macs=sum(_macs(file, op, first.shape) for op in ops),
                levels=tuple(possible),
            )
        )
    return tuple(units)


#: Multiplications that take as long as one element of an op that is bound by memory, roughly.
_MACS_AN_ELEMENT = 8


def between_of(file: TfliteFile, levels: Iterable[str]) -> tuple[Unit, ...]:
    """The ops without weights that can be at one of the static ``levels``, as units."""
    offered = [LEVELS[level] for level in LEVELS if level in levels]
    inner = _inner(file)
    units: dict[str, Unit] = {}
    for op in op_scopes(file):
        possible = [level.name for level in offered if op.op in level.operations]
        graph = file.subgraphs[op.subgraph]
        real = graph.operators[op.index]
        if op.weight is not None or op.subgraph in inner or not possible or not real.outputs:
            continue
        outputs = [graph.tensors[i] for i in real.outputs]
        if any(tensor.dtype != "float32" for tensor in outputs):
            continue
        depth = graph.tensors[real.inputs[0]].shape[-1:] if op.op == "BATCH_MATMUL" else ()
        elements = sum(math.prod(tensor.shape) for tensor in outputs)
        units[op.scope] = Unit(
            name=op.scope,
            op=op.op,
            scopes=(op.scope,),
            tensors=tuple(tensor.name for tensor in outputs),
            elements=0,
            channels=0,
            rotation=0,
            macs=elements * (depth[0] if depth else _MACS_AN_ELEMENT),
            levels=(FLOAT, *possible),
        )
    return tuple(units.values())


def producers_of(file: TfliteFile, units: Sequence[Unit]) -> list[frozenset[int | None]]:
    """For each unit those that compute its inputs; None among them for all that is no unit."""
    number = {scope: index for index, unit in enumerate(units) for scope in unit.scopes}
    found: list[set[int | None]] = [set() for _ in units]
    makers: dict[tuple[int, int], int | None] = {}
    for op in op_scopes(file):
        graph = file.subgraphs[op.subgraph]
        real = graph.operators[op.index]
        mine = number.get(op.scope)
        makers.update({(graph.index, out): mine for out in real.outputs})
        if mine is not None:
            found[mine].update(
                makers.get((graph.index, i))
                for i in real.inputs
                if i >= 0 and not graph.tensors[i].is_constant
            )
    return [frozenset(one) for one in found]


def _inner(file: TfliteFile) -> set[int]:
    """Subgraphs that ops run, loops' bodies say: static files of such do not load."""
    return {g for graph in file.subgraphs for op in graph.operators for g in op.subgraphs}


def _channels(op: str, shape: tuple[int, ...]) -> int:
    if not shape:
        return 1
    if op == "BATCH_MATMUL":
        return 1
    return shape[-1] if op == "DEPTHWISE_CONV_2D" else shape[0]


def _macs(file: TfliteFile, op: OpScope, shape: tuple[int, ...]) -> int:
    if op.op == "EMBEDDING_LOOKUP":
        return 0  # a copy of rows
    graph = file.subgraphs[op.subgraph]
    outputs = math.prod(graph.tensors[graph.operators[op.index].outputs[0]].shape)
    return outputs * (math.prod(shape) // max(1, _channels(op.op, shape)))


def expected_bytes(unit: Unit, level: str) -> int:
    """What a file grows by, about, when the unit goes from float32 to ``level`` (negative)."""
    if level == FLOAT or not unit.elements:
        return 0
    known = LEVELS[level]
    stored = unit.elements * known.bits / 8
    # One float32 scale and one int64 zero point a channel; an op, a tensor and its name.
    scales = 0 if level == "float16" or known.block else 12 * unit.channels
    ops = (known.dequantizes + 5 * known.rotates) * len(unit.scopes)
    added = (220 + len(unit.tensors[0])) * ops
    if known.moments == "OSCAR":  # a MUL by a vector as wide as the layer
        added += 4 * unit.elements // unit.channels + 300 * len(unit.scopes)
    return round(stored + scales + added + 40 - 4 * unit.elements)


def shared_bytes(units: Sequence[Unit], assignment: Assignment) -> int:
    """Bytes of the matrices that rotated units have in common, each counted once."""
    return sum(
        4 * rows * rows
        for rows in {
            unit.rotation
            for unit, level in zip(units, assignment, strict=True)
            if LEVELS[level].rotates
        }
    )


# ------------------------------------------------------------------------------------------ rules


def rules_of(units: Sequence[Unit], assignment: Assignment) -> tuple[Rule, ...]:
    """The shortest rules of ai-edge-quantizer that give each unit its level; none for all float.

    The level whose list of ops would be the longest becomes the rule for all ops, and the others
    are exceptions from it, one rule each. Later rules win.
    """
    by_level: dict[str, list[Unit]] = {}
    for unit, level in zip(units, assignment, strict=True):
        by_level.setdefault(level, []).append(unit)
    if set(by_level) <= {FLOAT}:
        return ()

    def text(level: str) -> int:
        return sum(len(re.escape(s)) for unit in by_level[level] for s in unit.scopes)

    # In blocks, the quantizer stops at a width that they do not divide.
    bases = [
        level
        for level in by_level
        if not (LEVELS[level].block and _misfits(units, LEVELS[level]))
        and not LEVELS[level].activations  # would reach ops that are no unit
        and level != FLOAT
    ]
    base = max(bases, key=lambda level: (text(level), level), default=FLOAT)
    if FLOAT in by_level and (base == FLOAT or text(FLOAT) > text(base)):
        base = FLOAT
    rules: list[Rule] = [] if base == FLOAT else [LEVELS[base].rule(".*")]
    for level in LEVELS:  # in one order, so that the same assignment gives the same rules
        if level == base or level not in by_level:
            continue
        # A unit that the rule for all does not reach is float without a word.
        touched = [
            unit
            for unit in by_level[level]
            if level != FLOAT or {unit.op} <= LEVELS[base].operations
        ]
        scopes = [scope for unit in touched for scope in unit.scopes]
        if scopes:
            rules.append(LEVELS[level].rule(any_of(scopes)))
    return tuple(rules)


def any_of(scopes: Sequence[str]) -> str:
    """The regex that matches these scopes and nothing else."""
    escaped = [re.escape(scope) for scope in scopes]
    return f"^{escaped[0]}$" if len(escaped) == 1 else f"^(?:{'|'.join(escaped)})$"


def _misfits(units: Sequence[Unit], level: Level) -> bool:
    return any(unit.op in level.operations and level.name not in unit.levels for unit in units)


# ------------------------------------------------------------------------------------------ noise


class NoiseModel:
    """The noise and the bytes of every unit at every level: measured ones, and likely ones.

    A unit's noise at a level that was not measured comes from its noise at one that was, times what
    the step between these levels is worth in the units where both are known, or else in whole
    recipes; without any, from its share of the weights.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = units
        self.measured: dict[tuple[int, str], float] = {}
        self.bytes: dict[tuple[int, str], int] = {}
        self.totals: dict[str, float] = {}  # of recipes that give all units one level
        self._weights = sum(unit.elements for unit in units) or 1

    def noise(self, unit: int, level: str) -> float:
        """What the unit adds at ``level``."""
        if level == FLOAT:
            return 0.0
        known = self.measured.get((unit, level))
        if known is not None:
            return known
        near = [
            (abs(math.log(self._worth(other) / self._worth(level))), other)
            for other in self.units[unit].levels
            if (unit, other) in self.measured
        ]
        if near:
            other = min(near)[1]
            return self.measured[unit, other] * self._step(other, level)
        share = self.units[unit].elements / self._weights
        if level in self.totals:
            return self.totals[level] * share
        if self.totals:
            other = min(
                self.totals, key=lambda o: abs(math.log(self._worth(o) / self._worth(level)))
            )
            return self.totals[other] * share * self._worth(level) / self._worth(other)
        return LEVELS[level].noise * 1e-3 * share

    def size(self, unit: int, level: str) -> int:
        """Bytes that the file grows by when the unit goes from float32 to ``level``."""
        known = self.bytes.get((unit, level))
        return known if known is not None else expected_bytes(self.units[unit], level)

    def total(self, assignment: Assignment) -> float:
        """The noise of a whole assignment."""
        return math.fsum(self.noise(unit, level) for unit, level in enumerate(assignment))

    def _worth(self, level: str) -> float:
        return LEVELS[level].noise or 1e-12

    def _step(self, before: str, after: str) -> float:
        both = [
            math.log(self.measured[unit, after] / self.measured[unit, before])
            for unit in range(len(self.units))
            if 0 < self.measured.get((unit, after), 0.0) < math.inf
            and 0 < self.measured.get((unit, before), 0.0) < math.inf
        ]
        if len(both) >= 3:
            return math.exp(statistics.median(both))
        # Above 0 dB the error is no longer small, and says nothing about other levels.
        if all(0 < self.totals.get(level, 0.0) < 0.5 for level in (before, after)):
            return self.totals[after] / self.totals[before]
        return self._worth(after) / self._worth(before)


def cheapest(
    noises: Sequence[Sequence[float]],
    costs: Sequence[Sequence[float]],
    capacity: float,
    *,
    steps: int = 4096,
) -> list[int] | None:
    """Which option of each unit, at the least total cost with a total noise within ``capacity``.

    Dynamic programming over the noise, in ``steps`` parts of the capacity, to the nearest one;
    None if even the quietest options are too noisy. Of equal costs the earlier option is taken.
    """
    best = np.zeros(steps + 1)
    picks: list[np.ndarray] = []
    parts: list[list[int]] = []
    for noise, cost in zip(noises, costs, strict=True):
        taken = [
            round(min(n / capacity, 2.0) * steps) if capacity > 0 else (0 if n == 0 else 2 * steps)
            for n in noise
        ]
        rows = np.full((len(noise), steps + 1), np.inf)
        for option, (part, price) in enumerate(zip(taken, cost, strict=True)):
            if part <= steps:
                rows[option, part:] = best[: steps + 1 - part] + price
        pick = rows.argmin(axis=0).astype(np.int16)
        best = rows[pick, np.arange(steps + 1)]
        picks.append(pick)
        parts.append(taken)
    if not np.isfinite(best[steps]):
        return None
    left = steps
    chosen: list[int] = []
    for pick, taken in zip(reversed(picks), reversed(parts), strict=True):
        option = int(pick[left])
        chosen.append(option)
        left -= taken[option]
    return chosen[::-1]
