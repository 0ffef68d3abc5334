"""The converter in a process of its own: ``python -m tpu2edge.export.lower_child FOLDER TARGET``.

FOLDER holds ``<n>.pt2`` and ``<n>.json`` (the signature) for each program. What happens goes out as
JSON lines on the descriptor that was stdout; stdout itself becomes stderr, where native code prints.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

from tpu2edge.errors import ConversionError, Tpu2EdgeError
from tpu2edge.types import Signature


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


def main() -> int:
    """Lower the programs; the last line sent is the result or the error."""
    folder, target = Path(sys.argv[1]), Path(sys.argv[2])
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def send(**event: Any) -> None:
        out.write(json.dumps(event) + "\n")

    def progress(stage: str, done: float | None = None, total: float | None = None) -> None:
        send(event="stage", stage=stage, done=done, total=total)

    try:
        progress("import litert-torch")
        from tpu2edge.export.lower import Loweree, lower_programs

        warnings.simplefilter("ignore")
        programs = [
            Loweree(
                program=_load(file),
                signature=Signature.from_json(json.loads(file.with_suffix(".json").read_text())),
            )
            for file in sorted(folder.glob("*.pt2"))
        ]
        lowered = lower_programs(programs, target, progress=progress)
    except Tpu2EdgeError as error:
        send(event="error", **error.to_json())
        return 0
    send(
        event="result",
        nodes={name: source.to_json() for name, source in lowered.nodes.items()},
        origins=dict(lowered.origins),
        notes=[[note.code, note.text] for note in lowered.notes],
    )
    return 0


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # all is written; taking torch and MLIR down in order costs a second
