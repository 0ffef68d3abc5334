"""Recurrent layers (LSTM, GRU, RNN) as loops: the file does not grow with the sequence.

litert-torch takes nn.LSTM apart into every step of every gate: a 160-step layer becomes thousands
of operators and minutes of conversion. Here one layer and direction becomes one matrix product for
the inputs of all steps, and one operator of our own for the recurrence, which is lowered to
``stablehlo.while`` (LiteRT: WHILE).

LiteRT copies what a loop carries at every turn. A sequence longer than ``_ONE_LOOP`` is therefore
cut into about sqrt(T) chunks, an outer loop over chunks and an inner one over the steps of a chunk:
T * sqrt(T) instead of T * T copied numbers. The last chunk may overlap the one before; it starts at
the first step that is not done. Unrolling a few steps instead would be no better: XNNPACK packs the
weights once for each operator that uses them, which then no longer fit the cache.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn import functional

from tpu2edge.export import blame
from tpu2edge.types import Note

__all__ = ["DECOMPOSITIONS", "LOWERINGS", "note_unrolled", "quick_shapes"]

aten = torch.ops.aten

_ONE_LOOP = 32  # steps: up to here one loop is as fast as two (measured for 64 and 256 units)

_State = tuple[torch.Tensor, ...]

# ------------------------------------------------------------------ the operators of our own (torch)

_SCHEMA = "(Tensor x, Tensor[] state, Tensor w, Tensor? b, Tensor? p, str cell, bool reverse)"


def _recurrence(
    x: torch.Tensor,
    state: Sequence[torch.Tensor],
    w: torch.Tensor,
    b: torch.Tensor | None,
    p: torch.Tensor | None,
    cell: str,
    reverse: bool,
) -> list[torch.Tensor]:
    """The outputs of all steps, then the last state.

    Args:
        x: what the inputs add to the gates, (T, B, gates).
        state: the initial (h,) or (h, c), each (B, units).
        w: recurrent weights, (gates, units of h).
        b: recurrent bias, (gates,).
        p: projection of h, (projected, units).
        cell: "lstm", "gru", "tanh" or "relu".
        reverse: from the last step to the first.
    """
    steps: list[torch.Tensor] = []
    now: _State = tuple(state)
    for row in x.flip(0) if reverse else x:
        now = _step(row, now, w, b, p, cell)
        steps.append(now[0])
    y = torch.stack(steps)
    return [y.flip(0) if reverse else y, *(value.clone() for value in now)]


def _step(row: torch.Tensor, state: _State, w: torch.Tensor, b: Any, p: Any, cell: str) -> _State:
    gates = functional.linear(state[0], w, b)
    if cell == "lstm":
        i, f, g, o = (row + gates).chunk(4, -1)
        c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        return (h if p is None else h @ p.t()), c
    if cell == "gru":
        xr, xz, xn = row.chunk(3, -1)
        hr, hz, hn = gates.chunk(3, -1)
        n = torch.tanh(xn + torch.sigmoid(xr + hr) * hn)
        return (n + torch.sigmoid(xz + hz) * (state[0] - n),)
    return (getattr(torch, cell)(row + gates),)


_NAME = "tpu2edge::recurrence"


def _recurrence_fake(
    x: torch.Tensor, state: Sequence[torch.Tensor], *_args: Any
) -> list[torch.Tensor]:
    y = x.new_empty((x.shape[0], *state[0].shape))
    return [y, *(torch.empty_like(value) for value in state)]


if not hasattr(torch.ops.tpu2edge, "recurrence"):
    torch.library.define(_NAME, f"{_SCHEMA} -> Tensor[]")
    torch.library.impl(_NAME, "CompositeExplicitAutograd", _recurrence)
    torch.library.register_fake(_NAME, _recurrence_fake)


# --------------------------------------------------------------------------- decompositions (torch)


def _layers(
    given: torch.Tensor,
    states: Sequence[torch.Tensor],
    params: Sequence[torch.Tensor],
    cell: str,
    has_biases: bool,
    num_layers: int,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, ...]:
    """All layers and directions: the output, then each final state, stacked as torch does."""
    x = given.transpose(0, 1) if batch_first else given
    directions = 2 if bidirectional else 1
    per_cell = len(params) // (num_layers * directions)
    finals: list[Sequence[torch.Tensor]] = []
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            index = layer * directions + direction
            w_ih, w_hh, *rest = params[index * per_cell : (index + 1) * per_cell]
            b_ih, b_hh = (rest[0], rest[1]) if has_biases else (None, None)
            p = rest[-1] if len(rest) % 2 else None  # the projection comes last
            if cell != "gru" and b_ih is not None and b_hh is not None:
                b_ih, b_hh = b_ih + b_hh, None  # a GRU multiplies part of it by a gate
            y, *final = torch.ops.tpu2edge.recurrence(
                functional.linear(x, w_ih, b_ih),
                [state[index] for state in states],
                w_hh,
                b_hh,
                p,
                cell,
                direction == 1,
            )
            outputs.append(y)
            finals.append(final)
        x = torch.cat(outputs, -1) if directions == 2 else outputs[0]
    y = x.transpose(0, 1) if batch_first else x
    return (y, *(torch.stack(parts) for parts in zip(*finals, strict=True)))


def _lstm(
    given: torch.Tensor,
    hx: Sequence[torch.Tensor],
    params: Sequence[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> Any:
    if train and dropout:
        return NotImplemented
    return _layers(given, hx, params, "lstm", has_biases, num_layers, bidirectional, batch_first)


def _simple(cell: str) -> Callable[..., Any]:
    def layers(
        given: torch.Tensor,
        hx: torch.Tensor,
        params: Sequence[torch.Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> Any:
        if train and dropout:
            return NotImplemented
        return _layers(
            given, [hx], params, cell, has_biases, num_layers, bidirectional, batch_first
        )

    return layers


DECOMPOSITIONS: dict[Any, Any] = {
    aten.lstm.input: _lstm,
    aten.gru.input: _simple("gru"),
    aten.rnn_tanh.input: _simple("tanh"),
    aten.rnn_relu.input: _simple("relu"),
}

# ----------------------------------------------------------------------------------- cells by hand

_CELLS = (
    aten.lstm_cell.default,
    aten.gru_cell.default,
    aten.rnn_tanh_cell.default,
    aten.rnn_relu_cell.default,
)
_PER_CELL = 16  # LiteRT operators of one LSTMCell call
_MANY = 1000  # operators


def note_unrolled(program: ExportedProgram, notes: list[Note]) -> None:
    """Say so when a Python loop over an LSTMCell or the like makes the graph long."""
    calls = Counter(
        (node.target, blame.module_path(node))
        for node in program.graph.nodes
        if node.target in _CELLS
    )
    for (op, path), count in calls.items():
        if count * _PER_CELL > _MANY:
            name = str(op).removeprefix("aten.").removesuffix(".default")
            text = (
                f"{count} calls of the {name} '{path}' stay unrolled, about "
                f"{count * _PER_CELL} operators: nn.LSTM, nn.GRU or nn.RNN would become one loop"
            )
            notes.append(Note(code="unrolled-cell", text=text))


# ------------------------------------------------------------------------------------- tracing


@contextlib.contextmanager
def quick_shapes() -> Iterator[None]:
    """Let torch find the shapes of a recurrent layer's results without running every step.

    For the stand-ins that torch.export traces with, torch takes the layer apart into its steps only
    to throw all but the shapes away: 30 s for 640 steps. The operator itself stays in the graph.
    """
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    with contextlib.ExitStack() as stack:
        for op in DECOMPOSITIONS:
            usual = op.py_kernels.get(key)
            if usual is not None:
                stack.enter_context(mock.patch.dict(op.py_kernels, {key: _Quick(usual)}))
        yield


class _Quick:
    """torch's own function, but the shapes alone for fake tensors that nobody records."""

    def __init__(self, usual: Callable[..., Any]) -> None:
        self._usual = usual

    def __call__(
        self, given: Any, hx: Any, params: Any, *rest: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, ...]:
        states = (hx,) if isinstance(hx, torch.Tensor) else tuple(hx)
        fake = isinstance(given, FakeTensor) and get_proxy_mode() is None
        if not fake or len(rest) != 6 or kwargs:
            result: tuple[torch.Tensor, ...] = self._usual(given, hx, params, *rest, **kwargs)
            return result
        _, _, _, _, bidirectional, _ = rest
        width = states[0].shape[-1] * (2 if bidirectional else 1)
        y = given.new_empty((*given.shape[:-1], width))
        return (y, *(torch.empty_like(state) for state in states))


# ---------------------------------------------------------------------------- lowering (StableHLO)


def _lower(
    lctx: Any,
    x: Any,
    state: Sequence[Any],
    w: Any,
    b: Any,
    p: Any,
    cell: str,
    reverse: bool,
) -> list[Any]:
    if not all(value.type.has_static_shape for value in (x, *state)):
        raise ValueError("a recurrent layer needs a fixed batch and a fixed number of steps")
    emit = _Emitter(w, b, p, cell, reverse)
    steps, batch, _ = x.type.shape
    y = emit.slice(x, [0, 0, 0], [steps, batch, state[0].type.shape[1]])  # overwritten step by step
    if steps == 1:
        now = emit.step(emit.reshape(x, x.type.shape[1:]), tuple(state))
        return [emit.reshape(now[0], [1, *now[0].type.shape]), *now]
    if steps <= _ONE_LOOP:
        return emit.steps(x, y, emit.number(0), tuple(state))
    return emit.chunks(x, y, tuple(state), math.isqrt(steps - 1) + 1)


class _Emitter:
    """Writes StableHLO operations at the current insertion point."""

    def __init__(self, w: Any, b: Any, p: Any, cell: str, reverse: bool) -> None:
        from litert_converter.mlir import ir
        from litert_converter.mlir.dialects import stablehlo

        self.ir, self.hlo = ir, stablehlo
        self.w, self.b, self.p = w, b, p
        self.cell, self.reverse = cell, reverse
        self.i32 = ir.RankedTensorType.get([], ir.IntegerType.get_signless(32))

    # ------------------------------------------------------------------------------- the loops

    def chunks(self, x: Any, y: Any, state: tuple[Any, ...], size: int) -> list[Any]:
        """The steps in chunks of ``size``; the last one overlaps if ``size`` does not divide."""
        hlo = self.hlo
        total, *rest = x.type.shape
        last = total - size  # where the last chunk starts

        def body(done: Any, x: Any, y: Any, *state: Any) -> list[Any]:
            start = hlo.minimum(done, self.number(last))
            first = hlo.subtract(done, start)
            if self.reverse:
                start = hlo.subtract(self.number(last), start)
            part = self.window(x, start, [size, *rest])
            out = self.window(y, start, [size, *y.type.shape[1:]])
            out, *now = self.steps(part, out, first, state)
            return [hlo.add(done, self.number(size)), self.update(y, out, start), *now]

        return self.loop(total, self.number(0), x, [y, *state], body)

    def steps(self, x: Any, y: Any, first: Any, state: tuple[Any, ...]) -> list[Any]:
        """All steps of ``x`` from the ``first`` on; the outputs go into ``y``."""
        total, *rest = x.type.shape

        def body(done: Any, x: Any, y: Any, *state: Any) -> list[Any]:
            where = self.hlo.subtract(self.number(total - 1), done) if self.reverse else done
            now = self.step(self.reshape(self.window(x, where, [1, *rest]), rest), state)
            out = self.reshape(now[0], [1, *now[0].type.shape])
            following = self.hlo.add(done, self.number(1))
            return [following, self.update(y, out, where), *now]

        return self.loop(total, first, x, [y, *state], body)

    def loop(
        self, end: int, start: Any, x: Any, carried: list[Any], body: Callable[..., list[Any]]
    ) -> list[Any]:
        """``while start < end: start, *carried = body(start, x, *carried)``; gives ``carried``.

        The body gets ``x`` and the weights as arguments of its own that stay what they are:
        litert-torch clones functions, and a region that looks outside would not survive that. The
        converter makes them values from outside again.
        """
        ir, hlo = self.ir, self.hlo
        own = (self.w, self.b, self.p)
        fixed = [x, *(value for value in own if value is not None)]
        initial = [start, *fixed, *carried]
        kinds = [value.type for value in initial]
        location = ir.Location.current
        loop = hlo.WhileOp(kinds, initial)
        condition, inner = (
            region.blocks.append(*kinds, arg_locs=[location] * len(kinds))
            for region in loop.regions
        )
        with ir.InsertionPoint(condition):
            less = hlo.ComparisonDirectionAttr.get("LT")
            done = condition.arguments[0]
            hlo.return_([hlo.compare(done, self.number(end), comparison_direction=less)])
        with ir.InsertionPoint(inner):
            done, x, *rest = inner.arguments
            given = iter(rest)
            self.w, self.b, self.p = (value if value is None else next(given) for value in own)
            following, *now = body(done, x, *given)
            kept = [x, *(value for value in (self.w, self.b, self.p) if value is not None)]
            hlo.return_([following, *kept, *now])
        self.w, self.b, self.p = own
        return list(loop.results)[len(initial) - len(carried) :]

    # -------------------------------------------------------------------------------- one step

    def step(self, row: Any, state: tuple[Any, ...]) -> tuple[Any, ...]:
        """As ``_step`` above."""
        hlo = self.hlo
        gates = self.product(state[0], self.w)
        if self.b is not None:
            gates = hlo.add(gates, self.spread(self.b, gates))
        if self.cell == "lstm":
            i, f, g, o = self.split(hlo.add(row, gates), 4)
            kept = hlo.multiply(hlo.logistic(f), state[1])
            c = hlo.add(kept, hlo.multiply(hlo.logistic(i), hlo.tanh(g)))
            h = hlo.multiply(hlo.logistic(o), hlo.tanh(c))
            return (h if self.p is None else self.product(h, self.p)), c
        if self.cell == "gru":
            xr, xz, xn = self.split(row, 3)
            hr, hz, hn = self.split(gates, 3)
            reset = hlo.logistic(hlo.add(xr, hr))
            n = hlo.tanh(hlo.add(xn, hlo.multiply(reset, hn)))
            update = hlo.logistic(hlo.add(xz, hz))
            return (hlo.add(n, hlo.multiply(update, hlo.subtract(state[0], n))),)
        total = hlo.add(row, gates)
        if self.cell == "tanh":
            return (hlo.tanh(total),)
        return (hlo.maximum(total, self.zeros(total.type)),)

    # ------------------------------------------------------------------------------ operations

    def number(self, value: int) -> Any:
        """A scalar int32 constant."""
        ir = self.ir
        attribute = ir.IntegerAttr.get(self.i32.element_type, value)
        return self.hlo.constant(ir.DenseElementsAttr.get_splat(self.i32, attribute))

    def zeros(self, kind: Any) -> Any:
        ir = self.ir
        zero = ir.FloatAttr.get(kind.element_type, 0.0)
        return self.hlo.constant(ir.DenseElementsAttr.get_splat(kind, zero))

    def product(self, a: Any, b: Any) -> Any:
        """``a @ b.T``"""
        ir, hlo = self.ir, self.hlo
        kind = ir.RankedTensorType.get([a.type.shape[0], b.type.shape[0]], a.type.element_type)
        numbers = hlo.DotDimensionNumbers.get(
            lhs_batching_dimensions=[],
            rhs_batching_dimensions=[],
            lhs_contracting_dimensions=[1],
            rhs_contracting_dimensions=[1],
        )
        return hlo.dot_general(kind, a, b, numbers)

    def spread(self, vector: Any, like: Any) -> Any:
        return self.hlo.broadcast_in_dim(
            like.type, vector, self.ir.DenseI64ArrayAttr.get([len(like.type.shape) - 1])
        )

    def reshape(self, value: Any, shape: Sequence[int]) -> Any:
        kind = self.ir.RankedTensorType.get(list(shape), value.type.element_type)
        return self.hlo.reshape(kind, value)

    def slice(self, value: Any, start: Sequence[int], end: Sequence[int]) -> Any:
        make = self.ir.DenseI64ArrayAttr.get
        return self.hlo.slice(value, make(list(start)), make(list(end)), make([1] * len(start)))

    def split(self, value: Any, count: int) -> list[Any]:
        batch, width = value.type.shape
        size = width // count
        return [self.slice(value, [0, k * size], [batch, (k + 1) * size]) for k in range(count)]

    def window(self, value: Any, start: Any, sizes: Sequence[int]) -> Any:
        """``sizes`` numbers of ``value``, from ``start`` on along the first dimension."""
        starts = [start, *[self.number(0)] * (len(sizes) - 1)]
        return self.hlo.dynamic_slice(value, starts, self.ir.DenseI64ArrayAttr.get(list(sizes)))

    def update(self, value: Any, part: Any, start: Any) -> Any:
        starts = [start, *[self.number(0)] * (len(value.type.shape) - 1)]
        return self.hlo.dynamic_update_slice(value, part, starts)


LOWERINGS = {torch.ops.tpu2edge.recurrence.default: _lower}
