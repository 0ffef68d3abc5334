"""Programs, a figure and a skip that the tests of the predicted TPU share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tpu2edge.runtime_check.reference.tpu import libtpu_version
from tpu2edge.types import HloArgument, StableHlo, TensorSpec


@pytest.fixture(scope="session")
def libtpu() -> str:
    """libtpu's version; skips where it is not installed."""
    version = libtpu_version()
    if version is None:
        pytest.skip("needs the TPU compiler: pip install 'tpu2edge[tpu]'")
    return version


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU2EDGE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def dot_program() -> Callable[..., StableHlo]:
    """Makes a program of one contraction, lhs's last dimension with rhs's ``axis``."""

    def make(lhs: tuple[int, ...], rhs: tuple[int, ...], axis: int = 0) -> StableHlo:
        out = (*lhs[:-1], *rhs[:axis], *rhs[axis + 1 :])
        kinds = ["tensor<" + "x".join(map(str, s)) + "xf32>" for s in (lhs, rhs, out)]
        text = (
            f"module {{ func.func public @main(%a: {kinds[0]}, %b: {kinds[1]}) -> {kinds[2]} {{\n"
            f"  %0 = stablehlo.dot_general %a, %b, contracting_dims = [{len(lhs) - 1}] x [{axis}]"
            f" : ({kinds[0]}, {kinds[1]}) -> {kinds[2]}\n  return %0 : {kinds[2]}\n}} }}"
        )
        return StableHlo(
            module=text.encode(),
            route="by hand",
            versions={},
            arguments=(
                HloArgument(name="a", shape=lhs, dtype="float32"),
                HloArgument(name="b", shape=rhs, dtype="float32"),
            ),
            outputs=(TensorSpec(name="out", shape=out, dtype="float32"),),
        )

    return make


@pytest.fixture(scope="session")
def sqnr_db() -> Callable[[np.ndarray, np.ndarray], float]:
    """10 log10 of signal power over error power, computed in float64."""

    def figure(reference: np.ndarray, other: np.ndarray) -> float:
        reference = np.asarray(reference, np.float64)
        noise = float(((reference - other) ** 2).sum())
        return float("inf") if noise == 0 else 10 * np.log10((reference**2).sum() / noise)

    return figure
