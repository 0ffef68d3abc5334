"""Recurrent layers become loops: right numbers, and a file that does not grow with the sequence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tpu2edge.errors import ExportError, LoweringError
from tpu2edge.export.lower import Lowered, Loweree, lower_programs
from tpu2edge.export.program import TracedProgram, trace_module
from tpu2edge.export.rewrites import recurrent
from tpu2edge.flatbuffer import read_tflite, summarize
from tpu2edge.quantize.apply import quantize_file
from tpu2edge.runtime_check.devices.client import Session
from tpu2edge.types import Dim


class Recurrent(nn.Module):
    """A recurrent layer with its initial state as further inputs, all results as outputs."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor, *state: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if not state:
            y, last = self.layer(x)
        else:
            y, last = self.layer(x, state if len(state) == 2 else state[0])
        return (y, *last) if isinstance(last, tuple) else (y, last)


def convert(layer: nn.Module, args: tuple[Any, ...], path: Path) -> tuple[TracedProgram, Lowered]:
    torch.manual_seed(1)
    traced = trace_module(Recurrent(layer), args)
    return traced, lower_programs([Loweree(traced.program, traced.signature)], path)


def check(traced: TracedProgram, path: Path, tolerance: float = 2e-6) -> None:
    """The file's outputs equal eager's, twice over: no state is left in the file."""
    want = traced.eager(traced.example)
    with Session(path) as session:
        for got in session.run("serving_default", [traced.example, traced.example]):
            assert set(got) == set(want)
            for name, truth in want.items():
                np.testing.assert_allclose(got[name], truth, atol=tolerance, rtol=0, err_msg=name)


def operators(path: Path) -> int:
    return sum(len(graph.operators) for graph in read_tflite(path).subgraphs)


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


# Steps: one (no loop), a few, one loop, two loops with and without an overlapping last chunk.
CASES = {
    "lstm-1": (nn.LSTM(6, 10, 2, batch_first=True, bidirectional=True), [(2, 1, 6)]),
    "lstm-2": (nn.LSTM(6, 10, 2, batch_first=True, bidirectional=True), [(2, 2, 6)]),
    "lstm-32": (nn.LSTM(6, 10, 2, batch_first=True, bidirectional=True), [(2, 32, 6)]),
    "lstm-36": (nn.LSTM(6, 10, 2, bidirectional=True), [(36, 3, 6)]),
    "lstm-41": (nn.LSTM(6, 10, 2, bidirectional=True), [(41, 1, 6)]),
    "lstm-state": (nn.LSTM(6, 10), [(9, 3, 6), (1, 3, 10), (1, 3, 10)]),
    "lstm-unbatched": (nn.LSTM(6, 10), [(9, 6)]),
    "lstm-projected": (
        nn.LSTM(6, 10, 2, proj_size=4, bidirectional=True),
        [(40, 2, 6), (4, 2, 4), (4, 2, 10)],
    ),
    "lstm-projected-no-bias": (nn.LSTM(6, 10, proj_size=4, bias=False), [(9, 2, 6)]),
    "lstm-no-bias": (nn.LSTM(6, 10, bias=False), [(9, 2, 6)]),
    "lstm-dropout": (nn.LSTM(6, 10, 2, dropout=0.5), [(9, 2, 6)]),
    "gru": (nn.GRU(6, 10, 2, bidirectional=True), [(40, 3, 6), (4, 3, 10)]),
    "gru-batch-first": (nn.GRU(6, 10, batch_first=True), [(3, 17, 6)]),
    "gru-no-bias": (nn.GRU(6, 10, bias=False), [(40, 1, 6)]),
    "rnn-tanh": (nn.RNN(6, 10, 2, bidirectional=True), [(40, 3, 6)]),
    "rnn-relu": (nn.RNN(6, 10, nonlinearity="relu", batch_first=True), [(3, 9, 6), (1, 3, 10)]),
    "by-reference": (nn.LSTM(40, 520, batch_first=True), [(1, 5, 40)]),  # weights above 1 MiB
}


@pytest.mark.parametrize("case", CASES)
def test_a_recurrent_layer_gives_the_numbers_of_pytorch(case: str, tmp_path: Path) -> None:
    layer, shapes = CASES[case]
    traced, lowered = convert(layer, tuple(rand(*s) for s in shapes), tmp_path / "m.tflite")
    assert [note.code for note in lowered.notes] == ["rewrite-recurrent-loop"]
    check(traced, lowered.path)
    truth, eager = traced.oracle(traced.example), traced.eager(traced.example)
    for name, value in truth.items():  # the float64 reference runs torch's own operator
        assert value.dtype == np.float64
        np.testing.assert_allclose(value, eager[name], atol=1e-6)


def test_size_and_operators_do_not_grow_with_the_sequence(tmp_path: Path) -> None:
    sizes = set()
    for steps in (40, 100, 400):
        layer = nn.LSTM(6, 10, num_layers=2, batch_first=True, bidirectional=True)
        _, lowered = convert(layer, (rand(1, steps, 6),), tmp_path / "m.tflite")
        sizes.add((operators(lowered.path), lowered.path.stat().st_size // 1000))
    assert len(sizes) == 1, sizes
    assert next(iter(sizes))[0] < 200


def test_two_layers_that_share_weights_and_a_loop_beside_other_operators(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(4, 8, 3, padding=1)
            self.norm = nn.BatchNorm1d(8)
            self.layer = nn.LSTM(8, 8, batch_first=True)
            self.head = nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            h = torch.relu(self.norm(self.conv(x))).transpose(1, 2)
            once, state = self.layer(h)
            twice, (last, _) = self.layer(once + h, state)
            return self.head(twice), last[-1]

    traced = trace_module(Net(), (rand(2, 4, 50),))
    lowered = lower_programs([Loweree(traced.program, traced.signature)], tmp_path / "m.tflite")
    check(traced, lowered.path)


def test_recipes_reach_the_weights_inside_the_loop(tmp_path: Path) -> None:
    traced, lowered = convert(nn.LSTM(32, 64), (rand(40, 1, 32),), tmp_path / "m.tflite")
    small = tmp_path / "q.tflite"
    quantize_file(lowered.path, small, "dynamic_wi8_afp32")
    kinds = summarize(read_tflite(small)).weight_bytes_by_kind
    assert kinds["int8 per-channel axis 0"] == 4 * 64 * (32 + 64)
    check(traced, small, tolerance=0.02)


def test_torchs_own_shape_functions_are_back_after_tracing() -> None:
    op = torch.ops.aten.lstm.input
    before = dict(op.py_kernels)
    convertible = Recurrent(nn.LSTM(3, 4))
    trace_module(convertible, (rand(5, 1, 3),))
    assert dict(op.py_kernels) == before


@pytest.mark.parametrize("cell", ["lstm", "gru", "tanh", "relu"])
def test_the_operator_of_our_own_computes_what_torch_does(cell: str) -> None:
    layer: nn.RNNBase = {
        "lstm": nn.LSTM(3, 4),
        "gru": nn.GRU(3, 4),
        "tanh": nn.RNN(3, 4),
        "relu": nn.RNN(3, 4, nonlinearity="relu"),
    }[cell]
    op = next(
        op
        for op in recurrent.DECOMPOSITIONS
        if str(op)
        .removeprefix("aten.")
        .startswith(cell if cell in ("lstm", "gru") else f"rnn_{cell}")
    )
    x, h = rand(5, 2, 3), rand(1, 2, 4)
    state: Any = (h, h + 1) if cell == "lstm" else h
    with torch.no_grad():
        arguments = (x, state, list(layer._flat_weights), True, 1, 0.0, False, False, False)
        for got, want in zip(recurrent.DECOMPOSITIONS[op](*arguments), op(*arguments), strict=True):
            torch.testing.assert_close(got, want)


def test_packed_sequences_are_refused_in_words() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.LSTM(3, 4, batch_first=True)

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
            return self.layer(packed)[1][0]

    with pytest.raises(ExportError, match="packs sequences of different lengths") as caught:
        trace_module(Packed(), (rand(2, 5, 3), torch.tensor([5, 3])))
    assert caught.value.place is not None
    assert caught.value.place.module == "layer"


@pytest.mark.parametrize("axis", [0, 1])
def test_a_dynamic_recurrent_layer_is_refused_in_words(axis: int, tmp_path: Path) -> None:
    traced = trace_module(
        Recurrent(nn.GRU(3, 4)),
        (rand(5, 2, 3),),
        dynamic={"x": {axis: Dim(name="n", min=2, max=20)}},
    )
    with pytest.raises(LoweringError, match="needs a fixed batch and a fixed number of steps"):
        lower_programs([Loweree(traced.program, traced.signature)], tmp_path / "m.tflite")


def test_a_long_loop_over_a_cell_is_noted(tmp_path: Path) -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.LSTMCell(3, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            state: tuple[torch.Tensor, torch.Tensor] | None = None
            for row in x:
                state = self.cell(row, state)
            assert state is not None
            return state[0]

    traced = trace_module(Loop(), (rand(63, 1, 3),))
    lowered = lower_programs([Loweree(traced.program, traced.signature)], tmp_path / "m.tflite")
    (note,) = lowered.notes
    assert note.code == "unrolled-cell"
    assert "63 calls of the lstm_cell 'cell' stay unrolled" in note.text
    check(traced, lowered.path)
