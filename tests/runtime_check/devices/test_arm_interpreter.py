"""The C worker against LiteRT's own Python Interpreter, both on the same emulated core: equal bits.

The Interpreter is the arm64 wheel's, in an arm64 CPython with NumPy: Debian's packages through the
user's own apt, wheels by pip, 130 MB beside the devices' parts, fetched once. It has its kernels in
another library than the CompiledModel that the C worker drives.
"""

from __future__ import annotations

import dataclasses
import json
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

from tpu2edge.errors import DeviceError
from tpu2edge.quantize.apply import Quantizer
from tpu2edge.quantize.recipes import recipe
from tpu2edge.runtime_check.devices.client import Session
from tpu2edge.runtime_check.devices.host import litert_version, load_options
from tpu2edge.runtime_check.devices.install import (
    Part,
    apt_dependencies,
    apt_lists,
    apt_packages,
    new_part,
    part_named,
    pip_wheel,
)
from tpu2edge.runtime_check.devices.profiles import Profile
from tpu2edge.runtime_check.devices.runners import Launch, launch_of
from tpu2edge.types import Signature, TensorSpec

DATA = Path(__file__).parents[2] / "data"
WORKER = Path(__file__).parents[3] / "runtime_check" / "devices" / "worker.py"
DEVICES = {"cortex-a53": "arm-v8.0", "cortex-a76": "arm-v8.2-dotprod", "cortex-a710": "arm-v9-i8mm"}
PART = "arm64-python"
WHEEL_PLATFORMS = tuple(f"manylinux_2_{minor}_aarch64" for minor in (17, 27, 28, 34))
# These come with the devices' own part.
C_LIBRARIES = {"libc6", "libgcc-s1", "libstdc++6"}


def fetch_python() -> Part:
    options = apt_lists("arm64")
    names = apt_dependencies("python3-minimal", options=options)
    (program,) = [name for name in names if name.startswith("python3.")]  # "python3.11-minimal"
    version = program.removeprefix("python").removesuffix("-minimal")
    python = [program, f"libpython{version}-minimal", f"libpython{version}-stdlib"]
    needed = set(apt_dependencies(*python, options=options)) - C_LIBRARIES
    libraries = sorted(name for name in needed if name.startswith(("lib", "zlib")))
    with new_part(PART) as (folder, record):
        versions = apt_packages([*python, *libraries], folder / "root", options=options)
        wheels = folder / "wheels"
        wheels.mkdir()
        for package, wanted in (("ai-edge-litert", litert_version()), ("numpy", "")):
            wheel = pip_wheel(
                package, wheels, version=wanted, platforms=WHEEL_PLATFORMS, python=version
            )
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder / "site")
            wheel.unlink()
        record["source"] = f"python {versions[program]} by apt, wheels by pip"
        record["facts"] = {"program": f"root/usr/bin/python{version}"}
    part = part_named(PART)
    assert part is not None
    return part


@pytest.fixture(scope="module")
def on_arm_python(ready: Callable[[str], Profile]) -> Callable[[str], Launch]:
    """The worker of this machine's Interpreter, worker.py, in arm64's CPython on a device's core."""
    try:
        part = part_named(PART) or fetch_python()
    except DeviceError as err:
        pytest.skip(f"no arm64 CPython to compare with: {err}")
    folders = {path.parent for path in (part.folder / "root").rglob("*aarch64-linux-gnu/*.so.*")}

    def launch(name: str) -> Launch:
        native = launch_of(ready(name))
        at = native.command.index("--library-path")
        libraries = ":".join([native.command[at + 1], *map(str, sorted(folders))])
        python = str(part.folder / part.facts["program"])
        return dataclasses.replace(
            native,
            command=(*native.command[: at + 1], libraries, python, "-S", "-u", str(WORKER)),
            env={
                **native.env,
                "PYTHONHOME": str(part.folder / "root" / "usr"),
                "PYTHONPATH": str(part.folder / "site"),
            },
            load=load_options(ready(name), "interpreter"),
        )

    return launch


@pytest.fixture(scope="module")
def interpreters(on_arm_python: Callable[[str], Launch]) -> Iterator[Callable[[str], Session]]:
    """A running Interpreter on a device's core; starting one costs 3 s, so it is kept."""
    running: dict[str, Session] = {}

    def start(name: str) -> Session:
        if name not in running:
            first = DATA / "small.float32.tflite"
            running[name] = Session(first, launch=on_arm_python(name), timeout_s=120)
        return running[name]

    yield start
    for session in running.values():
        session.close()


@pytest.fixture(scope="module")
def files(
    tmp_path_factory: pytest.TempPathFactory,
    write_graph: Callable[..., Path],
    two_signatures_tflite: Path,
    dynamic_tflite: Path,
) -> Mapping[str, list[Path]]:
    """By kind of recipe: what is committed, and the mixed network (make_mixed.py) quantized now."""
    folder = tmp_path_factory.mktemp("kinds")
    stored = json.loads((DATA / "mixed.ranges.json").read_text())
    ranges = {
        name: (np.full(shape, low, "float32"), np.full(shape, high, "float32"))
        for name, (shape, low, high) in stored.items()
    }
    made: dict[str, Path] = {}
    with Quantizer(DATA / "mixed.float32.tflite", timeout_s=120) as quantizer:
        for name in (
            "float16",
            "weight_only_wi8_afp32",
            "dynamic_wi8_afp32",
            "dynamic_wi4_afp32",
            "static_wi8_ai8",
            "static_wi8_ai16",
            "int8-static",
        ):
            wanted = recipe(name)
            made[name] = folder / f"mixed.{name}.tflite"
            quantizer.quantize(made[name], wanted, ranges if "static" in name else None)
    rng = np.random.default_rng(5)
    any_rows = write_graph(
        tensors={"x": ("float32", [-1, 32]), "y": ("float32", [-1, 32])},
        constants={"w": rng.standard_normal((32, 32)).astype("float32")},
        ops=[("FULLY_CONNECTED", ["x", "w"], ["y"])],
        inputs={"x": "x"},
        outputs={"y": "y"},
    )
    any_rows_int8 = folder / "any_rows.dynamic_wi8_afp32.tflite"
    with Quantizer(any_rows, timeout_s=120) as quantizer:
        quantizer.quantize(any_rows_int8, recipe("dynamic_wi8_afp32"), None)
    return {
        "float": [*sorted(DATA.glob("*.float32.tflite")), made["float16"]],
        "weight-only int8": [made["weight_only_wi8_afp32"]],
        "dynamic int8": [
            *sorted(DATA.glob("*.dynamic_wi8_afp32.tflite")),
            made["dynamic_wi8_afp32"],
            made["dynamic_wi4_afp32"],
        ],
        "static int8": [
            DATA / "small.static_wi8_ai8.tflite",
            made["static_wi8_ai8"],
            made["int8-static"],
        ],
        "int16 activations": [made["static_wi8_ai16"]],
        "several signatures": [two_signatures_tflite],
        "any number of rows": [dynamic_tflite, any_rows, any_rows_int8],
    }


def samples_for(signature: Signature) -> list[dict[str, np.ndarray]]:
    """Three, over the whole range of integers; a size that is open is 1, 4 and 3."""
    rng = np.random.default_rng(2)

    def values(shape: list[int], dtype: str) -> np.ndarray:
        if dtype == "float32":
            return rng.standard_normal(shape).astype("float32")
        if dtype == "int32":  # rows of an embedding
            return rng.integers(0, 100, shape, "int32")
        limits = np.iinfo(dtype)
        return rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)

    return [
        {
            spec.name: values([n if isinstance(n, int) else size for n in spec.shape], spec.dtype)
            for spec in signature.inputs
        }
        for size in (1, 4, 3)
    ]


def tensors_of(session: Session) -> dict[str, tuple[frozenset[TensorSpec], frozenset[TensorSpec]]]:
    """Each signature's inputs and outputs: names, types, scales and which sizes are open."""
    return {one.name: (frozenset(one.inputs), frozenset(one.outputs)) for one in session.signatures}


@pytest.mark.parametrize("core", DEVICES)
@pytest.mark.parametrize(
    "kind",
    [
        "float",
        "weight-only int8",
        "dynamic int8",
        "static int8",
        "int16 activations",
        "several signatures",
        "any number of rows",
    ],
)
def test_the_c_worker_gives_the_bits_of_the_interpreter_on_the_same_core(
    kind: str, core: str, ready, interpreters, files
) -> None:
    interpreter = interpreters(DEVICES[core])
    assert interpreter.hello["machine"] == "aarch64"
    assert interpreter.hello["litert"] in (litert_version(), "unknown")
    for path in files[kind]:
        interpreter.load(path)
        with Session(path, launch=launch_of(ready(DEVICES[core]))) as worker:
            assert tensors_of(worker) == tensors_of(interpreter)
            for signature in worker.signatures:
                samples = samples_for(signature)
                wanted = interpreter.run(signature.name, samples)
                got = worker.run(signature.name, samples)
                for number, (one, other) in enumerate(zip(wanted, got, strict=True)):
                    assert set(one) == set(other) == {spec.name for spec in signature.outputs}
                    for name, array in one.items():
                        where = f"{path.name}, '{name}' of '{signature.name}', sample {number}"
                        assert array.dtype == other[name].dtype, where
                        assert array.shape == other[name].shape, where
                        assert array.tobytes() == other[name].tobytes(), where


def test_the_core_and_not_the_worker_decides_the_bits(
    ready, interpreters, dense, dense_samples
) -> None:
    """The other half of the table: a core with dot products gives other bits, by either runtime."""
    found: dict[str, dict[str, bytes]] = {}
    for core in ("cortex-a53", "cortex-a76"):
        interpreter = interpreters(DEVICES[core])
        interpreter.load(dense[1])
        (there,) = interpreter.run("serving_default", dense_samples[24:25])
        with Session(dense[1], launch=launch_of(ready(DEVICES[core]))) as worker:
            (here,) = worker.run("serving_default", dense_samples[24:25])
        found[core] = {"interpreter": there["y"].tobytes(), "worker": here["y"].tobytes()}
    assert found["cortex-a53"]["interpreter"] == found["cortex-a53"]["worker"]
    assert found["cortex-a76"]["interpreter"] == found["cortex-a76"]["worker"]
    assert found["cortex-a53"] != found["cortex-a76"]
