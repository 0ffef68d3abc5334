"""The bundle: checked hashes, one rename into place, nothing overwritten by accident."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from tpu2edge import bundle as bundles
from tpu2edge.bundle import load_bundle
from tpu2edge.errors import BundleError
from tpu2edge.files import (
    canonical_json,
    sha256_of,
    sha256_of_arrays,
    write_atomically,
)
from tpu2edge.runtime_check.budget import default_budget
from tpu2edge.runtime_check.parity import CaseReport, ParityReport, Reason
from tpu2edge.runtime_check.reference import ReferenceWriter
from tpu2edge.types import LayerSource, Sample, Signature, TensorSpec, Verdict

SPEC = TensorSpec(name="x", shape=(2,), dtype="float32")
SIGNATURE = Signature(name="s", inputs=(SPEC,), outputs=(SPEC,))
REPORT = ParityReport(
    cases=(
        CaseReport(
            model="model.float32.tflite",
            recipe="float32",
            device="host",
            signature="s",
            output="x",
            verdict=Verdict.FAIL,
            budget="sqnr>=80dB",
            reasons=(Reason(code="budget", text="too far"),),
        ),
    ),
    reference="somebody",
    data_kind="given",
    samples=1,
)
LAYERS = {"t": [{"module": "m", "op": "o", "file": "f.py", "line": 3}]}


def fill(folder: Path, content: bytes = b"the model") -> Path:
    file = folder / "model.float32.tflite"
    file.write_bytes(content)
    (folder / "parity.json").write_text(canonical_json(REPORT.to_json(times=False)))
    (folder / "layers.json").write_text(canonical_json(LAYERS))
    (folder / "log.txt").write_text("chatter\n")
    with ReferenceWriter(
        folder / "reference", SIGNATURE, provider="eager", precision="f32", data={"kind": "given"}
    ) as writer:
        writer.add(Sample(id="a", inputs={"x": np.zeros(2)}), {"x": np.ones(2)})
    bundles.write_manifest(
        folder,
        {
            "signature": SIGNATURE.to_json(),
            "models": [
                {
                    "recipe": "float32",
                    "file": file.name,
                    "sha256": sha256_of(file),
                    "size_bytes": file.stat().st_size,
                    "signatures": [SIGNATURE.to_json()],
                    "budget": default_budget("float32").to_json(),
                }
            ],
            "notes": [{"code": "eval-mode", "text": "a line"}],
            "times": {"devices": {"model.float32.tflite@host": {"load_ms": 1.5}}},
        },
    )
    return folder


@pytest.fixture
def made(tmp_path) -> Path:
    folder = tmp_path / "bundle"
    with bundles.staged(folder, force=False) as staging:
        fill(staging)
    return folder


def test_a_bundle_comes_back_as_it_was_written(made):
    bundle = load_bundle(made)
    assert bundle.verdict is Verdict.FAIL
    assert bundle.report.cases == REPORT.cases
    assert bundle.report.times == {"model.float32.tflite@host": {"load_ms": 1.5}}
    model = bundle.model()
    assert model.path.read_bytes() == b"the model"
    assert model.signature() == SIGNATURE
    assert model.layers == {"t": (LayerSource(module="m", op="o", file="f.py", line=3),)}
    assert bundle.reference().sample_ids == ("a",)
    assert [str(note) for note in bundle.notes] == ["a line"]
    assert bundle.manifest["format_version"] == 1


def test_a_bundle_can_be_moved(made, tmp_path):
    moved = shutil.move(made, tmp_path / "elsewhere")
    assert load_bundle(str(moved)).model().path.is_file()


def test_a_recipe_that_is_not_in_the_bundle_is_refused_with_those_that_are(made):
    with pytest.raises(BundleError, match="no recipe 'float16'") as error:
        load_bundle(made).model("float16")
    assert "['float32']" in error.value.do


@pytest.mark.parametrize(
    "name",
    [
        "model.float32.tflite",
        "parity.json",
        "layers.json",
        "reference/manifest.json",
        "reference/samples-00000.safetensors",
    ],
)
def test_one_flipped_bit_or_a_missing_file_is_named(made, name):
    raw = bytearray((made / name).read_bytes())
    raw[len(raw) // 2] ^= 1
    (made / name).write_bytes(raw)
    with pytest.raises(BundleError, match=f"{name} was changed"):
        load_bundle(made)
    (made / name).unlink()
    with pytest.raises(BundleError, match=f"{name} is missing"):
        load_bundle(made)


def test_all_that_is_wrong_is_listed_at_once(made):
    (made / "parity.json").unlink()
    (made / "model.float32.tflite").write_bytes(b"another")
    with pytest.raises(BundleError) as error:
        load_bundle(made)
    assert "parity.json is missing" in error.value.what
    assert "model.float32.tflite was changed" in error.value.what


def test_the_log_may_change(made):
    (made / "log.txt").write_text("more")
    assert load_bundle(made)


def edit(folder: Path, change) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("key", ["files", "models", "notes", "format_version"])
def test_a_manifest_that_lacks_a_part_is_damaged(made, key):
    edit(made, lambda manifest: manifest.pop(key))
    with pytest.raises(BundleError, match="is damaged"):
        load_bundle(made)


def test_a_model_that_the_list_of_files_leaves_out_is_checked_all_the_same(made):
    edit(made, lambda manifest: manifest["files"].pop("model.float32.tflite"))
    (made / "model.float32.tflite").write_bytes(b"another")
    with pytest.raises(BundleError, match=r"model\.float32\.tflite was changed"):
        load_bundle(made)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"kind": "other"}'])
def test_a_folder_with_another_manifest_is_no_bundle(made, text):
    (made / "manifest.json").write_text(text)
    with pytest.raises(BundleError):
        load_bundle(made)


def test_what_is_no_folder_is_no_bundle(tmp_path):
    with pytest.raises(BundleError, match=r"no manifest\.json"):
        load_bundle(tmp_path)
    with pytest.raises(BundleError):
        load_bundle(tmp_path / "gone")


def test_a_newer_format_asks_for_an_upgrade(made):
    edit(made, lambda manifest: manifest.update(format_version=99))
    with pytest.raises(BundleError, match="format 99") as error:
        load_bundle(made)
    assert "upgrade" in error.value.do


def test_the_same_content_gives_the_same_manifest(tmp_path):
    for name in ("a", "b"):
        with bundles.staged(tmp_path / name, force=False) as staging:
            fill(staging)
    assert sha256_of(tmp_path / "a" / "manifest.json") == sha256_of(
        tmp_path / "b" / "manifest.json"
    )


# ---------------------------------------------------------------------------------------- staging


def left_behind(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_nothing_is_there_until_all_is_there(tmp_path):
    target = tmp_path / "deep" / "bundle"
    with bundles.staged(target, force=False) as staging:
        fill(staging)
        assert not target.exists()
        assert staging.parent == target.parent  # so that a rename is enough
    assert left_behind(tmp_path / "deep") == ["bundle"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("force", [False, True])
def test_whatever_goes_wrong_leaves_nothing_behind(tmp_path, made, error, force):
    target = made if force else tmp_path / "new"
    before = sha256_of(made / "manifest.json")

    def broken() -> None:
        with bundles.staged(target, force=force) as staging:
            fill(staging, b"half")
            raise error

    with pytest.raises(error):
        broken()
    assert left_behind(tmp_path) == ["bundle"]
    assert sha256_of(made / "manifest.json") == before
    assert load_bundle(made)


def test_a_bundle_that_exists_is_not_overwritten_unless_asked(made, tmp_path):
    with pytest.raises(BundleError, match="exists") as error:
        bundles.refuse_existing(made, force=False)
    assert "--force" in error.value.do
    with bundles.staged(made, force=True) as staging:
        fill(staging, b"second")
    assert load_bundle(made).model().path.read_bytes() == b"second"
    assert left_behind(tmp_path) == ["bundle"]


def test_replacing_works_where_folders_cannot_be_exchanged(made, tmp_path, monkeypatch):
    monkeypatch.setattr(bundles, "_exchange", lambda *_: False)
    with bundles.staged(made, force=True) as staging:
        fill(staging, b"second")
    assert load_bundle(made).model().path.read_bytes() == b"second"
    assert left_behind(tmp_path) == ["bundle"]


def test_a_bundle_that_appears_meanwhile_is_kept(tmp_path):
    target = tmp_path / "bundle"

    def race() -> None:
        with bundles.staged(target, force=False) as staging:
            fill(staging, b"late")
            target.mkdir()
            fill(target, b"early")

    with pytest.raises(BundleError, match="exists"):
        race()
    assert load_bundle(target).model().path.read_bytes() == b"early"


def test_an_empty_folder_is_taken(tmp_path):
    target = tmp_path / "empty"
    target.mkdir()
    with bundles.staged(target, force=False) as staging:
        fill(staging)
    assert load_bundle(target)


@pytest.mark.parametrize("manifest", [None, "{}", '{"name": "a web app", "icons": []}', "["])
def test_what_is_no_bundle_of_ours_is_not_replaced_even_with_force(tmp_path, manifest):
    target = tmp_path / "home"
    target.mkdir()
    (target / "thesis.txt").write_text("years of work")
    if manifest is not None:
        (target / "manifest.json").write_text(manifest)
    with pytest.raises(BundleError, match="is no bundle, so it is not replaced"):
        bundles.refuse_existing(target, force=True)
    assert (target / "thesis.txt").read_text() == "years of work"


def test_a_file_or_a_link_in_the_way_is_not_replaced(tmp_path):
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("x")
    link.symlink_to(tmp_path / "nowhere")
    for target in (file, link):
        for force in (False, True):
            with pytest.raises(BundleError):
                bundles.refuse_existing(target, force=force)


# ------------------------------------------------------------------------------------------ layers


def test_a_tensor_is_traced_to_all_nodes_in_its_name():
    nodes = {
        "conv2d": LayerSource(module="body.0", op="aten.conv2d.default", file="n.py", line=3),
        "relu": LayerSource(module="body.1", op="aten.relu.default"),
    }
    found = bundles.layers_of_tensors(
        ["~body.0/conv2d;~body.1/relu;", "x/unknown;", "plain", "a/relu;b/relu"], nodes
    )
    assert list(found) == ["~body.0/conv2d;~body.1/relu;", "a/relu;b/relu"]
    assert [entry["module"] for entry in found["~body.0/conv2d;~body.1/relu;"]] == [
        "body.0",
        "body.1",
    ]
    assert len(found["a/relu;b/relu"]) == 1


# ------------------------------------------------------------------------------------------- files


def test_canonical_json_is_the_same_for_the_same_data_and_refuses_nan():
    assert canonical_json({"b": 1, "a": [2]}) == canonical_json({"a": [2], "b": 1})
    assert canonical_json({"a": "é"}).endswith('"é"\n}\n')
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json({"a": float("nan")})


def test_a_digest_of_arrays_sees_names_types_shapes_and_values():
    base = {"a": np.zeros(4, np.float32), "b": np.ones(2)}
    digest = sha256_of_arrays(base)
    assert digest == sha256_of_arrays(dict(reversed(base.items())))
    for other in (
        {"c": base["a"], "b": base["b"]},
        {"a": base["a"].reshape(2, 2), "b": base["b"]},
        {"a": base["a"].astype(np.int32), "b": base["b"]},
        {"a": base["a"], "b": base["b"] + 1},
    ):
        assert digest != sha256_of_arrays(other)


def test_writing_atomically_keeps_the_old_file_when_it_fails(tmp_path, monkeypatch):
    file = tmp_path / "f"
    write_atomically(file, "old")

    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="no space"):
        write_atomically(file, "new")
    assert file.read_text() == "old"
    assert os.listdir(tmp_path) == ["f"]  # noqa: PTH208
    assert oct(file.stat().st_mode & 0o777) == "0o644"
