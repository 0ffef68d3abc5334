"""Samples a second through a worker process, against a bare loop in this process.

    python benchmarks/worker_throughput.py [--samples N] [--json FILE]

1,000 images at batch 1 through the digits model: ``Session.run`` on one side, ``set_tensor``,
``invoke``, ``get_tensor`` on the other; by turns, the median of five. "With start-up" counts
starting the process and loading the file on our side, loading the file on the bare one.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from ai_edge_litert.interpreter import Interpreter
from measuring import Lines

from tpu2edge.runtime_check.devices.client import Session

REPEAT = 5


def export_digits(folder: Path) -> Path:
    import tpu2edge

    sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "digits"))
    from model import get_args, get_model

    bundle = tpu2edge.export_model(get_model(), get_args(), output=folder / "digits", num_samples=2)
    return bundle.model().path


def bare_loop(file: Path, samples: list[dict[str, np.ndarray]]) -> tuple[float, float]:
    """Seconds for all samples, and the same with loading."""
    begun = time.perf_counter()
    interpreter = Interpreter(model_path=str(file), num_threads=1)
    interpreter.allocate_tensors()
    source = interpreter.get_input_details()[0]["index"]
    target = interpreter.get_output_details()[0]["index"]
    loaded = time.perf_counter()
    for sample in samples:
        interpreter.set_tensor(source, sample["image"])
        interpreter.invoke()
        interpreter.get_tensor(target)
    end = time.perf_counter()
    return end - loaded, end - begun


def worker(file: Path, samples: list[dict[str, np.ndarray]]) -> tuple[float, float]:
    begun = time.perf_counter()
    with Session(file) as session:
        loaded = time.perf_counter()
        count = sum(1 for _ in session.run("serving_default", samples))
        end = time.perf_counter()
    assert count == len(samples)
    return end - loaded, end - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    generator = np.random.default_rng(0)
    images = generator.random((args.samples, 1, 1, 8, 8), dtype=np.float32)
    samples = [{"image": image} for image in images]
    lines = Lines()
    with tempfile.TemporaryDirectory() as temporary:
        file = export_digits(Path(temporary))
        runs = [(worker(file, samples), bare_loop(file, samples)) for _ in range(REPEAT)]
    for index, label, at_least in ((0, "steady", 0.7), (1, "with start-up", None)):
        ours, bare = (
            args.samples / statistics.median(run[side][index] for run in runs) for side in (0, 1)
        )
        lines.add(f"worker, {label}", ours, bare, unit="samples/s", at_least=at_least)
    lines.write(args.json)


if __name__ == "__main__":
    main()
