"""Options that mean the same in several commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "AsJson",
    "Budgets",
    "BundleForce",
    "CalibrationData",
    "CalibrationMethod",
    "Checkpoint",
    "DeviceFiles",
    "Devices",
    "KeepFloat",
    "Levels",
    "MaxLatency",
    "MaxSize",
    "Metric",
    "Optimize",
    "Quiet",
    "RecipeFiles",
    "Recipes",
    "ReferenceForce",
    "ReferenceOutput",
    "ReferenceSignatureName",
    "Seed",
    "Threads",
    "TimeLimit",
]

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print the last line only, and what is wrong.")
]
Checkpoint = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        help="Weights: .safetensors, .pt/.pth, or a PyTorch Distributed Checkpoint folder.",
    ),
]
Recipes = Annotated[
    list[str] | None,
    typer.Option(
        "--recipe",
        metavar="NAME",
        help="How the file is quantized: float32, float16, int8, int8-static, int4, int8-oscar, int4-gptq … "
        "(a name that does not exist lists all), or auto: the smallest mix within the budget. "
        "Repeatable: one file each.",
    ),
]
RecipeFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--recipe-file",
        metavar="JSON",
        help="A recipe of your own, in ai-edge-quantizer's format. Repeatable.",
    ),
]
KeepFloat = Annotated[
    list[str] | None,
    typer.Option(
        metavar="MODULE",
        help="A torch module that no recipe quantizes, as 'encoder.layers.0.*'. Repeatable.",
    ),
]
CalibrationData = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATH_OR_FUNCTION",
        help="Samples that activations are measured on, for static recipes, -gptq and -oscar: files "
        "as for --inputs, or file.py:function, which gives samples by input name. Repeatable. Without it: "
        "half of the samples that are checked.",
    ),
]
CalibrationMethod = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="How a range is made of them: minmax, moving-average, percentile or mse.",
    ),
]
Metric = Annotated[
    str | None,
    typer.Option(
        metavar="FILE.PY:FUNCTION",
        help="A metric of your own, from all outputs; bounded by --budget 'metric_drop<=1%' and the like.",
    ),
]
Optimize = Annotated[
    str, typer.Option(metavar="WHAT", help="What --recipe auto makes small: size or latency.")
]
Levels = Annotated[
    list[str] | None,
    typer.Option(
        "--level",
        metavar="NAME",
        help="A level that --recipe auto may give a layer, as int8-static; float32 only if named "
        "too. Repeatable. [all]",
    ),
]
MaxSize = Annotated[
    str | None,
    typer.Option(
        metavar="SHARE", help="Largest file that --recipe auto may choose: 40% of the float32 file."
    ),
]
MaxLatency = Annotated[
    str | None,
    typer.Option(
        metavar="SHARE",
        help="Longest run that --recipe auto may choose: 100% of the float32 file's.",
    ),
]
TimeLimit = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS", help="When --recipe auto ends with the best it has. [until it is done]"
    ),
]
Budgets = Annotated[
    list[str] | None,
    typer.Option(
        "--budget",
        metavar="TEXT",
        help="Bounds that the numbers must keep, as 'sqnr>=30dB' or 'logits:top1>=0.99'. "
        "Repeatable. Without it: the recipe's own.",
    ),
]
BundleForce = Annotated[
    bool, typer.Option("--force", help="Replace a bundle that is there already.")
]
Devices = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="Where to run the files: host, arm-v8.2-dotprod … (`tpu2edge devices` lists them), or all "
        "that are ready. Repeatable, or joined by commas. [host]",
    ),
]
DeviceFiles = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="TOML", help="A device profile of your own, to run the files on too. Repeatable."
    ),
]
Threads = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Threads for running the files.")
]
Seed = Annotated[int, typer.Option(metavar="N", help="Of the made-up samples.")]

ReferenceOutput = Annotated[
    Path, typer.Option("--output", "-o", metavar="DIR", help="The reference folder to make.")
]
ReferenceSignatureName = Annotated[
    str, typer.Option(metavar="NAME", help="Name of the entry, as for export.")
]
ReferenceForce = Annotated[
    bool, typer.Option("--force", help="Replace a reference that is there already.")
]
