"""In what precision a TPU computes each matmul, read from what its compiler made of it.

A TPU's matrix unit multiplies bfloat16 and adds float32. What becomes of a float32 matmul depends
on the setting and on the compiler:

- ``bf16``: both operands rounded once (the default);
- ``bf16x3``, ``bf16x6``: operands split into bfloat16 parts, 3 or 6 products (high, highest);
- ``f32``: not on the matrix unit at all, but multiplied and summed in float32 by the vector unit.
  v5e and v6e do so with a single row (batch 1), tpu7x does not;
- ``native``: the operands are not float32, so nothing is rounded.

Every matmul is marked before compiling and looked up by its mark afterwards. One that is not found,
or that is found as something else, is an error: guessing would be wrong by up to 80 dB.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tpu2edge.errors import DeviceError, Place
from tpu2edge.runtime_check.reference.tpu.compile import Compiled

__all__ = ["NAIVE_MODES", "Matmul", "PrecisionPlan", "naive_plan", "plan_from_compiled"]

#: What the naive plan takes for every float32 matmul, by the setting.
NAIVE_MODES = {"default": "bf16", "high": "bf16x3", "highest": "bf16x6"}

_TAG = "t2e.matmul."  # program.TAG, which cannot be imported without JAX
_INSTRUCTION = re.compile(
    r"^\s*(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>[a-z]+[a-z0-9]*)\[[\d,<=]*\](?:\{[^}]*\})? "
    r"(?P<opcode>[\w\-]+)\((?P<operands>[^)]*)\)(?P<rest>.*)$"
)
_MARK = re.compile(rf'op_name="[^"]*{re.escape(_TAG)}(\d+)')


@dataclass(frozen=True, kw_only=True, slots=True)
class Matmul:
    """One dot or convolution of the program, and how the TPU computes it."""

    index: int  # in program order
    op: str  # "dot_general", "dot" or "convolution"
    module: str  # torch module path, "" when the route does not know it
    lhs: str  # "<32x96xf32>"
    rhs: str
    out: str
    mode: str
    evidence: tuple[str, ...]  # the compiled operations that carry its mark


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionPlan:
    """How each matmul of a program is computed."""

    matmuls: tuple[Matmul, ...]
    precision: str
    generation: str | None  # None: naive, no compiler was asked
    naive: bool

    @property
    def modes(self) -> tuple[str, ...]:
        """The mode of each matmul, in program order."""
        return tuple(m.mode for m in self.matmuls)

    def counts(self) -> dict[str, int]:
        """How many matmuls there are of each mode."""
        return dict(sorted(Counter(self.modes).items()))

    def modules_by_mode(self) -> dict[str, tuple[str, ...]]:
        """The torch modules (or, without a path, the shapes) whose matmuls have each mode."""
        grouped: dict[str, dict[str, None]] = {}
        for m in self.matmuls:
            grouped.setdefault(m.mode, {})[m.module or f"{m.op} {m.lhs} {m.rhs}"] = None
        return {mode: tuple(names) for mode, names in sorted(grouped.items())}


def naive_plan(matmuls: Sequence[Mapping[str, Any]], precision: str) -> PrecisionPlan:
    """The plan that rounds every float32 matmul alike, without having asked the compiler."""
    mode = NAIVE_MODES[precision]
    return PrecisionPlan(
        matmuls=tuple(
            _matmul(m, mode if m["elements"] == ["f32", "f32"] else "native", ()) for m in matmuls
        ),
        precision=precision,
        generation=None,
        naive=True,
    )


def plan_from_compiled(compiled: Compiled) -> PrecisionPlan:
    """The plan that ``compiled`` shows; DeviceError when a matmul cannot be accounted for."""
    found = _marked(compiled.hlo)
    planned = []
    for record in compiled.matmuls:
        mode, evidence = _mode(record, found.get(int(record["index"]), ()))
        if mode is None:
            seen = ", ".join(evidence) or "nothing that carries its mark"
            raise DeviceError(
                f"the TPU compiler's result for {compiled.generation} does not tell how the "
                f"{record['op']} {record['lhs']} x {record['rhs']} is computed (found: {seen})",
                do="use the naive prediction for this model, and report the case",
                place=Place(op=str(record["op"]), module=str(record["module"]) or None),
                step="tpu",
            )
        planned.append(_matmul(record, mode, evidence))
    return PrecisionPlan(
        matmuls=tuple(planned),
        precision=compiled.precision,
        generation=compiled.generation,
        naive=False,
    )


def _matmul(record: Mapping[str, Any], mode: str, evidence: tuple[str, ...]) -> Matmul:
    return Matmul(
        index=int(record["index"]),
        op=str(record["op"]),
        module=str(record["module"]),
        lhs=str(record["lhs"]),
        rhs=str(record["rhs"]),
        out=str(record["out"]),
        mode=mode,
        evidence=evidence,
    )


@dataclass(frozen=True, slots=True)
class _Instruction:
    """One instruction of an HLO text."""

    opcode: str
    type: str  # element type
    operands: tuple[str, ...]  # names
    rest: str


@dataclass(frozen=True, slots=True)
class _Marked:
    """One compiled operation that carries a matmul's mark and may be what became of it."""

    kind: str  # "product": on the matrix unit; "sum": reduce of products; "multiply"
    mode: str | None  # what it shows; None when that is not known
    text: str


def _marked(hlo: str) -> dict[int, list[_Marked]]:
    """The marked operations of an HLO text, by the matmul's index."""
    instructions: dict[str, _Instruction] = {}
    for line in hlo.splitlines():
        if (m := _INSTRUCTION.match(line)) is not None:
            names = [o.split()[-1].lstrip("%") for o in m["operands"].split(",") if o.strip()]
            instructions[m["name"]] = _Instruction(m["opcode"], m["type"], tuple(names), m["rest"])
    found: dict[int, list[_Marked]] = {}
    for one in instructions.values():
        mark = _MARK.search(one.rest)
        if mark is not None and (marked := _judged(one, instructions)) is not None:
            found.setdefault(int(mark.group(1)), []).append(marked)
    return found


def _judged(one: _Instruction, instructions: Mapping[str, _Instruction]) -> _Marked | None:
    """What a marked instruction shows; None for those that only move data (or hold others)."""
    if one.opcode in ("convolution", "dot"):
        types = " x ".join(getattr(instructions.get(n), "type", "?") for n in one.operands)
        words = re.search(r"operand_precision=\{([^}]*)\}", one.rest)
        settings = [s.strip() for s in words.group(1).split(",")] if words else ["default"]
        found = re.search(r"\balgorithm=(\w+)", one.rest)
        algorithm = found.group(1) if found else ""
        how = algorithm or f"precision {max(settings, key=_ORDER.index)}"
        mode = (
            _ALGORITHMS.get(algorithm)
            if algorithm
            else NAIVE_MODES[max(settings, key=_ORDER.index)]
        )
        return _Marked("product", mode, f"{one.opcode} {types} -> {one.type}, {how}")
    if one.opcode == "multiply":
        return _Marked("multiply", _mode_of_multiply(one, instructions), f"multiply {one.type}")
    if one.opcode == "reduce" and one.operands:
        inner = _behind(one.operands[0], instructions, _MOVES)
        if inner is not None and inner.opcode == "multiply":
            mode = _mode_of_multiply(inner, instructions) if one.type == "f32" else None
            return _Marked("sum", mode, f"reduce {one.type} of multiply {inner.type}")
        return _Marked("sum", None, f"reduce {one.type} of {inner.opcode if inner else 'unknown'}")
    return None


_ORDER = ("default", "high", "highest")
_ALGORITHMS = {
    "dot_bf16_bf16_f32": "bf16",
    "dot_bf16_bf16_f32_x3": "bf16x3",
    "dot_bf16_bf16_f32_x6": "bf16x6",
}
_MOVES = ("bitcast", "broadcast", "copy", "reshape", "transpose")  # values pass unchanged


def _behind(
    name: str, instructions: Mapping[str, _Instruction], passing: Sequence[str]
) -> _Instruction | None:
    """The instruction that computes the value ``name``, looking through ``passing``."""
    one = instructions.get(name)
    while one is not None and one.opcode in passing and one.operands:
        one = instructions.get(one.operands[0])
    return one


def _mode_of_multiply(one: _Instruction, instructions: Mapping[str, _Instruction]) -> str | None:
    """``f32`` for a float32 multiplication of operands that are not rounded just before."""
    if one.type != "f32":
        return None
    for name in one.operands:
        wide = _behind(name, instructions, _MOVES)
        if wide is not None and wide.opcode == "reduce-precision":
            return None
        if wide is not None and wide.opcode == "convert":
            narrow = _behind(wide.operands[0], instructions, _MOVES)
            if narrow is not None and narrow.opcode == "convert" and narrow.type == "bf16":
                return None
    return "f32"


def _mode(
    record: Mapping[str, Any], marked: Sequence[_Marked]
) -> tuple[str | None, tuple[str, ...]]:
    """The mode of one matmul, None when the evidence does not decide it, and the evidence."""
    evidence = tuple(sorted({m.text for m in marked}))
    elements = list(record["elements"])
    if elements != ["f32", "f32"]:
        return (None if "f32" in elements else "native"), evidence
    # On the matrix unit, other marked operations around the product do not matter. Off it, the
    # products have to be seen summed, unless there is only one to each result.
    for kind in (
        ("product", "sum", "multiply")
        if record["contraction"] == 1
        else (
            "product",
            "sum",
        )
    ):
        modes = {m.mode for m in marked if m.kind == kind}
        if modes:
            return (modes.pop() if len(modes) == 1 else None), evidence
    return None, evidence
