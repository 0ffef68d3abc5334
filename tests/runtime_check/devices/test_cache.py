"""Kept outputs: used only where nothing that they depend on has changed."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest

from tpu2edge.errors import DeviceError
from tpu2edge.runtime_check.devices import cache
from tpu2edge.runtime_check.devices.cache import CachedSession, clear_cache
from tpu2edge.runtime_check.devices.client import Session
from tpu2edge.runtime_check.devices.profiles import profile_named

HOST = profile_named("host")


def run(model: Path, samples, folder: Path, profile=HOST, signature="serving_default", **more):
    with CachedSession(model, profile, folder=folder, **more) as session:
        outputs = list(session.run(signature, samples))
        return outputs, session.hits, session.misses, session


def test_a_second_run_gives_the_same_bits_and_starts_no_process(
    small_tflite, small_samples, tmp_path, monkeypatch
) -> None:
    first, *counts, session = run(small_tflite, small_samples, tmp_path)
    assert counts == [0, 5]

    def start(*args: object, **more: object) -> Session:
        raise AssertionError("a process was started")

    monkeypatch.setattr(cache, "Session", start)
    second, *counts, kept = run(small_tflite, small_samples, tmp_path)
    assert counts == [5, 0]
    assert kept.signatures == session.signatures
    assert kept.times["samples"] == 5
    assert kept.peak_rss_kb == session.peak_rss_kb > 0
    for one, other in zip(first, second, strict=True):
        assert {n: a.tobytes() for n, a in one.items()} == {
            n: a.tobytes() for n, a in other.items()
        }
        assert {n: a.dtype for n, a in one.items()} == {n: a.dtype for n, a in other.items()}


def test_only_new_samples_are_run_and_all_come_in_order(
    small_tflite, small_samples, tmp_path
) -> None:
    run(small_tflite, small_samples[1:3], tmp_path)
    outputs, hits, misses, _ = run(small_tflite, small_samples, tmp_path)
    assert (hits, misses) == (2, 3)
    with Session(small_tflite) as session:
        wanted = list(session.run("serving_default", small_samples))
    for one, other in zip(outputs, wanted, strict=True):
        np.testing.assert_array_equal(one["logits"], other["logits"])


@pytest.mark.parametrize("change", ["file", "input", "threads", "kernels", "version", "signature"])
def test_whatever_the_outputs_depend_on_makes_them_anew(
    change: str, two_signatures_tflite, make_affine, tmp_path, monkeypatch
) -> None:
    x = {"x": np.float32([1, 2])}
    model = tmp_path / "m.tflite"
    shutil.copy(two_signatures_tflite, model)
    run(model, [x], tmp_path, signature="encode")
    profile, more, signature = HOST, {}, "encode"
    if change == "file":
        content = bytearray(model.read_bytes())
        content[content.find(b"made by hand")] = ord("M")
        model.write_bytes(content)
    elif change == "input":
        x = {"x": np.float32([1, 2.5])}
    elif change == "threads":
        more = {"threads": 2}
    elif change == "kernels":
        profile = dataclasses.replace(HOST, kernels="builtin")
    elif change == "version":
        real = cache.launch_of
        monkeypatch.setattr(
            cache,
            "launch_of",
            lambda p: dataclasses.replace(real(p), versions={**real(p).versions, "litert": "9"}),
        )
    else:
        signature = "decode"
    (outputs,), hits, misses, _ = run(model, [x], tmp_path, profile, signature, **more)
    assert (hits, misses) == (0, 1)
    np.testing.assert_array_equal(outputs["scaled"], x["x"] * (10 if signature == "decode" else 2))


def test_words_of_a_profile_change_nothing(small_tflite, small_samples, tmp_path) -> None:
    run(small_tflite, small_samples, tmp_path)
    renamed = dataclasses.replace(HOST, name="mine", description="the same machine")
    assert run(small_tflite, small_samples, tmp_path, renamed)[1:3] == (5, 0)


def test_scalars_booleans_and_empty_tensors_are_kept_with_their_shapes(
    typed_tflite, tmp_path
) -> None:
    sample = {
        "scalar": np.array(3.0, np.float32),
        "flag": np.array([True, False, True]),
        "count": np.array([[1, 2], [3, 4]], np.int32),
        "pixel": np.array([0, 255, 7, 1], np.uint8),
        "empty": np.zeros((0, 3), np.float32),
    }
    (first,), *_ = run(typed_tflite, [sample], tmp_path)
    (second,), hits, *_ = run(typed_tflite, [sample], tmp_path)
    assert hits == 1
    for name, array in first.items():
        assert second[name].shape == array.shape
        assert second[name].dtype == array.dtype
        assert second[name].tobytes() == array.tobytes()


def test_a_damaged_entry_is_made_anew(small_tflite, small_samples, tmp_path) -> None:
    run(small_tflite, small_samples, tmp_path)
    damaged = sorted(tmp_path.glob("*/*.safetensors"))[0]
    damaged.write_bytes(damaged.read_bytes()[:20])
    assert run(small_tflite, small_samples, tmp_path)[1:3] == (4, 1)
    assert run(small_tflite, small_samples, tmp_path)[1:3] == (5, 0)


def test_a_failure_is_not_kept(tmp_path) -> None:
    text = tmp_path / "text.tflite"
    text.write_text("this is no flatbuffer")
    for _ in range(2):
        with pytest.raises(DeviceError, match="cannot load"):
            CachedSession(text, HOST, folder=tmp_path / "kept")


def test_the_folder_stays_small_and_can_be_cleared(
    small_tflite, small_samples, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(cache, "_MOST_BYTES", 0)
    run(small_tflite, small_samples, tmp_path)
    assert cache._shrink(tmp_path, most=600) >= 0
    assert sum(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file()) <= 600
    assert clear_cache(tmp_path) >= 0
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]
