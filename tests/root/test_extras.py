"""Commands that need what is not installed name the extra, before they do anything."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tpu2edge.errors import DeviceError
from tpu2edge.extras import EXPORT_MODULES, need_modules
from tpu2edge.pipeline import export_source
from tpu2edge.quantizing import quantize_model
from tpu2edge.requests import ExportRequest

DATA = Path(__file__).parents[1] / "data"


def test_nothing_is_missing_where_the_extra_is_installed() -> None:
    need_modules("tpu2edge export", EXPORT_MODULES)


def test_an_export_without_torch_names_the_extra_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "litert_torch", None)
    request = ExportRequest(source="model.py", output=tmp_path / "out", reference="eager")
    with pytest.raises(
        DeviceError, match=r"tpu2edge export needs torch, litert_torch, not"
    ) as error:
        export_source(request)
    assert error.value.exit_code == 4
    assert error.value.do.startswith("pip install 'tpu2edge[export]'")
    assert not list(tmp_path.iterdir())


def test_quantizing_needs_the_quantizer_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ai_edge_quantizer", None)
    with pytest.raises(DeviceError, match="quantizing needs ai_edge_quantizer, not installed"):
        quantize_model(DATA / "small.float32.tflite", output=tmp_path / "out", recipes="float16")
    assert not list(tmp_path.iterdir())
