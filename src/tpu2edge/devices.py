"""Which devices files can be run on here, and getting what is missing for one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tpu2edge.errors import DeviceError
from tpu2edge.types import Progress, no_progress

__all__ = ["install_devices", "list_devices"]


def list_devices(files: Sequence[Path] = ()) -> list[dict[str, Any]]:
    """All profiles with their state, as plain data: name, description, runner, state, text.

    ``state`` is "ready", "missing" (it can be installed) or "impossible" (not on this machine).

    Raises:
        OptionError: a profile of the user's cannot be read.
    """
    from tpu2edge.runtime_check.devices.profiles import profiles
    from tpu2edge.runtime_check.devices.runners import state_of

    found: list[dict[str, Any]] = []
    for profile in profiles(files).values():
        state = state_of(profile)
        found.append(
            {
                **profile.to_json(),
                "state": str(state.kind),
                "text": state.text,
                "how": state.how,
                "slow": state.slow,
                "file": None if profile.file is None else profile.file.name,
            }
        )
    return found


def install_devices(
    names: Sequence[str] = (),
    *,
    files: Sequence[Path] = (),
    progress: Progress = no_progress,
) -> list[dict[str, Any]]:
    """Fetch what devices need; all that can be installed here without names. Gives their states.

    Raises:
        OptionError: an unknown name.
        DeviceError: one that was named cannot be had here, or fetching it failed.
    """
    from tpu2edge.runtime_check.devices.profiles import profile_named, profiles
    from tpu2edge.runtime_check.devices.runners import StateKind, state_of
    from tpu2edge.runtime_check.devices.runners import install_devices as fetch

    if names:
        wanted = [profile_named(name, files) for name in dict.fromkeys(names)]
    else:
        wanted = [p for p in profiles(files).values() if state_of(p).kind is StateKind.MISSING]
    states = fetch(wanted, progress)
    told = [
        {
            "name": name,
            "state": str(state.kind),
            "text": state.text,
            "how": state.how,
            "slow": state.slow,
        }
        for name, state in states.items()
    ]
    failed = [one for one in told if one["state"] != StateKind.READY]
    if names and failed:
        raise DeviceError(
            "; ".join(f"device '{one['name']}' is not ready: {one['text']}" for one in failed),
            do="; ".join(dict.fromkeys(one["how"] for one in failed if one["how"])),
            step="install",
        )
    return told
