"""Predictions of torch models, beside an independent way and without libtpu."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from tpu2edge.errors import DataError
from tpu2edge.export.stablehlo import stablehlo_from_program
from tpu2edge.runtime_check.reference.tpu import compile_program, predict, topology_named
from tpu2edge.runtime_check.reference.tpu.emulate import run_program
from tpu2edge.types import StableHlo

Sqnr = Callable[[np.ndarray, np.ndarray], float]


class SmallVision(nn.Module):
    """Convolutions (one depthwise), attention and a head: each kind of matmul once."""

    def __init__(self, top: bool = True) -> None:
        super().__init__()
        self.top = top
        self.patch = nn.Conv2d(3, 32, 4, 4)
        self.depthwise = nn.Conv2d(32, 32, 3, padding=1, groups=32)
        self.qkv = nn.Linear(32, 96)
        self.head = nn.Linear(32, 5)

    def forward(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        x = torch.relu(self.depthwise(self.patch(image))).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, dim=-1)
        x = x + nn.functional.scaled_dot_product_attention(q, k, v)[:, 0]
        logits = self.head(x.mean(1))
        return {"logits": logits, "top": logits.argmax(-1)} if self.top else {"logits": logits}


def lowered(batch: int, top: bool = True) -> tuple[StableHlo, nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model, image = SmallVision(top).eval(), torch.randn(batch, 3, 16, 16)
    return stablehlo_from_program(torch.export.export(model, (image,))), model, image


@pytest.mark.parametrize(("batch", "generation"), [(4, "v5e"), (1, "v6e"), (1, "tpu7x")])
def test_the_plan_agrees_with_the_compilers_own_graph_run_on_the_cpu(
    batch: int, generation: str, libtpu: str, sqnr_db: Sqnr
) -> None:
    # Without the int64 output: the TPU compiler splits those by custom calls the CPU has not.
    program, model, image = lowered(batch, top=False)
    with torch.no_grad():
        eager = model(image)["logits"].numpy()
    sample = {"image": image.numpy()}
    found = predict(program, [sample], generation=generation)
    ours = found.outputs[0]["logits"]
    compiled = compile_program(program, topology_named(generation), prelayout=True)
    runs = run_program(program, [sample], modes=None, prelayout=compiled.prelayout)
    next(runs)
    theirs = next(runs)[0][0]
    runs.close()
    assert abs(sqnr_db(eager, ours) - sqnr_db(eager, theirs)) < 1.0
    assert 35 < sqnr_db(eager, ours) < 75
    single = batch == 1 and generation != "tpu7x"
    head = [m for m in found.plan.matmuls if m.out == f"<{batch}x5xf32>"]
    assert [m.mode for m in head] == ["f32" if single else "bf16"]


def test_the_program_in_float32_is_the_model(sqnr_db: Sqnr) -> None:
    program, model, image = lowered(2)
    with torch.no_grad():
        eager = model(image)["logits"].numpy()
    count = len(predict(program, [], naive=True).plan.matmuls)
    runs = run_program(program, [[image.numpy()]], modes=["f32"] * count)
    next(runs)
    assert sqnr_db(eager, next(runs)[0][0]) > 115
    runs.close()


def test_naive_prediction_says_what_it_is_and_needs_no_libtpu(
    monkeypatch: pytest.MonkeyPatch, sqnr_db: Sqnr
) -> None:
    monkeypatch.setattr("tpu2edge.runtime_check.reference.tpu.compile.libtpu_version", lambda: None)
    program, model, image = lowered(2)
    samples = [image.numpy(), image.numpy() + 1]
    found = predict(program, [{"image": s} for s in samples], naive=True)
    assert found.label == "predicted (naive)"
    assert found.provider == "tpu-emulated-naive"
    assert found.libtpu is None
    assert found.plan.naive
    assert found.plan.counts() == {"bf16": 6}
    assert "rounded alike" in found.not_modelled[0]
    assert len(found.outputs) == 2
    for sample, outputs in zip(samples, found.outputs, strict=True):
        assert list(outputs) == ["logits", "top"]
        assert outputs["top"].dtype == np.int64
        with torch.no_grad():
            eager = model(torch.from_numpy(sample))["logits"].numpy()
        assert 35 < sqnr_db(eager, outputs["logits"]) < 75


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        ({"picture": np.zeros((2, 3, 16, 16), np.float32)}, "has inputs"),
        ({"image": np.zeros((1, 3, 16, 16), np.float32)}, "has shape"),
        ({"image": np.zeros((2, 3, 16, 16), np.int32)}, "is int32"),
        ([], "has 0 inputs"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(sample: object, words: str) -> None:
    program, _, _ = lowered(2)
    with pytest.raises(DataError, match=words):
        predict(program, [sample], naive=True)  # type: ignore[list-item]
