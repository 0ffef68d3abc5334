"""Makes the .tflite files beside it; run by hand, the files are committed.

Made on 2026-11-30 with torch 2.13.0, litert-torch 0.10.0, ai-edge-quantizer 0.10.0.
"""

from __future__ import annotations

from pathlib import Path

import litert_torch
import numpy as np
import torch
from ai_edge_quantizer import quantizer, recipe

HERE = Path(__file__).parent


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(2, 4, 3)
        self.hidden = torch.nn.Linear(4 * 16, 16)
        self.head = torch.nn.Linear(16, 3)

    def forward(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        features = torch.relu(self.hidden(torch.relu(self.conv(image)).flatten(1)))
        return {"logits": self.head(features), "features": features}


def main() -> None:
    torch.manual_seed(0)
    model = Small().eval()
    path = HERE / "small.float32.tflite"
    litert_torch.convert(model, (), {"image": torch.randn(1, 2, 6, 6)}).export(str(path))
    samples = np.random.default_rng(0).standard_normal((8, 1, 2, 6, 6)).astype("float32")
    for name in ("dynamic_wi8_afp32", "static_wi8_ai8"):
        quantizing = quantizer.Quantizer(str(path), getattr(recipe, name)())
        ranges = None
        if quantizing.need_calibration:
            ranges = quantizing.calibrate({"serving_default": [{"image": s} for s in samples]})
        model_bytes = quantizing.quantize(ranges).quantized_model
        (HERE / f"small.{name}.tflite").write_bytes(model_bytes)


if __name__ == "__main__":
    main()
