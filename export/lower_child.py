"""The converter in a process of its own: ``python -m tpu2edge.export.lower_child FOLDER TARGET``.

FOLDER holds ``<n>.pt2`` and ``<n>.json`` (the signature) for each program, and ``imports``, the modules
that bring operators of other packages; children.py says how it tells what happens.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from pathlib import Path
from typing import Any

from tpu2edge.children import run_child
from tpu2edge.errors import ConversionError
from tpu2edge.types import Progress, Signature


def _load(file: Path) -> Any:
    import torch

    try:
        return torch.export.load(file)
    except Exception as err:
        raise ConversionError(
            "the traced program cannot be handed to the converter's process: "
            f"{type(err).__name__}: {str(err)[:300]}",
            do="use the command line, which converts in the process that traced it; an operator of "
            "another package may have to be imported first",
        ) from err


def lower(progress: Progress) -> dict[str, Any]:
    """Lower the programs; gives what :class:`Lowered` holds beside the path."""
    folder, target = Path(sys.argv[1]), Path(sys.argv[2])
    progress("import litert-torch")
    from tpu2edge.export.lower import Loweree, lower_programs

    for module in (folder / "imports").read_text().split():
        # What is missing then is told with the program that needs it.
        with contextlib.suppress(Exception):
            importlib.import_module(module)
    programs = [
        Loweree(
            program=_load(file),
            signature=Signature.from_json(json.loads(file.with_suffix(".json").read_text())),
        )
        for file in sorted(folder.glob("*.pt2"))
    ]
    lowered = lower_programs(programs, target, progress=progress)
    return {
        "nodes": {name: source.to_json() for name, source in lowered.nodes.items()},
        "origins": dict(lowered.origins),
        "notes": [[note.code, note.text] for note in lowered.notes],
    }


if __name__ == "__main__":
    run_child(lower)
