"""``tpu2edge devices`` and ``tpu2edge devices install``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tpu2edge.cli.options import AsJson, Quiet

__all__ = ["app"]

app = typer.Typer(
    invoke_without_command=True,
    rich_markup_mode=None,
    help="List the devices that files can be run on, or install what one needs.",
)

_Files = Annotated[
    list[Path] | None,
    typer.Option("--device-file", metavar="TOML", help="A profile of your own. Repeatable."),
]


@app.callback()
def list_(
    context: typer.Context,
    device_file: _Files = None,
    json: AsJson = False,
) -> int | None:
    """List the devices that files can be run on, or install what one needs.

    A device is a kernel class: what LiteRT computes depends on the instructions that a core has, not on
    the name of the phone. Profiles of your own are TOML files in the configuration folder of tpu2edge
    (docs/devices.md), or given by --device-file.

    \b
    Examples:
      tpu2edge devices
      tpu2edge devices install arm-v8.0 arm-v8.2-dotprod arm-v9-i8mm
      tpu2edge check out --device host,arm-v8.0,arm-v8.2-dotprod
    """
    if context.invoked_subcommand is not None:
        return None
    from tpu2edge.cli import printing
    from tpu2edge.devices import list_devices

    printing.print_devices(list_devices(tuple(device_file or ())), as_json=json)
    return 0


@app.command("install")
def install(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME…", help="Devices; without one: all that can be installed here."
        ),
    ] = None,
    device_file: _Files = None,
    json: AsJson = False,
    quiet: Quiet = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show what pip, apt and npm write.")
    ] = False,
) -> int:
    """Fetch what devices need into tpu2edge's cache: an emulator, libraries, LiteRT for its machine.

    Nothing is installed into the system, and no root is needed: packages come through your own pip, apt
    and npm, and are unpacked below $XDG_CACHE_HOME/tpu2edge.

    \b
    Examples:
      tpu2edge devices install
      tpu2edge devices install arm-v8.0 web-wasm
    """
    from tpu2edge.cli import printing
    from tpu2edge.cli.display import Display
    from tpu2edge.cli.supervise import run_job
    from tpu2edge.requests import InstallRequest

    request = InstallRequest(names=tuple(names or ()), device_files=tuple(device_file or ()))
    outcome = run_job("install", request.to_json(), display=Display(quiet=quiet, verbose=verbose))
    printing.print_installed(outcome, as_json=json)
    return outcome.exit_code
