"""The stages strung together: from a model to a checked bundle.

``export_model`` is the Python API, ``export_source`` the same from what the command line was given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpu2edge import references
from tpu2edge.bundle import Bundle
from tpu2edge.errors import DataError, OptionError
from tpu2edge.exporting import ExportJob
from tpu2edge.extras import need_modules
from tpu2edge.folders import refuse_existing
from tpu2edge.logs import Stages
from tpu2edge.options import (
    budget_texts,
    family_options,
    options_of,
    parse_dynamic,
    parse_shapes,
)
from tpu2edge.requests import ExportRequest
from tpu2edge.sampling import (
    SampleSet,
    given_samples,
    made_up_samples,
    replayed_samples,
    samples_in_files,
)
from tpu2edge.tracing import (
    Entries,
    checkpoint_owner,
    is_program,
    origin_of,
    trace_entries,
    weights_of,
)
from tpu2edge.types import Dim, NoteSink, Progress, Sample, no_progress

if TYPE_CHECKING:
    import torch

    from tpu2edge.export.program import TracedProgram
    from tpu2edge.runtime_check.budget import Budget
    from tpu2edge.runtime_check.reference import Reference

__all__ = ["export_model", "export_source"]


def export_model(
    module: torch.nn.Module | torch.export.ExportedProgram | Mapping[str, tuple[Any, ...]],
    args: tuple[Any, ...] | torch.Tensor | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    output: Path | str,
    recipes: Sequence[str | Path] = ("float32",),
    budget: Budget | str | Sequence[str] | None = None,
    keep_float: Sequence[str] = (),
    calibration_data: Sequence[Any] = (),
    calibration_method: str = "minmax",
    metric: str | None = None,
    optimize: str = "size",
    levels: Sequence[str] = (),
    max_size: float | str | None = None,
    max_latency: float | str | None = None,
    time_limit_s: float | None = None,
    reference: Reference | Path | str = "eager",
    samples: Sequence[Sample | Mapping[str, Any]] | None = None,
    num_samples: int | None = None,
    dynamic: Mapping[str, Mapping[int, Dim | torch.export.Dim]] | None = None,
    shapes: Mapping[str, Sequence[Sequence[int]]] | None = None,
    channels_last: Sequence[str] = (),
    channels_last_output: Sequence[str] = (),
    signature_name: str = "serving_default",
    devices: Sequence[str] = ("host",),
    threads: int | None = None,
    seed: int = 0,
    force: bool = False,
    progress: Progress = no_progress,
    on_note: NoteSink | None = None,
    log_path: Path | None = None,
) -> Bundle:
    """Export ``module`` to a folder of checked LiteRT files and give the verified bundle.

    Safe to call inside a training loop: the module, its mode, its weights, its devices, the random
    generators and the grad mode are as before afterwards; the converter, the quantizer and all that
    runs a ``.tflite`` have processes of their own, so what kills them does not kill the training.

    Args:
        module: a torch module on any device and in any mode, an ExportedProgram, or, for several
            signatures in one file, ``{"encode": (model.encode, args), "decode": (decoder, args,
            kwargs)}``: modules, or methods of modules; weights they share are stored once.
        args: example positional inputs (a lone tensor counts as one); an ExportedProgram has its own.
        kwargs: example keyword inputs.
        output: the folder to make; it appears in one rename when all is done.
        recipes: names of recipes, "float32", plain ones as "int8" or those of ai-edge-quantizer; a Path
            is a recipe file in ai-edge-quantizer's format; "auto" is the smallest within the budget.
        budget: bounds for all recipes, as a Budget or as text ("sqnr>=30dB"); defaults by recipe.
        keep_float: torch module paths that no recipe quantizes, with the wildcards of fnmatch.
        calibration_data: samples that activations are measured on (static, -gptq, -oscar): paths,
            "file.py:function", or samples by input name. Without it: half of the samples checked.
        calibration_method: how a range is made of them: "minmax", "moving-average", "percentile", "mse".
        metric: a function of your own, "file.py:accuracy" (docs/budgets.md), as a case of the report.
        optimize: what "auto" makes small, "size" or "latency".
        levels: what "auto" may choose from for each layer (``tpu2edge.quantize.sensitivity.LEVELS``);
            float32 only if it is named, too. All if none is.
        max_size: the largest file that "auto" may choose, as a share of the float file (0.4 or "40%").
        max_latency: the longest run, likewise; the answer then depends on what was timed.
        time_limit_s: when "auto" ends with the best it has.
        reference: what the numbers are held to: "eager" (the module in float32), "f64",
            "tpu-emulated[:v5e][@high]", "tpu-emulated-naive", "auto" (predicted for v5e if the extra
            "tpu" is installed), or a captured Reference or its folder, which brings its own samples.
        samples: inputs to check with, by input name (arrays or tensors); else the example and seeded
            variations of it, and the report says that the data is synthetic. With several
            signatures each sample goes to those whose inputs it fits.
        num_samples: how many synthetic samples; 8 if None, 4 above 200 MB of weights.
        dynamic: for each input name, which axes may change, e.g. ``{"x": {0: Dim(...)}}``, with
            this package's Dim or torch.export.Dim; both ends and a size between are checked.
        shapes: for input names, several shapes each, ``{"x": [(1, 3, 8, 8), (4, 3, 8, 8)]}``: one
            signature for each, the k-th shapes of all inputs together. The first is called
            ``signature_name``, others have their shapes behind it, ``serving_default_4x3x8x8``.
        channels_last: inputs that the file takes as NHWC. The example is what the module takes;
            ``samples``, ``dynamic``, ``shapes`` and the reference are in the file's layout.
        channels_last_output: outputs that the file gives as NHWC.
        signature_name: name of the entry in the file.
        devices: where to check; "host" is this machine.
        threads: LiteRT threads.
        seed: of the synthetic samples.
        force: replace a bundle that is there.
        progress: told which stage is under way.
        on_note: told each thing that was done to the copy of the module.
        log_path: a log that is being written already and is moved into the bundle; else third-party
            output is caught while the converter runs.

    Returns:
        The bundle; look at ``bundle.verdict``: a FAIL is a result, not an exception.

    Raises:
        ConversionError: the model cannot be exported or converted (exit status 3).
        InputError: the inputs, options or the output folder do not fit (exit status 2).
    """
    job = ExportJob(
        output=Path(output),
        family=family_options(
            recipes,
            budgets=budget_texts(budget),
            budget=budget if not isinstance(budget, (str, Sequence)) else None,
            keep_float=keep_float,
            calibration=calibration_data,
            estimator=calibration_method,
            metric=metric,
            optimize=optimize,
            levels=levels,
            max_size=max_size,
            max_latency=max_latency,
            time_limit_s=time_limit_s,
            devices=devices,
            threads=threads,
        ),
        seed=seed,
        force=force,
        progress=Stages(progress),
        on_note=on_note,
        log_path=log_path,
        choice=references.choice_of(reference),
        isolate=True,
    )
    refuse_existing(job.output, force=force)
    need_modules("export_model")
    entries: Entries
    if isinstance(module, Mapping):
        from tpu2edge.export.sources import signatures_from_mapping

        if args is not None or kwargs:
            raise DataError(
                "example inputs were given beside a mapping of signatures",
                do='put them into it: {"encode": (model.encode, (x,))}',
            )
        entries = signatures_from_mapping(module, "export_model")
    else:
        if not is_program(module) and args is None and not kwargs:
            raise DataError("no example inputs were given", do="pass args=(tensor, …) or kwargs")
        given = tuple(args) if isinstance(args, (tuple, list)) else (args,)
        entries = {signature_name: (module, given if args is not None else (), dict(kwargs or {}))}

    def data(programs: Sequence[TracedProgram]) -> list[SampleSet]:
        if job.choice.kind == "given":
            if samples is not None:
                raise OptionError(
                    "samples and a captured reference were both given",
                    do="leave samples away: a reference brings its own",
                )
            return replayed_samples(programs, job.choice.path or reference, str(weights))
        if samples is None:
            return [made_up_samples(program, num_samples, seed) for program in programs]
        return given_samples(programs, samples, num_samples, seed)

    weights = weights_of(entries)
    provenance = {
        "source": {"origin": origin_of(entries)},
        "weights_sha256": weights,
        "options": {"signature_name": signature_name, "num_samples": num_samples},
    }
    several = isinstance(module, Mapping)
    if isinstance(channels_last, str) or isinstance(channels_last_output, str):
        raise OptionError("channels_last takes names", do='give a tuple, channels_last=("x",)')
    last = (tuple(channels_last), tuple(channels_last_output))
    return job.run(lambda: trace_entries(entries, dynamic, shapes, last, several), data, provenance)


def export_source(
    request: ExportRequest,
    *,
    progress: Progress = no_progress,
    on_note: NoteSink | None = None,
    log_path: Path | None = None,
) -> Bundle:
    """The same for a model named on the command line; see :func:`export_model`."""
    job = ExportJob(
        output=request.output,
        family=options_of(request),
        seed=request.seed,
        force=request.force,
        progress=Stages(progress),
        on_note=on_note,
        log_path=log_path,
        choice=references.ReferenceChoice.parse(request.reference),
        isolate=False,
    )
    refuse_existing(request.output, force=request.force)
    dynamic, shapes = parse_dynamic(request.dynamic), parse_shapes(request.shapes)
    job.check_budgets()
    job.progress("import torch")
    need_modules("tpu2edge export")
    from tpu2edge.export.checkpoints import checkpoint_digest, load_checkpoint
    from tpu2edge.export.sources import load_source

    job.progress("load model")
    loaded = load_source(request.source)
    notes = list(loaded.notes)
    provenance: dict[str, Any] = {
        "source": {"origin": loaded.origin, "sha256": loaded.sha256},
        "options": {
            name: value
            for name, value in request.to_json().items()
            if name not in ("source", "output", "force", "checkpoint", "inputs")
        },
    }
    if request.checkpoint is not None:
        job.progress("load checkpoint")
        owner = checkpoint_owner(loaded)
        notes.extend(load_checkpoint(owner, request.checkpoint))
        provenance["checkpoint"] = {
            "name": request.checkpoint.name,
            "sha256": checkpoint_digest(request.checkpoint),
        }
    entries: Entries
    if loaded.signatures is not None:
        entries = loaded.signatures
    elif loaded.program is not None:
        entries = {request.signature_name: (loaded.program, (), {})}
    else:
        entries = {request.signature_name: (loaded.module, loaded.args or (), loaded.kwargs)}
    provenance["weights_sha256"] = weights_of(entries)

    def traced() -> list[TracedProgram]:
        if loaded.signatures is None:
            loaded.refuse_without_inputs(request.source)
        last = (request.channels_last, request.channels_last_output)
        return trace_entries(entries, dynamic, shapes, last, loaded.signatures is not None)

    def data(programs: Sequence[TracedProgram]) -> list[SampleSet]:
        if job.choice.kind == "given":
            if request.inputs:
                raise OptionError(
                    "--inputs and a captured --reference were both given",
                    do="leave --inputs away: a reference brings its own samples",
                )
            return replayed_samples(programs, job.choice.path, provenance["weights_sha256"])
        if not request.inputs:
            return [
                made_up_samples(program, request.num_samples, request.seed) for program in programs
            ]
        return samples_in_files(programs, request)

    return job.run(traced, data, provenance, notes)
