"""The network of make_mixed.py: one of each layer that recipes treat differently."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
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


def loop_tflite(write_graphs: Callable[..., Path], path: Path) -> Path:
    """while i < 3: i, x = i + 1, x * 2"""
    from ai_edge_litert import schema_py_generated as schema

    state = {"float32": ("float32", [2]), "int32": ("int32", [])}
    one, two, three = np.int32(1).reshape(()), np.float32([2, 2]), np.int32(3).reshape(())
    main = {
        "signature": "serving_default",
        "tensors": {"i": state["int32"], "x": state["float32"], "n": state["int32"]}
        | {"y": state["float32"]},
        "constants": {},
        "ops": [("WHILE", ("i", "x"), ("n", "y"))],
        "inputs": {"i": "i", "x": "x"},
        "outputs": {"y": "y"},
    }
    condition = {
        "signature": "condition",
        "tensors": {"ci": state["int32"], "cx": state["float32"], "go": ("bool", [])},
        "constants": {"three": three},
        "ops": [("LESS", ("ci", "three"), ("go",))],
        "inputs": {"i": "ci", "x": "cx"},
        "outputs": {"go": "go"},
    }
    body = {
        "signature": "body",
        "tensors": {"bi": state["int32"], "bx": state["float32"], "bn": state["int32"]}
        | {"by": state["float32"]},
        "constants": {"one": one, "two": two},
        "ops": [("ADD", ("bi", "one"), ("bn",)), ("MUL", ("bx", "two"), ("by",))],
        "inputs": {"i": "bi", "x": "bx"},
        "outputs": {"n": "bn", "y": "by"},
    }
    write_graphs(path, main, condition, body)
    model = schema.ModelT.InitFromObj(schema.Model.GetRootAs(path.read_bytes(), 0))
    model.signatureDefs = model.signatureDefs[:1]
    options = model.subgraphs[0].operators[0].builtinOptions
    options.condSubgraphIndex, options.bodySubgraphIndex = 1, 2
    import flatbuffers

    builder = flatbuffers.Builder(1024)
    builder.Finish(model.Pack(builder), b"TFL3")
    path.write_bytes(bytes(builder.Output()))
    return path
