"""A model in a process of its own: right outputs, and every death of it told in words."""

from __future__ import annotations

import io
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tpu2edge.errors import DataError, DeviceError
from tpu2edge.runtime_check.devices import client
from tpu2edge.runtime_check.devices.client import Session, host_command
from tpu2edge.types import Dim

# A worker that answers as a real one does, but does what a broken one does at one request.
FAULTY = """
import os, signal, sys, time
sys.argv[0] = {worker!r}
source = open({worker!r}).read()
space = {{"__name__": "worker", "__file__": {worker!r}}}
exec(compile(source, {worker!r}, "exec"), space)
real = space["_Model"].run
calls = [0]
def run(self, *args):
    calls[0] += 1
    if calls[0] == {at}:
        {act}
    return real(self, *args)
space["_Model"].run = run
space["main"]()
"""


def faulty(act: str, at: int = 2) -> list[str]:
    return [sys.executable, "-c", FAULTY.format(worker=host_command()[-1], act=act, at=at)]


def images(count: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [{"image": rng.standard_normal((1, 2, 6, 6)).astype("float32")} for _ in range(count)]


def test_outputs_equal_those_of_litert_in_this_process(small_tflite):
    from ai_edge_litert.interpreter import Interpreter

    runner = Interpreter(str(small_tflite)).get_signature_runner("serving_default")
    given = images(3)
    with Session(small_tflite) as session:
        got = list(session.run("serving_default", given))
    assert len(got) == 3
    for sample, outputs in zip(given, got, strict=True):
        wanted = runner(**sample)
        assert set(outputs) == {"logits", "features"}
        for name in wanted:
            np.testing.assert_array_equal(outputs[name], wanted[name])


def test_a_signature_tells_names_shapes_and_types(small_tflite, dynamic_tflite):
    with Session(small_tflite) as session:
        (signature,) = session.signatures
    assert signature.name == "serving_default"
    assert signature.input("image").shape == (1, 2, 6, 6)
    assert {spec.name: spec.dtype for spec in signature.outputs} == {
        "logits": "float32",
        "features": "float32",
    }
    with Session(dynamic_tflite) as session:
        size, columns = session.signatures[0].input("x").shape
    assert isinstance(size, Dim)
    assert columns == 2


def test_scalars_booleans_integers_and_empty_tensors_pass_unchanged(typed_tflite):
    samples = [
        {
            "scalar": np.array(3.0 + i, np.float32),
            "flag": np.array([True, False, bool(i)]),
            "count": np.array([[1, 2], [3, i]], np.int32),
            "pixel": np.array([0, 255, 7, i], np.uint8),
            "empty": np.zeros((0, 3), np.float32),
        }
        for i in range(3)
    ]
    with Session(typed_tflite) as session:
        got = list(session.run("serving_default", samples))
    for i, outputs in enumerate(got):
        assert outputs["scalar"].shape == ()
        assert outputs["scalar"] == (3 + i) / 2
        np.testing.assert_array_equal(outputs["flag"], [False, True, not i])
        np.testing.assert_array_equal(outputs["count"], [[3, 6], [9, 3 * i]])
        np.testing.assert_array_equal(outputs["pixel"], [0, 255, 7, i])
        assert outputs["empty"].shape == (0, 3)
        assert {n: a.dtype.name for n, a in outputs.items()} == {
            "scalar": "float32",
            "flag": "bool",
            "count": "int32",
            "pixel": "uint8",
            "empty": "float32",
        }


def test_each_of_two_signatures_answers_for_itself(two_signatures_tflite):
    x = np.array([1, 3], np.float32)
    with Session(two_signatures_tflite) as session:
        assert sorted(s.name for s in session.signatures) == ["decode", "encode"]
        for _ in range(2):
            (encoded,) = session.run("encode", [{"x": x}])
            (decoded,) = session.run("decode", [{"x": x}])
            np.testing.assert_array_equal(encoded["scaled"], [2, 6])
            np.testing.assert_array_equal(encoded["shifted"], [2, 4])
            np.testing.assert_array_equal(decoded["scaled"], [10, 30])
            np.testing.assert_array_equal(decoded["shifted"], [6, 8])
        with pytest.raises(DataError, match="no signature 'train'"):
            list(session.run("train", [{"x": x}]))


def test_a_dynamic_axis_takes_another_size_from_sample_to_sample(dynamic_tflite):
    sizes = [1, 3, 3, 2, 1, 5]
    samples = [{"x": np.arange(2 * n, dtype=np.float32).reshape(n, 2)} for n in sizes]
    with Session(dynamic_tflite) as session:
        got = list(session.run("serving_default", samples))
    for sample, outputs in zip(samples, got, strict=True):
        np.testing.assert_array_equal(outputs["scaled"], 2 * sample["x"])
        np.testing.assert_array_equal(outputs["shifted"], sample["x"] + 1)


def test_many_samples_in_chunks_keep_their_order(make_affine, monkeypatch):
    monkeypatch.setattr(client, "_CHUNK_SAMPLES", 7)
    path = make_affine(np.ones(4), np.zeros(4))
    samples = [{"x": np.full(4, i, np.float32)} for i in range(100)]
    with Session(path) as session:
        got = [float(out["scaled"][0]) for out in session.run("serving_default", samples)]
        assert session.times["samples"] == 100
    assert got == list(range(100))


def test_a_sample_larger_than_the_pipe_comes_back_whole(tmp_path, make_affine):
    size = 5_000_000  # 20 MB, some three hundred times what a pipe holds
    path = make_affine(np.float32([2]), np.float32([0]), shape=[size])
    x = np.arange(size, dtype=np.float32)
    with Session(path) as session:
        for outputs in session.run("serving_default", [{"x": x}, {"x": -x}]):
            x_now = outputs["shifted"]
            np.testing.assert_array_equal(outputs["scaled"], 2 * x_now)
    np.testing.assert_array_equal(x_now, -x)


@pytest.mark.parametrize("threads", [1, 4])
def test_threads_are_taken_and_change_no_number_much(small_tflite, threads):
    with Session(small_tflite) as session:
        (wanted,) = session.run("serving_default", images(1))
    with Session(small_tflite, threads=threads) as session:
        (got,) = session.run("serving_default", images(1))
    np.testing.assert_allclose(got["logits"], wanted["logits"], rtol=0, atol=1e-6)


def test_the_plain_kernels_give_nearly_the_same_numbers(small_tflite):
    results = []
    for kernels in ("default", "builtin", "reference"):
        with Session(small_tflite, kernels=kernels) as session:
            (out,) = session.run("serving_default", images(1))
            results.append(out["logits"])
    np.testing.assert_allclose(results[1], results[0], rtol=0, atol=1e-6)
    np.testing.assert_allclose(results[2], results[0], rtol=0, atol=1e-6)


def test_times_and_memory_are_reported(small_tflite):
    with Session(small_tflite) as session:
        list(session.run("serving_default", images(5)))
        assert session.times["samples"] == 5
        assert 0 < session.times["first_ms"] <= session.times["total_ms"]
        assert session.times["load_ms"] > 0
        assert session.peak_rss_kb > 10_000


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        ({"picture": np.zeros((1, 2, 6, 6), np.float32)}, "picture"),
        ({"image": np.zeros((1, 2, 6, 5), np.float32)}, r"\[1, 2, 6, 5\]"),
        ({"image": np.zeros((2, 6, 6), np.float32)}, r"\[2, 6, 6\]"),
        ({"image": np.zeros((1, 2, 6, 6), np.float64)}, "float64"),
        ({}, "takes"),
    ],
)
def test_a_sample_that_does_not_fit_is_refused_and_the_session_lives(small_tflite, sample, words):
    with Session(small_tflite) as session:
        with pytest.raises(DataError, match=words):
            list(session.run("serving_default", [sample]))
        assert len(list(session.run("serving_default", images(1)))) == 1


# -------------------------------------------------------------------------------------- broken


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL"])
def test_a_worker_killed_in_mid_run_is_a_device_error_with_the_signals_name(small_tflite, name):
    command = faulty(f"os.kill(os.getpid(), signal.{name})")
    words = rf"'phone' died by signal {name}.*run small"
    with Session(small_tflite, command=command, device="phone") as session:
        answers = session.run("serving_default", images(5))
        next(answers)  # the first sample goes alone, the second request is the one that kills
        with pytest.raises(DeviceError, match=words) as error:
            next(answers)
    assert error.value.exit_code == 4
    with Session(small_tflite) as session:
        assert len(list(session.run("serving_default", images(5)))) == 5


def test_a_worker_killed_from_outside_is_named_too(small_tflite):
    with Session(small_tflite) as session:
        os.kill(session._process.pid, signal.SIGKILL)
        with pytest.raises(DeviceError, match=r"SIGKILL \(the system may be out of memory\)"):
            list(session.run("serving_default", images(1)))


def test_the_last_words_of_a_dying_worker_are_in_the_message_and_in_the_log(small_tflite):
    act = "sys.stderr.write('INFO: chatter\\nout of weights\\n'); sys.stderr.flush(); os._exit(3)"
    log = io.BytesIO()
    with (
        pytest.raises(DeviceError, match="exit status 3") as error,
        Session(small_tflite, command=faulty(act, at=1), log=log) as session,
    ):
        list(session.run("serving_default", images(1)))
    assert "out of weights" in str(error.value)
    assert "chatter" not in str(error.value)
    assert b"INFO: chatter\nout of weights" in log.getvalue()


def test_a_worker_that_hangs_is_ended_after_the_timeout(small_tflite):
    begin = time.monotonic()
    with Session(small_tflite, command=faulty("time.sleep(600)"), timeout_s=1.5) as session:
        with pytest.raises(DeviceError, match=r"gave no answer in 2 s while it was to run"):
            list(session.run("serving_default", images(5)))
        assert session._process.poll() is not None
    assert time.monotonic() - begin < 5


def test_a_worker_that_stops_reading_is_ended_too(make_affine):
    path = make_affine(np.float32([2]), np.float32([0]), shape=[5_000_000])
    x = np.zeros(5_000_000, np.float32)
    with (
        Session(path, command=faulty("time.sleep(600)", at=1), timeout_s=1.5) as session,
        pytest.raises(DeviceError, match="gave no answer"),
    ):
        list(session.run("serving_default", [{"x": x}]))


def test_a_worker_that_closes_its_pipes_and_lives_on_is_ended(small_tflite, monkeypatch):
    act = "os.close(1); os.close(space['_out'].fileno()); time.sleep(600)"
    monkeypatch.setattr(client, "_DYING_S", 0.3)
    with (
        Session(small_tflite, command=faulty(act), timeout_s=30) as session,
        pytest.raises(DeviceError, match="SIGKILL"),
    ):
        list(session.run("serving_default", images(5)))


@pytest.mark.parametrize(
    "command", [["echo", "hello from a login banner"], ["printf", r"\3\0\0\0abc"]]
)
def test_a_command_that_is_no_worker_is_told_so(small_tflite, command):
    with pytest.raises(DeviceError, match="does not speak the worker protocol"):
        Session(small_tflite, command=command)


def test_a_command_that_is_not_there_points_to_doctor(small_tflite):
    with pytest.raises(DeviceError, match="cannot be started") as error:
        Session(small_tflite, command=["/no/such/worker"])
    assert "doctor" in error.value.do


def test_a_file_that_is_no_model_is_refused_by_litert_in_words(tmp_path):
    path = tmp_path / "text.tflite"
    path.write_text("this is no flatbuffer")
    with pytest.raises(DeviceError, match=r"cannot load text\.tflite"):
        Session(path)
    with pytest.raises(DeviceError, match=r"cannot load gone\.tflite"):
        Session(tmp_path / "gone.tflite")


def test_corrupted_files_never_end_this_process_nor_hang(tmp_path, small_tflite):
    good = small_tflite.read_bytes()
    rng = random.Random(1)
    outcomes = set()
    for number in range(6):
        bad = bytearray(good)
        if number < 2:
            bad = bad[: len(bad) // (number + 2)]
        for _ in range(40):
            bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        path = tmp_path / f"{number}.tflite"
        path.write_bytes(bad)
        try:
            with Session(path, timeout_s=20) as session:
                for signature in session.signatures:
                    list(session.run(signature.name, images(1)))
            outcomes.add("ran")
        except (DeviceError, DataError) as error:
            outcomes.add(type(error).__name__)
    assert "DeviceError" in outcomes


def test_closing_ends_the_process_even_in_mid_answer(small_tflite):
    session = Session(small_tflite)
    next(session.run("serving_default", images(3)))
    session.close()
    assert session._process.poll() is not None
    session.close()


def test_the_worker_needs_no_torch_and_no_tpu2edge(small_tflite):
    script = (
        "import sys, runpy; sys.stdin.close(); "
        "sys.modules['torch'] = sys.modules['tpu2edge'] = None; "
        f"runpy.run_path({host_command()[-1]!r}, run_name='x'); "
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        input=b"",
        capture_output=True,
        check=False,
        cwd=Path(small_tflite).parent,
    )
    assert done.returncode == 0, done.stderr.decode()
