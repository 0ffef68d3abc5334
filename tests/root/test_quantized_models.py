"""A model that was quantized in PyTorch, from the module to the checked bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tpu2edge
from tpu2edge.errors import ModelSourceError, OptionError, QuantizationError
from tpu2edge.export.sources import load_source
from tpu2edge.runtime_check.budget import default_budget
from tpu2edge.types import AS_QUANTIZED, BASE_RECIPE, is_base

tq: Any = pytest.importorskip("torchao.quantization")


def quantized() -> tuple[nn.Module, tuple[torch.Tensor]]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)).eval()
    tq.quantize_(module, tq.Int8DynamicActivationInt8WeightConfig())
    return module, (torch.randn(4, 32),)


def test_a_quantized_model_gets_a_bundle_with_an_honest_name_and_a_budget_of_its_own(
    tmp_path: Path,
) -> None:
    module, args = quantized()
    before = module[0].weight.qdata.clone()  # type: ignore[index]
    bundle = tpu2edge.export_model(module, args, output=tmp_path / "out", num_samples=2)
    assert torch.equal(module[0].weight.qdata, before)  # type: ignore[index]
    (model,) = bundle.models
    assert model.recipe == "as_quantized_dynamic"
    assert model.path.name == "model.as_quantized_dynamic.tflite"
    assert bundle.model() is model  # what has to be shipped, as float32 of a float model
    assert str(bundle.verdict) == "PASS"
    (note,) = [note.text for note in bundle.notes if note.code == "as-quantized"]
    assert "2 weights, 2 activations at run time" in note
    # Held to the quantized module, and the kernels' own scales are all of the difference.
    (case,) = bundle.report.cases
    assert case.split is not None
    assert case.split.quantization_db is None
    assert case.metrics is not None
    assert 30 < float(case.metrics.sqnr_db_worst or 0) < 80


@pytest.mark.parametrize("recipe", ["dynamic_wi8_afp32", "float16"])
def test_a_quantized_model_is_not_quantized_twice(recipe: str, tmp_path: Path) -> None:
    module, args = quantized()
    with pytest.raises(QuantizationError) as caught:
        tpu2edge.export_model(
            module, args, output=tmp_path / "out", recipes=["float32", recipe], num_samples=2
        )
    assert f"--recipe {recipe} would quantize it a second time" in str(caught.value)
    assert "its own integers and scales" in caught.value.do
    assert not (tmp_path / "out").exists()


def test_what_is_stored_as_the_model_has_it_is_no_recipe_to_ask_for(tmp_path: Path) -> None:
    module = nn.Linear(4, 4)
    with pytest.raises(OptionError, match="unknown recipe"):
        tpu2edge.export_model(
            module, torch.ones(1, 4), output=tmp_path / "out", recipes=["as_quantized_static"]
        )


def test_a_quant_config_beside_a_float_model_is_refused(tmp_path: Path) -> None:
    # litert_torch.convert takes one, and converts a float model as if it were not there.
    (tmp_path / "m.py").write_text(
        "import torch\n"
        "from litert_torch.quantize import pt2e_quantizer as pt2e\n"
        "from litert_torch.quantize.quant_config import QuantConfig\n"
        "def get_model():\n"
        "    one = pt2e.PT2EQuantizer().set_global(pt2e.get_symmetric_quantization_config())\n"
        "    config = QuantConfig(pt2e_quantizer=one)\n"
        "    return torch.nn.Linear(4, 4), (torch.ones(1, 4),), config\n"
    )
    with pytest.raises(ModelSourceError) as caught:
        load_source(str(tmp_path / "m.py"))
    assert "QuantConfig, which quantizes nothing by itself" in str(caught.value)
    assert "convert_pt2e" in caught.value.do


def test_each_way_to_be_quantized_has_a_default_budget() -> None:
    assert is_base(BASE_RECIPE)
    assert not is_base("dynamic_wi8_afp32")
    least = []
    for name in AS_QUANTIZED:
        assert is_base(name)
        budget = default_budget(name)
        assert name in budget.source
        least.append(next(b.value for b in budget.floats if b.metric == "sqnr"))
    assert least == [20, 15, 80]
