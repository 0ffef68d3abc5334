"""Several signatures in one file: shapes of one input, and methods or modules that share weights."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tpu2edge
from tpu2edge.capturing import capture_source
from tpu2edge.checking import check_target
from tpu2edge.errors import BundleError, DataError, ModelSourceError, OptionError
from tpu2edge.flatbuffer import read_tflite, signatures_of
from tpu2edge.pipeline import export_source
from tpu2edge.requests import CaptureRequest, CheckRequest, ExportRequest, SurveyRequest
from tpu2edge.runtime_check.devices.client import Session
from tpu2edge.runtime_check.reference.tpu import libtpu_version
from tpu2edge.surveying import survey_source

WIDTH = 300  # so that the weights (352 kB each) outweigh all else in the file

MODEL = '''
import torch
from torch import nn

class Coder(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 300)
        self.mid = nn.Linear(300, 300)
        self.down = nn.Linear(300, 8)

    def encode(self, x):
        return {"code": torch.tanh(self.mid(self.up(x)))}

    def decode(self, code, *, gain):
        return {"y": self.down(torch.relu(self.mid(code))) * gain}

class Both(nn.Module):
    """Another module around the same weights."""
    def __init__(self, coder):
        super().__init__()
        self.coder = coder
    def forward(self, x):
        return self.coder.decode(self.coder.encode(x)["code"], gain=2.0)

def get_signatures():
    torch.manual_seed(0)
    coder = Coder()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 8, generator=generator)
    code = torch.randn(1, 300, generator=generator)
    return {
        "encode": (coder.encode, (x,)),
        "decode": (coder.decode, (code,), {"gain": torch.tensor(3.0)}),
        "both": (Both(coder), x),
    }

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 64, 3, padding=1)
        self.deep = nn.Conv2d(64, 128, 3)
        self.head = nn.Linear(128, 10)

    def forward(self, x, scale):
        x = torch.relu(self.deep(torch.relu(self.conv(x))))
        return self.head(x.mean((2, 3))) * scale

def net():
    torch.manual_seed(0)
    return Net(), (torch.randn(1, 3, 8, 8), torch.ones(1))

def wrong():
    return {"a": (lambda x: x, (torch.ones(1),)), "b": (Net(), (torch.ones(1),))}
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("signatures")
    (folder / "coder.py").write_text(MODEL)
    return folder


def request(folder: Path, name: str, source: str = "coder.py", **options: Any) -> ExportRequest:
    options.setdefault("reference", "eager")
    return ExportRequest(source=str(folder / source), output=folder / name, **options)


@pytest.fixture(scope="module")
def coder(folder: Path) -> tpu2edge.Bundle:
    recipes = ("float32", "dynamic_wi8_afp32", "float16")
    return export_source(request(folder, "coder", recipes=recipes))


@pytest.fixture(scope="module")
def shaped(folder: Path) -> tpu2edge.Bundle:
    shapes = ("x=1x3x8x8,4x3x12x8",)
    return export_source(request(folder, "shaped", "coder.py:net", shapes=shapes))


def test_methods_and_modules_are_signatures_with_their_own_names(coder: tpu2edge.Bundle) -> None:
    assert str(coder.verdict) == "PASS"
    assert coder.signatures == ("encode", "decode", "both")
    found = {s.name: s for s in signatures_of(read_tflite(coder.model().path))}
    assert set(found) == {"encode", "decode", "both"}
    assert [spec.name for spec in found["decode"].inputs] == ["code", "gain"]
    assert [spec.name for spec in found["encode"].outputs] == ["code"]
    assert [s.name for s in coder.model().signatures] == ["encode", "decode", "both"]


def test_every_signature_has_its_own_samples_reference_oracle_and_cases(
    coder: tpu2edge.Bundle,
) -> None:
    assert (coder.path / "reference/decode/oracle/manifest.json").is_file()
    with Session(coder.model().path) as session:
        for name in coder.signatures:
            reference = coder.reference(signature=name)
            oracle = coder.reference("oracle", signature=name)
            assert reference.signature.name == name
            for index in range(len(reference)):
                (got,) = session.run(name, [reference.inputs(index)])
                for output, value in reference.outputs(index).items():
                    np.testing.assert_allclose(got[output], value, rtol=0, atol=1e-5)
                    np.testing.assert_allclose(oracle.outputs(index)[output], value, atol=1e-5)
    cases = {(case.signature, case.output, case.recipe) for case in coder.report.cases}
    assert len(cases) == 9 == len(coder.report.cases)
    assert coder.report.case("y", signature="both").signature == "both"
    split = coder.report.case("y", signature="decode", recipe="float16").split
    assert split is not None
    assert split.quantization_db is not None
    with pytest.raises(BundleError, match="'encode', 'decode', 'both'"):
        coder.reference(signature="encoder")


def test_shared_weights_are_stored_once_in_every_recipe(coder: tpu2edge.Bundle) -> None:
    weights = (8 * WIDTH * 2 + WIDTH * WIDTH) * 4
    sizes = {model.recipe: model.size_bytes for model in coder.models}
    assert weights < sizes["float32"] < 1.1 * weights
    assert sizes["dynamic_wi8_afp32"] < 0.35 * weights
    assert sizes["float16"] < 0.6 * weights


def test_check_runs_all_signatures_or_the_one_that_is_asked_for(
    coder: tpu2edge.Bundle, folder: Path
) -> None:
    report = check_target(CheckRequest(target=coder.path))
    assert str(report.verdict) == "PASS"
    assert len(report.cases) == 9
    one = check_target(CheckRequest(target=coder.path, signature="decode"))
    assert {case.signature for case in one.cases} == {"decode"}
    alone = check_target(
        CheckRequest(target=coder.model().path, reference=coder.path, budgets=("y:sqnr>=60dB",))
    )
    assert {case.signature for case in alone.cases} == {"encode", "decode", "both"}
    with pytest.raises(BundleError, match="no signature 'up'"):
        check_target(CheckRequest(target=coder.path, signature="up"))
    with pytest.raises(OptionError, match="no output"):
        check_target(CheckRequest(target=coder.path, budgets=("z:sqnr>=60dB",)))


@pytest.fixture(scope="module")
def captured(folder: Path) -> Path:
    """A folder with a reference of each of the three signatures, called otherwise than those."""
    for number, name in enumerate(("encode", "decode", "both")):
        request = CaptureRequest(
            source=str(folder / "coder.py"),
            output=folder / "captured" / f"ref{number}",
            signature_name=name,
            num_samples=2,
        )
        assert capture_source(request).signature.name == name
    return folder / "captured"


def test_captured_signatures_hold_an_export_and_a_check(
    coder: tpu2edge.Bundle, captured: Path, folder: Path
) -> None:
    report = check_target(CheckRequest(target=coder.path, reference=captured))
    assert str(report.verdict) == "PASS"
    assert len(report.cases) == 9
    assert {case.metrics.samples for case in report.cases if case.metrics} == {2}
    one = check_target(CheckRequest(target=coder.path, reference=captured, signature="decode"))
    assert {case.signature for case in one.cases} == {"decode"}
    made = export_source(request(folder, "held", recipes=("float32",), reference=str(captured)))
    assert str(made.verdict) == "PASS"
    assert [case.signature for case in made.report.cases if case.model == "reference"] == [
        "encode",
        "decode",
        "both",
    ]


@pytest.mark.parametrize("target", ["bundle", "file"])
def test_a_reference_of_one_signature_checks_that_one_and_says_what_is_left(
    coder: tpu2edge.Bundle, captured: Path, target: str
) -> None:
    path = coder.path if target == "bundle" else coder.model().path
    notes: list[str] = []
    report = check_target(
        CheckRequest(target=path, reference=captured / "ref1"),
        on_note=lambda note: notes.append(note.text),
    )
    assert {(case.signature, case.output) for case in report.cases} == {("decode", "y")}
    assert str(report.verdict) == "PASS"
    (said,) = notes
    assert said == (
        "the reference has no samples for the signatures 'encode', 'both': they are not checked"
    )
    notes.clear()
    asked = CheckRequest(target=path, reference=captured / "ref1", signature="decode")
    check_target(asked, on_note=lambda note: notes.append(note.text))
    assert notes == []


def test_a_bundle_is_a_reference_of_all_its_signatures(coder: tpu2edge.Bundle) -> None:
    for path in (coder.path, coder.model().path):
        report = check_target(CheckRequest(target=path, reference=coder.path))
        assert {case.signature for case in report.cases} == {"encode", "decode", "both"}


def test_references_that_fit_no_signature_are_refused_by_name(
    coder: tpu2edge.Bundle, shaped: tpu2edge.Bundle, captured: Path, tmp_path: Path
) -> None:
    with pytest.raises(OptionError, match="is of the signature 'serving_default'") as error:
        check_target(
            CheckRequest(target=coder.path, reference=shaped.path / "reference"),
        )
    assert "here there is 'encode', 'decode', 'both'" in error.value.what
    assert "--signature NAME" in error.value.do
    shutil.copytree(captured, tmp_path / "twice")
    shutil.copytree(captured / "ref1", tmp_path / "twice" / "again")
    with pytest.raises(DataError, match="are both of the signature 'decode'"):
        check_target(CheckRequest(target=coder.path, reference=tmp_path / "twice"))
    shutil.rmtree(tmp_path / "twice" / "again")
    with pytest.raises(BundleError, match="has no reference of the signature 'up'"):
        check_target(CheckRequest(target=coder.path, reference=tmp_path / "twice", signature="up"))


def test_of_several_signatures_one_is_captured_and_has_to_be_named(
    folder: Path, tmp_path: Path
) -> None:
    asked = CaptureRequest(source=str(folder / "coder.py"), output=tmp_path / "ref")
    with pytest.raises(OptionError, match="several signatures") as error:
        capture_source(asked)
    assert "encode, decode, both" in error.value.what
    assert error.value.do == "name it: --signature-name encode"
    with pytest.raises(OptionError, match="gives no signature 'up'") as error:
        capture_source(replace(asked, signature_name="up"))
    assert error.value.do == "--signature-name: one of encode, decode, both"
    assert not (tmp_path / "ref").exists()


def test_of_several_signatures_one_is_surveyed_and_has_to_be_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked before the TPU's compiler is: it need not be there."""
    monkeypatch.setattr("tpu2edge.runtime_check.reference.tpu.libtpu_version", lambda: "0.0.52")
    asked = SurveyRequest(source=str(folder / "coder.py"), generations=("v5e",))
    with pytest.raises(OptionError, match="several signatures, and this takes one") as error:
        survey_source(asked)
    assert error.value.do == "name it: --signature-name encode"
    with pytest.raises(OptionError, match="gives no signature 'up'"):
        survey_source(replace(asked, signature_name="up"))
    alone = replace(asked, source=f"{folder / 'coder.py'}:net", signature_name="up")
    with pytest.raises(OptionError, match="gives one model"):
        survey_source(alone)


def test_a_signature_is_surveyed(folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    if libtpu_version() is None:
        pytest.skip("needs the TPU compiler: pip install 'tpu2edge[tpu]'")
    monkeypatch.setenv("TPU2EDGE_CACHE", str(tmp_path))
    asked = SurveyRequest(
        source=str(folder / "coder.py"), generations=("v5e",), signature_name="decode"
    )
    (found,) = survey_source(asked)["topologies"]
    assert sorted(name for names in found["modules"].values() for name in names) == ["down", "mid"]


def test_layers_are_called_as_in_the_module_of_the_method(coder: tpu2edge.Bundle) -> None:
    modules = {s.module for sources in coder.model().layers.values() for s in sources}
    assert {"up", "mid", "coder.mid"} <= modules
    assert not any("method_owner" in module for module in modules)
    for graph in read_tflite(coder.model().path).subgraphs:
        named = {graph.tensors[i].name for op in graph.operators for i in op.outputs}
        found = {s.module for name in named for s in coder.model().layers.get(name, ())}
        assert ("coder.up" in found) == (graph.name == "both")
        assert ("up" in found) == (graph.name == "encode")


def test_shapes_make_one_signature_each_with_the_weights_stored_once(
    shaped: tpu2edge.Bundle, folder: Path
) -> None:
    assert str(shaped.verdict) == "PASS"
    assert shaped.signatures == ("serving_default", "serving_default_4x3x12x8")
    shapes = [signature.input("x").shape for signature in shaped.model().signatures]
    assert shapes == [(1, 3, 8, 8), (4, 3, 12, 8)]
    assert shaped.reference(signature="serving_default_4x3x12x8").inputs(3)["x"].shape[0] == 4
    weights = (64 * 27 + 128 * 64 * 9 + 1280) * 4
    assert shaped.model().size_bytes < 1.15 * weights


def test_files_of_samples_go_to_the_signatures_that_they_fit(folder: Path) -> None:
    rng = np.random.default_rng(0)
    one = {"scale": np.ones((3, 1), np.float32)}
    np.savez(folder / "small.npz", x=rng.normal(size=(3, 1, 3, 8, 8)).astype("f4"), **one)
    np.savez(folder / "odd.npz", x=rng.normal(size=(3, 1, 3, 9, 8)).astype("f4"), **one)
    made = request(
        folder,
        "with-files",
        "coder.py:net",
        shapes=("x=1x3x8x8,2x3x12x8",),
        inputs=(folder / "small.npz",),
        num_samples=2,
    )
    bundle = export_source(made)
    assert list(bundle.reference().sample_ids) == [f"small.npz#{i}" for i in range(3)]
    other = bundle.reference(signature="serving_default_2x3x12x8")
    assert list(other.sample_ids) == ["example", "variation-1"]
    assert any("none of the samples fits" in str(note) for note in bundle.notes)
    with pytest.raises(DataError, match=r"odd\.npz"):
        export_source(
            request(
                folder,
                "odd",
                "coder.py:net",
                shapes=("x=1x3x8x8,2x3x12x8",),
                inputs=(folder / "odd.npz",),
            )
        )


def test_the_python_api_takes_a_mapping_and_isolates_the_converter(tmp_path: Path) -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Linear(200, 200)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.w(x)

        def back(self, y: torch.Tensor) -> torch.Tensor:
            return y @ self.w.weight

    torch.manual_seed(0)
    pair = Pair()
    x = torch.randn(2, 200)
    bundle = tpu2edge.export_model(
        {"there": (pair, x), "back": (pair.back, (x,))},
        output=tmp_path / "out",
        samples=[{"x": x * 2}, {"y": x - 1}],
    )
    assert str(bundle.verdict) == "PASS"
    assert bundle.reference().sample_ids == ("sample-0",)
    assert bundle.reference(signature="back").sample_ids == ("sample-1",)
    assert pair.training
    # One way needs the matrix transposed: two orders of the same values at most.
    assert bundle.model().size_bytes < 2.1 * 200 * 200 * 4


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"source": "coder.py:net", "shapes": ("x=1x3x8",)}, OptionError, "as many sizes"),
        ({"source": "coder.py:net", "shapes": ("y=1x3x8x8",)}, OptionError, "names no input 'y'"),
        (
            {"source": "coder.py:net", "shapes": ("x=1x3x8x8,2x3x8x8", "scale=1")},
            OptionError,
            "different numbers",
        ),
        (
            {"source": "coder.py:net", "shapes": ("x=1x3x8x8",), "dynamic": ("x.0=1:4",)},
            OptionError,
            "does not go with --dynamic",
        ),
        ({"source": "coder.py", "shapes": ("x=1x8",)}, OptionError, "does not go with a mapping"),
        ({"source": "coder.py", "dynamic": ("q.0=1:4",)}, OptionError, "names no input"),
        ({"source": "coder.py:wrong"}, ModelSourceError, "a module, or a method"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(
    folder: Path, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        export_source(request(folder, "refused", **options))
    assert not (folder / "refused").exists()
