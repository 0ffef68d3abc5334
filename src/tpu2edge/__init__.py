"""tpu2edge: from a PyTorch model trained on TPU to a checked LiteRT file.

The public names are loaded on first use, so that ``import tpu2edge`` costs no torch, jax or LiteRT.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpu2edge.bundle import Bundle, load_bundle
    from tpu2edge.capturing import capture
    from tpu2edge.checking import check_parity
    from tpu2edge.errors import Tpu2EdgeError
    from tpu2edge.pipeline import export_model
    from tpu2edge.quantizing import quantize_model
    from tpu2edge.runtime_check.budget import Budget
    from tpu2edge.runtime_check.parity import ParityReport
    from tpu2edge.runtime_check.reference import Reference
    from tpu2edge.types import Dim, EdgeModel, Sample, Signature, TensorSpec, Verdict

__version__ = "0.1.0"

_HOME = {
    "Budget": "tpu2edge.runtime_check.budget",
    "Bundle": "tpu2edge.bundle",
    "Dim": "tpu2edge.types",
    "EdgeModel": "tpu2edge.types",
    "ParityReport": "tpu2edge.runtime_check.parity",
    "Reference": "tpu2edge.runtime_check.reference",
    "Sample": "tpu2edge.types",
    "Signature": "tpu2edge.types",
    "TensorSpec": "tpu2edge.types",
    "Tpu2EdgeError": "tpu2edge.errors",
    "Verdict": "tpu2edge.types",
    "capture": "tpu2edge.capturing",
    "check_parity": "tpu2edge.checking",
    "export_model": "tpu2edge.pipeline",
    "load_bundle": "tpu2edge.bundle",
    "quantize_model": "tpu2edge.quantizing",
}

__all__ = [
    "Budget",
    "Bundle",
    "Dim",
    "EdgeModel",
    "ParityReport",
    "Reference",
    "Sample",
    "Signature",
    "TensorSpec",
    "Tpu2EdgeError",
    "Verdict",
    "__version__",
    "capture",
    "check_parity",
    "export_model",
    "load_bundle",
    "quantize_model",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'tpu2edge' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
