"""A TPU prediction in a process of its own: ``python -m tpu2edge.predict_child FOLDER``.

FOLDER holds ``program.pt2``, ``request.json`` (signature, choice) and ``inputs/``, a reference with
the samples; ``predicted/`` is written. JSON lines go out on the descriptor that was stdout. A
process of its own keeps jax, and the settings that lowering changes, out of the caller's.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path

from tpu2edge.errors import Tpu2EdgeError
from tpu2edge.types import Signature


def main() -> int:
    """Predict; the last line sent is the result or the error."""
    folder = Path(sys.argv[1])
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def send(**event: object) -> None:
        out.write(json.dumps(event) + "\n")

    def progress(stage: str, done: float | None = None, total: float | None = None) -> None:
        send(event="stage", stage=stage, done=done, total=total)

    try:
        import torch

        from tpu2edge.references import ReferenceChoice, predict_outputs
        from tpu2edge.runtime_check.reference import Reference, ReferenceWriter

        warnings.simplefilter("ignore")
        request = json.loads((folder / "request.json").read_text())
        signature = Signature.from_json(request["signature"])
        samples = list(Reference.load(folder / "inputs").samples())
        choice = ReferenceChoice(**request["choice"])
        program = torch.export.load(folder / "program.pt2")
        found = predict_outputs(program, signature, samples, choice, progress=progress)
        with ReferenceWriter(
            folder / "predicted",
            signature,
            provider=found.provider,
            precision=found.precision,
            data={},
            borrow_inputs="../inputs",
        ) as writer:
            for sample, outputs in zip(samples, found.outputs, strict=True):
                writer.add(sample, outputs)
    except Tpu2EdgeError as error:
        send(event="error", **error.to_json())
        return 0
    send(
        event="result",
        provider=found.provider,
        precision=found.precision,
        extra=found.extra,
        notes=[[note.code, note.text] for note in found.notes],
    )
    return 0


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)
