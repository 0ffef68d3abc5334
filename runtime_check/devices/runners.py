"""What starts a worker for a profile, whether it can be started here, and what would make it so.

A runner is a module with three functions: ``state(profile)``, ``launch(profile)`` and
``install(profile, progress)``. It is imported when a profile asks for it. All workers speak the
protocol of docs/architecture.md, so that `Session` needs to know a command and no more.
"""

from __future__ import annotations

import enum
import importlib
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

from tpu2edge.errors import DeviceError
from tpu2edge.runtime_check.devices.profiles import Profile, is_found_by_name
from tpu2edge.types import Progress, no_progress

__all__ = [
    "Launch",
    "Runner",
    "State",
    "StateKind",
    "install_command",
    "install_device",
    "install_devices",
    "launch_of",
    "missing",
    "runner_of",
    "state_of",
]

_MODULES = {
    "host": "tpu2edge.runtime_check.devices.host",
    "qemu": "tpu2edge.runtime_check.devices.qemu",
    "isa": "tpu2edge.runtime_check.devices.isa",
    "gpu": "tpu2edge.runtime_check.devices.gpu",
    "wasm": "tpu2edge.runtime_check.devices.wasm",
    "adb": "tpu2edge.runtime_check.devices.adb",
}


class StateKind(enum.StrEnum):
    """Whether a device can be used now."""

    READY = "ready"
    MISSING = "missing"  # `tpu2edge devices install` fetches what it needs
    IMPOSSIBLE = "impossible"  # not on this machine, whatever is installed


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """Whether a device can be used now, and in words what it is, how to get it, or why not."""

    kind: StateKind
    text: str
    how: str = ""  # the command that makes it ready
    slow: str = ""  # a word on it when it runs, but by a slower way than it could

    @property
    def ready(self) -> bool:
        """Whether it can be started now."""
        return self.kind is StateKind.READY


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """How a worker process is started for one device, and what it is told to load.

    ``prepare`` is called before the process is started, ``cleanup`` after it has ended: by them a
    worker is carried to a phone and removed from it. ``path_on_device`` gives the path under which
    the worker finds a file of this machine, and may carry it there, too.
    """

    device: str
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    load: Mapping[str, Any] = field(default_factory=dict)  # goes into the load request
    limit_bytes: int | None = None  # the worker limits its own data (RLIMIT_DATA) to this
    memory_mb: int | None = None  # the limit in words, whoever enforces it
    emulated: bool = False  # its times are no device's times
    versions: Mapping[str, str] = field(default_factory=dict)  # what the outputs depend on
    path_on_device: Callable[[Path], str] = str
    shell_status: bool = False  # a status above 128 stands for a signal, as shells tell one
    prepare: Callable[[], None] | None = None
    cleanup: Callable[[], None] | None = None


def missing(profile: Profile, text: str, *, slow: str = "") -> State:
    """The state of a device that `tpu2edge devices install` makes ready."""
    how = install_command(profile)
    return State(kind=StateKind.MISSING, text=text, how=how, slow=slow)


def install_command(*wanted: Profile) -> str:
    """What to type to have devices installed; a profile's own file belongs to it."""
    files = dict.fromkeys(one.file for one in wanted if one.file and not is_found_by_name(one))
    words = [*(one.name for one in wanted), *(w for f in files for w in ("--device-file", str(f)))]
    return f"tpu2edge devices install {shlex.join(words)}"


class Runner(Protocol):
    """What a runner's module offers."""

    def state(self, profile: Profile) -> State:
        """Whether ``profile`` can be started now."""
        ...

    def launch(self, profile: Profile) -> Launch:
        """How it is started; called when it is ready."""
        ...

    def install(self, profile: Profile, progress: Progress) -> None:
        """Fetch and check what is missing; nothing when it is ready."""
        ...


def runner_of(profile: Profile) -> Runner:
    """The module that runs ``profile``."""
    return cast(Runner, importlib.import_module(_MODULES[profile.runner]))


def state_of(profile: Profile) -> State:
    """Ready, how to install it, or why not here."""
    try:
        runner = runner_of(profile)
    except ModuleNotFoundError as err:
        if err.name != _MODULES[profile.runner]:
            raise
        text = f"this version of tpu2edge has no runner '{profile.runner}'"
        return State(kind=StateKind.IMPOSSIBLE, text=text)
    return runner.state(profile)


def launch_of(profile: Profile) -> Launch:
    """How the worker of ``profile`` is started.

    Raises:
        DeviceError: it is not ready; the message says what to do.
    """
    state = state_of(profile)
    if not state.ready:
        raise DeviceError(
            f"device '{profile.name}' is not ready: {state.text}",
            do=f"run `{state.how}`" if state.how else "",
            step="start",
        )
    return runner_of(profile).launch(profile)


def install_device(profile: Profile, progress: Progress = no_progress) -> State:
    """Fetch what ``profile`` needs and does not have yet, and say how it stands then.

    Raises:
        DeviceError: it cannot be had here, or fetching it failed.
    """
    state = state_of(profile)
    if state.kind is StateKind.IMPOSSIBLE:
        raise DeviceError(f"device '{profile.name}' is not for here: {state.text}", step="install")
    if state.ready:
        return state
    runner_of(profile).install(profile, progress)
    return state_of(profile)


def install_devices(
    wanted: Sequence[Profile], progress: Progress = no_progress
) -> dict[str, State]:
    """The same for several; one that fails does not keep the others from it.

    A device that failed has its reason as an "impossible" state.
    """
    found: dict[str, State] = {}
    for profile in wanted:
        try:
            found[profile.name] = install_device(profile, progress)
        except DeviceError as err:
            found[profile.name] = State(kind=StateKind.IMPOSSIBLE, text=str(err))
    return found
