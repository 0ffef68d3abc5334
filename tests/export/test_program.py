"""A traced program: names, types, notes and refusals, and the two ways to run it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tpu2edge.errors import DataError, ExportError, ModelSourceError, OptionError
from tpu2edge.export.program import (
    keep_global_state,
    numpy_from_tensor,
    trace_module,
    trace_program,
)
from tpu2edge.types import Dim


class Fn(nn.Module):
    """A function as a module; its parameters keep their names."""

    def __new__(cls, function, **buffers):
        body = type("Body", (nn.Module,), {"forward": lambda self, *a, **k: None})
        # torch.export keeps the source lines of frames called forward only.
        function.__code__ = function.__code__.replace(co_name="forward")
        body.forward = function
        module = body()
        for name, value in buffers.items():
            module.register_buffer(name, value)
        return module.eval()


def specs(items) -> list[str]:
    return [str(spec) for spec in items]


def texts(traced, code: str) -> list[str]:
    return [note.text for note in traced.notes if note.code == code]


X = torch.linspace(-1, 1, 6).reshape(2, 3)


# --------------------------------------------------------------------------------- names and types


def test_a_signature_has_the_users_names_and_the_edge_types():
    def forward(self, ids, opts, *, bias, flag=True):
        return {"b": {"x": bias + 1, "y": ids * 2}, "a": (opts["k"].double(), ids > 1)}

    traced = trace_module(
        Fn(forward),
        (torch.tensor([1, 2]), {"k": X}),
        {"bias": X.half()},
        signature_name="encode",
    )
    assert traced.signature.name == "encode"
    assert specs(traced.signature.inputs) == [
        "ids: int32[2]",
        "opts.k: float32[2x3]",
        "bias: float32[2x3]",
    ]
    assert specs(traced.signature.outputs) == [
        "b.x: float32[2x3]",
        "b.y: int32[2]",
        "a.0: float32[2x3]",
        "a.1: bool[2]",
    ]
    assert texts(traced, "narrowed-input") == ["input 'ids': int64 narrowed as int32"]
    assert texts(traced, "widened-input") == ["input 'bias': float16 computed as float32"]
    assert texts(traced, "narrowed-output") == [
        "output 'b.y': int64 narrowed as int32",
        "output 'a.0': float64 narrowed as float32",
    ]
    assert {name: a.dtype.name for name, a in traced.example.items()} == {
        "ids": "int32",
        "opts.k": "float32",
        "bias": "float32",
    }


@pytest.mark.parametrize(
    ("dtype", "edge"),
    [
        (torch.float64, "float32"),
        (torch.bfloat16, "float32"),
        (torch.int64, "int32"),
        (torch.int16, "int16"),
        (torch.int8, "int8"),
        (torch.uint8, "uint8"),
        (torch.bool, "bool"),
    ],
)
def test_every_input_type_has_an_edge_type(dtype, edge):
    traced = trace_module(Fn(lambda self, x: (x, x.float() * 2)), (torch.ones(3).to(dtype),))
    assert traced.signature.input("x").dtype == edge
    got = traced.eager(traced.example)
    np.testing.assert_array_equal(got["output_1"], [2, 2, 2])


def test_an_input_type_that_litert_lacks_is_refused_by_name():
    with pytest.raises(DataError, match="input 'x' has the type torch"):
        trace_module(Fn(lambda self, x: x.real), (torch.zeros(2, dtype=torch.complex64),))


def test_an_output_type_that_litert_lacks_is_refused_by_name():
    with pytest.raises(ExportError, match="output 'spectrum' has the type torch") as error:
        trace_module(Fn(lambda self, x: {"spectrum": torch.fft.fft(x)}), (X,))
    assert "view_as_real" in error.value.do


def test_scalars_and_empty_tensors_are_inputs_too():
    def forward(self, scale, x, none):
        return x * scale, none.sum()

    traced = trace_module(Fn(forward), (torch.tensor(2.0), X, torch.zeros(0, 4)))
    assert specs(traced.signature.inputs)[0] == "scale: float32[scalar]"
    assert traced.signature.input("none").shape == (0, 4)
    got = traced.eager(traced.example)
    np.testing.assert_array_equal(got["output_0"], 2 * X.numpy())
    assert got["output_1"].shape == ()


def test_passed_through_and_repeated_outputs_keep_their_places():
    traced = trace_module(Fn(lambda self, x: (x, x + 1, x)), (X,))
    for run in (traced.eager, traced.oracle):
        got = run(traced.example)
        assert list(got) == ["output_0", "output_1", "output_2"]
        np.testing.assert_array_equal(got["output_0"], X.numpy())
        np.testing.assert_array_equal(got["output_2"], X.numpy())
        np.testing.assert_allclose(got["output_1"], X.numpy() + 1)


def test_none_and_numbers_among_the_outputs_are_said_to_be_left_out():
    traced = trace_module(Fn(lambda self, x: {"y": x + 1, "loss": None, "n": 3}), (X,))
    assert [spec.name for spec in traced.signature.outputs] == ["y"]
    assert len(texts(traced, "output-left-out")) == 2


def test_arguments_that_are_no_tensors_are_fixed_and_said():
    def forward(self, x, power=2, how="sum", mask=None):
        return x**power if how == "sum" else x

    traced = trace_module(Fn(forward), (X,), {"power": 3, "mask": None})
    assert texts(traced, "baked-in") == ["argument 'power' is 3: fixed in the file"]
    np.testing.assert_allclose(traced.eager(traced.example)["output_0"], X.numpy() ** 3, rtol=1e-6)


def test_inputs_that_do_not_fit_forward_are_refused():
    with pytest.raises(ModelSourceError, match="do not fit forward"):
        trace_module(nn.Linear(3, 2).eval(), (X, X))


def test_outputs_that_no_input_reaches_are_known_as_constant():
    def forward(self, x):
        return {"y": x + 1, "anchors": torch.arange(4), "table": self.table * 2}

    traced = trace_module(Fn(forward, table=torch.ones(2)), (X,))
    assert traced.constant_outputs == {"anchors", "table"}


# ----------------------------------------------------------------------------------------- values


def test_eager_is_the_users_module_in_its_own_types():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh()).eval()
    traced = trace_module(module, (X,))
    got = traced.eager({"input": X.numpy()})
    np.testing.assert_array_equal(got["output_0"], module(X).detach().numpy())
    assert got["output_0"].dtype == np.float32


def test_each_sample_is_run_on_its_own():
    def forward(self, x):
        self.count += 1
        x.mul_(2)
        return x + self.count

    traced = trace_module(Fn(forward, count=torch.zeros(())), (X,))
    given = X.numpy().copy()
    first = traced.oracle({"x": given})["output_0"]
    second = traced.oracle({"x": given})["output_0"]
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(given, X.numpy())


def test_an_int64_program_takes_int32_samples():
    traced = trace_module(Fn(lambda self, ids: ids * 2**20), (torch.tensor([1, 2]),))
    got = traced.eager({"ids": np.array([3, 2**12], np.int32)})
    assert got["output_0"].tolist() == [3 * 2**20, 2**32]  # in the program's own int64


def test_a_sample_without_an_input_is_refused_by_name():
    traced = trace_module(Fn(lambda self, a, b: a + b), (X, X))
    with pytest.raises(DataError, match="lacks input 'b'") as error:
        traced.eager({"a": X.numpy()})
    assert "['a', 'b']" in error.value.do


def test_a_module_that_raises_on_a_sample_is_told_with_its_line():
    traced = trace_module(nn.Sequential(nn.Embedding(3, 2)).eval(), (torch.tensor([0, 1]),))
    with pytest.raises(ExportError, match=r"fails on a sample: IndexError") as error:
        traced.eager({"input": np.array([7, 0], np.int32)})
    assert error.value.place.module == "0"


def test_a_bfloat16_module_is_eager_and_exact_in_float32():
    module = nn.Linear(3, 2).bfloat16().eval()
    traced = trace_module(module, (X.bfloat16(),))
    assert texts(traced, "computed-in-float32")
    got = traced.eager({"input": X.numpy()})["output_0"]
    wanted = torch.nn.functional.linear(X, module.weight.float(), module.bias.float())
    np.testing.assert_allclose(got, wanted.detach().numpy(), rtol=1e-6)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3),
        torch.arange(6.0).reshape(2, 3).t(),
        torch.tensor([1 + 2j]).conj(),
        torch.ones(2, dtype=torch.bfloat16),
        torch.ones(2, requires_grad=True),
        torch.zeros(0, 3),
    ],
)
def test_a_tensor_becomes_an_array_of_the_same_values(tensor):
    array = numpy_from_tensor(tensor)
    assert array.shape == tuple(tensor.shape)
    assert array.tolist() == tensor.detach().tolist()
    if tensor.numel() and not tensor.requires_grad and tensor.dim():
        array[...] = 7
        assert tensor.flatten()[0] != 7  # a copy


# ---------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda self, x: x * 2 if x.sum() > 0 else x, "not one graph"),
        (lambda self, x: x[: int(x.sum().item())], "not one graph"),
        (lambda self, x: 3, "not a tensor"),
        (lambda self, x: undefined, "NameError"),  # noqa: F821
    ],
)
def test_what_torch_export_cannot_take_is_an_export_error_with_the_line(function, words):
    with pytest.raises(ExportError, match=words) as error:
        trace_module(Fn(function), (X,))
    assert error.value.exit_code == 3
    if words != "not a tensor":
        assert error.value.place.file.endswith("test_program.py")


def test_a_constant_that_int32_cannot_hold_is_refused_by_name():
    module = Fn(lambda self, x: x + self.table.sum(), table=torch.tensor([1, 2**31]))
    with pytest.raises(ExportError, match=r"int64 constant 'table' .*2147483648") as error:
        trace_module(module, (X,))
    assert error.value.place.tensor == "table"
    fits = Fn(lambda self, x: x + self.table.sum(), table=torch.tensor([-(2**31), 2**31 - 1]))
    assert trace_module(fits, (X,)).signature.inputs


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 2**40, torch.iinfo(torch.int64).max])
def test_a_number_that_int32_cannot_hold_is_refused_with_its_line(value):
    for function in (
        lambda self, ids: ids + value,
        lambda self, ids: torch.where(ids > 0, ids, value),
        lambda self, ids: ids.masked_fill(ids > 0, value),
    ):
        with pytest.raises(ExportError, match=f"the number {value} beside an int64") as error:
            trace_module(Fn(function), (torch.tensor([1, 2]),))
        assert error.value.place.file.endswith("test_program.py")


def test_open_ends_of_slices_are_no_numbers():
    traced = trace_module(Fn(lambda self, ids: ids[1:] + ids[:-1]), (torch.tensor([1, 2, 3]),))
    assert traced.eager(traced.example)["output_0"].tolist() == [3, 5]


# ----------------------------------------------------------------------------------------- dynamic


def dim(low: int, high: int) -> dict[int, Dim]:
    return {0: Dim(name="n", min=low, max=high)}


def test_a_dynamic_axis_is_a_range_in_inputs_and_outputs():
    traced = trace_module(Fn(lambda self, x: (x * 2, x.sum(1))), (X,), dynamic={"x": dim(1, 8)})
    size, columns = traced.signature.input("x").shape
    assert (size.min, size.max, columns) == (1, 8, 3)
    assert traced.signature.output("output_0").shape == (size, 3)
    assert traced.signature.output("output_1").shape == (size,)
    for n in (1, 5, 8):
        x = np.full((n, 3), n, np.float32)
        for run in (traced.eager, traced.oracle):
            np.testing.assert_array_equal(run({"x": x})["output_0"], 2 * x)


def test_axes_that_must_be_equal_share_one_range():
    traced = trace_module(
        Fn(lambda self, a, b: a + b), (X, X), dynamic={"a": dim(1, 8), "b": dim(2, 6)}
    )
    first, second = (traced.signature.input(n).shape[0] for n in "ab")
    assert first.name == second.name


def test_an_example_of_size_one_can_still_be_dynamic():
    traced = trace_module(Fn(lambda self, x: x * 2), (X[:1],), dynamic={"x": dim(1, 4)})
    assert traced.eager({"x": np.ones((4, 3), np.float32)})["output_0"].shape == (4, 3)


@pytest.mark.parametrize(
    ("dynamic", "words"),
    [
        ({"y": dim(1, 4)}, "names no input 'y'"),
        ({"x": {2: Dim(name="n", min=1, max=4)}}, "axes 0 to 1, not 2"),
    ],
)
def test_a_dynamic_axis_that_is_not_there_is_refused(dynamic, words):
    with pytest.raises(OptionError, match=words):
        trace_module(Fn(lambda self, x: x * 2), (X,), dynamic=dynamic)


def test_a_dynamic_axis_that_the_model_fixes_is_refused_in_words():
    with pytest.raises(ExportError, match="dynamic") as error:
        trace_module(
            nn.Linear(3, 2).eval(), (X,), dynamic={"input": {1: Dim(name="n", min=2, max=8)}}
        )
    assert "--dynamic" in error.value.do


# ---------------------------------------------------------------------------------- saved programs


def test_a_saved_program_is_traced_with_its_own_example_and_says_so(tmp_path):
    module = nn.Sequential(nn.Linear(3, 2)).eval()
    torch.export.save(torch.export.export(module, (X,)), tmp_path / "m.pt2")
    traced = trace_program(torch.export.load(tmp_path / "m.pt2"), signature_name="s")
    assert texts(traced, "program") == ["the source is a saved program: eager is that program"]
    assert traced.signature.name == "s"
    (name,) = [spec.name for spec in traced.signature.inputs]
    assert name == "input"
    got = traced.eager({"input": X.numpy()})["output_0"]
    np.testing.assert_allclose(got, module(X).detach().numpy(), rtol=1e-6)


def test_a_saved_program_keeps_its_dynamic_axis_and_its_keys():
    size = torch.export.Dim("n", min=2, max=9)
    program = torch.export.export(
        Fn(lambda self, x: {"twice": x * 2}), (X,), dynamic_shapes=({0: size},)
    )
    traced = trace_program(program)
    found = traced.signature.input("x").shape[0]
    assert (found.min, found.max) == (2, 9)
    assert [spec.name for spec in traced.signature.outputs] == ["twice"]


# ------------------------------------------------------------------------------------ global state


def state() -> tuple[Any, ...]:
    return (
        torch.get_rng_state().tolist(),
        np.random.get_state()[1].tolist(),
        random.getstate(),
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.is_autocast_enabled("cpu"),
        torch.get_default_device(),
    )


def test_a_trace_leaves_random_states_modes_and_defaults_as_they_were():
    def forward(self, x):
        np.random.rand()
        random.random()
        return x + torch.rand(3)

    module = nn.Sequential(Fn(forward), nn.Linear(3, 2), nn.Dropout()).train()
    module[0].eval()
    before = state()
    traced = trace_module(module, (X,))
    traced.eager(traced.example)
    traced.oracle(traced.example)
    assert state() == before
    assert [m.training for m in module.modules()] == [True, False, True, True]
    assert all(p.requires_grad for p in module.parameters())


def test_state_is_put_back_after_a_failure_too():
    before = state()

    def inside() -> None:
        with keep_global_state():
            torch.manual_seed(5)
            torch.set_grad_enabled(False)
            torch.set_default_dtype(torch.float64)
            random.seed(5)
            np.random.seed(5)
            raise KeyError

    with pytest.raises(KeyError):
        inside()
    assert state() == before


def test_a_callers_autocast_does_not_reach_the_export():
    module = nn.Linear(3, 2).eval()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        traced = trace_module(module, (X,))
        got = traced.eager({"input": X.numpy()})["output_0"]
        assert torch.is_autocast_enabled("cpu")
        assert module(X).dtype is torch.bfloat16
    np.testing.assert_array_equal(got, module(X).detach().numpy())
    kinds = {n.meta["val"].dtype for n in traced.program.graph.nodes if n.op == "call_function"}
    assert kinds == {torch.float32}


def test_a_callers_default_device_does_not_reach_the_export():
    module = Fn(lambda self, x: x + torch.arange(3))
    with torch.device("meta"):
        traced = trace_module(module, (X,))
        got = traced.eager({"x": X.numpy()})["output_0"]
        assert torch.zeros(1).device.type == "meta"
    np.testing.assert_array_equal(got, X.numpy() + np.arange(3, dtype=np.float32))


def test_a_module_and_inputs_made_in_inference_mode_can_be_exported():
    with torch.inference_mode():
        module, x = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval(), X * 1
        inside = trace_module(module, (x,))
    outside = trace_module(module, (x,))
    got = [traced.eager({"input": X.numpy()})["output_0"] for traced in (inside, outside)]
    np.testing.assert_array_equal(*got)


def test_inputs_that_ask_for_gradients_are_only_read():
    x = X.clone().requires_grad_(True)
    traced = trace_module(Fn(lambda self, x: x * 2), (x,))
    assert traced.example["x"].tolist() == x.tolist()
    assert x.requires_grad
    assert x.grad is None


def test_a_cast_to_half_precision_in_forward_is_computed_in_float32_and_said():
    class Casts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2).bfloat16()

        def forward(self, x):
            return self.layer(x.bfloat16()).float()

    module = Casts().eval()
    traced = trace_module(module, (X,))
    weight, bias = (p.detach().double() for p in module.layer.parameters())
    wanted = torch.nn.functional.linear(X.double(), weight, bias).numpy()
    np.testing.assert_allclose(traced.eager(traced.example)["output_0"], wanted, rtol=1e-5)
    np.testing.assert_allclose(traced.oracle(traced.example)["output_0"], wanted, rtol=1e-12)
    assert any("half precision" in text for text in texts(traced, "computed-in-float32"))
    assert module.layer.weight.dtype is torch.bfloat16
