"""What each TPU generation would make of a model, asked of the TPU's own compiler, without a TPU."""

from __future__ import annotations

from typing import Any

from tpu2edge.errors import DeviceError, OptionError
from tpu2edge.extras import need_modules
from tpu2edge.requests import SurveyRequest
from tpu2edge.types import Note, NoteSink, Progress, no_progress

__all__ = ["GENERATIONS", "survey_source"]

#: What is asked for when no generation is named: those that can be rented.
GENERATIONS = ("v4", "v5e", "v5p", "v6e", "tpu7x")


def survey_source(
    request: SurveyRequest, *, progress: Progress = no_progress, on_note: NoteSink | None = None
) -> dict[str, Any]:
    """The program of ``request.source`` compiled for each generation, as plain data.

    That is ``TpuReport.to_json()``, modules by their own paths. A generation that refuses the
    program is a result.

    Raises:
        DeviceError: libtpu is not installed.
        OptionError: an unknown generation, precision or signature.
        ConversionError: the model cannot be traced, or lowered to StableHLO.
    """
    from tpu2edge.runtime_check.reference.tpu import libtpu_version, report, topology_named
    from tpu2edge.runtime_check.reference.tpu.compile import check_precision

    if libtpu_version() is None:
        raise DeviceError(
            "the TPU compiler (libtpu) is not installed",
            do="pip install 'tpu2edge[tpu]' (Linux x86-64); no TPU is needed for it",
            step="tpu",
        )
    check_precision(request.precision)
    names = [topology_named(n).generation for n in (request.generations or GENERATIONS)]
    progress("import torch")
    need_modules("tpu2edge doctor --tpu", ("torch", "litert_torch", "jax"))
    from tpu2edge.export.blame import strip_wrapper
    from tpu2edge.export.program import trace_module, trace_program
    from tpu2edge.export.sources import load_source
    from tpu2edge.export.stablehlo import stablehlo_from_program
    from tpu2edge.tracing import entry_of, trace_entries

    progress("load model")
    loaded = load_source(request.source)
    entry = None
    if loaded.signatures is not None:
        entry = entry_of(loaded, request.signature_name, option="--signature-name")
    elif request.signature_name is not None:
        raise OptionError(
            f"--signature-name is for several signatures, and {loaded.origin} gives one model",
            do="leave it away",
        )
    else:
        loaded.refuse_without_inputs(request.source)
    progress("trace")
    if loaded.signatures is not None and entry is not None:
        (traced,) = trace_entries({entry: loaded.signatures[entry]}, None, None, ((), ()), True)
    elif loaded.program is not None:
        traced = trace_program(loaded.program)
    else:
        assert loaded.module is not None
        traced = trace_module(loaded.module, loaded.args or (), loaded.kwargs)
    progress("lower to StableHLO")
    signature = traced.signature
    lowered = stablehlo_from_program(
        traced.program,
        input_names=[spec.name for spec in signature.inputs],
        output_names=[spec.name for spec in signature.outputs],
    )
    notes: tuple[Note, ...] = (*loaded.notes, *traced.notes, *lowered.notes)
    for note in notes:
        if on_note is not None:
            on_note(note)
    found = report(
        lowered, tuple(dict.fromkeys(names)), precision=request.precision, progress=progress
    )
    data = found.to_json()
    for one in data["topologies"]:
        if "modules" in one:
            one["modules"] = {
                mode: [strip_wrapper(name) for name in modules]
                for mode, modules in one["modules"].items()
            }
    return {"model": loaded.origin, **data}
