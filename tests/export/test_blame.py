"""From an exception or a node to the user's own module path and line."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

from tpu2edge.errors import ExportError
from tpu2edge.export.blame import (
    module_path,
    place_of_exception,
    place_of_node,
    source_of_node,
    strip_wrapper,
)
from tpu2edge.export.program import trace_module


class Leaf(nn.Module):
    def __init__(self, act) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(x)  # the line of the leaf


class Block(nn.Module):
    def __init__(self, act) -> None:
        super().__init__()
        self.attention = Leaf(act)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x + 1)


class Deep(nn.Module):
    def __init__(self, act) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.ReLU(), Block(act))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def raises(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("boom")  # the line that raises


def branches(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.sum() > 0 else x  # the line that branches


def line_of(text: str) -> int:
    lines = inspect.getsource(inspect.getmodule(line_of)).splitlines()
    return next(n for n, line in enumerate(lines, 1) if line.endswith(text))


def caught(call) -> Exception:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is looked at
        return error
    raise AssertionError("nothing was raised")


def test_an_error_deep_in_a_submodule_names_its_path_and_the_users_line():
    module = Deep(raises)
    place = place_of_exception(caught(lambda: module(torch.ones(2))), module)
    assert place.module == "layers.1.attention"
    assert place.file.endswith("test_blame.py")
    assert place.line == line_of("# the line that raises")
    assert place.code == 'raise RuntimeError("boom")  # the line that raises'


def test_an_error_inside_torch_names_the_users_line_that_called_it():
    module = Deep(lambda x: x @ torch.ones(7, 7))  # the bad product
    place = place_of_exception(caught(lambda: module(torch.ones(2, 2))), module)
    assert place.module == "layers.1.attention"
    assert place.line == line_of("# the bad product")


def test_a_library_module_of_the_user_is_the_module_that_is_named():
    module = nn.Sequential(nn.ReLU(), nn.Linear(3, 3))
    place = place_of_exception(caught(lambda: module(torch.ones(2, 2))), module)
    assert place.module == "1"


def test_an_error_that_was_wrapped_is_followed_to_its_cause():
    module = Deep(raises)

    def wrapped() -> None:
        try:
            module(torch.ones(2))
        except RuntimeError as err:
            raise ValueError("outer") from err

    place = place_of_exception(caught(wrapped), module)
    assert place.module == "layers.1.attention"
    assert place.line == line_of("# the line that raises")


def test_an_error_that_causes_itself_does_not_hang():
    first, second = RuntimeError("a"), RuntimeError("b")
    first.__context__, second.__context__ = second, first
    assert place_of_exception(first, nn.ReLU()).module is None


@pytest.mark.parametrize(
    ("act", "line", "words"),
    [
        (raises, "# the line that raises", "RuntimeError: boom"),
        (branches, "# the line that branches", "is not one graph"),
    ],
)
def test_a_failing_export_names_module_and_line(act, line, words):
    with pytest.raises(ExportError, match=words) as error:
        trace_module(Deep(act).eval(), (torch.ones(2),))
    place = error.value.place
    assert place.module == "layers.1.attention"
    assert place.file.endswith("test_blame.py")
    assert place.line == line_of(line)
    assert f"module 'layers.1.attention', {place.file}:{place.line}" in str(error.value)


def test_every_node_of_a_program_knows_its_module_and_line():
    traced = trace_module(Deep(torch.sin).eval(), (torch.ones(2),))
    nodes = {str(n.target): n for n in traced.program.graph.nodes if n.op == "call_function"}
    sine = place_of_node(nodes["aten.sin.default"])
    assert sine.op == "aten.sin.default"
    assert sine.module == "layers.1.attention"
    assert sine.file.endswith("test_blame.py")
    # torch.export records the forward frames only, not the functions that they call.
    assert sine.line == line_of("# the line of the leaf")
    assert module_path(nodes["aten.relu.default"]) == "layers.0"
    assert module_path(nodes["aten.add.Tensor"]) == "layers.1"
    assert source_of_node(nodes["aten.sin.default"]).to_json() == {
        "module": "layers.1.attention",
        "op": "aten.sin.default",
        "file": sine.file,
        "line": sine.line,
    }


def test_an_operator_of_the_top_module_is_told_as_such():
    traced = trace_module(Leaf(torch.cos).eval(), (torch.ones(2),))
    (node,) = [n for n in traced.program.graph.nodes if "cos" in str(n.target)]
    place = place_of_node(node)
    assert place.module == ""
    assert "the top module" in str(place)
    assert place.line == line_of("# the line of the leaf")


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        ("L['self'].inner.layers.0", "layers.0"),
        ("inner", ""),
        ("inner.inner", "inner"),
        ("inner.head@2", "head"),
        ("innermost.x", "innermost.x"),
        ("", ""),
    ],
)
def test_the_tracing_wrapper_is_taken_off_paths_but_the_users_own_inner_is_not(path, wanted):
    assert strip_wrapper(path) == wanted


def test_our_own_frames_are_never_the_users_place():
    # The error comes from torch, called by our own tracing code: there is no line of the user's.
    with pytest.raises(ExportError) as error:
        trace_module(nn.Sequential(nn.Linear(3, 2)).eval(), (torch.ones(2, 5),))
    assert "program.py" not in str(error.value.place)
    assert error.value.place.module == "0"
