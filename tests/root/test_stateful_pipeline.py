"""Stateful and recurrent models through the whole pipeline."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn

from tpu2edge import export_model
from tpu2edge.runtime_check.devices.client import Session
from tpu2edge.types import Verdict


class Decoder(nn.Module):
    """A streaming recurrent layer whose state and position are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(6, 8)
        self.places = nn.Embedding(5, 6)
        self.register_buffer("h", torch.zeros(1, 1, 8))
        self.register_buffer("position", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, h = self.layer(x + self.places(self.position), self.h)
        self.h.copy_(h)
        self.position += 1
        return y


def test_the_samples_of_a_stateful_model_are_a_sequence_of_calls(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Decoder().eval()
    frames = [torch.randn(2, 1, 6) for _ in range(7)]
    bundle = export_model(
        model, (frames[0],), output=tmp_path / "out", samples=[{"x": x} for x in frames[:5]]
    )
    assert bundle.verdict is Verdict.PASS
    assert bundle.manifest["signatures"][0]["state"] == {
        "state.h": "h",
        "state.position": "position",
    }
    positions = [int(s.inputs["state.position"][0]) for s in bundle.reference().samples()]
    assert positions == [0, 1, 2, 3, 4]
    state = dict(np.load(tmp_path / "out" / "state.npz"))
    with Session(bundle.model().path) as session, torch.no_grad():
        for frame in frames[:5]:
            (got,) = session.run("serving_default", [{"x": frame.numpy(), **state}])
            np.testing.assert_allclose(got["output_0"], model(frame), atol=1e-6)
            state = {name: got[name] for name in state}


def test_synthetic_samples_start_again_when_the_state_is_used_up(tmp_path: Path) -> None:
    torch.manual_seed(0)
    bundle = export_model(Decoder(), (torch.randn(2, 1, 6),), output=tmp_path / "out")
    assert bundle.verdict is Verdict.PASS
    positions = [int(s.inputs["state.position"][0]) for s in bundle.reference().samples()]
    assert positions == [0, 1, 2, 3, 4, 0, 1, 2]  # five places only
