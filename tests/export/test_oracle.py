from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from tpu2edge.export.program import trace_module


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.register_buffer("shift", torch.randn(8))

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.norm(torch.relu(self.first(x)) * scale + self.shift)
        return {"y": y, "again": y @ self.first.weight}


def samples(count: int) -> list[dict[str, np.ndarray]]:
    generator = np.random.default_rng(0)
    return [
        {
            "x": generator.standard_normal((2, 6)).astype(np.float32),
            "scale": generator.standard_normal(8).astype(np.float32),
        }
        for _ in range(count)
    ]


@pytest.mark.parametrize("step_bytes", [32 << 20, 1, 2 * 2 * 8 * 8])
def test_samples_in_step_get_the_outputs_that_each_gets_alone(
    monkeypatch: pytest.MonkeyPatch, step_bytes: int
) -> None:
    monkeypatch.setattr("tpu2edge.export.oracle._STEP_BYTES", step_bytes)
    module = Net().eval()
    given = samples(5)
    traced = trace_module(module, tuple(torch.from_numpy(v) for v in given[0].values()))
    alone = [traced.oracle(sample) for sample in given]
    together = list(traced.oracles(given))
    assert len(together) == 5
    for one, other, sample in zip(alone, together, given, strict=True):
        double = Net().eval()
        double.load_state_dict(module.state_dict())
        wanted = double.double()(*(torch.from_numpy(v).double() for v in sample.values()))
        for name in ("y", "again"):
            assert np.array_equal(one[name], other[name])
            assert one[name].dtype == np.float64
            assert np.allclose(one[name], wanted[name].detach().numpy(), rtol=1e-12, atol=1e-12)


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.scaled_dot_product_attention(x, x, x)
        return self.layer(nn.functional.dropout(y, training=self.training))


def test_attention_and_dropout_that_is_off_go_in_step() -> None:
    given = [
        {"x": np.full((1, 4, 8), i, np.float32) + np.eye(4, 8, dtype=np.float32)} for i in (1, 2)
    ]
    traced = trace_module(Attending().eval(), (torch.from_numpy(given[0]["x"]),))
    assert traced._oracle._step > 1
    for one, other in zip([traced.oracle(s) for s in given], traced.oracles(given), strict=True):
        (name,) = one
        assert np.array_equal(one[name], other[name])


class Drawing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)


def test_a_program_that_draws_random_numbers_draws_the_same_for_each_sample() -> None:
    traced = trace_module(Drawing(), (torch.zeros(3),))
    first, second = traced.oracles([{"x": np.zeros(3, np.float32)}] * 2)
    (name,) = first
    assert np.array_equal(first[name], second[name])
    assert np.allclose(first[name], traced.oracle({"x": np.zeros(3, np.float32)})[name])


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        return x + self.count


def test_a_program_that_writes_to_a_buffer_starts_anew_for_each_sample() -> None:
    traced = trace_module(Counting(), (torch.zeros(3),))
    found = list(traced.oracles([{"x": np.zeros(3, np.float32)}] * 3))
    (name,) = found[0]
    assert [output[name].tolist() for output in found] == [[1.0, 1.0, 1.0]] * 3
