"""Makes scaled_output.float32.tflite beside it; run by hand, the file is committed.

An output that is also multiplied by a number: LiteRT 2.3's GPU accelerator leaves it unwritten.
Made on 2026-12-01 with torch 2.13.0, litert-torch 0.10.0.
"""

from __future__ import annotations

from pathlib import Path

import litert_torch
import torch


class ScaledOutput(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.dense(x)
        return {"plain": y, "half": y * 0.5}


def main() -> None:
    torch.manual_seed(0)
    path = Path(__file__).with_name("scaled_output.float32.tflite")
    litert_torch.convert(ScaledOutput().eval(), (), {"x": torch.randn(1, 16)}).export(str(path))


if __name__ == "__main__":
    main()
