"""One recipe applied to one float ``.tflite``, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import IO

from tpu2edge.children import ending
from tpu2edge.errors import DeviceError, OptionError, QuantizationError
from tpu2edge.quantize.recipes import known_recipe

__all__ = ["quantize_file"]

_CHILD = Path(__file__).with_name("child.py")


def quantize_file(source: Path, target: Path, recipe: str, *, log: IO[bytes] | None = None) -> None:
    """Write to ``target`` what ``recipe`` makes of the float file ``source``.

    Raises:
        OptionError: there is no such recipe, or it quantizes nothing.
        QuantizationError: the recipe cannot be applied.
        DeviceError: the quantizer's process died.
    """
    info = known_recipe(recipe)
    if recipe == "float32":
        raise OptionError("recipe 'float32' quantizes nothing", do="use the float file as it is")
    command = [sys.executable, "-u", str(_CHILD), str(source), str(target), recipe]
    done = subprocess.run(
        [*command, info.upstream or ""],
        capture_output=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    if log is not None:
        log.write(done.stderr)
    if done.returncode != 0:
        tail = " / ".join(done.stderr.decode(errors="replace").strip().splitlines()[-3:])
        raise DeviceError(
            f"ai-edge-quantizer died by {ending(done.returncode)} at recipe '{recipe}': {tail}",
            do="try another recipe; the other recipes of this run are not affected",
            step="quantize",
        )
    lines = done.stdout.decode(errors="replace").strip().splitlines()
    if not lines:
        raise DeviceError(f"ai-edge-quantizer gave no answer at recipe '{recipe}'", step="quantize")
    answer = json.loads(lines[-1])
    if not answer["ok"]:
        raise QuantizationError(
            f"recipe '{recipe}' cannot be applied: {answer['type']}: {answer['error']}",
            do="try another recipe, e.g. dynamic_wi8_afp32 or weight_only_wi8_afp32",
            step="quantize",
        )
