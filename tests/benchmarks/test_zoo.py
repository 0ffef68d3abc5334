"""A sample of the zoo that `benchmarks/zoo.py` measures: one-KV-head decoders are wrong without us."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ZOO = Path(__file__).parents[2] / "benchmarks" / "zoo.py"


@pytest.mark.parametrize("name", ["transformers/GemmaConfig", "transformers/FNetConfig"])
def test_a_model_of_the_zoo_passes(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(ZOO), "--child", name, "ours"],
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("@@")]
    assert lines, done.stderr[-2000:]
    assert '"state": "pass"' in lines[-1], lines[-1]
