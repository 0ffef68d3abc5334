"""``tpu2edge export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tpu2edge.cli.options import (
    AsJson,
    Budgets,
    BundleForce,
    CalibrationData,
    CalibrationMethod,
    Checkpoint,
    DeviceFiles,
    Devices,
    KeepFloat,
    Levels,
    MaxLatency,
    MaxSize,
    Metric,
    Optimize,
    Quiet,
    RecipeFiles,
    Recipes,
    Seed,
    Threads,
    TimeLimit,
)

__all__ = ["export"]


def export(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="file.py, file.py:function, package.module:function (the function returns a "
            "module, or a module and example inputs; get_model and get_args are found too), or a "
            "saved ExportedProgram (.pt2).",
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="The bundle folder to make.")
    ],
    checkpoint: Checkpoint = None,
    inputs: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PATH",
            help="Samples to check with, by input name: .npz, .safetensors, or a folder of them. "
            "Repeatable. Without it: the example inputs and seeded variations of them.",
        ),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            metavar="REF",
            help="What the numbers are held to: a captured reference folder, "
            "tpu-emulated[:v5e|v6e|v5p|v4|tpu7x][@high|highest], tpu-emulated-naive, eager or f64. "
            "Without it: predicted for a TPU v5e (naive without the extra 'tpu').",
        ),
    ] = None,
    num_samples: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="How many samples to make up when no --inputs are given. [8; 4 above 200 MB of weights]",
        ),
    ] = None,
    dynamic: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME.AXIS=MIN:MAX",
            help="An input's dimension that may change from run to run. Repeatable.",
        ),
    ] = None,
    shapes: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=SHAPE,SHAPE…",
            help="One signature for each shape, weights stored once: x=1x3x224x224,8x3x224x224. "
            "Repeatable for other inputs: the k-th shapes belong together.",
        ),
    ] = None,
    channels_last: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="An input that the file takes with channels last (NHWC); --inputs, --shapes and "
            "--dynamic are then in that layout. Repeatable.",
        ),
    ] = None,
    channels_last_output: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="An output that the file gives with channels last. Repeatable."
        ),
    ] = None,
    signature_name: Annotated[
        str, typer.Option(metavar="NAME", help="Name of the entry in the file.")
    ] = "serving_default",
    recipe: Recipes = None,
    recipe_file: RecipeFiles = None,
    budget: Budgets = None,
    metric: Metric = None,
    keep_float: KeepFloat = None,
    calibration_data: CalibrationData = None,
    calibration_method: CalibrationMethod = "minmax",
    optimize: Optimize = "size",
    levels: Levels = None,
    max_size: MaxSize = None,
    max_latency: MaxLatency = None,
    time_limit: TimeLimit = None,
    device: Devices = None,
    device_file: DeviceFiles = None,
    threads: Threads = None,
    seed: Seed = 0,
    force: BundleForce = False,
    json: AsJson = False,
    quiet: Quiet = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show what torch and the converter write.")
    ] = False,
) -> int:
    """Take a PyTorch model to a .tflite file that was run and compared.

    The bundle folder holds the files, the reference, the parity report and a log.

    \b
    Examples:
      tpu2edge export model.py -o out
      tpu2edge export model.py:build --checkpoint weights.safetensors --inputs samples.npz -o out
      tpu2edge export model.py --recipe float32 --recipe int8 -o out
      tpu2edge export model.py --recipe int8-static --calibration-data samples/ -o out
      tpu2edge export model.py --inputs x.npz --recipe auto --budget 'sqnr>=35dB' -o out
      tpu2edge export model.py --shapes x=1x3x224x224,8x3x224x224 -o out
      tpu2edge export model.py --channels-last x -o out
      tpu2edge export model.py --dynamic tokens.1=8:128 --budget 'sqnr>=60dB' -o out
    """
    from tpu2edge.cli import printing
    from tpu2edge.cli.display import Display
    from tpu2edge.cli.supervise import run_job
    from tpu2edge.requests import ExportRequest

    request = ExportRequest(
        source=model,
        output=output,
        checkpoint=checkpoint,
        inputs=tuple(inputs or ()),
        num_samples=num_samples,
        dynamic=tuple(dynamic or ()),
        shapes=tuple(shapes or ()),
        channels_last=tuple(channels_last or ()),
        channels_last_output=tuple(channels_last_output or ()),
        signature_name=signature_name,
        recipes=tuple(recipe or (() if recipe_file else ("float32",))),
        recipe_files=tuple(recipe_file or ()),
        keep_float=tuple(keep_float or ()),
        calibration=tuple(calibration_data or ()),
        estimator=calibration_method,
        metric=metric,
        optimize=optimize,
        levels=tuple(levels or ()),
        max_size=max_size,
        max_latency=max_latency,
        time_limit_s=time_limit,
        budgets=tuple(budget or ()),
        devices=tuple(device or ()),
        device_files=tuple(device_file or ()),
        threads=threads,
        seed=seed,
        force=force,
        reference=reference,
    )
    outcome = run_job(
        "export",
        request.to_json(),
        display=Display(quiet=quiet, verbose=verbose),
        output=output,
    )
    printing.print_export(outcome, output, as_json=json, quiet=quiet)
    return outcome.exit_code
