"""Buffers that forward writes to are carried from call to call as inputs and outputs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tpu2edge.errors import ConversionError, ExportError
from tpu2edge.export.lower import Loweree, lower_programs
from tpu2edge.export.program import TracedProgram, trace_module
from tpu2edge.runtime_check.devices.client import Session

CALLS = 4


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def chain(module: nn.Module, calls: list[tuple[torch.Tensor, ...]], path: Path) -> TracedProgram:
    """Export, then run the file as an app does; every output equals the eager module's own."""
    before = {name: value.clone() for name, value in module.state_dict().items()}
    traced = trace_module(module, calls[0])
    lower_programs([Loweree(traced.program, traced.signature)], path)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name
    inputs = [spec.name for spec in traced.signature.inputs if spec.name not in traced.state]
    carried = {name: traced.example[name] for name in traced.state}
    eager = copy.deepcopy(module).eval()
    with Session(path) as session, torch.no_grad():
        for call in calls:
            given = dict(zip(inputs, (np.asarray(t) for t in call), strict=True))
            sample = {**given, **carried}
            sample = {s.name: sample[s.name].astype(s.dtype) for s in traced.signature.inputs}
            (got,) = session.run("serving_default", [sample])
            result = eager(*call)
            wanted = result if isinstance(result, tuple) else (result,)
            outputs = [s.name for s in traced.signature.outputs if s.name not in traced.state]
            for name, truth in zip(outputs, wanted, strict=True):
                np.testing.assert_allclose(got[name], truth, atol=2e-6, err_msg=name)
            for reference in (traced.eager(sample), traced.oracle(sample)):
                assert set(reference) == set(got)
                for name, array in reference.items():
                    np.testing.assert_allclose(got[name], array, atol=2e-6, err_msg=name)
            carried = {name: got[name] for name in traced.state}
    for name, path_in_module in traced.state.items():
        owner, _, key = path_in_module.rpartition(".")
        value = getattr(eager.get_submodule(owner), key)
        np.testing.assert_allclose(carried[name], value, atol=2e-6, err_msg=name)
    return traced


class Counter(nn.Module):
    count: torch.Tensor

    def __init__(self, kind: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.register_buffer("count", torch.full((1,), 2, dtype=kind))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x + self.count


class Ring(nn.Module):
    """The last four inputs, by assignment of a new tensor; the buffer is not in the checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(4, 3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache = torch.cat([self.cache[1:], x])
        return self.cache.mean(0)


class StreamingConv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 5, 3)
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("past", torch.zeros(1, 2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cat([self.past, x], -1)
        self.past.copy_(x[..., -2:])
        return torch.relu_(self.norm(self.conv(x)))


class Attention(nn.Module):
    """One token at a time, with a cache of fixed length and a position."""

    def __init__(self, width: int = 8, length: int = 6) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.register_buffer("keys", torch.zeros(length, width))
        self.register_buffer("values", torch.zeros(length, width))
        self.register_buffer("position", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        self.keys.index_copy_(0, self.position, k)
        self.values.index_copy_(0, self.position, v)
        past = torch.arange(self.keys.shape[0]) <= self.position
        scores = (q @ self.keys.t()).masked_fill(~past, float("-inf"))
        self.position += 1
        return scores.softmax(-1) @ self.values


class Slots(nn.Module):
    """A cache that is written by position as an input, through a slice and through an index."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(2, 6, 3))

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        self.cache[0, :2] = x[:2]
        self.cache[1].index_copy_(0, at, x[:1])
        return self.cache.sum(1)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Counter(), Counter(torch.int64)])
        self.head = nn.Sequential(nn.Linear(3, 3), Ring())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return self.head(x)


class Shared(nn.Module):
    """One buffer in two modules: one state."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Counter(), Counter()
        self.b.count = self.a.count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) * self.b(x)


class TiedState(nn.Module):
    """The buffer is read as a weight in two places, and written in between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3, bias=False), nn.Module()
        self.register_buffer("table", rand(3, 3))
        self.last.register_buffer("table", self.table)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x) @ self.table
        self.table.mul_(0.5).add_(y.mean())
        return y + x @ self.last.table  # type: ignore[operator]


class Attributes(nn.Module):
    """Plain tensor attributes are carried like buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.sum, self.last = torch.zeros(3), torch.zeros(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.sum += x
        y = self.sum - self.last
        self.last = x * 2
        return y


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(3, 4)
        self.register_buffer("h", torch.zeros(1, 1, 4))
        self.register_buffer("c", torch.zeros(1, 1, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, (h, c) = self.layer(x, (self.h, self.c))
        self.h.copy_(h)
        self.c.copy_(c)
        return y


def tokens(*shape: int) -> list[tuple[torch.Tensor, ...]]:
    return [(rand(*shape, seed=seed),) for seed in range(CALLS)]


CASES: dict[str, tuple[Callable[[], nn.Module], list[Any], set[str]]] = {
    "counter": (Counter, tokens(1, 3), {"count"}),
    "integer-counter": (lambda: Counter(torch.int64), tokens(1, 3), {"count"}),
    "ring": (Ring, tokens(1, 3), {"cache"}),
    "streaming-conv": (StreamingConv, tokens(1, 2, 5), {"past"}),
    "attention": (Attention, tokens(1, 8), {"keys", "values", "position"}),
    "slots": (
        Slots,
        [(rand(2, 3, seed=i), torch.tensor([i])) for i in range(CALLS)],
        {"cache"},
    ),
    "nested": (Nested, tokens(1, 3), {"parts.0.count", "parts.1.count", "head.1.cache"}),
    "shared": (Shared, tokens(1, 3), {"a.count"}),
    "tied": (TiedState, tokens(2, 3), {"table"}),
    "attributes": (Attributes, tokens(3), {"sum", "last"}),
    "recurrent": (Recurrent, tokens(5, 1, 3), {"h", "c"}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_chain_of_calls_equals_the_eager_module(case: str, tmp_path: Path) -> None:
    make, calls, paths = CASES[case]
    torch.manual_seed(0)
    traced = chain(make().eval(), calls, tmp_path / "m.tflite")
    assert traced.state == {f"state.{path}": path for path in paths}
    inputs = [spec for spec in traced.signature.inputs if spec.name in traced.state]
    outputs = [spec for spec in traced.signature.outputs if spec.name in traced.state]
    assert inputs == outputs
    assert any(note.code == "state" for note in traced.notes)


def test_the_names_of_states_never_meet_the_models_own() -> None:
    class Clash(Counter):
        def forward(self, x: torch.Tensor, state: dict[str, torch.Tensor]) -> dict[str, Any]:  # type: ignore[override]
            return {"state2": {"count": super().forward(x)}, "y": state["count"] * 2}

    traced = trace_module(Clash(), (torch.ones(3), {"count": torch.ones(1)}))
    assert [s.name for s in traced.signature.inputs] == ["x", "state.count", "state3.count"]
    assert [s.name for s in traced.signature.outputs] == ["state2.count", "y", "state3.count"]
    assert traced.state == {"state3.count": "count"}


def test_what_is_written_but_never_read_is_left_out_with_a_note(tmp_path: Path) -> None:
    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
            self.register_buffer("seen", torch.zeros(3))
            self.register_buffer("total", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.seen.copy_(x)
            self.total += x
            return x * 2

    traced = chain(Watched(), tokens(3), tmp_path / "m.tflite")
    # The sum over the calls is kept: it says something that the app cannot know otherwise.
    assert traced.state == {"state.total": "total"}
    (note,) = [note for note in traced.notes if note.code == "state-left-out"]
    assert note.text.startswith("'calls', 'seen': written by forward, but nothing reads it")


def test_a_batch_norm_in_evaluation_mode_and_caches_that_are_made_anew_are_no_state() -> None:
    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.table = torch.zeros(3, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.table = torch.outer(torch.arange(x.shape[0]), torch.ones(4)).cos()
            return self.norm(x).relu_() * self.table

    traced = trace_module(Rotary(), (rand(3, 4),))
    assert traced.state == {}
    assert [spec.name for spec in traced.signature.inputs] == ["x"]
    assert len(traced.eager(traced.example)) == 1


def test_an_input_written_in_place_is_right_and_the_callers_array_stays(tmp_path: Path) -> None:
    class InPlace(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x[:, 0] = 7.0
            x.mul_(2)
            return x + y, x

    example = rand(2, 3)
    kept = example.clone()
    traced = trace_module(InPlace(), (example, rand(2, 3, seed=1)))
    lower_programs([Loweree(traced.program, traced.signature)], tmp_path / "m.tflite")
    assert torch.equal(example, kept)
    sample = dict(traced.example)
    with Session(tmp_path / "m.tflite") as session:
        (got,) = session.run("serving_default", [sample])
    for name, truth in traced.eager(sample).items():
        np.testing.assert_allclose(got[name], truth, atol=1e-6)
    np.testing.assert_array_equal(sample["x"], kept)
    (note,) = [note for note in traced.notes if note.code == "input-written"]
    assert "input 'x'" in note.text


# ---------------------------------------------------------------------------------------- refusals


def test_a_parameter_that_is_written_is_refused() -> None:
    class Learns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.weight.add_(x)
            return x * self.weight

    with pytest.raises(ConversionError, match=r"own weights or state \('weight'\)") as caught:
        trace_module(Learns(), (torch.ones(3),))
    assert caught.value.place is not None
    assert caught.value.place.code == "self.weight.add_(x)"


def test_a_state_that_grows_is_refused() -> None:
    class Grows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.zeros(1, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.cache = torch.cat([self.cache, x])
            return self.cache.sum(0)

    with pytest.raises(ExportError, match=r"'cache' has the shape \[1, 3\] before .* \[2, 3\]"):
        trace_module(Grows(), (torch.ones(1, 3),))


def test_a_shared_buffer_that_is_replaced_in_one_module_is_refused() -> None:
    class Parts(Shared):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.a.count = self.a.count + 1
            return x * self.a.count + self.b.count

    with pytest.raises(ExportError, match="'a.count' is one buffer in several modules before"):
        trace_module(Parts(), (torch.ones(1, 3),))
