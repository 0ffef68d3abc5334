"""Makes the mixed.* files beside it; run by hand, the files are committed.

A network with one of each layer that recipes treat differently: convolution, depthwise and
transposed convolution, embedding, an LSTM cell, linear layers of even and odd width, and an output
that the graph's last op reads.

Made on 2026-12-01 with torch 2.13.0, litert-torch 0.10.0, ai-edge-quantizer 0.10.0.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from ai_edge_quantizer import quantizer, recipe
from torch import nn

from tpu2edge.bundle import layers_of_tensors
from tpu2edge.export.lower import Loweree, lower_programs
from tpu2edge.export.program import trace_module
from tpu2edge.flatbuffer import read_tflite

HERE = Path(__file__).parent


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(100, 48)
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        self.dw = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.ct = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.lstm = nn.LSTMCell(48, 32)
        self.lin = nn.Linear(40, 64)
        self.odd = nn.Linear(64, 37)
        self.out = nn.Linear(37, 10)

    def forward(self, image: torch.Tensor, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        picture = self.ct(torch.relu(self.dw(torch.relu(self.conv(image))))).mean((2, 3))
        words = self.emb(ids)
        state = self.lstm(words[:, 1], self.lstm(words[:, 0]))
        joined = torch.cat([picture, state[0]], 1)
        logits = self.out(torch.tanh(self.odd(nn.functional.gelu(self.lin(joined)))))
        return {"logits": logits, "p": torch.softmax(logits, -1)}


def samples(seed: int, count: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [
        {
            "image": rng.standard_normal((1, 3, 16, 16)).astype("float32"),
            "ids": rng.integers(0, 100, (1, 12)).astype("int32"),
        }
        for _ in range(count)
    ]


def main() -> None:
    torch.manual_seed(0)
    path = HERE / "mixed.float32.tflite"
    traced = trace_module(Mixed().eval(), (torch.randn(1, 3, 16, 16), torch.zeros(1, 12).long()))
    lowered = lower_programs([Loweree(traced.program, traced.signature)], path)
    names = [t.name for graph in read_tflite(path).subgraphs for t in graph.tensors]
    layers = layers_of_tensors(names, lowered.nodes)
    modules = {name: sorted({p["module"] for p in places}) for name, places in layers.items()}
    (HERE / "mixed.layers.json").write_text(json.dumps(modules, indent=1, sort_keys=True) + "\n")
    quantizing = quantizer.Quantizer(str(path), recipe.static_wi8_ai8())
    ranges = quantizing.calibrate({"serving_default": samples(0, 4)})
    shapes = {
        name: [np.shape(r["min"]), float(np.min(r["min"])), float(np.max(r["max"]))]
        for name, r in ranges.items()
    }
    (HERE / "mixed.ranges.json").write_text(json.dumps(shapes, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
