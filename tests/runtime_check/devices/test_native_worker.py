"""The C worker against LiteRT's Python Interpreter on the same CPU: the same bits, and its faults."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tpu2edge.errors import (
    DataError,
    DeviceCrashError,
    DeviceError,
    UnsupportedError,
    UnwrittenError,
)
from tpu2edge.runtime_check.devices.client import Session, Tap
from tpu2edge.runtime_check.devices.host import host_command
from tpu2edge.runtime_check.devices.profiles import profile_named
from tpu2edge.runtime_check.devices.runners import launch_of

DATA = Path(__file__).parents[2] / "data"
NATIVE = Path(__file__).parents[3] / "runtime_check" / "devices" / "native"
FILES = sorted(path.name for path in DATA.glob("*.tflite"))


def random_samples(session: Session, count: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(1)
    (signature,) = session.signatures
    samples = []
    for _ in range(count):
        sample = {}
        for spec in signature.inputs:
            values = rng.standard_normal(spec.shape) * (1 if spec.dtype == "float32" else 25)
            if spec.dtype in ("int32", "int64"):  # indices into a table of 100
                values = np.abs(values) % 100
            sample[spec.name] = values.astype(spec.dtype)
        samples.append(sample)
    return samples


def assert_same_bits(got: list[dict[str, np.ndarray]], wanted: list[dict[str, np.ndarray]]) -> None:
    assert len(got) == len(wanted)
    for one, other in zip(got, wanted, strict=True):
        assert set(one) == set(other)
        for name in other:
            assert one[name].dtype == other[name].dtype
            assert one[name].shape == other[name].shape
            assert one[name].tobytes() == other[name].tobytes()


@pytest.mark.parametrize("source", ["worker.c", "cpuid_level.c"])
def test_the_binaries_that_ship_were_made_from_the_sources_beside_them(source: str) -> None:
    binary = {"worker.c": "t2e_worker.arm64", "cpuid_level.c": "cpuid_level.x86_64.so"}[source]
    digest = hashlib.sha256((NATIVE / source).read_bytes()).hexdigest()
    assert digest.encode() in (NATIVE / binary).read_bytes(), "run native/build.sh"


@pytest.mark.parametrize("level", ["host", "avx2", "sse41"])
@pytest.mark.parametrize("name", FILES)
def test_outputs_are_the_interpreters_bit_for_bit_on_the_same_cpu(
    native_worker, ready, name: str, level: str
) -> None:
    path, launch, native = DATA / name, None, native_worker()
    if level != "host":
        launch = launch_of(ready(f"laptop-{level}"))
        # Whatever makes this CPU that level makes it so for both: a preloaded library, or QEMU.
        under = launch.command[: len(launch.command) - len(host_command())]
        native = replace(native, command=(*under, *native.command), env=launch.env)
    with Session(path, launch=launch) as python, Session(path, launch=native) as c:

        def described(session: Session) -> list[tuple[str, list[str], list[str]]]:
            return [
                (s.name, sorted(map(repr, s.inputs)), sorted(map(repr, s.outputs)))
                for s in session.signatures
            ]

        assert described(c) == described(python)
        samples = random_samples(python, 4)
        assert_same_bits(
            list(c.run("serving_default", samples)), list(python.run("serving_default", samples))
        )


@pytest.mark.parametrize("worker", ["c", "python-compiled"])
def test_types_sizes_signatures_and_names_pass_as_through_the_interpreter(
    worker: str, native_worker, run_on, two_signatures_tflite, dynamic_tflite, write_graph
) -> None:
    launch = native_worker() if worker == "c" else compiled_host()
    kinds = {"scalar": ("float32", []), "flag": ("bool", [3]), "count": ("int32", [2, 2])}
    kinds["pixel"] = ("uint8", [4])
    typed = write_graph(
        tensors={**kinds, **{f"{name}_out": kind for name, kind in kinds.items()}},
        constants={"half": np.float32(0.5).reshape(()), "three": np.int32([[3]])},
        ops=[
            ("MUL", ("scalar", "half"), ("scalar_out",)),
            ("LOGICAL_NOT", ("flag",), ("flag_out",)),
            ("MUL", ("count", "three"), ("count_out",)),
            ("MAXIMUM", ("pixel", "pixel"), ("pixel_out",)),
        ],
        inputs={name: name for name in kinds},
        outputs={name: f"{name}_out" for name in kinds},
    )
    samples = [
        {
            "scalar": np.array(3.0 + i, np.float32),
            "flag": np.array([True, False, bool(i)]),
            "count": np.array([[1, 2], [3, i]], np.int32),
            "pixel": np.array([0, 255, 7, i], np.uint8),
        }
        for i in range(3)
    ]
    assert_same_bits(run_on(typed, samples, launch), run_on(typed, samples))
    sizes = [1, 3, 3, 2, 1, 5]
    dynamic = [{"x": np.arange(2 * n, dtype=np.float32).reshape(n, 2)} for n in sizes]
    assert_same_bits(run_on(dynamic_tflite, dynamic, launch), run_on(dynamic_tflite, dynamic))
    with Session(two_signatures_tflite, launch=launch) as session:
        for _ in range(2):
            x = {"x": np.array([1, 3], np.float32)}
            (encoded,) = session.run("encode", [x])
            (decoded,) = session.run("decode", [x])
            np.testing.assert_array_equal(encoded["scaled"], [2, 6])
            np.testing.assert_array_equal(decoded["scaled"], [10, 30])
    odd = 'a"\\ü€😀\n'
    named = write_graph(
        tensors={"x": ("float32", [2]), "y": ("float32", [2])},
        ops=[("ADD", ["x", "x"], ["y"])],
        inputs={odd: "x"},
        outputs={f"{odd}/y": "y"},
    )
    (outputs,) = run_on(named, [{odd: np.float32([1, 2])}], launch)
    np.testing.assert_array_equal(outputs[f"{odd}/y"], [2, 4])


@pytest.mark.parametrize("dtype", ["int16", "int64"])
def test_integers_that_pythons_buffers_refuse_go_through_the_c_worker(
    dtype: str, native_worker, run_on, write_graph
) -> None:
    path = write_graph(
        tensors={"x": (dtype, [3]), "y": (dtype, [3])},
        constants={"shape": np.int32([3])},
        ops=[("RESHAPE", ["x", "shape"], ["y"])],
        inputs={"x": "x"},
        outputs={"y": "y"},
    )
    x = np.array([-5, 0, np.iinfo(dtype).max], dtype)
    (outputs,) = run_on(path, [{"x": x}], native_worker())
    np.testing.assert_array_equal(outputs["y"], x)


def test_an_empty_tensor_is_refused_by_the_c_worker_in_words(native_worker, typed_tflite) -> None:
    sample = {
        "scalar": np.array(3.0, np.float32),
        "flag": np.zeros(3, bool),
        "count": np.zeros((2, 2), np.int32),
        "pixel": np.zeros(4, np.uint8),
        "empty": np.zeros((0, 3), np.float32),
    }
    with (
        Session(typed_tflite, launch=native_worker()) as session,
        pytest.raises(UnsupportedError, match="'empty' is empty"),
    ):
        list(session.run("serving_default", [sample]))


def compiled_host():
    launch = launch_of(profile_named("host"))
    return replace(launch, load={**launch.load, "runtime": "compiled"})


@pytest.mark.parametrize("worker", ["c", "python-compiled"])
def test_an_output_that_is_an_input_or_a_constant_is_right(
    worker: str, native_worker, run_on, write_graph
) -> None:
    launch = native_worker() if worker == "c" else compiled_host()
    path = write_graph(
        tensors={"x": ("float32", [4]), "y": ("float32", [4])},
        constants={"c": np.float32([5, 6])},
        ops=[("ADD", ["x", "x"], ["y"])],
        inputs={"x": "x"},
        outputs={"y": "y", "same": "x", "fixed": "c"},
    )
    for x in (np.float32([1, 2, 3, 4]), np.float32([0, -1, np.nan, np.inf])):
        (outputs,) = run_on(path, [{"x": x}], launch)
        np.testing.assert_array_equal(outputs["y"], x + x)
        np.testing.assert_array_equal(outputs["same"], x)
        np.testing.assert_array_equal(outputs["fixed"], [5, 6])


def test_a_wrong_request_is_refused_in_words_and_the_worker_lives(
    native_worker, small_tflite
) -> None:
    image = np.zeros((1, 2, 6, 6), np.float32)
    with Session(small_tflite, launch=native_worker()) as session:
        for sample in (
            {"picture": image},
            {"image": image[..., 1:]},
            {"image": image.astype("f8")},
        ):
            with pytest.raises(DataError):
                list(session.run("serving_default", [sample]))
        for header, arrays, words in [
            (
                {"op": "run", "signature": "none", "count": 1},
                {"image": image[None]},
                "no signature",
            ),
            ({"op": "run", "signature": "serving_default", "count": 1}, {}, "0 inputs given"),
            (
                {"op": "run", "signature": "serving_default", "count": 1},
                {"image": image[None, ..., 1:]},
                "shape does not fit",
            ),
            (
                {"op": "run", "signature": "serving_default", "count": 1},
                {"image": image[None].astype(np.int32)},
                "int32 given, float32 expected",
            ),
            ({"op": "dance"}, {}, "unknown op 'dance'"),
            ({"op": "load", "path": str(small_tflite)}, {}, "loaded already"),
        ]:
            with pytest.raises(DeviceError, match=words):
                session._request(header, arrays, "run")
        (outputs,) = session.run("serving_default", [{"image": image}])
        assert outputs["logits"].shape == (1, 3)


def test_what_the_c_worker_cannot_do_it_says(native_worker, small_tflite, tmp_path) -> None:
    with pytest.raises(DeviceError, match="cannot look at tensors inside"):
        Session(small_tflite, launch=native_worker(), taps=[Tap("t", 1, "serving_default")])
    text = tmp_path / "text.tflite"
    text.write_text("this is no flatbuffer")
    with pytest.raises(DeviceError, match=r"text\.tflite' is no \.tflite file"):
        Session(text, launch=native_worker())
    with pytest.raises(DeviceError, match=r"gone\.tflite' cannot be read"):
        Session(tmp_path / "gone.tflite", launch=native_worker())
    with pytest.raises(DeviceCrashError, match="exit status 2"):
        Session(small_tflite, launch=native_worker(tmp_path / "none.so"))


def test_an_operator_without_a_kernel_is_told_as_such(native_worker, write_graph, run_on) -> None:
    import flatbuffers
    from ai_edge_litert import schema_py_generated as schema

    path = write_graph(
        tensors={"x": ("float32", [2]), "y": ("float32", [2])},
        ops=[("CUSTOM", ["x"], ["y"])],
        inputs={"x": "x"},
        outputs={"y": "y"},
    )
    model = schema.ModelT.InitFromPackedBuf(path.read_bytes())
    model.operatorCodes[0].customCode = b"Teleport"
    builder = flatbuffers.Builder(1024)
    builder.Finish(model.Pack(builder), b"TFL3")
    path.write_bytes(bytes(builder.Output()))
    for launch in (None, native_worker()):
        with pytest.raises(UnsupportedError, match="Teleport"):
            run_on(path, [{"x": np.zeros(2, np.float32)}], launch)


FAKE = """
#include <stddef.h>
// A LiteRT whose runs succeed and write nothing; all else is the real one's.
int LiteRtRunCompiledModel(void *m, size_t s, size_t ni, void **i, size_t no, void **o) {
  return 0;
}
"""


def test_an_output_that_is_left_as_it_was_is_an_error(
    native_worker, litert_library, tmp_path, small_tflite, small_samples
) -> None:
    source, library = tmp_path / "fake.c", tmp_path / "fake.so"
    source.write_text(FAKE)
    compiler = shutil.which("cc")
    assert compiler
    link = ["-shared", "-fPIC", "-Wl,--no-as-needed", str(litert_library)]
    rpath = f"-Wl,-rpath,{litert_library.parent}"
    subprocess.run([compiler, "-o", str(library), str(source), *link, rpath], check=True)
    with (
        Session(small_tflite, launch=native_worker(library)) as session,
        pytest.raises(UnwrittenError, match=r"left \d+ of \d+ elements of output") as error,
    ):
        list(session.run("serving_default", small_samples))
    assert error.value.exit_code == 4
    assert re.search(r"left (3 of 3|16 of 16) ", str(error.value))


def test_the_python_worker_finds_unwritten_outputs_of_a_compiled_model_too(
    small_tflite, small_samples
) -> None:
    host = compiled_host()
    script = (
        f"source = open({host.command[-1]!r}).read()\n"
        "space = {'__name__': 'worker'}\n"
        "exec(compile(source, 'worker.py', 'exec'), space)\n"
        "load = space['_Compiled'].__init__\n"
        "def init(self, header):\n"
        "    load(self, header)\n"
        "    real = self.model\n"
        "    class Idle:\n"
        "        def __getattr__(self, name): return getattr(real, name)\n"
        "        def run_by_index(self, *args): pass\n"
        "    self.model = Idle()\n"
        "space['_Compiled'].__init__ = init\n"
        "space['main']()\n"
    )
    launch = replace(host, command=(host.command[0], "-c", script))
    with (
        Session(small_tflite, launch=launch) as session,
        pytest.raises(UnwrittenError, match="of output"),
    ):
        list(session.run("serving_default", small_samples))


def test_values_equal_to_the_poison_by_chance_are_no_error(
    native_worker, run_on, write_graph
) -> None:
    path = write_graph(
        tensors={"x": ("uint8", [4]), "y": ("uint8", [4])},
        ops=[("MAXIMUM", ["x", "x"], ["y"])],
        inputs={"x": "x"},
        outputs={"y": "y"},
    )
    for x in (np.uint8([255, 255, 255, 255]), np.uint8([0x5A] * 4), np.uint8([255, 0x5A, 0, 1])):
        for launch in (native_worker(), compiled_host()):
            (outputs,) = run_on(path, [{"x": x}], launch)
            np.testing.assert_array_equal(outputs["y"], x)
