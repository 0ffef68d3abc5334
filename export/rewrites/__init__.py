"""Rewrites of the traced program before it is lowered: one file a kind, one row of REWRITES each.

A rewrite gives the same numbers as what it replaces, in operators that LiteRT has. It can act at
three points, whichever is the simplest for its kind:

1. ``on_exported``: on the graph as torch.export gave it (operators as the user wrote them).
2. ``decompositions``: a function in plain torch for an operator, traced in the operator's place by
   the decomposition that takes place anyway, so it costs no time of its own. A function that gives
   NotImplemented leaves this call as it would have been.
3. ``on_decomposed``: on the graph in core operators, just before it is lowered.

A rewrite can bring operators of its own, and for each a function that emits StableHLO
(``lowerings``).

The graph is always a copy of our own. Graph functions change it in place and give the number of
places; a Note tells the user. Every row has a test with values from PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.export import ExportedProgram

from tpu2edge.export.rewrites import (
    broadcast_transpose,
    complex_numbers,
    convolution,
    counting,
    data_dependent,
    elementwise,
    embedding_bag,
    fold_batch_norm,
    grid_sample,
    high_rank,
    indexing,
    integers,
    matmul,
    nearest,
    pad,
    pooling,
    random,
    recurrent,
    resize,
    scattering,
    sorting,
    unpool,
    windows,
)
from tpu2edge.export.rewrites.splice import apply_table
from tpu2edge.types import Note

__all__ = [
    "REWRITES",
    "Rewrite",
    "add_decompositions",
    "add_lowerings",
    "on_decomposed",
    "on_exported",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rewrite:
    """One kind of change: what it does, why it is needed, and where it acts (see the module)."""

    name: str
    why: str
    on_exported: Callable[[ExportedProgram], int] | None = None
    decompositions: Mapping[Any, Callable[..., Any]] = field(default_factory=dict)
    on_decomposed: Callable[[ExportedProgram], int] | None = None
    lowerings: Mapping[Any, Callable[..., Any]] = field(default_factory=dict)


REWRITES: tuple[Rewrite, ...] = (
    Rewrite(
        name="data-dependent-size",
        why="a size that hangs on values has no place in a LiteRT graph; masks that are constants, "
        "or are written back to, do not need one",
        on_exported=data_dependent.apply,
    ),
    Rewrite(
        name="bincount-minlength",
        why="the length of a bincount hangs on the values; it is taken to be minlength, so larger "
        "numbers do not count",
        on_exported=data_dependent.bincounts,
        decompositions=data_dependent.DECOMPOSITIONS,
    ),
    Rewrite(
        name="fold-batch-norm",
        why="large constants are handed to the converter by reference and not folded there: a "
        "ResNet-50 would keep its 53 multiplications and run at half the speed",
        on_exported=fold_batch_norm.apply,
    ),
    Rewrite(
        name="recurrent-loop",
        why="LSTM, GRU and RNN are taken apart step by step: size and conversion time grow with "
        "the sequence (64 steps of a two-layer LSTM: 4,104 operators)",
        decompositions=recurrent.DECOMPOSITIONS,
        lowerings=recurrent.LOWERINGS,
    ),
    Rewrite(
        name="broadcast-transpose",
        why="the converter drops a transpose that follows a broadcast of an axis of size 1: wrong "
        "numbers in every decoder with one key-value head",
        on_decomposed=broadcast_transpose.apply,
    ),
    Rewrite(
        name="nearest-resize",
        why="RESIZE_NEAREST_NEIGHBOR takes other pixels than PyTorch where the ratio is not whole",
        on_exported=nearest.apply,
        decompositions=nearest.DECOMPOSITIONS,
    ),
    Rewrite(
        name="unpool",
        why="max unpooling has no lowering; it adds up in SCATTER_ND",
        decompositions=unpool.DECOMPOSITIONS,
    ),
    Rewrite(
        name="sort",
        why="STABLEHLO_SORT, which litert-torch gives for sort and for the values of top-k, has no "
        "kernel; TOPK_V2 has",
        decompositions=sorting.DECOMPOSITIONS,
    ),
    Rewrite(
        name="integer-arithmetic",
        why="integer powers, remainders and divisions are computed in float32, wrong above 2**24, "
        "and shifts have no lowering",
        decompositions=integers.DECOMPOSITIONS,
    ),
    Rewrite(
        name="index",
        why="reads by index become GATHER_ND with SELECT and BROADCAST_TO, which delegates leave to "
        "the CPU; GATHER does the same",
        on_exported=indexing.selected,
        decompositions=indexing.DECOMPOSITIONS,
    ),
    Rewrite(
        name="scatter",
        why="writes by index and by mask have no lowering, or one that the converter refuses",
        decompositions=scattering.DECOMPOSITIONS,
    ),
    Rewrite(
        name="counting",
        why="histograms, bins, grouped products and most cumulative operators have no lowering",
        decompositions=counting.DECOMPOSITIONS,
    ),
    Rewrite(
        name="random",
        why="a random operator would give the same numbers at every call, or ones that nothing can "
        "be compared with: refused",
        on_exported=random.refuse,
    ),
    Rewrite(
        name="drop-checks",
        why="a check of values has no form in LiteRT; the note says that the file does not check",
        on_exported=random.drop_checks,
    ),
    Rewrite(
        name="empty",
        why="memory that is allocated first and written later has no lowering",
        on_exported=random.fill_empty,
    ),
    Rewrite(
        name="complex-numbers",
        why="LiteRT has no complex numbers and two Fourier transforms on one thread; pairs of real "
        "tensors and products with matrices give the same",
        on_exported=complex_numbers.apply,
    ),
    Rewrite(
        name="convolution",
        why="transposed convolutions with padding, dilation or groups, and grouped ones in three "
        "dimensions, do not convert (some crash the converter)",
        decompositions=convolution.DECOMPOSITIONS,
    ),
    Rewrite(
        name="pad",
        why="PAD takes five dimensions and no small integers; reflected, repeated and circular pads "
        "become index arithmetic and GATHER_ND, or do not convert",
        decompositions=pad.DECOMPOSITIONS,
    ),
    Rewrite(
        name="windows",
        why="unfold pads tensors of more dimensions than PAD takes, fold scatters, REVERSE_V2 takes "
        "neighbouring axes only, BROADCAST_TO eight dimensions",
        on_exported=partial(apply_table, table=windows.SPLICES),
        decompositions=windows.DECOMPOSITIONS,
    ),
    Rewrite(
        name="pooling",
        why="three-dimensional, dilated, ragged and adaptive pooling become REDUCE_WINDOW or gather, "
        "or do not convert, and the indices of maxima come out wrong",
        on_exported=pooling.apply,
    ),
    Rewrite(
        name="resize",
        why="RESIZE_BILINEAR ignores a given scale factor (wrong numbers); antialiased and other "
        "interpolations have no lowering, or gather",
        on_exported=resize.apply,
    ),
    Rewrite(
        name="grid-sample",
        why="grid_sample has no lowering in three dimensions, and none that converts with reflection",
        decompositions=grid_sample.DECOMPOSITIONS,
    ),
    Rewrite(
        name="embedding-bag",
        why="embedding_bag has no lowering",
        on_exported=embedding_bag.apply,
    ),
    Rewrite(
        name="elementwise",
        why="a few elementwise operators have no lowering, or one that cannot be written to a file",
        decompositions=elementwise.DECOMPOSITIONS,
    ),
    Rewrite(
        name="matmul",
        why="BATCH_MATMUL takes no integers and at most five dimensions, to which the converter "
        "itself merges reshapes",
        decompositions=matmul.DECOMPOSITIONS,
        on_decomposed=matmul.keep_rank,
    ),
    Rewrite(
        name="high-rank",
        why="elementwise kernels take four to six dimensions; the others do not convert",
        on_decomposed=high_rank.apply,
    ),
)


def on_exported(program: ExportedProgram, notes: list[Note]) -> None:
    """Run the graph rewrites of the first kind, in the table's order."""
    for rewrite in REWRITES:
        if rewrite.on_exported is not None:
            _note(rewrite, rewrite.on_exported(program), notes)
    recurrent.note_unrolled(program, notes)


def add_decompositions(table: Any, applied: set[str]) -> Any:
    """``table`` (operator -> function) with the rewrites' functions before its own.

    The names of rewrites whose functions are used are added to ``applied``.
    """
    for rewrite in REWRITES:
        for op, function in rewrite.decompositions.items():
            table[op] = _Chained(function, op, table.get(op), rewrite.name, applied)
    return table


def add_lowerings(register: Callable[[Any], Callable[[Any], Any]]) -> None:
    """Give litert-torch's ``register`` (a decorator maker) the rewrites' own operators."""
    for rewrite in REWRITES:
        for op, function in rewrite.lowerings.items():
            register(op)(function)


def on_decomposed(program: ExportedProgram, notes: list[Note], applied: set[str]) -> None:
    """Run the graph rewrites of the third kind, and note those of the second kind."""
    noted = {note.code for note in notes}
    for rewrite in REWRITES:
        if rewrite.on_decomposed is not None:
            _note(rewrite, rewrite.on_decomposed(program), notes)
        elif rewrite.name in applied and f"rewrite-{rewrite.name}" not in noted:
            notes.append(Note(code=f"rewrite-{rewrite.name}", text=f"{rewrite.name}: applied"))


def _note(rewrite: Rewrite, count: int, notes: list[Note]) -> None:
    if count:
        places = "1 place" if count == 1 else f"{count} places"
        notes.append(Note(code=f"rewrite-{rewrite.name}", text=f"{rewrite.name}: {places}"))


_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


class _Chained:
    """A rewrite's function, and what would have been done where it does not apply."""

    def __init__(
        self, function: Callable[..., Any], op: Any, usual: Any, name: str, applied: set[str]
    ) -> None:
        self._function, self._op, self._name, self._applied = function, op, name, applied
        # While a program is decomposed, op.decompose() would lead back here.
        self._usual = usual or op.py_kernels.get(_COMPOSITE)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self._function(*args, **kwargs)
        if result is not NotImplemented:
            self._applied.add(self._name)
            return result
        if self._usual is not None:
            return self._usual(*args, **kwargs)
        if torch._C._dispatch_has_kernel_for_dispatch_key(self._op.name(), _COMPOSITE):
            return self._op._op_dk(_COMPOSITE, *args, **kwargs)
        return NotImplemented
