"""Makes dense.float32.tflite and dense.dynamic_wi8_afp32.tflite, run by hand:

    PYTHONPATH=tests python tests/data/make_dense.py

Two fully connected layers with a ReLU between them, the float file by tests/conftest.py, the other
one by ai-edge-quantizer 0.10.0 from it; 2026-12-01. Dynamic int8 in fully connected layers is where
ARM cores with dot products compute other numbers than those without.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from conftest import Graph, write_tflite

HERE = Path(__file__).parent
SIZE = 32


def main() -> None:
    from ai_edge_quantizer import quantizer, recipe

    rng = np.random.default_rng(0)
    weights = {
        f"w{i}": (rng.standard_normal((SIZE, SIZE)) / SIZE**0.5).astype(np.float32) for i in (1, 2)
    }
    biases = {f"b{i}": rng.standard_normal(SIZE).astype(np.float32) for i in (1, 2)}
    tensors = {name: ("float32", [4, SIZE]) for name in ("x", "h", "r", "y")}
    graph = Graph(
        signature="serving_default",
        tensors=tensors,
        constants={**weights, **biases},
        ops=[
            ("FULLY_CONNECTED", ["x", "w1", "b1"], ["h"]),
            ("RELU", ["h"], ["r"]),
            ("FULLY_CONNECTED", ["r", "w2", "b2"], ["y"]),
        ],
        inputs={"x": "x"},
        outputs={"y": "y"},
    )
    float_file = write_tflite(HERE / "dense.float32.tflite", graph)
    work = quantizer.Quantizer(str(float_file), recipe.dynamic_wi8_afp32())
    content = work.quantize().quantized_model
    (HERE / "dense.dynamic_wi8_afp32.tflite").write_bytes(bytes(content))


if __name__ == "__main__":
    main()
