"""``tpu2edge doctor``."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["doctor"]


def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> int:
    """Say what is installed here, and what is missing.

    Versions, whether LiteRT runs, and what a TPU, adb or QEMU would need.

    Ends with 0 when `tpu2edge export` can run on this machine, with 4 when not.
    """
    from tpu2edge.cli import printing
    from tpu2edge.doctor import diagnose

    found = diagnose()
    if json:
        printing.print_json(found.to_json())
    else:
        printing.print_diagnosis(found)
    return found.exit_code
