"""The float64 oracle is the same program in double: compared with module.double() on real nets."""

from __future__ import annotations

import copy
import hashlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tpu2edge.export.program import TracedProgram, trace_module


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.GELU(), nn.MaxPool2d(2)
        )
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3))).softmax(-1)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 5, num_layers=2, batch_first=True, bidirectional=True)

    def forward(self, x):
        out, (h, _) = self.lstm(x)
        return out, h


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).view(2, 7, 3, 4, 4).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(2, 7, 16))


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, ids):
        return self.norm(self.embed(ids)) @ self.embed.weight.T


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x):
        return self.layer(x)


class InPlace(nn.Module):
    def forward(self, x):
        y = x * 3
        y[:, 0] = 0.375  # torch.export holds this one as a float32 constant: an exact number
        y[:, 1:].add_(0.1).mul_(x[:, 1:])
        z = torch.zeros_like(x)
        z[:, 2] += y.sum(1)
        return y.relu_() + z


class Factories(nn.Module):
    def forward(self, x):
        n = x.shape[1]
        ramp = torch.arange(0, 1, 1 / n) + torch.linspace(0, 1 / 3, n)
        full = torch.full((n,), 0.1) + torch.ones(n) / 3 + torch.eye(n)[0] + torch.tensor(0.25)
        frequencies = 1.0 / 10000 ** (torch.arange(0, n) / n)
        steps = torch.arange(n, dtype=torch.float32) / 7
        return x * ramp + full * frequencies + steps


class FromIntegers(nn.Module):
    def forward(self, ids):
        return ids / 3, (ids * 0.1).sin(), ids.float() / 7, torch.sqrt(ids), ids.sum() / 9.0


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.full((3,), 0.1))

    def forward(self, x):
        before = self.total * 1
        self.total.add_(x / 3)
        self.total.mul_(0.7)
        return before + self.total


NETS = {
    "conv": (Conv, lambda: torch.randn(2, 3, 8, 8)),
    "lstm": (Recurrent, lambda: torch.randn(2, 4, 6)),
    "attention": (Attention, lambda: torch.randn(2, 7, 16)),
    "embedding": (Tokens, lambda: torch.randint(0, 11, (2, 5))),
    "encoder": (Encoder, lambda: torch.randn(2, 5, 8)),
    "in place": (InPlace, lambda: torch.randn(2, 4)),
}


def traced_pair(make, draw) -> tuple[nn.Module, torch.Tensor, TracedProgram]:
    torch.manual_seed(0)
    module, x = make().eval(), draw()
    for child in module.modules():
        if isinstance(child, nn.BatchNorm2d):
            child.running_mean.normal_()
            child.running_var.uniform_(0.5, 2)
    return module, x, trace_module(module, (x,))


def wide(x: torch.Tensor) -> torch.Tensor:
    return x.double() if x.is_floating_point() else x


def flat(result) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    return [tensor for item in result for tensor in flat(item)]


def as_edge(traced: TracedProgram, x: torch.Tensor):
    (spec,) = traced.signature.inputs
    return {spec.name: x.numpy().astype(spec.dtype)}


@pytest.mark.parametrize("name", NETS)
def test_the_oracle_is_the_module_in_double(name):
    module, x, traced = traced_pair(*NETS[name])
    with torch.no_grad():
        wanted = flat(copy.deepcopy(module).double()(wide(x)))
    got = list(traced.oracle(as_edge(traced, x)).values())
    eager = list(traced.eager(as_edge(traced, x)).values())
    assert len(got) == len(wanted)
    for value, near, true in zip(got, eager, wanted, strict=True):
        assert value.dtype == "float64"
        assert near.dtype == "float32"
        torch.testing.assert_close(torch.from_numpy(value), true, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(torch.from_numpy(near).double(), true, rtol=1e-4, atol=1e-5)
    assert traced.oracle_exceptions == ()


class ExplicitFloat(nn.Module):
    """module.double() stays in float32 inside, or fails; the oracle does not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x):
        y = self.first(x).float()
        y = y.to(torch.float32) * y.type_as(torch.zeros(1))
        y = F.softmax(y, -1, dtype=torch.float32)
        return self.second(y)


def test_a_float_that_forward_asks_for_is_a_double_in_the_oracle():
    module, x, traced = traced_pair(ExplicitFloat, lambda: torch.randn(2, 4))
    d = copy.deepcopy(module).double()
    with torch.no_grad():
        y = d.first(x.double())
        true = d.second(F.softmax(y * y, -1))
    (got,) = traced.oracle(as_edge(traced, x)).values()
    torch.testing.assert_close(torch.from_numpy(got), true, rtol=1e-13, atol=1e-13)


def in_double(make, x: torch.Tensor) -> list[torch.Tensor]:
    """The module itself with float64 as torch's default and for what is named float32."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return flat(make(x))
    finally:
        torch.set_default_dtype(default)


def test_factories_are_made_in_double():
    _, x, traced = traced_pair(Factories, lambda: torch.randn(2, 6))

    def true(x):
        n = 6
        ramp = torch.arange(0, 1, 1 / n) + torch.linspace(0, 1 / 3, n)
        full = torch.full((n,), 0.1) + torch.ones(n) / 3 + torch.eye(n)[0] + 0.25
        return x * ramp + full / 10000 ** (torch.arange(0, n) / n) + torch.arange(n) / 7

    (wanted,) = in_double(true, x.double())
    (got,) = traced.oracle(as_edge(traced, x)).values()
    torch.testing.assert_close(torch.from_numpy(got), wanted, rtol=1e-14, atol=1e-14)


def test_integers_become_doubles_where_they_become_floats():
    _, x, traced = traced_pair(FromIntegers, lambda: torch.tensor([1, 2, 5, 10]))
    wanted = in_double(lambda i: [i / 3, (i * 0.1).sin(), i / 7, i.sqrt(), i.sum() / 9], x)
    got = list(traced.oracle(as_edge(traced, x)).values())
    for value, true in zip(got, wanted, strict=True):
        torch.testing.assert_close(torch.from_numpy(value), true, rtol=1e-15, atol=0)
    assert torch.get_default_dtype() is torch.float32


def test_a_buffer_is_read_as_it_was_written_and_starts_anew_in_each_run():
    _, x, traced = traced_pair(Stateful, lambda: torch.randn(3))
    start = torch.full((3,), 0.1).double()  # the float32 number 0.1, as the module holds it
    wanted = start + (start + x.double() / 3) * 0.7
    for _ in range(2):
        (got,) = traced.oracle(as_edge(traced, x)).values()
        torch.testing.assert_close(torch.from_numpy(got), wanted, rtol=1e-14, atol=0)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))

    def forward(self, x):
        def yes(x):
            return torch.sin(x @ self.weight) + torch.linspace(0, 1 / 3, 3)

        def no(x):
            return x.to(torch.float32) / 3

        return torch.cond(x.sum() > 0, yes, no, (x,))


@pytest.mark.parametrize("sign", [1, -1])
def test_both_branches_of_cond_are_computed_in_double(sign):
    module, x, traced = traced_pair(Branching, lambda: torch.rand(3, 3) * sign)
    true = x.double() / 3
    if sign > 0:
        ramp = torch.linspace(0, 1 / 3, 3, dtype=torch.float64)
        true = torch.sin(x.double() @ module.weight.detach().double()) + ramp
    (got,) = traced.oracle(as_edge(traced, x)).values()
    torch.testing.assert_close(torch.from_numpy(got), true, rtol=1e-13, atol=1e-13)


def test_integer_and_boolean_outputs_stay_what_they_are():
    class Mixed(nn.Module):
        def forward(self, x):
            return x.argmax(-1), x > 0, x.round().int(), x / 3

    _, x, traced = traced_pair(Mixed, lambda: torch.randn(2, 4))
    got = list(traced.oracle(as_edge(traced, x)).values())
    assert [str(value.dtype) for value in got] == ["int64", "bool", "int32", "float64"]


def test_an_operator_bound_to_the_width_of_its_type_is_computed_as_traced_and_named():
    class Bits(nn.Module):
        def forward(self, x):
            return x.view(torch.int32), x / 3

    _, x, traced = traced_pair(Bits, lambda: torch.randn(2, 4))
    bits, third = traced.oracle(as_edge(traced, x)).values()
    assert bits.tolist() == x.view(torch.int32).tolist()
    assert third.dtype == "float64"
    assert len(traced.oracle_exceptions) == 1
    assert "view" in traced.oracle_exceptions[0]


def test_the_oracle_changes_neither_the_program_nor_its_inputs():
    module, x, traced = traced_pair(Stateful, lambda: torch.randn(3))

    def state() -> tuple[str, dict[str, str]]:
        tensors = {**traced.program.state_dict, **traced.program.constants}
        return str(traced.program.graph), {
            name: f"{t.dtype} {hashlib.sha256(t.detach().numpy().tobytes()).hexdigest()}"
            for name, t in tensors.items()
        }

    before, given = state(), as_edge(traced, x)
    kept = given["x"].copy()
    first = traced.oracle(given)["output_0"]
    second = traced.oracle(given)["output_0"]
    assert state() == before
    assert (given["x"] == kept).all()
    assert (first == second).all()
    assert module.total.tolist() == pytest.approx([0.1] * 3)


def test_an_input_that_is_written_to_is_the_oracles_own():
    class Writes(nn.Module):
        def forward(self, ids):
            ids.add_(1)
            return ids * 2

    from tpu2edge.export.oracle import Oracle

    ids = torch.tensor([1, 2, 3], dtype=torch.int32)
    program = torch.export.export(Writes(), (ids.clone(),))
    assert Oracle(program).run([ids])[0].tolist() == [4, 6, 8]
    assert ids.tolist() == [1, 2, 3]
