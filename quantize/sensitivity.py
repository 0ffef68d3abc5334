"""Which parts of a model can be stored at which level, and how much noise each adds.

A *unit* is one choice: an op with weights, or all ops that share one weight buffer (the steps of an
unrolled loop, tied embeddings), since giving them different levels would store the weights twice.
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
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    "Assignment",
    "Level",
    "NoiseModel",
    "Unit",
    "cheapest",
    "expected_bytes",
    "rules_of",
    "units_of",
]

#: Level of each unit, in the units' order.
Assignment = tuple[str, ...]

FLOAT = "float32"

_WEIGHT_OPS = frozenset(
    {
        "BATCH_MATMUL",
        "CONV_2D",
        "CONV_2D_TRANSPOSE",
        "DEPTHWISE_CONV_2D",
        "EMBEDDING_LOOKUP",
        "FULLY_CONNECTED",
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """One way to store weights; the ops that it is for are those of upstream's policy.

    ``noise`` is what its error is usually worth, in units of int8 weight-only's.
    """

    name: str
    about: str
    rule: Callable[[str], Rule] = field(repr=False, compare=False)
    bits: float
    operations: frozenset[str]
    noise: float
    integer: bool = False  # computes with integers: fast
    dequantizes: bool = False  # an op is added before the unit
    block: int = 0
    calibrated: bool = False


def _keep(regex: str) -> Rule:
    return keep(regex=regex)


def _float16(regex: str) -> Rule:
    return float16(regex=regex)


def _level(
    name: str, about: str, rule: Callable[[str], Rule], bits: float, ops: str, noise: float, how: str
) -> Level:
    block = int(name.rpartition("-b")[2]) if "-b" in name else 0
    return Level(
        name=name,
        about=about,
        rule=rule,
        bits=bits,
        operations=frozenset(ops.split()) if ops else _WEIGHT_OPS,
        noise=noise,
        integer=how in ("dynamic", "static"),
        dequantizes=how == "weights",
        block=block,
        calibrated=how == "static",
    )


_NO_BATCH_MATMUL = (
    "CONV_2D CONV_2D_TRANSPOSE DEPTHWISE_CONV_2D EMBEDDING_LOOKUP FULLY_CONNECTED"
)

#: All levels by name, in the order in which a tie is decided (ai_edge_quantizer.default_policy of
#: 0.10 says for which ops). Block scales are two bytes each.
LEVELS: Mapping[str, Level] = {
    level.name: level
    for level in (
        _level(FLOAT, "float32 weights", _keep, 32, "", 0.0, "float"),
        _level(
            "int8-dynamic",
            "int8 weights, activations quantized at run time",
            lambda regex: dynamic(8, regex=regex),
            8,
            "",
            4.0,
            "dynamic",
        ),
        _level(
            "int8-weights",
            "int8 weights, computed in float32",
            lambda regex: weight_only(8, regex=regex),
            8,
            "",
            1.0,
            "weights",
        ),
        _level(
            "float16",
            "float16 weights, computed in float32",
            _float16,
            16,
            _NO_BATCH_MATMUL,
            2e-4,
            "weights",
        ),
        _level(
            "int4-dynamic",
            "int4 weights, activations quantized at run time",
            lambda regex: dynamic(4, regex=regex),
            4,
            "FULLY_CONNECTED EMBEDDING_LOOKUP CONV_2D",
            330.0,
            "dynamic",
        ),
        _level(
            "int4-weights",
            "int4 weights, computed in float32",
            lambda regex: weight_only(4, regex=regex),
            4,
            "BATCH_MATMUL FULLY_CONNECTED EMBEDDING_LOOKUP CONV_2D",
            328.0,  # (127 / 7)^2
            "weights",
        ),
        _level(
            "int4-dynamic-b32",
            "int4 weights in blocks of 32, activations quantized at run time",
            lambda regex: dynamic(4, regex=regex, block=32),
            4.5,
            "FULLY_CONNECTED EMBEDDING_LOOKUP",
            140.0,
            "dynamic",
        ),
        _level(
            "int4-dynamic-b128",
            "int4 weights in blocks of 128, activations quantized at run time",
            lambda regex: dynamic(4, regex=regex, block=128),
            4.125,
            "FULLY_CONNECTED EMBEDDING_LOOKUP",
            220.0,
            "dynamic",
        ),
        _level(
            "int8-static",
            "int8 weights and activations, ranges known beforehand",
            lambda regex: static(8, 8, regex=regex),
            8,
            "BATCH_MATMUL CONV_2D CONV_2D_TRANSPOSE DEPTHWISE_CONV_2D FULLY_CONNECTED",
            10.0,
            "static",
        ),
    )
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """One op with weights, or all that share its weights."""

    name: str  # the first op's scope
    op: str
    scopes: tuple[str, ...]
    tensors: tuple[str, ...]  # names of the weights
    elements: int
    channels: int
    macs: int  # multiplications of one run, of one turn for an op inside a loop
    levels: tuple[str, ...]  # what its ops can be, FLOAT first


def units_of(file: TfliteFile, levels: Iterable[str] | None = None) -> tuple[Unit, ...]:
    """The units of a float file, in its order.

    Args:
        file: the float file.
        levels: which levels to offer; all that need no calibration if None.
    """
    offered = [
        level
        for level in LEVELS.values()
        if (level.name in levels if levels is not None else not level.calibrated)
    ]
    groups: dict[int, list[OpScope]] = {}
    for op in op_scopes(file):
        if op.op not in _WEIGHT_OPS or op.weight is None:
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
        possible = [FLOAT] + [
            level.name
            for level in offered
            if level.name != FLOAT
            and kinds <= level.operations
            and (not level.block or width % level.block == 0)
        ]
        units.append(
            Unit(
                name=ops[0].scope,
                op=ops[0].op,
                scopes=tuple(dict.fromkeys(op.scope for op in ops)),
                tensors=tuple(dict.fromkeys(weight.name for weight in weights)),
                elements=elements,
                channels=_channels(ops[0].op, first.shape),
                macs=sum(_macs(file, op, first.shape) for op in ops),
                levels=tuple(possible),
            )
        )
    return tuple(units)


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
    if level == FLOAT:
        return 0
    known = LEVELS[level]
    stored = unit.elements * known.bits / 8
    # One float32 scale and one int64 zero point a channel; an op, a tensor and its name.
    scales = 0 if level == "float16" or known.block else 12 * unit.channels
    added = (220 + len(unit.tensors[0])) * len(unit.scopes) if known.dequantizes else 0
    return round(stored + scales + added + 40 - 4 * unit.elements)


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
        if not (LEVELS[level].block and _misfits(units, LEVELS[level])) and level != FLOAT
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
        scopes = [re.escape(scope) for unit in touched for scope in unit.scopes]
        if scopes:
            regex = f"^{scopes[0]}$" if len(scopes) == 1 else f"^(?:{'|'.join(scopes)})$"
            rules.append(LEVELS[level].rule(regex))
    return tuple(rules)


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

    def total_size(self, assignment: Assignment) -> int:
        """Bytes that the whole assignment takes beyond float32 (negative)."""
        return sum(self.size(unit, level) for unit, level in enumerate(assignment))

    def _worth(self, level: str) -> float:
        return LEVELS[level].noise or 1e-12

    def _step(self, before: str, after: str) -> float:
        both = [
            math.log(self.measured[unit, after] / self.measured[unit, before])
            for unit in range(len(self.units))
            if self.measured.get((unit, after), 0.0) > 0
            and self.measured.get((unit, before), 0.0) > 0
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
