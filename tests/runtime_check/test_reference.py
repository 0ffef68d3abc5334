"""References on disk: what goes in comes out, and what is damaged is told."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tpu2edge.errors import BundleError
from tpu2edge.files import sha256_of
from tpu2edge.runtime_check.reference import Reference, ReferenceWriter, store
from tpu2edge.types import Dim, Sample, Signature, TensorSpec

SIGNATURE = Signature(
    name="serving_default",
    inputs=(TensorSpec(name="x", shape=(Dim(name="n", min=1, max=8), 2), dtype="float32"),),
    outputs=(
        TensorSpec(name="y/z", shape=(2,), dtype="float32"),
        TensorSpec(name="ids", shape=(), dtype="int64"),
    ),
)


def sample(index: int) -> tuple[Sample, dict[str, np.ndarray]]:
    x = np.full((index + 1, 2), index, np.float32)
    return (
        Sample(id=f"case #{index}", inputs={"x": x}),
        {"y/z": np.array([index, -index], np.float64), "ids": np.array(index)},
    )


def write(path: Path, count: int = 3, **more: object) -> Reference:
    head = {"provider": "eager", "precision": "f32", "data": {"kind": "given"}, **more}
    with ReferenceWriter(path, SIGNATURE, **head) as writer:
        for index in range(count):
            writer.add(*sample(index))
    return Reference.load(path)


def edit(path: Path, change) -> None:
    file = path / "manifest.json"
    manifest = json.loads(file.read_text())
    changed = change(manifest)
    file.write_text(json.dumps(manifest if changed is None else changed))


def test_samples_come_back_in_order_with_their_names_types_and_shapes(tmp_path):
    reference = write(tmp_path / "r", weights_sha256="abc", extra={"device": "none"})
    assert len(reference) == 3
    assert reference.sample_ids == ("case #0", "case #1", "case #2")
    assert reference.signature == SIGNATURE
    assert (reference.weights_sha256, reference.extra) == ("abc", {"device": "none"})
    for index, read in enumerate(reference.samples()):
        written, outputs = sample(index)
        assert read.id == written.id
        np.testing.assert_array_equal(read.inputs["x"], written.inputs["x"])
        for name, array in reference.outputs(index).items():
            assert (array.dtype, array.shape) == (outputs[name].dtype, outputs[name].shape)
            np.testing.assert_array_equal(array, outputs[name])


@pytest.mark.parametrize(
    "array",
    [
        np.array(3, np.int64),
        np.array(True),
        np.zeros((0, 3), np.float32),
        np.arange(12, dtype=np.float32).reshape(3, 4).T,
        np.broadcast_to(np.float32(2), (2, 3)),
        np.array([np.nan, np.inf, -np.inf], np.float32),
        np.array([1.5], np.float16),
        np.arange(5, dtype=np.uint8)[::-1],
    ],
    ids=lambda a: f"{a.dtype}{a.shape}",
)
def test_any_kind_of_array_is_kept_exactly(tmp_path, array):
    spec = TensorSpec(name="x", shape=array.shape, dtype=array.dtype.name)
    signature = Signature(name="s", inputs=(spec,), outputs=(spec,))
    with ReferenceWriter(tmp_path, signature, provider="eager", precision="f32", data={}) as writer:
        writer.add(Sample(id="a", inputs={"x": array}), {"x": array})
    read = Reference.load(tmp_path).outputs(0)["x"]
    assert (read.dtype, read.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(read, array)


def test_what_is_added_is_copied_so_that_the_caller_may_reuse_the_array(tmp_path):
    array = np.zeros(2, np.float64)
    with ReferenceWriter(tmp_path, SIGNATURE, provider="eager", precision="f32", data={}) as writer:
        for value in (1, 2):
            array[:] = value
            made, outputs = sample(0)
            writer.add(made, {**outputs, "y/z": array})
    reference = Reference.load(tmp_path)
    assert [float(reference.outputs(i)["y/z"][0]) for i in (0, 1)] == [1.0, 2.0]


def test_many_samples_go_to_several_files_and_come_back_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "_SHARD_BYTES", 100)
    reference = write(tmp_path, 20)
    assert len(list(tmp_path.glob("samples-*.safetensors"))) > 3
    assert [int(reference.outputs(i)["ids"]) for i in range(20)] == list(range(20))
    assert [s.inputs["x"].shape[0] for s in reference.samples()] == list(range(1, 21))


def test_the_same_samples_give_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        write(tmp_path / name)
    for file in (tmp_path / "a").iterdir():
        assert sha256_of(file) == sha256_of(tmp_path / "b" / file.name)


def test_a_reference_beside_another_borrows_its_inputs(tmp_path):
    write(tmp_path)
    oracle = write(tmp_path / "oracle", provider="oracle-f64", borrow_inputs="..")
    np.testing.assert_array_equal(oracle.inputs(2)["x"], sample(2)[0].inputs["x"])
    text = (tmp_path / "oracle" / "samples-00000.safetensors").read_bytes()
    assert b"/input/" not in text


def test_inputs_borrowed_from_other_samples_are_refused(tmp_path):
    write(tmp_path, 2)
    oracle = write(tmp_path / "oracle", 3, borrow_inputs="..")
    with pytest.raises(BundleError, match="other samples"):
        oracle.inputs(0)


def test_an_unfinished_reference_is_none(tmp_path):
    def interrupted():
        with ReferenceWriter(
            tmp_path, SIGNATURE, provider="eager", precision="f32", data={}
        ) as writer:
            writer.add(*sample(0))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with pytest.raises(BundleError, match="is no reference"):
        Reference.load(tmp_path)


def test_one_flipped_bit_is_noticed(tmp_path):
    write(tmp_path)
    file = tmp_path / "samples-00000.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    with pytest.raises(BundleError, match=r"samples-00000\.safetensors' is damaged"):
        Reference.load(tmp_path)
    assert len(Reference.load(tmp_path, verify=False)) == 3


def test_a_missing_file_is_named(tmp_path):
    write(tmp_path)
    (tmp_path / "samples-00000.safetensors").unlink()
    with pytest.raises(BundleError, match=r"samples-00000\.safetensors' is missing"):
        Reference.load(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.pop("signature"),
        lambda m: m.pop("shards"),
        lambda m: m.update(signature={"name": "x"}),
        lambda m: m.update(format_version="new"),
        lambda m: m.update(shards=[{}]),
        lambda m: m.update(kind="something"),
        lambda m: [1, 2],
    ],
)
def test_a_manifest_that_is_not_whole_is_a_bundle_error(tmp_path, change):
    write(tmp_path)

    def apply(manifest):
        result = change(manifest)
        return result if result == [1, 2] else None

    edit(tmp_path, apply)
    with pytest.raises(BundleError):
        Reference.load(tmp_path)


def test_a_newer_format_asks_for_an_upgrade(tmp_path):
    write(tmp_path)
    edit(tmp_path, lambda m: m.update(format_version=99))
    with pytest.raises(BundleError, match="format 99") as error:
        Reference.load(tmp_path)
    assert "upgrade" in error.value.do


def test_a_sample_that_is_in_no_file_is_told(tmp_path):
    write(tmp_path)
    edit(tmp_path, lambda m: m["samples"].append("case #3"))
    reference = Reference.load(tmp_path)
    with pytest.raises(BundleError, match="sample 3 is in none"):
        reference.outputs(3)


def test_a_sample_that_lacks_an_output_is_told(tmp_path):
    with ReferenceWriter(tmp_path, SIGNATURE, provider="eager", precision="f32", data={}) as writer:
        made, outputs = sample(0)
        writer.add(made, {"ids": outputs["ids"]})
    with pytest.raises(BundleError, match=r"'case #0' lacks the outputs \['y/z'\]"):
        Reference.load(tmp_path).outputs(0)


def test_one_line_says_who_in_which_precision_on_what(tmp_path):
    reference = write(tmp_path)
    assert reference.describe() == (
        "the torch module in float32 on the CPU (f32), 3 samples, given data"
    )
