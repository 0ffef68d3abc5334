"""Options that mean the same in several commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "AsJson",
    "Checkpoint",
    "Devices",
    "Quiet",
    "ReferenceForce",
    "ReferenceOutput",
    "ReferenceSignatureName",
    "Seed",
    "Threads",
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
Devices = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="Where to run the files. Repeatable. [host]"),
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
