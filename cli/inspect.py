"""``tpu2edge inspect``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tpu2edge.cli.options import AsJson

__all__ = ["inspect"]


def inspect(
    path: Annotated[
        Path, typer.Argument(metavar="FILE", help="A .tflite file, or a bundle folder: all in it.")
    ],
    tensors: Annotated[
        bool, typer.Option("--tensors", help="List every tensor, not only the largest weights.")
    ] = False,
    json: AsJson = False,
) -> int:
    """Show what is in a .tflite file without running it.

    Signatures, operators and which of them XNNPACK leaves to slower kernels, how each weight is
    quantized, and how many bytes stayed float.

    \b
    Examples:
      tpu2edge inspect out/model.float32.tflite
      tpu2edge inspect out --tensors
      tpu2edge inspect out --json | jq '.models[0].weights.float_bytes'
    """
    from tpu2edge.cli import printing
    from tpu2edge.flatbuffer import read_models

    files = read_models(path)
    if json:
        printing.print_json({"models": [printing.model_json(f, tensors=tensors) for f in files]})
    else:
        for file in files:
            printing.print_model(file, tensors=tensors)
    return 0
