"""Devices that are ready: what is missing is fetched once a run, as a user would fetch it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tpu2edge.runtime_check.devices.client import Session
from tpu2edge.runtime_check.devices.profiles import Profile, profile_named
from tpu2edge.runtime_check.devices.runners import Launch, install_device

DATA = Path(__file__).parents[2] / "data"
RECIPES = ("float32", "dynamic_wi8_afp32", "static_wi8_ai8")
NATIVE = Path(__file__).parents[3] / "runtime_check" / "devices" / "native"


@pytest.fixture(scope="session")
def ready() -> Callable[[str], Profile]:
    """The profile of that name, installed if it was not."""

    def install(name: str) -> Profile:
        profile = profile_named(name)
        assert install_device(profile).ready
        return profile

    return install


@pytest.fixture(scope="session")
def dense() -> tuple[Path, Path]:
    """The files of make_dense.py: x float32[64,32] -> y, in float32 and with dynamic int8."""
    return DATA / "dense.float32.tflite", DATA / "dense.dynamic_wi8_afp32.tflite"


@pytest.fixture(scope="session")
def dense_samples() -> list[dict[str, np.ndarray]]:
    """Among these 32, the inputs 24 and 31 bring an activation near a rounding tie."""
    rng = np.random.default_rng(0)
    return [{"x": rng.standard_normal((64, 32)).astype(np.float32)} for _ in range(32)]


@pytest.fixture(scope="session")
def litert_library() -> Path:
    """LiteRT's library for this machine."""
    import ai_edge_litert

    return Path(ai_edge_litert.__file__).with_name("libLiteRt.so")


@pytest.fixture(scope="session")
def native_worker(
    tmp_path_factory: pytest.TempPathFactory, litert_library: Path
) -> Callable[..., Launch]:
    """The C worker built for this machine, with LiteRT's library or another one."""
    compiler = shutil.which("cc")
    assert compiler, "the tests need a C compiler (package gcc)"
    program = tmp_path_factory.mktemp("worker") / "worker"
    strict = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(
        [compiler, *strict, "-o", str(program), str(NATIVE / "worker.c"), "-ldl"], check=True
    )

    def launch(library: Path = litert_library, **env: str) -> Launch:
        return Launch(device="c", command=(str(program), str(library), "2.3.0"), env=env)

    return launch


def outputs_of(
    model: Path,
    samples: Sequence[dict[str, np.ndarray]],
    launch: Launch | None = None,
    **more: object,
) -> list[dict[str, np.ndarray]]:
    with Session(model, launch=launch, **more) as session:  # type: ignore[arg-type]
        return list(session.run(session.signatures[0].name, samples))


@pytest.fixture(scope="session")
def run_on() -> Callable[..., list[dict[str, np.ndarray]]]:
    """Run samples through the first signature of a file."""
    return outputs_of


@pytest.fixture
def small_samples() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(3)
    return [{"image": rng.standard_normal((1, 2, 6, 6)).astype("float32")} for _ in range(5)]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user who has installed and configured nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path


@pytest.fixture(scope="session")
def small_files(small_tflite: Path) -> dict[str, Path]:
    """The same small network by recipe."""
    return {name: small_tflite.with_name(f"small.{name}.tflite") for name in RECIPES}


def _stored(spec: Any, values: Any) -> Any:
    if spec.dtype == "float32":
        return values.astype("float32")
    return np.clip(np.round(values / spec.scale + spec.zero_point), -128, 127).astype(spec.dtype)


@pytest.fixture(scope="session")
def distance_to_host() -> Callable[..., dict[str, float]]:
    """Largest difference to this machine's Interpreter over the range, by output; 8 samples.

    Quantized outputs are compared as stored: one step is 1/255 of the largest possible range.
    """

    def measure(path: Path, launch: Launch, count: int = 8) -> dict[str, float]:
        rng = np.random.default_rng(1)
        with Session(path) as host:
            (signature,) = host.signatures
            (spec,) = signature.inputs
            samples = [
                {spec.name: _stored(spec, rng.standard_normal(spec.shape))} for _ in range(count)
            ]
            wanted = list(host.run(signature.name, samples))
        with Session(path, launch=launch) as device:
            (there,) = device.signatures
            assert there.name == signature.name
            assert set(there.inputs) == set(signature.inputs)
            assert set(there.outputs) == set(signature.outputs)
            got = list(device.run(signature.name, samples))
        found = {}
        for output in signature.outputs:
            a = np.stack([one[output.name].astype("float64") for one in wanted])
            b = np.stack([one[output.name].astype("float64") for one in got])
            assert a.shape == b.shape
            span = 255.0 if output.dtype == "int8" else float(np.ptp(a))
            found[output.name] = float(np.abs(a - b).max()) / span
        return found

    return measure
