"""Second moments of what linear layers read, by which GPTQ and OSCAR weigh the errors of weights.

An error e of a row of weights costs eᵀ E[x xᵀ] e at the layer's output. GPTQ takes all of E[x xᵀ],
its Hessian: as wide as the layer, squared. OSCAR takes the diagonal, E[x²]. Both are collected with
the ranges (calibrate.py), and only for the layers that a recipe's rules name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tpu2edge.errors import OptionError
from tpu2edge.flatbuffer import TfliteFile
from tpu2edge.quantize.recipes import Recipe
from tpu2edge.quantize.rules import in_order
from tpu2edge.quantize.scopes import OpScope, op_scopes
from tpu2edge.types import Array

__all__ = ["Moments", "MomentsWanted", "moments_wanted"]

# ai-edge-quantizer has these algorithms for no other op (algorithm_manager, 0.10).
_LINEAR = "FULLY_CONNECTED"

# Where the system does not say how much memory is free.
_USUAL_FREE = 8 << 30


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Moments:
    """By the name of the tensor that a layer reads, over all samples.

    ``hessians`` hold 2 Σ x xᵀ / n, float32 of shape (width, width); ``squares`` Σ mean(x²) / n,
    float64 of shape (width,), n being the samples as ai-edge-quantizer counts them: the sum of the
    first dimensions (gptq.calibrate, oscar.calibrate).
    """

    hessians: Mapping[str, Array] = field(default_factory=dict)
    squares: Mapping[str, Array] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """Of the Hessians; the squares are small."""
        return sum(hessian.nbytes for hessian in self.hessians.values())

    def __bool__(self) -> bool:
        return bool(self.hessians or self.squares)


@dataclass(frozen=True, kw_only=True, slots=True)
class MomentsWanted:
    """Which tensors, by subgraph and index, and the width of the layers that read them."""

    hessians: Mapping[tuple[int, int], int] = field(default_factory=dict)
    squares: Mapping[tuple[int, int], int] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """What the Hessians take up in float32."""
        return sum(4 * width * width for width in self.hessians.values())

    def refuse_too_large(self) -> None:
        """OptionError if the Hessians would take more than a quarter of the memory that is free.

        They are in memory once while they are counted, then in temporary files, which may be memory
        too: once for all, and once for each quantizer at work.
        """
        free = _free_bytes()
        if self.size_bytes <= free // 4:
            return
        widths = sorted(self.hessians.values(), reverse=True)
        raise OptionError(
            f"GPTQ needs {_gb(self.size_bytes)} for the Hessians of {len(widths)} inputs of layers, up "
            f"to {widths[0]} wide: more than a quarter of the {_gb(free)} of memory that are free",
            do="use OCTAV or OSCAR (-octav, -oscar) in its place, or leave the widest layers to other "
            "rules or float (--keep-float)",
        )


def moments_wanted(file: TfliteFile, recipes: Iterable[Recipe]) -> MomentsWanted:
    """What the recipes' rules for GPTQ and OSCAR need to know of the activations of ``file``."""
    hessians: dict[tuple[int, int], int] = {}
    squares: dict[tuple[int, int], int] = {}
    ordered = [in_order(recipe.rules) for recipe in recipes if recipe.needs_moments]
    if not ordered:
        return MomentsWanted()
    for op in op_scopes(file):
        if op.op != _LINEAR or op.weight is None:
            continue
        graph = file.subgraphs[op.subgraph]
        read = graph.operators[op.index].inputs[0]
        tensor, shape = graph.tensors[read], graph.tensors[op.weight].shape
        if tensor.is_constant or tensor.dtype != "float32" or len(shape) != 2:
            continue
        algorithms = {key for rules in ordered for key in _algorithms(rules, op)}
        for key, found in (("GPTQ", hessians), ("OSCAR", squares)):
            if key in algorithms:
                found.setdefault((graph.index, read), int(shape[1]))
    return MomentsWanted(hessians=hessians, squares=squares)


def _algorithms(rules: Sequence[Mapping[str, object]], op: OpScope) -> set[str]:
    """Those that an op may come to: by the last rule that fits it, or where that fails an earlier."""
    found: set[str] = set()
    for rule in rules:
        if rule["operation"] in ("*", op.op) and re.search(str(rule["regex"]), op.scope):
            if rule["algorithm_key"] == "no_quantize":
                found.clear()
            else:
                found.add(str(rule["algorithm_key"]))
    return found


def _free_bytes() -> int:
    try:
        text = Path("/proc/meminfo").read_text()
        return 1024 * next(int(x.split()[1]) for x in text.splitlines() if "MemAvailable" in x)
    except (OSError, StopIteration):
        return _USUAL_FREE


def _gb(count: int) -> str:
    return f"{math.ceil(count / 1e7) / 100:g} GB"
