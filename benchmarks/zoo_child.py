"""One model of the zoo through one side, judged: what `zoo.py` runs in a process of its own.

Both sides are judged alike: the file is run on two inputs, and every output is held to eager, which
is itself held to the same module in float64.
"""

from __future__ import annotations

import copy
import resource
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

PASS_DB = 100.0
#: Below PASS_DB a result may still be as good as eager itself: this much worse than eager's own
#: distance to float64 is taken for rounding, more for wrong.
ROUNDING_DB = 6.0
MEMORY_BYTES = 9 << 30

Arrays = list[Any]


def measure(name: str, side: str) -> dict[str, Any]:
    """The row of the table: ``state``, and where they are known ``db``, ``floor`` and ``why``."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    import torch
    from zoo_models import MODELS, other_inputs

    torch.manual_seed(0)
    try:
        module, args = MODELS[name]()
        inputs = [args, other_inputs(args)]
        with torch.no_grad():
            wanted = [_arrays(copy.deepcopy(module)(*copy.deepcopy(one))) for one in inputs]
    except Exception as error:  # noqa: BLE001 - whatever a package raises, it is not a conversion
        return {"state": "absent", "why": _said(error)}
    if all(not array.any() for array in wanted[0]):
        return {"state": "absent", "why": "eager gives 0 everywhere"}
    floor = _floor(module, inputs, wanted)
    with tempfile.TemporaryDirectory() as folder:
        convert = _ours if side == "ours" else _bare
        found = convert(module, args, Path(folder))
        if "path" in found:
            found |= _judged(found.pop("path"), found.pop("names", None), inputs, wanted, floor)
    return {**found, "floor": floor}


def _ours(module: Any, args: Any, folder: Path) -> dict[str, Any]:
    import tpu2edge
    from tpu2edge.export import lower

    def here(programs: Any, path: Path, *, log: Any = None, progress: Any) -> Any:
        return lower.lower_programs(programs, path, progress=progress)

    try:
        # This process is one of its own already, as the command line's is.
        with mock.patch.object(lower, "lower_isolated", here):
            made = tpu2edge.export_model(module, args, output=folder / "out", num_samples=2)
    except tpu2edge.Tpu2EdgeError as error:
        return {"state": "refused", "why": f"{error.what} [{error.place}]"[:400]}
    except Exception as error:  # noqa: BLE001 - a traceback is a result, too
        return {"state": "exception", "why": _said(error)}
    if str(made.verdict) != "PASS":
        reasons = [r.text for case in made.report.cases for r in case.reasons]
        return {"state": "fail", "why": next(iter(reasons), "")[:400]}
    model = made.models[0]
    names = [spec.name for spec in model.signatures[0].inputs]
    row = {"path": model.path, "names": names, "bytes": model.size_bytes}
    row["notes"] = sorted({note.code for note in made.notes})
    row["xnnpack"] = next((note.text for note in made.notes if note.code == "xnnpack"), "takes all")
    return row


def _bare(module: Any, args: Any, folder: Path) -> dict[str, Any]:
    import litert_torch

    path = folder / "m.tflite"
    try:
        litert_torch.convert(module, args).export(str(path))
    except Exception as error:  # noqa: BLE001 - whatever the other side raises is its result
        return {"state": "exception", "why": _said(error)}
    return {"path": path, "bytes": path.stat().st_size}


def _judged(
    path: Path,
    names: Sequence[str] | None,
    inputs: Sequence[tuple[Any, ...]],
    wanted: Sequence[Arrays],
    floor: float | None,
) -> dict[str, Any]:
    from tpu2edge.runtime_check.devices.client import Session

    samples = []
    for one in inputs:
        tensors = [x.int() if str(x.dtype) == "torch.int64" else x for x in one]
        labels = names or [f"args_{index}" for index in range(len(tensors))]
        samples.append({k: x.contiguous().numpy() for k, x in zip(labels, tensors, strict=True)})
    try:
        with Session(path, timeout_s=120.0) as session:
            signature = session.signatures[0]
            order = [spec.name for spec in signature.outputs]
            if names is None:  # litert-torch's output_10 stands before output_2
                order.sort(key=lambda name: (len(name), name))
            got = [[out[name] for name in order] for out in session.run(signature.name, samples)]
    except Exception as error:  # noqa: BLE001 - a file that cannot be run is a result
        return {"state": "does not run", "why": _said(error)}
    if any(len(a) != len(b) for a, b in zip(wanted, got, strict=True)):
        return {"state": "wrong", "why": f"{len(got[0])} outputs instead of {len(wanted[0])}"}
    db = _worst(wanted, got)
    rounding = floor is not None and db >= floor - ROUNDING_DB
    return {"state": "pass" if db >= PASS_DB else "low" if rounding else "wrong", "db": db}


def _floor(
    module: Any, inputs: Sequence[tuple[Any, ...]], wanted: Sequence[Arrays]
) -> float | None:
    """How far eager is from float64, in dB; None where a module cannot be run in float64."""
    import torch

    try:
        wide = copy.deepcopy(module).double()
        with torch.no_grad():
            exact = [
                _arrays(wide(*(x.double() if x.is_floating_point() else x for x in one)))
                for one in inputs
            ]
        return _worst(exact, wanted)
    except Exception:  # noqa: BLE001 - a dtype that is written into the module
        return None


def _worst(wanted: Sequence[Arrays], got: Sequence[Arrays]) -> float:
    """The least SQNR of all outputs and inputs; -300 where NaN or the shape tells that it is wrong."""
    import numpy as np

    from tpu2edge.runtime_check.metrics import sqnr_db

    least = 300.0  # as JSON has no infinity
    for arrays, others in zip(wanted, got, strict=True):
        for want, have in zip(arrays, others, strict=True):
            have = np.asarray(have)
            if want.shape != have.shape:
                return -300.0
            db = float(sqnr_db(want.astype(np.float64), have.astype(np.float64)))
            least = min(least, db) if db == db else -300.0
    return max(least, -300.0)


def _arrays(outputs: Any) -> Arrays:
    import torch
    from torch.utils import _pytree

    return [
        leaf.detach().contiguous().numpy()
        for leaf in _pytree.tree_leaves(outputs)
        if isinstance(leaf, torch.Tensor)
    ]


def _said(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = next((line for line in lines if "error:" in line), lines[0] if lines else "")
    return f"{type(error).__name__}: {told.split('error: ', 1)[-1]}"[:300]
