"""Predict a TPU's outputs without one: the program on XLA:CPU, each matmul rounded as planned."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tpu2edge.errors import DataError, DeviceError
from tpu2edge.runtime_check.reference.tpu.compile import (
    Compiled,
    check_precision,
    compile_program,
    default_cache,
)
from tpu2edge.runtime_check.reference.tpu.plan import (
    NAIVE_MODES,
    PrecisionPlan,
    naive_plan,
    plan_from_compiled,
)
from tpu2edge.runtime_check.reference.tpu.process import Child
from tpu2edge.runtime_check.reference.tpu.topologies import topology_named
from tpu2edge.types import Array, StableHlo, TensorSpec

__all__ = ["NOT_MODELLED", "Prediction", "predict"]

#: In what a prediction differs from a TPU, beside the compiler's version.
NOT_MODELLED = (
    "the order in which the matrix unit adds products",
    "how the TPU splits operands for high and highest (here: rounded to nearest)",
    "the TPU's own exp, log, tanh, logistic, reciprocal and square root (up to 0.6 dB at default "
    "precision; at highest they alone limit a v5e to 84-129 dB)",
    "rewrites of the TPU compiler other than which unit and precision a matmul gets",
    "TorchTPU's flash attention (the program is decomposed; 48-80 dB apart)",
)
_NOT_MODELLED_NAIVE = (
    "which matmuls the TPU compiler keeps in float32 (with a single row, most of them on v5e and "
    "v6e): all are rounded alike here",
)
_LABELS = {"default": "bf16-default", "high": "bf16_3x-high", "highest": "f32-highest"}

Inputs = Mapping[str, Array] | Sequence[Array]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What a TPU would return, as far as that can be told without one. Never "TPU output"."""

    outputs: tuple[Mapping[str, Array], ...]  # one a sample; floats as float32
    plan: PrecisionPlan
    label: str  # "predicted" or "predicted (naive)"
    provider: str  # "tpu-emulated" or "tpu-emulated-naive"
    precision_label: str  # "bf16-default", "bf16_3x-high" or "f32-highest"
    topology: str | None  # libtpu's name; None when naive
    libtpu: str | None
    libtpu_build: str | None
    jax: str
    route: str
    not_modelled: tuple[str, ...]
    seconds: Mapping[str, float]  # "compile" (0 from the cache), "load", "run"
    peak_bytes: int  # of the child that ran the program


def predict(
    program: StableHlo,
    inputs: Iterable[Inputs],
    *,
    generation: str = "v5e",
    precision: str = "default",
    naive: bool = False,
    timeout_s: float = 600.0,
    cache: Path | bool | None = True,
) -> Prediction:
    """What a TPU of ``generation`` returns for each of ``inputs``, at ``precision``.

    Each sample is a mapping by the program's input names, or arrays in their order. The program is
    compiled once for the TPU and once for the CPU. With ``naive`` no TPU compiler is needed and
    every float32 matmul is rounded alike. ``timeout_s`` holds for compiling, and again for each
    sample. ``cache`` is the folder for compiled programs; True is the user's, None or False none.
    """
    check_precision(precision)
    start = time.monotonic()
    compiled: Compiled | None = None
    plan: PrecisionPlan | None = None
    if not naive:
        folder = default_cache() if cache is True else (cache or None)
        compiled = compile_program(
            program,
            topology_named(generation),
            precision=precision,
            timeout_s=timeout_s,
            cache=folder,
        )
        plan = plan_from_compiled(compiled)
    compile_s = time.monotonic() - start
    modes = None if plan is None else plan.modes
    runner = run_program(program, inputs, modes=modes, precision=precision, timeout_s=timeout_s)
    about = next(runner)
    outputs, run_s, peak = [], 0.0, 0
    for arrays, reply in runner:
        outputs.append(
            {s.name: _as_model(a, s) for s, a in zip(program.outputs, arrays, strict=True)}
        )
        run_s += reply["seconds"]
        peak = max(peak, reply["peak_bytes"])
    if plan is None:
        plan = naive_plan(about[1]["matmuls"], precision)
    return Prediction(
        outputs=tuple(outputs),
        plan=plan,
        label="predicted (naive)" if naive else "predicted",
        provider="tpu-emulated-naive" if naive else "tpu-emulated",
        precision_label=_LABELS[precision],
        topology=compiled.topology if compiled else None,
        libtpu=compiled.libtpu if compiled else None,
        libtpu_build=compiled.libtpu_build if compiled else None,
        jax=about[1]["jax"],
        route=program.route,
        not_modelled=(*(_NOT_MODELLED_NAIVE if naive else ()), *NOT_MODELLED),
        seconds={"compile": compile_s, "load": about[1]["seconds"], "run": run_s},
        peak_bytes=peak,
    )


def run_program(
    program: StableHlo,
    inputs: Iterable[Inputs],
    *,
    modes: Sequence[str] | None,
    precision: str = "default",
    prelayout: str | None = None,
    timeout_s: float = 600.0,
) -> Iterator[tuple[list[Array], dict[str, Any]]]:
    """First nothing and what was loaded, then the flat outputs and figures of each sample.

    ``modes`` says how to compute each matmul, None the naive way for ``precision``. ``prelayout``
    runs that HLO of the TPU compiler instead of the program it came from.
    """
    weights = [a for a in program.arguments if a.is_weight]
    request = {
        "do": "load",
        "modes": None if modes is None else list(modes),
        "naive": NAIVE_MODES[precision],
        # A rewritten matmul must not ask the CPU for a precision of its own: left as lowered.
        "precision": "default",
        "prelayout": prelayout,
        "is_weight": [a.is_weight for a in program.arguments],
    }
    layout: list[tuple[str, Sequence[int]]] = [("uint8", (len(program.module),))]
    layout += [(a.dtype, a.shape) for a in weights]

    def blobs() -> Iterator[Array]:
        yield np.frombuffer(program.module, np.uint8)
        for weight in weights:
            assert weight.array is not None
            yield weight.array()

    with Child("runs the program on the CPU", timeout_s=timeout_s) as child:
        about, _ = child.ask(request, blobs(), layout)
        _raise_error(about)
        yield [], about
        for number, sample in enumerate(inputs):
            reply, arrays = child.ask({"do": "run"}, _flat_inputs(program, sample, number))
            _raise_error(reply)
            yield arrays, reply


def _raise_error(reply: Mapping[str, Any]) -> None:
    if "error" in reply:
        text = " ".join(str(reply["text"]).split())[:400]
        raise DeviceError(
            f"the program does not run on XLA:CPU: {reply['error']}: {text}",
            do="a custom call that only a TPU has ends this way; take another route to StableHLO",
            step="tpu",
        )


def _flat_inputs(program: StableHlo, sample: Inputs, number: int) -> list[Array]:
    """The arrays of one sample in the program's order, checked and in the program's dtypes."""
    wanted = program.inputs
    if isinstance(sample, Mapping):
        names = [a.name for a in wanted]
        if set(sample) != set(names):
            raise DataError(f"sample {number} has inputs {sorted(sample)}, the program {names}")
        arrays = [np.asarray(sample[name]) for name in names]
    else:
        arrays = [np.asarray(array) for array in sample]
        if len(arrays) != len(wanted):
            raise DataError(f"sample {number} has {len(arrays)} inputs, the program {len(wanted)}")
    flat = []
    for argument, array in zip(wanted, arrays, strict=True):
        if array.shape != argument.shape:
            raise DataError(
                f"sample {number}: input '{argument.name}' has shape {array.shape}, "
                f"the program takes {argument.shape}"
            )
        flat.append(_cast(array, argument.dtype, f"sample {number}: input '{argument.name}'"))
    return flat


_KINDS = {"i": "integer", "u": "integer", "f": "float", "b": "bool", "V": "float", "c": "complex"}


def _cast(array: Array, dtype: str, what: str) -> Array:
    if array.dtype.name == dtype:
        return array
    if dtype == "bfloat16":
        import ml_dtypes

        target: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    else:
        target = np.dtype(dtype)
    if _KINDS.get(array.dtype.kind) != _KINDS.get(target.kind):
        raise DataError(f"{what} is {array.dtype}, the program takes {dtype}")
    if target.kind in "iu" and array.size:
        limits = np.iinfo(target)
        low, high = int(array.min()), int(array.max())
        if low < limits.min or high > limits.max:
            raise DataError(f"{what} has values {low} to {high}, more than {dtype} holds")
    return array.astype(target)


def _as_model(array: Array, spec: TensorSpec) -> Array:
    """An output in the model's own dtype, save that every real float is float32."""
    if array.shape != spec.shape:
        raise DeviceError(f"output '{spec.name}' came as {array.shape}, not {spec.shape}")
    if array.dtype.kind == "f":
        return array.astype(np.float32, copy=False)
    return array.astype(spec.dtype, copy=False)
