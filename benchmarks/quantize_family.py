"""Six files of one network: ``tpu2edge export`` against converting and quantizing each anew.

    python benchmarks/quantize_family.py [--samples 100] [--json FILE]

The network is MiniLM with its trained weights (examples/pretrained). Ours is one command, with parity
checked on four samples; the other side is what people write today: for each variant a process with
``litert_torch.convert`` and ai-edge-quantizer, static calibration by its own loop, nothing checked.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from measuring import Lines, cost_of

HERE = Path(__file__).parent
EXAMPLE = HERE.parent / "examples" / "pretrained" / "minilm.py"
WANTED = 6.0
CHECKED = 4

#: Our recipe -> ai-edge-quantizer's recipe function; None: float, "" is its float16 rule.
VARIANTS: dict[str, str | None] = {
    "float32": None,
    "float16": "",
    "dynamic_wi8_afp32": "dynamic_wi8_afp32",
    "weight_only_wi8_afp32": "weight_only_wi8_afp32",
    "weight_only_wi4_afp32": "weight_only_wi4_afp32",
    "static_wi8_ai8": "static_wi8_ai8",
}


def samples(count: int) -> dict[str, np.ndarray]:
    """Token ids of made-up sentences: what is timed does not hang on what they say."""
    rng = np.random.default_rng(0)
    ids = rng.integers(1000, 20000, (count, 1, 64)).astype(np.int32)
    lengths = rng.integers(8, 64, (count, 1, 1))
    mask = (np.arange(64)[None, None] < lengths).astype(np.int32)
    return {"input_ids": ids * mask, "attention_mask": mask}


def bare(variant: str, data: Path, target: Path) -> None:
    """In a process of its own: one variant as people make it today."""
    sys.path.insert(0, str(EXAMPLE.parent))
    import litert_torch
    import minilm
    from ai_edge_quantizer import algorithm_manager, qtyping, quantizer, recipe

    litert_torch.convert(minilm.get_model(), minilm.get_args()).export(str(target))
    upstream = VARIANTS[variant]
    if upstream is None:
        return
    if upstream:
        worker: Any = quantizer.Quantizer(str(target), getattr(recipe, upstream)())
    else:
        worker = quantizer.Quantizer(str(target))
        worker.update_quantization_recipe(
            regex=".*",
            operation_name=qtyping.TFLOperationName.ALL_SUPPORTED,
            op_config=qtyping.OpQuantizationConfig(
                weight_tensor_config=qtyping.TensorQuantizationConfig(
                    num_bits=16, dtype=qtyping.TensorDataType.FLOAT
                ),
                compute_precision=qtyping.ComputePrecision.FLOAT,
                explicit_dequantize=True,
            ),
            algorithm_key=algorithm_manager.AlgorithmName.FLOAT_CASTING,
        )
    result = None
    if worker.need_calibration:
        arrays = np.load(data)
        feeds = [
            {"args_0": ids, "args_1": mask}
            for ids, mask in zip(arrays["input_ids"], arrays["attention_mask"], strict=True)
        ]
        result = worker.calibrate({"serving_default": feeds})
    worker.quantize(result).export_model(str(target.with_suffix(".q.tflite")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=100, help="for static calibration")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--bare", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.bare:
        variant, data, target = options.bare
        bare(variant, Path(data), Path(target))
        return
    lines = Lines()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        calibration, checked = folder / "calibration.npz", folder / "checked.npz"
        np.savez(calibration, **samples(options.samples))
        np.savez(checked, **samples(CHECKED))
        recipes = [word for recipe in VARIANTS for word in ("--recipe", recipe)]
        command = [
            *(sys.executable, "-m", "tpu2edge", "export", str(EXAMPLE), "--reference", "eager"),
            *("--inputs", str(checked), "--calibration-data", str(calibration), *recipes),
            *("--budget", "sqnr>=-20dB", "--budget", "embedding:allow_constant"),
            *("-o", str(folder / "out")),
        ]
        begun = time.perf_counter()
        ours = cost_of(command)
        print(f"ours {ours.wall_s:.1f} s wall, {ours.cpu_s:.1f} s CPU", flush=True)
        theirs = []
        for variant in VARIANTS:
            target = folder / f"bare.{variant}.tflite"
            child = [sys.executable, "-W", "ignore", __file__, "--bare", variant]
            theirs.append(cost_of([*child, str(calibration), str(target)]))
            print(f"bare {variant} {theirs[-1].wall_s:.1f} s wall", flush=True)
        wall = sum(one.wall_s for one in theirs)
        cpu = sum(one.cpu_s for one in theirs)
        lines.add("family of six, wall", ours.wall_s, wall, unit="s", at_most=1 / WANTED)
        lines.add("family of six, CPU", ours.cpu_s, cpu, unit="s")
        peak = max(one.peak_mb for one in theirs)
        lines.add("family of six, peak memory", ours.peak_mb, peak, unit="MB")
        print(f"{wall / ours.wall_s:.1f} x as fast; {time.perf_counter() - begun:.0f} s in all")
    if options.json:
        lines.write(options.json)


if __name__ == "__main__":
    main()
