"""Where LiteRT's refusal of a converted file is from: the operator, the module and the user's line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tpu2edge.errors import LoweringError
from tpu2edge.export.lower import Lowered, Loweree, lower_programs
from tpu2edge.export.program import trace_module
from tpu2edge.flatbuffer import read_tflite
from tpu2edge.refusals import refuse_unrunnable, write_beginning
from tpu2edge.runtime_check.budget import default_budget
from tpu2edge.runtime_check.devices.client import Session
from tpu2edge.runtime_check.parity import check_model
from tpu2edge.runtime_check.reference import Reference, ReferenceWriter
from tpu2edge.types import Dim, EdgeModel, Sample


class Product(nn.Module):
    """LiteRT's own kernels take a product over no elements, XNNPACK does not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.tanh()
        return y @ y.reshape(y.shape[1], y.shape[0])


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ReLU()
        self.blocks = nn.ModuleList([nn.Sigmoid(), Product()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        for block in self.blocks:
            y = block(y)
        return y * 2


class Sum(nn.Module):
    """Two inputs of one dynamic size: other sizes are refused by every kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.Tanh()
        self.add = Added()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.act(self.add(self.act(x), y))


class Added(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y


class Looked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids) + 1


def convert(
    module: nn.Module,
    example: tuple[torch.Tensor, ...],
    path: Path,
    dynamic: Mapping[str, Mapping[int, Dim]] | None = None,
) -> tuple[EdgeModel, Lowered]:
    traced = trace_module(module.eval(), example, dynamic=dynamic)
    lowered = lower_programs([Loweree(traced.program, traced.signature)], path)
    model = EdgeModel(
        path=path,
        signatures=(traced.signature,),
        recipe="float32",
        sha256="",
        size_bytes=path.stat().st_size,
    )
    return model, lowered


def refusal(model: EdgeModel, lowered: Lowered, samples: Any, folder: Path) -> LoweringError:
    """What an export says of a file that was checked with these samples."""
    signature = model.signatures[0]
    head: dict[str, Any] = {"provider": "eager", "precision": "f32", "data": {"kind": "given"}}
    with ReferenceWriter(folder / "reference", signature, **head) as writer:
        for index, inputs in enumerate(samples):
            outputs = {"output_0": np.zeros((2, 2), "float32")}
            writer.add(Sample(id=f"s{index}", inputs=inputs), outputs)
    reference = Reference.load(folder / "reference")
    report = check_model(model, reference, default_budget("float32"))
    with pytest.raises(LoweringError) as caught:
        refuse_unrunnable(report, model.path, lowered.nodes, reference)
    return caught.value


@pytest.mark.parametrize("dynamic", [False, True], ids=["when loaded", "when run"])
def test_what_only_the_delegate_refuses_is_traced_to_the_users_line(
    tmp_path: Path, dynamic: bool
) -> None:
    size = 3 if dynamic else 0
    axes = {"x": {1: Dim(name="n", min=1, max=8)}} if dynamic else None
    model, lowered = convert(Deep(), (torch.randn(2, size),), tmp_path / "m.tflite", axes)
    sizes = (3, 0, 2) if dynamic else (0,)
    samples = [{"x": np.zeros((2, n), "float32")} for n in sizes]
    error = refusal(model, lowered, samples, tmp_path)
    assert "XNNPACK delegate cannot prepare the operator BATCH_MATMUL" in str(error)
    assert error.place is not None
    assert error.place.module == "blocks.1"
    assert error.place.file is not None
    assert error.place.file.endswith("test_refusals.py")
    line = Path(__file__).read_text().splitlines()[(error.place.line or 0) - 1]
    assert line.strip() == "return y @ y.reshape(y.shape[1], y.shape[0])"


def test_what_every_kernel_refuses_is_told_in_their_words_not_the_delegates(tmp_path: Path) -> None:
    size = Dim(name="n", min=1, max=8)
    example = torch.randn(3, 4), torch.randn(3, 4)
    axes = {"x": {0: size}, "y": {0: size}}
    model, lowered = convert(Sum(), example, tmp_path / "m.tflite", axes)
    samples = [{"x": np.zeros((3, 4), "f4"), "y": np.zeros((n, 4), "f4")} for n in (3, 2)]
    error = refusal(model, lowered, samples, tmp_path)
    assert "LiteRT cannot prepare the operator ADD of the converted file" in str(error)
    assert "not broadcastable" in str(error)
    assert error.place is not None
    assert error.place.module == "add"


def test_what_a_kernel_refuses_is_traced_by_the_operators_number(tmp_path: Path) -> None:
    model, lowered = convert(Looked(), (torch.tensor([1, 2]),), tmp_path / "m.tflite")
    error = refusal(model, lowered, [{"ids": np.array([1, 7])}], tmp_path)
    assert "LiteRT cannot invoke the operator " in str(error)
    assert error.place is not None
    assert error.place.module == "table"


def test_a_beginning_of_a_file_runs_and_ends_with_what_nothing_uses(tmp_path: Path) -> None:
    file = read_tflite(Path(__file__).parents[1] / "data" / "small.float32.tflite")
    (graph,) = file.subgraphs
    target = tmp_path / "begun.tflite"
    for count in range(len(graph.operators) + 1):
        write_beginning(file, graph, count, target)
        begun = read_tflite(target)
        assert begun.subgraphs[0].operators == graph.operators[:count]
        made = {index for operator in graph.operators[:count] for index in operator.outputs}
        used = {index for operator in graph.operators[:count] for index in operator.inputs}
        assert set(begun.subgraphs[0].outputs) == made - used
        with Session(target) as session:
            image = np.ones((1, 2, 6, 6), "float32")
            assert list(session.run("serving_default", [{"image": image}])) == [{}]
