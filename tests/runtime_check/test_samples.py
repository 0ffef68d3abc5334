"""Samples come from files exactly as the model takes them, or are refused in words."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from tpu2edge.errors import DataError
from tpu2edge.runtime_check.samples import load_samples, synthetic_samples
from tpu2edge.types import Dim, TensorSpec

X = TensorSpec(name="x", shape=(1, 2, 3), dtype="float32")
IDS = TensorSpec(name="ids", shape=(1, 4), dtype="int32")
BATCH = Dim(name="batch", min=1, max=8)


def ramp(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.arange(np.prod(shape)).reshape(shape).astype(dtype)


def loaded(paths, inputs, notes=None):
    return load_samples(paths, inputs, (notes if notes is not None else []).append)


def refusal(paths, inputs) -> DataError:
    with pytest.raises(DataError) as caught:
        loaded(paths, inputs)
    return caught.value


@pytest.mark.parametrize(("shape", "count"), [((1, 2, 3), 1), ((5, 1, 2, 3), 5), ((5, 2, 3), 5)])
@pytest.mark.parametrize("ending", ["npz", "safetensors"])
def test_each_layout_of_samples_gives_the_same_numbers(tmp_path, shape, count, ending):
    path = tmp_path / f"digits.{ending}"
    array = ramp(*shape)
    np.savez(path, x=array) if ending == "npz" else save_file({"x": array}, path)
    samples = loaded([path], [X])
    assert len(samples) == count
    assert [sample.id for sample in samples] == [f"digits.{ending}#{i}" for i in range(count)]
    for i, sample in enumerate(samples):
        assert sample.inputs["x"].shape == (1, 2, 3)
        assert sample.inputs["x"].dtype == np.float32
        assert sample.inputs["x"].ravel().tolist() == list(range(6 * i, 6 * i + 6))
    assert samples[-1].id == f"digits.{ending}#{count - 1}"
    with pytest.raises(IndexError):
        samples[count]


def test_a_fixed_batch_cuts_the_rows_into_samples(tmp_path):
    spec = TensorSpec(name="x", shape=(2, 3), dtype="float32")
    np.savez(tmp_path / "a.npz", x=ramp(6, 3))
    samples = loaded([tmp_path / "a.npz"], [spec])
    assert len(samples) == 3
    assert samples[2].inputs["x"].tolist() == [[12, 13, 14], [15, 16, 17]]
    np.savez(tmp_path / "a.npz", x=ramp(7, 3))
    error = refusal([tmp_path / "a.npz"], [spec])
    assert "7 rows, which is no multiple of the model's batch of 2" in error.what
    assert "--dynamic x.0=1:7" in error.do


def test_a_dynamic_dimension_takes_every_size_within_its_bounds(tmp_path):
    spec = TensorSpec(name="x", shape=(BATCH, 3), dtype="float32")
    np.savez(tmp_path / "s1.npz", x=ramp(5, 3))
    np.savez(tmp_path / "s2.npz", x=ramp(4, 8, 3))
    samples = loaded([tmp_path], [spec])
    assert [sample.inputs["x"].shape for sample in samples] == [(5, 3)] + [(8, 3)] * 4
    np.savez(tmp_path / "s1.npz", x=ramp(9, 3))
    assert "batch 1..8" in refusal([tmp_path], [spec]).do


def test_a_dynamic_dimension_that_inputs_share_has_one_size(tmp_path):
    specs = [TensorSpec(name=n, shape=(BATCH, 3), dtype="float32") for n in ("x", "y")]
    np.savez(tmp_path / "a.npz", x=ramp(5, 3), y=ramp(4, 3))
    assert "batch has the size 5 in x and 4 in y" in refusal([tmp_path], specs).what


def test_a_folder_is_read_in_natural_order(tmp_path):
    for number in (10, 9, 1):
        np.savez(tmp_path / f"s{number}.npz", x=np.full((1, 2, 3), number, np.float32))
    (tmp_path / "readme.txt").write_text("not data")
    samples = loaded([tmp_path], [X])
    assert [sample.id for sample in samples] == ["s1.npz#0", "s9.npz#0", "s10.npz#0"]
    assert [float(sample.inputs["x"].max()) for sample in samples] == [1, 9, 10]
    assert [sample.id for sample in samples[1:]] == ["s9.npz#0", "s10.npz#0"]


def test_files_of_the_same_name_have_different_ids(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        np.savez(tmp_path / folder / "x.npz", x=ramp(1, 2, 3))
    samples = loaded([tmp_path / "a", tmp_path / "b"], [X])
    assert [sample.id for sample in samples] == ["a/x.npz#0", "b/x.npz#0"]


def test_inputs_must_have_the_same_number_of_samples(tmp_path):
    np.savez(tmp_path / "a.npz", x=ramp(5, 2, 3), ids=ramp(4, 4, dtype="int32"))
    assert "x: 5, ids: 4" in refusal([tmp_path / "a.npz"], [X, IDS]).what


def test_missing_and_unknown_names_are_listed_with_the_closest(tmp_path):
    np.savez(tmp_path / "a.npz", x=ramp(1, 2, 3), idx=ramp(1, 4, dtype="int32"))
    error = refusal([tmp_path / "a.npz"], [X, IDS])
    assert "expected x: float32[1x2x3], ids: int32[1x4]" in error.what
    assert "idx: int32[1x4]" in error.what
    assert "ids is missing (is it idx?)" in error.do


def test_one_array_of_another_name_is_refused_with_the_exact_fix(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.savez("a.npz", arr_0=ramp(1, 2, 3))
    error = refusal([Path("a.npz")], [X])
    fix = "np.savez('a.npz', x=np.load('a.npz')['arr_0'])"
    assert fix in error.do
    exec(fix, {"np": np})
    assert len(loaded([Path("a.npz")], [X])) == 1


def test_float64_and_int64_are_narrowed_with_one_note_for_each_input(tmp_path):
    for name in ("a", "b"):
        np.savez(
            tmp_path / f"{name}.npz",
            x=ramp(2, 2, 3, dtype="float64") + 0.1,
            ids=ramp(2, 4, dtype="int64"),
        )
    notes = []
    samples = loaded([tmp_path], [X, IDS], notes)
    assert [(note.code, note.text.split(":")[0]) for note in notes] == [
        ("narrowed-input", "input x"),
        ("narrowed-input", "input ids"),
    ]
    assert samples[0].inputs["x"].dtype == np.float32
    assert samples[0].inputs["x"][0, 0, 1] == np.float32(1.1)
    assert samples[1].inputs["ids"].tolist() == [[4, 5, 6, 7]]
    assert samples[1].inputs["ids"].dtype == np.int32


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1])
def test_an_integer_that_does_not_fit_is_refused_with_its_value(tmp_path, value):
    np.savez(tmp_path / "a.npz", ids=np.array([[1, 2, 3, value]]))
    error = refusal([tmp_path / "a.npz"], [IDS])
    assert f"ids holds {value}" in error.what
    assert error.place.tensor == "ids"


def test_a_float64_beyond_float32_is_refused_with_its_value(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.full((1, 2, 3), 1e39))
    assert "1e+39" in refusal([tmp_path / "a.npz"], [X]).what


def test_16_bit_floats_are_widened_exactly(tmp_path):
    half = ramp(1, 2, 3, dtype="float16") / 4
    np.savez(tmp_path / "a.npz", x=half)
    notes = []
    assert loaded([tmp_path / "a.npz"], [X], notes)[0].inputs["x"].tolist() == half.tolist()
    assert notes[0].code == "widened-input"
    brain = (ramp(3, 2, 3) / 4).astype(ml_dtypes.bfloat16)
    write_safetensors(tmp_path / "b.safetensors", "x", "BF16", brain)
    samples = loaded([tmp_path / "b.safetensors"], [X])
    assert samples[2].inputs["x"].tolist() == [[[3.0, 3.25, 3.5], [3.75, 4.0, 4.25]]]
    assert samples[2].inputs["x"].dtype == np.float32


@pytest.mark.parametrize(
    ("stored", "dtype"), [("F8_E4M3", "float8_e4m3fn"), ("F8_E5M2", "float8_e5m2")]
)
def test_8_bit_floats_are_read_and_told_by_name(tmp_path, stored, dtype):
    values = ramp(1, 2, 3).astype(getattr(ml_dtypes, dtype))
    write_safetensors(tmp_path / "a.safetensors", "x", stored, values)
    assert dtype in refusal([tmp_path / "a.safetensors"], [X]).what


def write_safetensors(path: Path, name: str, dtype: str, array: np.ndarray) -> None:
    data = array.tobytes()
    item = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [0, len(data)]}
    header = json.dumps({name: item}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


@pytest.mark.parametrize(
    ("spec", "dtype", "words"),
    [
        (X, "uint8", "preprocessing"),
        (X, "int64", "preprocessing"),
        (X, "bool", "float32"),
        (IDS, "float32", "whole numbers"),
        (IDS, "bool", "int32"),
        (TensorSpec(name="x", shape=(1, 4), dtype="bool"), "int32", "bool"),
    ],
)
def test_another_kind_of_dtype_is_refused_in_words(tmp_path, spec, dtype, words):
    array = np.ones(spec.shape, dtype)  # type: ignore[call-overload]
    np.savez(tmp_path / "a.npz", **{spec.name: array})
    error = refusal([tmp_path / "a.npz"], [spec])
    assert f"{spec.name} is {dtype}; expected {spec.dtype}" in error.what
    assert words in error.do


def test_nan_and_infinity_are_kept_and_noted_once(tmp_path):
    array = ramp(2, 2, 3)
    array[1, 0, 0] = np.nan
    array[1, 1, 1:] = np.inf
    np.savez(tmp_path / "a.npz", x=array)
    np.savez(tmp_path / "b.npz", x=array)
    notes = []
    samples = loaded([tmp_path], [X], notes)
    assert [note.code for note in notes] == ["nonfinite-input"]
    assert "1 NaN and 2 infinite" in notes[0].text
    assert np.isnan(samples[1].inputs["x"][0, 0, 0])


def test_a_wrong_shape_is_refused_and_channels_last_are_recognised(tmp_path):
    image = TensorSpec(name="image", shape=(1, 3, 8, 9), dtype="float32")
    np.savez(tmp_path / "a.npz", image=ramp(1, 8, 9, 3))
    error = refusal([tmp_path / "a.npz"], [image])
    assert "image has the shape 1x8x9x3; expected 1x3x8x9, or Nx1x3x8x9" in error.what
    assert "image.transpose(0, 3, 1, 2)" in error.do


class Evil:
    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self):
        return (os.mkdir, (self.folder,))


def test_pickled_objects_are_refused_and_not_run(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.array([Evil(str(tmp_path / "ran"))], dtype=object))
    assert "pickled objects" in refusal([tmp_path / "a.npz"], [X]).what
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("ending", ["npz", "safetensors"])
def test_a_damaged_file_is_refused_in_words(tmp_path, ending):
    path = tmp_path / f"a.{ending}"
    np.savez(path, x=ramp(9, 2, 3)) if ending == "npz" else save_file({"x": ramp(9, 2, 3)}, path)
    whole = path.read_bytes()
    for data in (whole[:-40], whole[:20], b"garbage" * 9, b""):
        path.write_bytes(data)
        assert path.name in refusal([path], [X]).what


def test_a_flipped_byte_of_an_npz_is_refused(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, x=ramp(9, 2, 3))
    with zipfile.ZipFile(path) as file:
        start = file.getinfo("x.npy").header_offset
    data = bytearray(path.read_bytes())
    data[start + 250] ^= 1
    path.write_bytes(data)
    assert "CRC" in refusal([path], [X]).what


def test_missing_and_foreign_files_are_refused(tmp_path):
    np.savez(tmp_path / "digits.npz", x=ramp(1, 2, 3))
    error = refusal([tmp_path / "digit.npz"], [X])
    assert "the closest is digits.npz" in error.what
    (tmp_path / "x.csv").write_text("1,2")
    assert "neither .npz nor .safetensors" in refusal([tmp_path / "x.csv"], [X]).what
    (tmp_path / "empty").mkdir()
    assert "holds no .npz" in refusal([tmp_path / "empty"], [X]).what
    np.savez(tmp_path / "none.npz", x=np.zeros((0, 2, 3), np.float32))
    assert "holds no sample" in refusal([tmp_path / "none.npz"], [X]).what


def test_loading_samples_needs_no_torch(tmp_path):
    np.savez(tmp_path / "a.npz", x=ramp(1, 2, 3))
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from tpu2edge.runtime_check.samples import load_samples\n"
        "from tpu2edge.types import TensorSpec\n"
        "x = TensorSpec(name='x', shape=(1, 2, 3), dtype='float32')\n"
        f"print(len(load_samples([Path({str(tmp_path)!r})], [x], print)))\n"
        "assert not {'torch', 'jax'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("1\n", "")


# ---- synthetic ----


def test_the_first_sample_is_the_example_and_the_others_differ():
    example = {"x": ramp(1, 2, 3), "ids": np.array([[3, 9, 4, 7]], np.int32)}
    samples = synthetic_samples(example, [X, IDS], count=4, seed=0)
    assert [sample.id for sample in samples] == [
        "example",
        "variation-1",
        "variation-2",
        "variation-3",
    ]
    assert np.array_equal(samples[0].inputs["x"], example["x"])
    values = {sample.inputs["x"].tobytes() for sample in samples}
    assert len(values) == 4
    for sample in samples:
        assert sample.inputs["x"].shape == (1, 2, 3)
        assert sample.inputs["x"].dtype == np.float32
        assert sample.inputs["ids"].dtype == np.int32
        assert sample.inputs["ids"].min() >= 3
        assert sample.inputs["ids"].max() <= 9


def test_draws_depend_on_seed_and_name_and_not_on_the_order_of_inputs():
    example = {"x": ramp(1, 2, 3), "ids": np.array([[3, 9, 4, 7]], np.int32)}
    both = synthetic_samples(example, [X, IDS], count=3, seed=5)
    swapped = synthetic_samples(example, [IDS, X], count=2, seed=5)
    alone = synthetic_samples(example, [X], count=2, seed=5)
    other = synthetic_samples(example, [X], count=2, seed=6)
    assert np.array_equal(both[1].inputs["x"], swapped[1].inputs["x"])
    assert np.array_equal(both[1].inputs["x"], alone[1].inputs["x"])
    assert not np.array_equal(alone[1].inputs["x"], other[1].inputs["x"])


def test_variations_keep_scale_and_range_and_are_skewed():
    spec = TensorSpec(name="x", shape=(40, 50), dtype="float32")
    example = {"x": np.random.default_rng(0).uniform(200, 255, (40, 50)).astype(np.float32)}
    samples = synthetic_samples(example, [spec], count=20, seed=0)
    for sample in samples[1:]:
        x = sample.inputs["x"].astype(np.float64)
        assert x.min() >= 200 - 27.5
        assert x.max() <= 255 + 27.6
        assert 5 < x.std() < 30
        assert len(np.unique(x)) > 1500
    noise = synthetic_samples({"x": ramp(40, 50) % 2}, [spec], count=2, seed=0)[1].inputs["x"]
    assert noise.min() == 0.0, "a non-negative example stays non-negative"


def test_constant_examples_become_normal_draws_around_their_value():
    spec = TensorSpec(name="x", shape=(50, 40), dtype="float32")
    for value in (0.0, 1.0):
        example = {"x": np.full((50, 40), value, np.float32)}
        x = synthetic_samples(example, [spec], count=2, seed=0)[1].inputs["x"]
        assert abs(float(x.mean()) - value) < 0.1
        assert abs(float(x.std()) - 1) < 0.1


def test_constant_integers_and_booleans_stay_and_others_keep_their_density():
    specs = [
        TensorSpec(name="length", shape=(1,), dtype="int32"),
        TensorSpec(name="on", shape=(4,), dtype="bool"),
        TensorSpec(name="mask", shape=(1000,), dtype="bool"),
    ]
    example = {
        "length": np.array([7], np.int32),
        "on": np.ones(4, bool),
        "mask": np.arange(1000) % 4 == 0,
    }
    sample = synthetic_samples(example, specs, count=2, seed=0)[1]
    assert sample.inputs["length"].tolist() == [7]
    assert sample.inputs["on"].tolist() == [True] * 4
    assert 200 < int(sample.inputs["mask"].sum()) < 300


def test_dynamic_sizes_are_made_by_repeating_or_cutting_the_example():
    spec = TensorSpec(name="x", shape=(BATCH, 2), dtype="float32")
    example = {"x": ramp(3, 2)}
    wide = synthetic_samples(example, [spec], count=2, seed=0, sizes={"batch": 7})
    assert wide[0].inputs["x"][:, 0].tolist() == [0, 2, 4, 0, 2, 4, 0]
    assert wide[1].inputs["x"].shape == (7, 2)
    narrow = synthetic_samples(example, [spec], count=1, seed=0, sizes={"batch": 1})
    assert narrow[0].inputs["x"].tolist() == [[0, 1]]
    with pytest.raises(DataError, match=r"size 9 of batch is outside of 1\.\.8"):
        synthetic_samples(example, [spec], count=1, seed=0, sizes={"batch": 9})
    with pytest.raises(DataError, match=r"known: batch \(1\.\.8\)"):
        synthetic_samples(example, [spec], count=1, seed=0, sizes={"time": 2})


def test_an_example_that_lacks_an_input_is_refused():
    with pytest.raises(DataError, match="lack ids: int32"):
        synthetic_samples({"x": ramp(1, 2, 3)}, [X, IDS], count=2, seed=0)


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.floats(width=32), min_size=1, max_size=12),
    seed=st.integers(0, 2**63),
)
@example(values=[3.4e38, -3.4e38, 3.3e38], seed=0)
@example(values=[float("nan"), float("inf")], seed=0)
def test_variations_are_finite_for_every_example(values, seed):
    spec = TensorSpec(name="x", shape=(len(values),), dtype="float32")
    given_values = {"x": np.array(values, np.float32)}
    x = synthetic_samples(given_values, [spec], count=2, seed=seed)[1].inputs["x"]
    assert x.shape == (len(values),)
    assert np.isfinite(x).all()
