"""A recipe applied to a real file, in a process of its own."""

from __future__ import annotations

import io

import numpy as np
import pytest

from tpu2edge.errors import DeviceError, OptionError, QuantizationError
from tpu2edge.files import sha256_of
from tpu2edge.flatbuffer import read_tflite, summarize
from tpu2edge.quantize import apply
from tpu2edge.quantize.apply import quantize_file
from tpu2edge.runtime_check.devices.client import Session
from tpu2edge.runtime_check.metrics import sqnr_db

IMAGE = np.random.default_rng(0).standard_normal((1, 2, 6, 6)).astype("float32")


def logits(path) -> np.ndarray:
    with Session(path) as session:
        (out,) = session.run("serving_default", [{"image": IMAGE}])
    return out["logits"]


@pytest.mark.parametrize(
    ("recipe", "stored", "at_least_db"),
    [
        ("float16", "float16", 55),
        ("dynamic_wi8_afp32", "int8", 25),
        ("weight_only_wi8_afp32", "int8", 30),
    ],
)
def test_weights_are_stored_as_the_recipe_says_and_the_file_still_runs(
    tmp_path, small_tflite, recipe, stored, at_least_db
):
    target = tmp_path / "q.tflite"
    before = sha256_of(small_tflite)
    quantize_file(small_tflite, target, recipe)
    assert sha256_of(small_tflite) == before
    by_shape = {w.shape: w.stored_as for w in summarize(read_tflite(target)).weights}
    assert by_shape[(16, 64)].startswith(stored)
    assert sqnr_db(logits(small_tflite), logits(target)) > at_least_db


def test_the_same_recipe_gives_the_same_bytes_twice(tmp_path, small_tflite):
    for name in ("a", "b"):
        quantize_file(small_tflite, tmp_path / name, "dynamic_wi8_afp32")
    assert sha256_of(tmp_path / "a") == sha256_of(tmp_path / "b")


@pytest.mark.parametrize("recipe", ["dynamic_wi8", "static_wi8_ai8", "float32"])
def test_a_recipe_that_does_not_quantize_writes_nothing(tmp_path, small_tflite, recipe):
    target = tmp_path / "q.tflite"
    with pytest.raises(OptionError):
        quantize_file(small_tflite, target, recipe)
    assert not target.exists()


def test_a_recipe_that_cannot_be_applied_is_refused_with_the_quantizers_words(tmp_path):
    source = tmp_path / "text.tflite"
    source.write_text("this is no flatbuffer")
    log = io.BytesIO()
    with pytest.raises(QuantizationError, match="'dynamic_wi8_afp32' cannot be applied: ") as error:
        quantize_file(source, tmp_path / "q.tflite", "dynamic_wi8_afp32", log=log)
    assert error.value.exit_code == 3
    assert error.value.step == "quantize"
    assert not (tmp_path / "q.tflite").exists()


@pytest.mark.parametrize(
    ("act", "words"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "died by signal SIGSEGV at recipe 'float16'"),
        ("sys.exit('no memory left')", "died by exit status 1 at recipe 'float16': no memory left"),
        ("sys.exit(0)", "gave no answer"),
    ],
)
def test_a_quantizer_that_dies_is_a_device_error_and_the_next_recipe_works(
    tmp_path, small_tflite, monkeypatch, act, words
):
    child = tmp_path / "child.py"
    child.write_text(f"import os, signal, sys\n{act}\n")
    with monkeypatch.context() as patch:
        patch.setattr(apply, "_CHILD", child)
        with pytest.raises(DeviceError, match=words) as error:
            quantize_file(small_tflite, tmp_path / "q.tflite", "float16")
        assert error.value.exit_code == 4
    quantize_file(small_tflite, tmp_path / "q.tflite", "float16")
    assert (tmp_path / "q.tflite").stat().st_size > 0


def test_what_the_quantizer_prints_goes_to_the_log_and_not_to_the_terminal(
    tmp_path, small_tflite, monkeypatch, capfd
):
    child = tmp_path / "child.py"
    child.write_text("import sys\nprint('chatter', file=sys.stderr)\nprint('{\"ok\": true}')\n")
    monkeypatch.setattr(apply, "_CHILD", child)
    log = io.BytesIO()
    quantize_file(small_tflite, tmp_path / "q.tflite", "float16", log=log)
    assert log.getvalue() == b"chatter\n"
    assert capfd.readouterr() == ("", "")
