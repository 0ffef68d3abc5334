"""Recurrent networks, a masked encoder, a decoder: planned, emulated, and checked the other way."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from tpu2edge.export.stablehlo import stablehlo_from_program
from tpu2edge.runtime_check.reference.tpu import compile_program, predict, topology_named
from tpu2edge.runtime_check.reference.tpu.emulate import run_program

Sqnr = Callable[[np.ndarray, np.ndarray], float]

pytestmark = pytest.mark.slow


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cell = kind(24, 32, batch_first=True)
        self.head = nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cell(x)[0].mean(1))


class Encoder(nn.Module):
    def __init__(self, layers: int, width: int = 48) -> None:
        super().__init__()
        make = nn.TransformerEncoderLayer
        self.layers = nn.ModuleList(
            make(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor, padded: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=padded)
        return self.norm(x)


class Decoder(nn.Module):
    """Grouped-query attention, root-mean-square norms and a gated feed-forward network."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.norm = nn.RMSNorm(width)
        self.gate, self.up = nn.Linear(width, 128), nn.Linear(width, 128)
        self.down = nn.Linear(128, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        normed = self.norm(x)
        q = self.q(normed).view(batch, length, 4, 16).transpose(1, 2)
        k, v = self.kv(normed).view(batch, length, 2, 2, 16).permute(2, 0, 3, 1, 4)
        k, v = (t.repeat_interleave(2, dim=1) for t in (k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + y.transpose(1, 2).reshape(batch, length, width)
        normed = self.norm(x)
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))


def padding(batch: int) -> torch.Tensor:
    padded = torch.zeros(batch, 12, dtype=torch.bool)
    padded[-1, 8:] = True
    return padded


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...]]]] = {
    "lstm": lambda: (Recurrent(nn.LSTM), (torch.randn(3, 8, 24),)),
    "gru, batch 1": lambda: (Recurrent(nn.GRU), (torch.randn(1, 8, 24),)),
    "masked encoder": lambda: (Encoder(2), (torch.randn(2, 12, 48), padding(2))),
    "decoder": lambda: (Decoder(), (torch.randn(2, 12, 64),)),
}


@pytest.mark.filterwarnings("ignore:The tensor attributes self.cell._flat_weights")
@pytest.mark.parametrize("name", MODELS)
def test_the_two_ways_to_predict_agree(name: str, libtpu: str, sqnr_db: Sqnr) -> None:
    torch.manual_seed(0)
    model, args = MODELS[name]()
    model.eval()
    with torch.no_grad():
        eager = model(*args).numpy()
    program = stablehlo_from_program(torch.export.export(model, args))
    sample = [a.numpy() for a in args]
    found = predict(program, [sample])
    compiled = compile_program(program, topology_named("v5e"), prelayout=True)
    runs = run_program(program, [sample], modes=None, prelayout=compiled.prelayout)
    next(runs)
    theirs = next(runs)[0][0]
    runs.close()
    ours = next(iter(found.outputs[0].values()))
    assert abs(sqnr_db(eager, ours) - sqnr_db(eager, theirs)) < 1.0
    assert 40 < sqnr_db(eager, ours) < 80


@pytest.mark.parametrize("fault", ["exchanged", "scaled by 1.01", "slightly older"])
def test_a_fault_within_the_tpus_noise_shows_against_the_prediction(
    fault: str, sqnr_db: Sqnr
) -> None:
    # A budget for TPU against float32 has to leave room for the TPU's rounding, and a small fault
    # hides in it. Here the prediction stands for the TPU too, so with the same weights it agrees
    # exactly; how near a real TPU comes to it decides how small a fault shows.
    torch.manual_seed(0)
    right = Encoder(12).eval()
    args = (torch.randn(2, 12, 48), padding(2))
    wrong = copy.deepcopy(right)
    with torch.no_grad():
        if fault == "exchanged":
            a, b = (wrong.layers[i].linear2.weight for i in (4, 5))
            a.copy_(right.layers[5].linear2.weight)
            b.copy_(right.layers[4].linear2.weight)
        elif fault == "scaled by 1.01":
            wrong.layers[6].linear2.weight.mul_(1.01)
        else:
            for weight in wrong.parameters():
                weight.add_(1e-4 * weight.std() * torch.randn_like(weight))
        eager = right(*args).numpy()
    sample = [[a.numpy() for a in args]]
    tpu, prediction = (
        predict(stablehlo_from_program(torch.export.export(m, args)), sample, naive=True).outputs[
            0
        ]["output_0"]
        for m in (wrong, right)
    )
    floor = sqnr_db(eager, prediction)
    against_eager, against_prediction = sqnr_db(eager, tpu), sqnr_db(prediction, tpu)
    assert 40 < floor < 60
    assert against_prediction < 60
    if fault != "exchanged":
        assert against_eager > 40  # passes any usual budget
