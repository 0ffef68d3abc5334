"""A TPU prediction in a process of its own: ``python -m tpu2edge.predict_child FOLDER``.

FOLDER holds ``program.pt2``, ``request.json`` (signature, choice) and ``inputs/``, a reference with
the samples; ``predicted/`` (and ``twin/``) is written; children.py says how it tells what happens.
A process of its own keeps jax, and the settings that lowering changes, out of the caller's.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tpu2edge.children import run_child
from tpu2edge.types import Progress, Signature


def predict(progress: Progress) -> dict[str, Any]:
    """Predict; gives what :class:`Predicted` holds beside the outputs."""
    folder = Path(sys.argv[1])
    import torch

    from tpu2edge.references import ReferenceChoice, predict_outputs
    from tpu2edge.runtime_check.reference import Reference, ReferenceWriter

    request = json.loads((folder / "request.json").read_text())
    signature = Signature.from_json(request["signature"])
    samples = list(Reference.load(folder / "inputs").samples())
    choice = ReferenceChoice(**request["choice"])
    program = torch.export.load(folder / "program.pt2")
    found = predict_outputs(
        program, signature, samples, choice, twin=request["twin"], progress=progress
    )
    for name, results in (("predicted", found.outputs), ("twin", found.twin)):
        if not results:
            continue
        with ReferenceWriter(
            folder / name,
            signature,
            provider=found.provider,
            precision=found.precision,
            data={},
            borrow_inputs="../inputs",
        ) as writer:
            for sample, outputs in zip(samples, results, strict=True):
                writer.add(sample, outputs)
    return {
        "provider": found.provider,
        "precision": found.precision,
        "extra": found.extra,
        "notes": [[note.code, note.text] for note in found.notes],
    }


if __name__ == "__main__":
    run_child(predict)
