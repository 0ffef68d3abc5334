"""Quantizing what is there already: a bundle's float file, or a ``.tflite`` from elsewhere."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import tpu2edge
from tpu2edge import family
from tpu2edge.autotuning import search_checkpoint
from tpu2edge.bundle import load_bundle
from tpu2edge.errors import BundleError, DataError, OptionError, QuantizationError
from tpu2edge.flatbuffer import read_tflite, summarize
from tpu2edge.options import chosen_recipes
from tpu2edge.quantize.apply import quantize_file
from tpu2edge.quantize.calibrate import Calibration
from tpu2edge.quantize.recipes import recipe_from_rules
from tpu2edge.quantize.rules import dynamic
from tpu2edge.runtime_check.reference import Reference


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(32, 128)
        self.body = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128))
        self.head = nn.Linear(128, 10)

    def forward(self, x):
        hidden = torch.relu(self.stem(x))
        return {"logits": self.head(torch.relu(self.body(hidden)))}


def rows(count: int, seed: int = 0) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [{"x": rng.standard_normal((1, 32)).astype(np.float32)} for _ in range(count)]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> tpu2edge.Bundle:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("float") / "out"
    return tpu2edge.export_model(Net(), torch.randn(1, 32), output=folder, samples=rows(8))


def notes_of(bundle: tpu2edge.Bundle) -> str:
    return "\n".join(note["text"] for note in bundle.manifest["notes"])


def test_a_bundle_is_quantized_without_its_model(bundle, tmp_path: Path):
    made = tpu2edge.quantize_model(
        bundle, output=tmp_path / "out", recipes=("int8", "int8-static", "float16")
    )
    assert [m.recipe for m in made.models] == ["dynamic_wi8_afp32", "int8-static", "float16"]
    sizes = {m.recipe: m.size_bytes / bundle.model().size_bytes for m in made.models}
    assert 0.25 < sizes["dynamic_wi8_afp32"] < 0.35
    assert 0.5 < sizes["float16"] < 0.56
    assert str(made.verdict) == "PASS"
    worst = {c.recipe: c.metrics.sqnr_db_worst for c in made.report.cases}
    assert worst["float16"] > 60 > worst["dynamic_wi8_afp32"] > 30 > worst["int8-static"] - 15
    # The split knows the float module and the oracle, for they came with the bundle.
    case = made.report.case("logits", recipe="int8-static")
    assert case.split is not None
    assert case.split.largest == "quantization"
    assert case.split.float32_db > 120
    assert "samples that are checked" in notes_of(made)


def test_a_tflite_from_elsewhere_is_held_to_its_own_outputs(bundle, tmp_path: Path):
    file = tmp_path / "theirs.tflite"
    shutil.copyfile(bundle.model().path, file)
    made = tpu2edge.quantize_model(file, output=tmp_path / "out", samples=rows(4, seed=1))
    reference = made.reference()
    assert reference.provider == "litert"
    assert len(reference) == 4
    assert made.report.case("logits", recipe="dynamic_wi8_afp32").metrics.sqnr_db_worst > 30
    assert made.manifest["source"]["origin"] == "theirs.tflite"


def test_a_tflite_without_samples_is_checked_on_random_numbers_and_says_so(bundle, tmp_path: Path):
    made = tpu2edge.quantize_model(bundle.model().path, output=tmp_path / "out")
    assert len(made.reference()) == 8
    assert "random numbers" in notes_of(made)


def test_a_reference_of_a_tflite_is_what_it_is_held_to(bundle, tmp_path: Path):
    samples = rows(4, seed=2)
    wrong = [{"logits": np.ones((1, 10), np.float32) * i} for i in range(4)]
    Reference.from_arrays(tmp_path / "ref", inputs=samples, outputs=wrong, precision="f32")
    made = tpu2edge.quantize_model(
        bundle.model().path, output=tmp_path / "out", reference=tmp_path / "ref"
    )
    assert str(made.verdict) == "FAIL"


def test_layers_named_by_module_stay_float(bundle, tmp_path: Path):
    made = tpu2edge.quantize_model(bundle, output=tmp_path / "out", keep_float=("body.*",))
    summary = summarize(read_tflite(made.model("dynamic_wi8_afp32").path))
    kinds = {
        weight.name.split("/")[0]: weight.is_float
        for weight in summary.weights
        if len(weight.shape) == 2
    }
    assert kinds == {"stem": False, "body.0": True, "body.2": True, "head": False}


def test_a_module_that_is_not_there_is_refused(bundle, tmp_path: Path):
    with pytest.raises(OptionError, match="encoder"):
        tpu2edge.quantize_model(bundle, output=tmp_path / "out", keep_float=("encoder",))
    assert not (tmp_path / "out").exists()


def test_a_recipe_file_gives_the_file_its_name(bundle, tmp_path: Path):
    made = tpu2edge.quantize_model(bundle, output=tmp_path / "a", recipes=("int8",))
    rules = made.manifest["models"][0]["recipe_json"]
    file = tmp_path / "my recipe.json"
    file.write_text(json.dumps(rules))
    again = tpu2edge.quantize_model(bundle, output=tmp_path / "b", recipes=(file,))
    assert again.models[0].recipe == "my_recipe"
    assert again.models[0].sha256 == made.models[0].sha256


def test_calibration_data_may_be_a_function_that_yields_samples(bundle, tmp_path: Path):
    (tmp_path / "data.py").write_text(
        "import numpy as np\n"
        "def samples():\n"
        "    rng = np.random.default_rng(3)\n"
        "    for _ in range(20):\n"
        "        yield {'x': rng.standard_normal((1, 32)).astype('float32')}\n"
        "def wrong():\n"
        "    yield {'y': 1.0}\n"
        "def large():\n"
        "    for sample in samples():\n"
        "        yield {'x': sample['x'] * 1000}\n"
    )

    def quantized(name: str) -> tpu2edge.Bundle:
        return tpu2edge.quantize_model(
            bundle,
            output=tmp_path / name,
            recipes=("int8-static",),
            calibration_data=(f"{tmp_path / 'data.py'}:{name}",),
        )

    good, bad = quantized("samples"), quantized("large")
    assert "calibrated on 20 samples" in notes_of(good)
    db = [b.report.case("logits", recipe="int8-static").metrics.sqnr_db_median for b in (good, bad)]
    assert db[0] > 25
    assert db[1] < 5
    assert "input 'x'" in notes_of(bad)  # it does not look like the samples that are checked
    with pytest.raises(DataError, match="'y'"):
        quantized("wrong")


def test_statistics_are_kept_in_the_bundle_and_used_again(bundle, tmp_path: Path):
    wanted = {"recipes": ("float32", "int8-static")}
    first = tpu2edge.quantize_model(
        bundle, output=tmp_path / "a", calibration_data=rows(30, seed=7), **wanted
    )
    again = tpu2edge.quantize_model(first, output=tmp_path / "b", **wanted)
    assert "those that 30 samples gave" in notes_of(again)
    assert again.models[1].sha256 == first.models[1].sha256
    other = tpu2edge.quantize_model(bundle, output=tmp_path / "c", **wanted)
    assert other.models[1].sha256 != first.models[1].sha256


def test_gptq_and_oscar_take_their_moments_from_samples_and_keep_them(bundle, tmp_path: Path):
    wanted = {"recipes": ("float32", "int4-weight-only-gptq", "int8-oscar")}
    first = tpu2edge.quantize_model(
        bundle, output=tmp_path / "a", calibration_data=rows(200, seed=7), **wanted
    )
    assert "calibrated on 200 samples, ranges by minmax, moments for GPTQ and OSCAR" in notes_of(
        first
    )
    again = tpu2edge.quantize_model(first, output=tmp_path / "b", **wanted)
    assert "ranges and moments of activations are those that 200 samples gave" in notes_of(again)
    assert [m.sha256 for m in again.models] == [m.sha256 for m in first.models]
    # Without calibration data the samples that are checked serve, which is said.
    other = tpu2edge.quantize_model(bundle, output=tmp_path / "c", **wanted)
    assert "no --calibration-data" in notes_of(other)
    assert [a.sha256 == b.sha256 for a, b in zip(other.models, first.models, strict=True)] == [
        True,
        False,
        False,
    ]


def test_statistics_without_the_moments_that_are_needed_are_not_used(bundle, tmp_path: Path):
    first = tpu2edge.quantize_model(
        bundle,
        output=tmp_path / "a",
        recipes=("float32", "int8-static"),
        calibration_data=rows(30, seed=7),
    )
    again = tpu2edge.quantize_model(first, output=tmp_path / "b", recipes=("int4-gptq",))
    assert "gave the source bundle" not in notes_of(again)
    assert "moments for GPTQ" in notes_of(again)


def test_hessians_too_large_for_a_bundle_are_not_kept_which_is_said(
    bundle, tmp_path: Path, monkeypatch
):
    monkeypatch.setattr(family, "_MOST_HESSIANS", 100_000)
    wanted = {"recipes": ("float32", "int4-gptq"), "calibration_data": rows(20)}
    first = tpu2edge.quantize_model(bundle, output=tmp_path / "a", **wanted)
    assert "the Hessians of GPTQ take 0 MB and are not kept" in notes_of(first)
    again = tpu2edge.quantize_model(first, output=tmp_path / "b", recipes=("int4-gptq",))
    assert "gave the source bundle" not in notes_of(again)
    assert (tmp_path / "a" / "calibration.npz").stat().st_size < 20_000


def test_a_recipe_file_may_name_gptq_for_some_layers(bundle, tmp_path: Path):
    file = tmp_path / "mine.json"
    gptq = dynamic(4, operation="FULLY_CONNECTED", algorithm="GPTQ", regex="")
    file.write_text(json.dumps([dynamic(8), gptq]))
    made = tpu2edge.quantize_model(
        bundle, output=tmp_path / "a", recipes=(file,), keep_float=("head",)
    )
    kinds = made.manifest["models"][0]["weights"]["bytes_by_kind"]
    assert set(kinds) == {"int4 per-channel axis 0", "float32"}
    rules = made.manifest["models"][0]["recipe_json"]
    (tmp_path / "again.json").write_text(json.dumps(rules))
    again = tpu2edge.quantize_model(
        bundle, output=tmp_path / "b", recipes=(tmp_path / "again.json",)
    )
    assert again.models[0].sha256 == made.models[0].sha256


@pytest.mark.parametrize("method", ["percentile", "mse", "moving-average"])
def test_every_calibration_method_gives_a_file_that_works(bundle, tmp_path: Path, method):
    made = tpu2edge.quantize_model(
        bundle, output=tmp_path / "out", recipes=("int8-static",), calibration_method=method
    )
    assert made.report.case("logits", recipe="int8-static").metrics.sqnr_db_median > 20


def test_auto_finds_a_smaller_file_within_the_budget_than_any_plain_recipe(bundle, tmp_path: Path):
    plain = tpu2edge.quantize_model(bundle, output=tmp_path / "plain", recipes=("int8", "int4"))
    int8, int4 = (
        plain.report.case("logits", recipe=m.recipe).metrics.sqnr_db_worst for m in plain.models
    )
    goal = min(int4 + 3, (int8 + int4) / 2)
    made = tpu2edge.quantize_model(
        bundle, output=tmp_path / "out", recipes=("auto",), budget=f"sqnr>={goal:.1f}dB"
    )
    assert str(made.verdict) == "PASS"
    assert made.models[0].size_bytes < 0.8 * plain.models[0].size_bytes
    told = json.loads((made.path / "search.json").read_text())
    assert told["met"]
    assert told["best"]["held_out"]["margin_db"] >= 0
    assert any(row["pareto"] for row in told["rows"])
    assert not search_checkpoint(tmp_path / "out").exists()
    # The recipe in the manifest makes the same bytes again.
    rules = made.manifest["models"][0]["recipe_json"]
    again = tmp_path / "again.tflite"
    known = Calibration.load(made.path / "calibration.npz", source=bundle.model().path)
    quantize_file(
        bundle.model().path, again, recipe_from_rules("again", rules), moments=known.moments
    )
    assert again.read_bytes() == made.models[0].path.read_bytes()


def test_the_recipe_of_a_search_holds_what_is_kept_float(bundle, tmp_path: Path):
    made = tpu2edge.quantize_model(
        bundle,
        output=tmp_path / "out",
        recipes=("auto",),
        budget="sqnr>=30dB",
        keep_float=("stem",),
        levels=("int8-dynamic", "int8-weights", "int4-dynamic"),
    )
    rules = made.manifest["models"][0]["recipe_json"]
    again = tmp_path / "again.tflite"
    quantize_file(bundle.model().path, again, recipe_from_rules("again", rules))
    assert again.read_bytes() == made.models[0].path.read_bytes()
    kept = [
        t for t in read_tflite(again).subgraphs[0].tensors if t.is_constant and t.shape == (128, 32)
    ]
    assert [t.dtype for t in kept] == ["float32"]


def test_auto_says_how_far_a_budget_is_that_not_even_the_float_file_meets(bundle, tmp_path: Path):
    made = tpu2edge.quantize_model(
        bundle, output=tmp_path / "out", recipes=("auto",), budget="sqnr>=400dB", time_limit_s=60
    )
    assert str(made.verdict) == "FAIL"
    assert "no file meets the budget" in notes_of(made)
    assert "not even the float32 file" in notes_of(made)
    assert not json.loads((made.path / "search.json").read_text())["met"]


def test_auto_says_what_stands_in_the_way_of_a_size_that_cannot_be_had(bundle, tmp_path: Path):
    made = tpu2edge.quantize_model(
        bundle, output=tmp_path / "out", recipes=("auto",), budget="sqnr>=60dB", max_size="35%"
    )
    assert str(made.verdict) == "FAIL"
    told = json.loads((made.path / "search.json").read_text())
    assert not told["met"]
    assert made.models[0].size_bytes < 0.36 * bundle.model().size_bytes
    modules = {module for one in told["in_the_way"] for module in one["modules"]}
    assert modules
    assert modules <= {"stem", "body.0", "body.1", "body.2", "head"}
    assert "in the way stand" in notes_of(made)


def test_auto_may_be_held_to_a_task_metric_alone(bundle, tmp_path: Path):
    (tmp_path / "metrics.py").write_text(
        "def agreement(outputs, reference):\n"
        "    pairs = zip(outputs, reference)\n"
        "    return sum(a['logits'].argmax() == b['logits'].argmax() for a, b in pairs) / len(outputs)\n"
    )
    made = tpu2edge.quantize_model(
        bundle,
        output=tmp_path / "out",
        recipes=("auto",),
        metric=f"{tmp_path / 'metrics.py'}:agreement",
        budget="metric>=1",
    )
    case = made.report.case("metric agreement", recipe="auto")
    assert case.task.value == case.task.reference == 1.0
    assert made.models[0].size_bytes < 0.35 * bundle.model().size_bytes


def test_a_search_that_was_killed_goes_on_where_it_was(bundle, tmp_path: Path):
    class Killed(BaseException):
        pass

    seen = 0

    def killer(stage: str, done: float | None = None, total: float | None = None) -> None:
        nonlocal seen
        seen += stage == "search"
        if seen > 10:
            raise Killed

    wanted = {"recipes": ("auto",), "budget": "sqnr>=30dB"}
    with pytest.raises(Killed):
        tpu2edge.quantize_model(bundle, output=tmp_path / "out", progress=killer, **wanted)
    kept = json.loads(search_checkpoint(tmp_path / "out").read_text())
    assert len(kept["measured"]) >= 5
    assert not (tmp_path / "out").exists()
    made = tpu2edge.quantize_model(bundle, output=tmp_path / "out", **wanted)
    assert "goes on from" in notes_of(made)
    fresh = tpu2edge.quantize_model(bundle, output=tmp_path / "fresh", **wanted)
    assert made.models[0].sha256 == fresh.models[0].sha256


def test_a_quantized_file_is_not_quantized_again(bundle, tmp_path: Path):
    made = tpu2edge.quantize_model(bundle, output=tmp_path / "out")
    with pytest.raises(QuantizationError, match="already"):
        tpu2edge.quantize_model(made.models[0].path, output=tmp_path / "again")
    with pytest.raises(BundleError, match="no float32 file"):
        tpu2edge.quantize_model(made, output=tmp_path / "again")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"recipes": ("int9",)}, "unknown recipe 'int9'"),
        ({"recipes": ()}, "no recipe"),
        ({"calibration_method": "best"}, "known: minmax"),
        ({"optimize": "latency"}, "--recipe auto"),
        ({"recipes": ("auto",), "optimize": "power"}, "known: size, latency"),
        ({"recipes": ("auto",), "time_limit_s": 0}, "above 0"),
        ({"recipes": ("auto",), "max_size": "small"}, "40%"),
        ({"calibration_data": ("x.npz",)}, "static recipes"),
        ({"budget": "metric>=1"}, "--metric"),
    ],
)
def test_options_that_make_no_sense_are_refused_before_any_work(bundle, tmp_path, options, words):
    with pytest.raises(OptionError) as caught:
        tpu2edge.quantize_model(bundle, output=tmp_path / "out", **options)
    assert words in str(caught.value)


def test_recipes_are_chosen_once_each_and_two_of_one_name_are_refused(tmp_path: Path):
    assert [r.name for r in chosen_recipes(("int8", "dynamic_wi8_afp32", "float32"))] == [
        "dynamic_wi8_afp32",
        "float32",
    ]
    file = tmp_path / "auto.json"
    file.write_text("[]")
    with pytest.raises(OptionError):
        chosen_recipes((file,))


def test_a_tflite_with_integer_inputs_needs_real_samples(typed_tflite, tmp_path: Path):
    with pytest.raises(DataError, match="--inputs"):
        tpu2edge.quantize_model(typed_tflite, output=tmp_path / "out")


def test_the_bundle_that_quantize_makes_is_verified_like_any_other(bundle, tmp_path: Path):
    tpu2edge.quantize_model(bundle, output=tmp_path / "out", recipes=("float32", "int8"))
    made = load_bundle(tmp_path / "out")
    assert {m.recipe for m in made.models} == {"float32", "dynamic_wi8_afp32"}
    assert made.model().sha256 == bundle.model().sha256
    assert made.manifest["models"][1]["weights"]["float_share"] < 0.05
