"""Makes dense.float32.tflite and dense.dynamic_wi8_afp32.tflite, run by hand:

    PYTHONPATH=tests python tests/data/make_dense.py

Five fully connected layers with ReLU, the float file by tests/conftest.py, the other
one by ai-edge-quantizer 0.10.0 from it; 2026-12-01. Dynamic int8 in fully connected layers is where
ARM cores with dot products compute other numbers than those without.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from conftest import Graph, write_tflite

HERE = Path(__file__).parent
SIZE, ROWS, LAYERS = 32, 64, 5


def main() -> None:
    from ai_edge_quantizer import quantizer, recipe

    rng = np.random.default_rng(0)
    constants, names, ops = {}, ["x"], []
    for layer in range(LAYERS):
        weight, bias = f"w{layer}", f"b{layer}"
        constants[weight] = (rng.standard_normal((SIZE, SIZE)) * (2 / SIZE) ** 0.5).astype("f4")
        constants[bias] = (rng.standard_normal(SIZE) / 4).astype("f4")
        ops.append(("FULLY_CONNECTED", [names[-1], weight, bias], [f"h{layer}"]))
        ops.append(("RELU", [f"h{layer}"], [f"r{layer}"]))
        names += [f"h{layer}", f"r{layer}"]
    graph = Graph(
        signature="serving_default",
        tensors={name: ("float32", [ROWS, SIZE]) for name in names},
        constants=constants,
        ops=ops,
        inputs={"x": "x"},
        outputs={"y": names[-1]},
    )
    float_file = write_tflite(HERE / "dense.float32.tflite", graph)
    work = quantizer.Quantizer(str(float_file), recipe.dynamic_wi8_afp32())
    content = work.quantize().quantized_model
    (HERE / "dense.dynamic_wi8_afp32.tflite").write_bytes(bytes(content))


if __name__ == "__main__":
    main()
