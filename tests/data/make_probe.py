"""Makes runtime_check/devices/native/probe.tflite, which a device runs once before it is called ready:

    PYTHONPATH=tests python tests/data/make_probe.py [FILE]

y = x + x on four floats, by tests/conftest.py; no constants, so that nothing but LiteRT and an ADD
is needed. 2026-12-01. tests/runtime_check/devices/test_probe.py makes it again, byte by byte.
"""

from __future__ import annotations

import sys
from pathlib import Path

from conftest import Graph, write_tflite

PROBE = Path(__file__).parents[2] / "runtime_check" / "devices" / "native" / "probe.tflite"


def main(path: Path) -> None:
    graph = Graph(
        signature="serving_default",
        tensors={"x": ("float32", [4]), "y": ("float32", [4])},
        constants={},
        ops=[("ADD", ["x", "x"], ["y"])],
        inputs={"x": "x"},
        outputs={"y": "y"},
    )
    write_tflite(path, graph)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else PROBE)
