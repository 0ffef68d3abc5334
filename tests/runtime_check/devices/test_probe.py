"""The committed .tflite files come from committed scripts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tpu2edge.runtime_check.devices import qemu

TESTS = Path(__file__).parents[2]


def test_the_probe_is_what_its_script_makes(tmp_path: Path) -> None:
    made = tmp_path / "probe.tflite"
    script = TESTS / "data" / "make_probe.py"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, sys.path)])}
    subprocess.run([sys.executable, str(script), str(made)], check=True, env=env)
    assert made.read_bytes() == qemu.PROBE.read_bytes()


def test_every_file_that_is_committed_has_a_script() -> None:
    scripts = "".join(path.read_text() for path in (TESTS / "data").glob("make_*.py"))
    files = [qemu.PROBE, *(TESTS / "data").glob("*.tflite")]
    assert len(files) >= 8
    assert [path.name for path in files if f"{path.name.split('.')[0]}." not in scripts] == []
