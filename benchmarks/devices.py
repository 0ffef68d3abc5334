"""What an emulated ARM device costs beside the emulator itself, and how long a small matrix takes.

    python benchmarks/devices.py [--device NAME] [--json FILE]

A warm case: a small CNN (the digits model) in float32, 8 samples, on a worker that is already
started and has run one sample. Ours is the wall time of ``Session.run`` as a user of it sees it;
bare is the time that QEMU spent inside LiteRT's invocations of these samples, which the worker
measures. Medians of seven rounds. Then: starting, loading and the first sample; the size of the
pack; and 5 devices x the recipes of the digits model x 8 samples, from nothing started.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from measuring import Lines

from tpu2edge.runtime_check.devices import qemu
from tpu2edge.runtime_check.devices.client import Session
from tpu2edge.runtime_check.devices.profiles import profile_named
from tpu2edge.runtime_check.devices.runners import install_device, launch_of

ROUNDS = 7
SAMPLES = 8
DEVICES = ("arm-v8.0", "arm-v8.2-dotprod", "arm-v9-i8mm", "laptop-avx2", "laptop-sse41")
RECIPES = ("float32", "float16", "dynamic_wi8_afp32", "weight_only_wi8_afp32")


def export_digits(folder: Path) -> dict[str, Path]:
    import tpu2edge

    sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "digits"))
    from model import get_args, get_model

    bundle = tpu2edge.export_model(
        get_model(), get_args(), output=folder / "digits", num_samples=2, recipes=RECIPES
    )
    return {recipe: bundle.model(recipe).path for recipe in RECIPES}


def warm(
    file: Path, device: str, samples: list[dict[str, np.ndarray]]
) -> tuple[float, float, float]:
    """Milliseconds of a warm case as seen here, inside of invocations, and of the cold start."""
    seen, inside = [], []
    begun = time.perf_counter()
    with Session(file, launch=launch_of(profile_named(device))) as session:
        name = session.signatures[0].name
        list(session.run(name, samples[:1]))
        cold = (time.perf_counter() - begun) * 1e3
        for _ in range(ROUNDS):
            before, started = session.times["invoke_ms"], time.perf_counter()
            count = sum(1 for _ in session.run(name, samples))
            seen.append((time.perf_counter() - started) * 1e3)
            inside.append(session.times["invoke_ms"] - before)
            assert count == SAMPLES
    return statistics.median(seen), statistics.median(inside), cold


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="arm-v8.2-dotprod")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    for device in {*DEVICES, args.device}:
        assert install_device(profile_named(device)).ready
    generator = np.random.default_rng(0)
    images = generator.random((SAMPLES, 1, 1, 8, 8), dtype=np.float32)
    samples = [{"image": image} for image in images]
    lines = Lines()
    with tempfile.TemporaryDirectory() as temporary:
        files = export_digits(Path(temporary))
        seen, inside, cold = warm(files["float32"], args.device, samples)
        lines.add(f"warm case on {args.device}", seen, inside, unit="ms", at_most=1.3)
        lines.add("cold start with the first sample, beside it", cold, seen, unit="ms")
        lines.add("pack", qemu.pack_bytes() / 1e6, 40, unit="MB", at_most=1)
        begun = time.perf_counter()
        for device in DEVICES:
            for file in files.values():
                with Session(file, launch=launch_of(profile_named(device))) as session:
                    assert sum(1 for _ in session.run("serving_default", samples)) == SAMPLES
        took = time.perf_counter() - begun
        cases = f"{len(DEVICES)} devices x {len(files)} recipes x {SAMPLES} samples"
        lines.add(cases, took, 120, unit="s", at_most=1)
    lines.write(args.json)


if __name__ == "__main__":
    main()
