"""The network of make_mixed.py: one of each layer that recipes treat differently."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tpu2edge.quantize.apply import Quantizer, Ranges
from tpu2edge.quantize.calibrate import calibrate
from tpu2edge.quantize.moments import Moments
from tpu2edge.quantize.recipes import recipe
from tpu2edge.runtime_check.devices.client import Session

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="session")
def mixed() -> Path:
    return DATA / "mixed.float32.tflite"


@pytest.fixture(scope="session")
def mixed_layers() -> dict[str, list[str]]:
    return json.loads((DATA / "mixed.layers.json").read_text())


@pytest.fixture(scope="session")
def mixed_ranges() -> Ranges:
    stored = json.loads((DATA / "mixed.ranges.json").read_text())
    return {
        name: (np.full(shape, low, "float32"), np.full(shape, high, "float32"))
        for name, (shape, low, high) in stored.items()
    }


@pytest.fixture(scope="session")
def mixed_moments(mixed: Path) -> Moments:
    rng = np.random.default_rng(2)
    samples = [
        {
            "image": rng.standard_normal((1, 3, 16, 16)).astype("float32"),
            "ids": rng.integers(0, 100, (1, 12)).astype("int32"),
        }
        for _ in range(32)
    ]
    recipes = [recipe("int4-gptq"), recipe("int4-oscar")]
    return calibrate(mixed, {"serving_default": samples}, recipes=recipes).moments


@pytest.fixture(scope="session")
def quantizer(mixed: Path) -> Iterator[Quantizer]:
    with Quantizer(mixed, timeout_s=120) as quantizer:
        yield quantizer


@pytest.fixture(scope="session")
def truth(mixed: Path) -> dict[str, np.ndarray]:
    """The float file's outputs for the sample of :func:`run_mixed`."""
    return run_mixed(mixed)


def run_mixed(path: Path) -> dict[str, np.ndarray]:
    """The outputs for one made-up sample, quantized and dequantized where the file wants it."""
    rng = np.random.default_rng(1)
    sample = {
        "image": rng.standard_normal((1, 3, 16, 16)).astype("float32"),
        "ids": rng.integers(0, 100, (1, 12)).astype("int32"),
    }
    with Session(path) as session:
        (signature,) = session.signatures
        for spec in signature.inputs:
            if spec.scale is not None:
                limits = np.iinfo(spec.dtype)
                steps = np.round(sample[spec.name] / spec.scale + (spec.zero_point or 0))
                sample[spec.name] = np.clip(steps, limits.min, limits.max).astype(spec.dtype)
        (out,) = session.run(signature.name, [sample])
        for spec in signature.outputs:
            if spec.scale is not None:
                out[spec.name] = (
                    out[spec.name].astype("float32") - (spec.zero_point or 0)
                ) * spec.scale
    return {name: np.asarray(value, "float64") for name, value in out.items()}
