"""ExportedProgram to StableHLO."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from tpu2edge.errors import ConversionError, LoweringError, OptionError
from tpu2edge.export.stablehlo import ROUTES, available_routes, stablehlo_from_program


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.offset = torch.ones(4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(
        self, x: torch.Tensor, extra: dict[str, list[torch.Tensor]], *, scale: torch.Tensor
    ) -> dict[str, object]:
        self.calls += 1
        y = self.linear(x) * scale + extra["bias"][0] + self.offset
        return {"y": y, "more": [y.argmax(-1), y > 0]}


def exported(route: str) -> object:
    args = (torch.ones(2, 3), {"bias": [torch.ones(4)]})
    return torch.export.export(Nested().eval(), args, {"scale": torch.tensor(2.0)})


@pytest.mark.parametrize("route", ROUTES)
def test_arguments_and_outputs_are_named_as_the_user_named_them(route: str) -> None:
    if route not in available_routes():
        pytest.skip(f"needs the package of the route {route}")
    found = stablehlo_from_program(exported(route), route=route)
    assert found.route == route
    assert [a.name for a in found.inputs] == ["x", "extra.bias.0", "scale"]
    assert [o.name for o in found.outputs] == ["y", "more.0", "more.1"]
    assert [o.dtype for o in found.outputs] == ["float32", "int64", "bool"]
    weights = {a.name: a for a in found.arguments if a.is_weight}
    assert set(weights) == {"linear.weight", "linear.bias", "calls", "offset"}
    for argument in weights.values():
        assert argument.array is not None
        assert argument.array().shape == argument.shape
        assert argument.array().dtype == np.dtype(argument.dtype)


@pytest.mark.parametrize("route", ["torchax", "litert-torch"])
def test_locations_name_the_module(route: str) -> None:
    if route not in available_routes():
        pytest.skip(f"needs the package of the route {route}")
    assert b"module:linear" in stablehlo_from_program(exported(route), route=route).module


def test_names_can_be_handed_in() -> None:
    model = nn.Linear(2, 2)
    program = torch.export.export(model, (torch.ones(1, 2),))
    found = stablehlo_from_program(program, input_names=["a"], output_names=["b"])
    assert [a.name for a in found.inputs] == ["a"]
    assert [o.name for o in found.outputs] == ["b"]
    with pytest.raises(ConversionError, match="2 input names"):
        stablehlo_from_program(program, input_names=["a", "b"])


def test_the_same_model_gives_the_same_bytes() -> None:
    model = nn.Linear(2, 2)
    first, second = (
        stablehlo_from_program(torch.export.export(model, (torch.ones(1, 2),))) for _ in range(2)
    )
    assert first.module == second.module


def test_an_unknown_route_lists_the_known_ones() -> None:
    program = torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),))
    with pytest.raises(OptionError, match=r"torchtpu.*torchax.*litert-torch"):
        stablehlo_from_program(program, route="onnx")


def test_dynamic_shapes_are_refused_by_name() -> None:
    program = torch.export.export(
        nn.Linear(2, 2), (torch.ones(3, 2),), dynamic_shapes=({0: torch.export.Dim("n")},)
    )
    with pytest.raises(ConversionError, match="'input' has dynamic dimensions"):
        stablehlo_from_program(program)


@torch.library.custom_op("tpu2edge_tests::opaque", mutates_args=())
def opaque(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@opaque.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Inner(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return opaque(x)


@pytest.mark.parametrize("route", ["torchax", "litert-torch"])
def test_an_operator_without_a_lowering_is_named_with_its_place(route: str) -> None:
    if route not in available_routes():
        pytest.skip(f"needs the package of the route {route}")
    model = nn.Sequential(nn.Linear(2, 2), Inner())
    program = torch.export.export(model, (torch.ones(1, 2),))
    with pytest.raises(LoweringError, match="opaque") as caught:
        stablehlo_from_program(program, route=route)
    place = caught.value.place
    assert place is not None
    assert place.module == "1"
    assert place.file == __file__
    assert place.code == "return opaque(x)"
