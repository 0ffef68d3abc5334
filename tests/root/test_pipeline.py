"""The main job end to end: what is written, what it is held to, and what is left when it stops."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tpu2edge
from tpu2edge.checking import check_target
from tpu2edge.errors import (
    BundleError,
    DataError,
    LoweringError,
    OptionError,
    QuantizationError,
)
from tpu2edge.pipeline import export_source
from tpu2edge.requests import CheckRequest, ExportRequest

MODEL = '''
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8 * 8 * 8, 64)
        self.last = nn.Linear(64, 10)

    def forward(self, image, scale):
        x = torch.relu(self.norm(self.stem(image))).flatten(1)
        hidden = torch.relu(self.head(x))
        return {"logits": self.last(hidden) * scale, "hidden": hidden}

def get_model():
    torch.manual_seed(0)
    return Net()

def get_args():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(1, 3, 8, 8, generator=generator), torch.tensor([2.0])

class Wrong(Net):
    """Its own trace is another program than what it runs: a flag that tracing turns."""
    def forward(self, image, scale):
        if torch.compiler.is_exporting():
            scale = scale * 1.001
        return super().forward(image, scale)

def wrong():
    torch.manual_seed(0)
    return Wrong(), get_args()

class Sorted(nn.Module):
    def forward(self, x):
        return torch.cumprod(x, 1).sort(1).values, torch.linalg.qr(x)[0]

class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 4)

    def forward(self, x):
        return torch.tanh(self.a(x)) * 2

def rows():
    return Rows(), (torch.randn(1, 6),)

def unsupported():
    return Sorted(), (torch.randn(4, 4),)
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipeline")
    (folder / "net.py").write_text(MODEL)
    return folder


def request(folder: Path, name: str, source: str = "net.py", **options: Any) -> ExportRequest:
    options.setdefault("reference", "eager")  # predictions: test_references.py
    return ExportRequest(source=str(folder / source), output=folder / name, **options)


@pytest.fixture(scope="module")
def bundle(folder: Path) -> tpu2edge.Bundle:
    recipes = ("float32", "float16", "dynamic_wi8_afp32", "weight_only_wi8_afp32")
    return export_source(request(folder, "bundle", recipes=recipes))


def test_a_good_export_is_a_verified_bundle_with_a_pass(bundle: tpu2edge.Bundle) -> None:
    assert str(bundle.verdict) == "PASS"
    names = {str(f.relative_to(bundle.path)) for f in bundle.path.rglob("*") if f.is_file()}
    assert names == {
        "manifest.json",
        "parity.json",
        "layers.json",
        "log.txt",
        "model.float32.tflite",
        "model.float16.tflite",
        "model.dynamic_wi8_afp32.tflite",
        "model.weight_only_wi8_afp32.tflite",
        "reference/manifest.json",
        "reference/samples-00000.safetensors",
        "reference/oracle/manifest.json",
        "reference/oracle/samples-00000.safetensors",
    }
    assert [model.recipe for model in bundle.models] == [
        "float32",
        "float16",
        "dynamic_wi8_afp32",
        "weight_only_wi8_afp32",
    ]
    sizes = {model.recipe: model.size_bytes for model in bundle.models}
    assert sizes["float16"] / sizes["float32"] == pytest.approx(0.52, abs=0.04)
    assert sizes["dynamic_wi8_afp32"] / sizes["float32"] == pytest.approx(0.28, abs=0.04)


def test_each_recipe_has_the_noise_it_must_have(bundle: tpu2edge.Bundle) -> None:
    report = bundle.report
    float32 = report.case("logits").metrics
    half = report.case("logits", recipe="float16").metrics
    int8 = report.case("logits", recipe="weight_only_wi8_afp32").metrics
    assert float32 is not None
    assert half is not None
    assert int8 is not None
    assert float32.sqnr_db_worst is not None
    assert half.sqnr_db_worst is not None
    assert int8.sqnr_db_worst is not None
    assert float32.sqnr_db_worst > 110
    assert 55 < half.sqnr_db_worst < 85
    assert 25 < int8.sqnr_db_worst < 55
    assert float32.range_error is not None
    assert float32.range_error < 2e-6


def test_the_error_split_says_which_step_made_the_error(bundle: tpu2edge.Bundle) -> None:
    split = bundle.report.case("logits", recipe="dynamic_wi8_afp32").split
    assert split is not None
    assert split.largest == "quantization"
    assert split.quantization_db is not None
    assert split.conversion_db is not None
    assert split.quantization_db < 60 < 110 < split.conversion_db
    plain = bundle.report.case("logits").split
    assert plain is not None
    assert plain.quantization_db is None


def test_names_and_provenance_are_in_the_manifest(bundle: tpu2edge.Bundle) -> None:
    signature = bundle.models[0].signature()
    assert [spec.name for spec in signature.inputs] == ["image", "scale"]
    assert [spec.name for spec in signature.outputs] == ["logits", "hidden"]
    manifest = bundle.manifest
    assert manifest["source"]["origin"].endswith("net.py:get_model")
    assert len(manifest["weights_sha256"]) == 64
    assert manifest["versions"]["torch"].startswith("2.")
    codes = {note.code for note in bundle.notes}
    assert {"eval-mode", "synthetic-data", "rewrite-fold-batch-norm"} <= codes
    reference = bundle.reference()
    assert (reference.provider, reference.precision, len(reference)) == ("eager", "f32", 8)
    assert bundle.reference("oracle").outputs(3)["logits"].dtype == np.float64
    np.testing.assert_array_equal(
        bundle.reference("oracle").inputs(3)["image"], reference.inputs(3)["image"]
    )


def test_the_same_request_gives_the_same_bytes_but_for_the_times(
    bundle: tpu2edge.Bundle, folder: Path
) -> None:
    recipes = tuple(model.recipe for model in bundle.models)
    again = export_source(request(folder, "again", recipes=recipes))
    for file in sorted(bundle.path.rglob("*")):
        name = file.relative_to(bundle.path)
        if file.is_dir() or name.name == "log.txt":
            continue
        if str(name) == "manifest.json":
            first, second = (
                json.loads((root / name).read_text()) for root in (bundle.path, again.path)
            )
            assert first.pop("times").keys() == second.pop("times").keys()
            assert first == second
        else:
            assert file.read_bytes() == (again.path / name).read_bytes(), name
    shutil.rmtree(again.path)


def test_given_samples_are_used_and_named(folder: Path) -> None:
    rng = np.random.default_rng(0)
    np.savez(
        folder / "real.npz",
        image=rng.normal(size=(5, 3, 8, 8)).astype(np.float32),
        scale=np.full((5, 1), 3, np.float64),
    )
    made = export_source(request(folder, "given", inputs=(folder / "real.npz",)))
    assert made.report.samples == 5
    assert made.report.data_kind == "files"
    assert made.reference().sample_ids[2] == "real.npz#2"
    assert "synthetic-data" not in {note.code for note in made.notes}


def test_a_strict_budget_fails_with_a_reason_and_keeps_the_bundle(folder: Path) -> None:
    made = export_source(request(folder, "strict", budgets=("logits:sqnr>=200dB",)))
    assert str(made.verdict) == "FAIL"
    assert made.report.exit_code == 1
    case = made.report.case("logits")
    assert case.reasons[0].code == "budget"
    assert "wanted at least 200 dB" in case.reasons[0].text
    assert "worst sample '" in case.reasons[0].text
    assert str(made.report.case("hidden").verdict) == "PASS"
    assert str(tpu2edge.load_bundle(made.path).verdict) == "FAIL"


def test_a_program_that_differs_from_the_module_fails(folder: Path) -> None:
    """The file equals the traced program to the last bit; only the module itself shows the fault."""
    made = export_source(request(folder, "differs", source="net.py:wrong"))
    case = made.report.case("logits")
    assert str(case.verdict) == "FAIL"
    assert case.metrics is not None
    assert case.metrics.sqnr_db_worst == pytest.approx(60, abs=1)  # 0.1 %


def test_a_model_that_cannot_be_converted_leaves_nothing_behind(folder: Path) -> None:
    with pytest.raises(LoweringError) as caught:
        export_source(request(folder, "impossible", source="net.py:unsupported"))
    assert caught.value.exit_code == 3
    assert caught.value.place is not None
    assert caught.value.place.line is not None
    assert not [f.name for f in folder.iterdir() if "impossible" in f.name]


def test_an_interrupted_export_leaves_the_last_good_bundle(
    bundle: tpu2edge.Bundle, folder: Path
) -> None:
    target = folder / "kept"
    shutil.copytree(bundle.path, target)
    before = sorted(folder.iterdir())

    def stop(stage: str, done: float | None = None, total: float | None = None) -> None:
        if stage == "write bundle":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_source(request(folder, "kept", force=True), progress=stop)
    assert sorted(folder.iterdir()) == before
    assert len(tpu2edge.load_bundle(target).models) == 4


def test_a_bundle_that_is_there_is_replaced_only_by_force(
    bundle: tpu2edge.Bundle, folder: Path
) -> None:
    target = folder / "replaced"
    shutil.copytree(bundle.path, target)
    with pytest.raises(BundleError, match="exists"):
        export_source(request(folder, "replaced"))
    assert len(tpu2edge.load_bundle(target).models) == 4
    made = export_source(request(folder, "replaced", force=True, num_samples=2))
    assert len(made.models) == 1
    assert not list(folder.glob(".replaced*"))


def test_a_corrupted_file_is_refused_before_it_is_run(
    bundle: tpu2edge.Bundle, folder: Path
) -> None:
    target = folder / "corrupt"
    shutil.copytree(bundle.path, target)
    file = target / "model.float32.tflite"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x10
    file.write_bytes(data)
    with pytest.raises(BundleError, match=r"model.float32.tflite was changed"):
        tpu2edge.load_bundle(target)
    with pytest.raises(BundleError, match=r"model.float32.tflite was changed"):
        check_target(CheckRequest(target=target))


def test_check_repeats_the_verdict_of_a_bundle_and_of_a_lone_file(bundle: tpu2edge.Bundle) -> None:
    report = check_target(CheckRequest(target=bundle.path))
    assert str(report.verdict) == "PASS"
    assert len(report.cases) == 8
    first = report.case("logits").metrics
    assert first == bundle.report.case("logits").metrics
    alone = check_target(CheckRequest(target=bundle.model("float16").path, reference=bundle.path))
    assert str(alone.verdict) == "FAIL"  # float16 held to the float32 budget
    named = check_target(
        CheckRequest(
            target=bundle.model("float16").path, reference=bundle.path, budgets=("sqnr>=45dB",)
        )
    )
    assert str(named.verdict) == "PASS"
    with pytest.raises(OptionError, match="nothing to be compared with"):
        check_target(CheckRequest(target=bundle.model().path))


def test_check_parity_finds_a_file_with_other_weights(
    bundle: tpu2edge.Bundle, folder: Path
) -> None:
    """A weight matrix scaled by 1 %: far below what a cosine of 0.9999 would notice."""
    from tpu2edge.flatbuffer import read_tflite, summarize

    file = read_tflite(bundle.model().path)
    weight = next(w for w in summarize(file).weights if w.shape == (64, 512))
    values = file.constant(weight.index)
    data = bundle.model().path.read_bytes()
    raw = np.ascontiguousarray(values).tobytes()
    assert data.count(raw) == 1
    changed = folder / "scaled.tflite"
    changed.write_bytes(data.replace(raw, (values * np.float32(1.01)).tobytes()))
    report = tpu2edge.check_parity(changed, bundle.reference())
    metrics = report.case("hidden").metrics
    assert metrics is not None
    assert str(report.verdict) == "FAIL"
    assert metrics.cosine_worst is not None
    assert metrics.cosine_worst > 0.9999
    assert metrics.sqnr_db_worst == pytest.approx(40, abs=1)


def test_a_recipe_that_changes_nothing_is_an_error(folder: Path) -> None:
    with pytest.raises(QuantizationError, match="changed nothing"):
        export_source(request(folder, "noop", recipes=("dynamic_wi8b32_afp32",)))


def test_a_recipe_alone_still_tells_conversion_from_quantization(folder: Path) -> None:
    made = export_source(request(folder, "alone", recipes=("dynamic_wi8_afp32",)))
    assert [model.path.name for model in made.models] == ["model.dynamic_wi8_afp32.tflite"]
    assert not (made.path / "model.float32.tflite").exists()
    split = made.report.case("logits", recipe="dynamic_wi8_afp32").split
    assert split is not None
    assert split.conversion_db is not None
    assert split.conversion_db > 110


def test_a_saved_program_is_exported(folder: Path) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3)).eval()
    torch.export.save(torch.export.export(module, (torch.randn(2, 4),)), folder / "saved.pt2")
    made = export_source(request(folder, "from-pt2", source="saved.pt2"))
    assert str(made.verdict) == "PASS"
    assert [spec.name for spec in made.models[0].signature().inputs] == ["input"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"recipes": ("dynamic_wi8",)}, "the closest is 'dynamic_wi8_afp32'"),
        ({"calibration": ("x.npz",)}, "static recipes"),
        ({"budgets": ("sqnr=30",)}, "is no bound"),
        ({"budgets": ("snr>=30dB",)}, "the closest is 'sqnr'"),
        ({"budgets": ("other:sqnr>=30dB",)}, "names no output"),
        ({"devices": ("phone",)}, "no device is called 'phone'"),
        ({"threads": 0}, "threads"),
        ({"dynamic": ("x=1:8",)}, "NAME.AXIS=MIN:MAX"),
        ({"dynamic": ("image.7=1:8",)}, "axes 0 to 3"),
        ({"dynamic": ("picture.0=1:8",)}, "names no input"),
        ({"num_samples": 0}, "at least 1"),
    ],
)
def test_wrong_options_are_refused_in_words(folder: Path, options: Any, words: str) -> None:
    with pytest.raises((OptionError, DataError), match=words) as caught:
        export_source(request(folder, "wrong", **options))
    assert caught.value.exit_code == 2
    assert not (folder / "wrong").exists()


def test_a_dynamic_batch_is_checked_at_both_ends_and_between(folder: Path) -> None:
    made = export_source(request(folder, "rows", source="net.py:rows", dynamic=("x.0=1:5",)))
    assert str(made.verdict) == "PASS"
    ids = made.reference().sample_ids
    assert ids[-3:] == ("smallest-size", "middle-size", "largest-size")
    sizes = [made.reference().inputs(len(ids) - n)["x"].shape[0] for n in (3, 2, 1)]
    assert sizes == [1, 3, 5]


def test_a_dynamic_size_that_cannot_be_lowered_is_refused_with_a_way_out(folder: Path) -> None:
    made = request(folder, "batched", source="net.py:unsupported", dynamic=("x.0=4:6",))
    with pytest.raises(LoweringError) as caught:
        export_source(made)
    assert caught.value.place is not None
    assert "--shapes x=4x4,6x4" in caught.value.do


def test_a_conv_net_and_torchs_own_dim_go_through_the_python_api(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, 2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 5)
    )
    rows = torch.export.Dim("rows", min=2, max=6)
    made = tpu2edge.export_model(
        net,
        torch.randn(1, 3, 8, 8),
        output=tmp_path / "out",
        dynamic={"input": {0: rows}},
        num_samples=2,
    )
    assert str(made.verdict) == "PASS"
    (shape,) = [spec.shape for spec in made.model().signature().inputs]
    assert (shape[0].min, shape[0].max) == (2, 6)  # type: ignore[union-attr]
    with pytest.raises(OptionError, match="no largest size"):
        tpu2edge.export_model(
            net,
            torch.randn(1, 3, 8, 8),
            output=tmp_path / "open",
            dynamic={"input": {0: torch.export.Dim("rows")}},
        )


def test_the_python_api_leaves_training_as_it_was(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 4)).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(8, 6)).sum().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    weights = [p.clone() for p in model.parameters()]
    state, x = torch.get_rng_state(), torch.ones(2, 6)
    made = tpu2edge.export_model(model, x, output=tmp_path / "out", num_samples=3)
    assert str(made.verdict) == "PASS"
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert all(child.training for child in model)
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    found = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(gradients, found, strict=True))
    assert all(p.requires_grad for p in model.parameters())
    optimizer.step()
    assert not torch.equal(weights[0], next(iter(model.parameters())))
    assert (made.path / "log.txt").stat().st_size > 0


def test_the_command_line_does_the_same(folder: Path, bundle: tpu2edge.Bundle) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tpu2edge", "export", "net.py", "-o", "cli", "--json"),
            *("--recipe", "float32", "--reference", "eager"),
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["verdict"] == "PASS"
    made = tpu2edge.load_bundle(folder / "cli")
    assert made.model().sha256 == bundle.model().sha256
    failed = subprocess.run(
        [sys.executable, "-m", "tpu2edge", "export", "net.py:unsupported", "-o", "no"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert failed.returncode == 3
    assert "net.py:" in failed.stderr
    assert "Traceback" not in failed.stderr
