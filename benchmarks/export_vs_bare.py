"""``tpu2edge export``, all of it, against bare ``litert_torch.convert`` + export + one run.

    python benchmarks/export_vs_bare.py [--model resnet50|bert_base] [--repeat N] [--json FILE]

Each side runs in fresh processes, by turns; the median counts. Then both files are run by turns
(30 times each, one thread), and their outputs compared. CPU seconds stand beside wall time, because
they change less on a machine that others use too.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from measuring import Lines, cost_of

HERE = Path(__file__).parent
WANTED_WALL = {"resnet50": 1.1, "bert_base": 0.8}
INVOKES = 30


def compare_files(name: str, ours: Path, bare: Path, lines: Lines) -> None:
    import models
    from ai_edge_litert.interpreter import Interpreter

    _, args = getattr(models, name)()
    sides: list[Any] = []
    for path in (ours, bare):
        interpreter = Interpreter(model_path=str(path), num_threads=1)
        interpreter.allocate_tensors()
        signature = next(iter(interpreter.get_signature_list().values()))
        runner = interpreter.get_signature_runner()
        details = runner.get_input_details()
        positional = [f"args_{i}" for i in range(len(args))]
        names = positional if set(positional) == set(details) else _argument_names(name)
        assert set(names) == set(details), (names, signature)
        for key, arg in zip(names, args, strict=True):
            interpreter.set_tensor(details[key]["index"], arg.numpy().astype(details[key]["dtype"]))
        (output,) = runner.get_output_details().values()
        del runner
        sides.append((interpreter, output["index"], []))
    for _ in range(INVOKES):
        for interpreter, _, times in sides:
            begun = time.perf_counter()
            interpreter.invoke()
            times.append(time.perf_counter() - begun)
    found = [interpreter.get_tensor(index).astype(np.float64) for interpreter, index, _ in sides]
    median = [1e3 * statistics.median(times) for _, _, times in sides]
    lines.add(f"{name} run time", *median, unit="ms", at_most=1.0)
    error = float(np.abs(found[0] - found[1]).max() / np.ptp(found[1]))
    same = "equal" if np.array_equal(*found) else f"error over range {error:.1e}"
    print(f"{name} outputs of the two files: {same}", flush=True)
    lines.add(
        f"{name} file size",
        ours.stat().st_size / 1e6,
        bare.stat().st_size / 1e6,
        unit="MB",
        at_most=1.0,
    )


def _argument_names(name: str) -> list[str]:
    return {"resnet50": ["image"], "bert_base": ["input_ids", "attention_mask"]}[name]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="append", choices=sorted(WANTED_WALL))
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    lines = Lines()
    for name in args.model or ["resnet50", "bert_base"]:
        with tempfile.TemporaryDirectory() as temporary:
            bundle, file = Path(temporary, "bundle"), Path(temporary, "bare.tflite")
            source = f"{HERE / 'models.py'}:{name}"
            ours, bare = [], []
            for _ in range(args.repeat):
                bare.append(cost_of([sys.executable, str(HERE / "bare.py"), name, str(file)]))
                command = [sys.executable, "-m", "tpu2edge", "export", source, "-o", str(bundle)]
                command += ["--reference", "eager"]  # the bare side predicts no TPU either
                ours.append(cost_of([*command, "--force"]))
            for field, label, unit, wanted in (
                ("wall_s", "wall time", "s", WANTED_WALL[name]),
                ("cpu_s", "CPU time", "s", None),
                ("peak_mb", "peak memory", "MB", 1.0),
            ):
                lines.add(
                    f"{name} {label}",
                    statistics.median(getattr(cost, field) for cost in ours),
                    statistics.median(getattr(cost, field) for cost in bare),
                    unit=unit,
                    at_most=wanted,
                )
            compare_files(name, bundle / "model.float32.tflite", file, lines)
    lines.write(args.json)


if __name__ == "__main__":
    main()
