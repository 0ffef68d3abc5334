"""This machine as a device: the Python worker, in a process of its own."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import sys
from pathlib import Path
from typing import Any

from tpu2edge.errors import DeviceError
from tpu2edge.runtime_check.devices.profiles import Profile
from tpu2edge.runtime_check.devices.runners import Launch, State, StateKind
from tpu2edge.types import Progress

__all__ = ["host_command", "install", "launch", "litert_version", "load_options", "state"]

_WORKER = Path(__file__).with_name("worker.py")


def host_command() -> list[str]:
    """The command that starts a worker on this machine."""
    return [sys.executable, "-u", str(_WORKER)]


def litert_version() -> str:
    """The installed version of LiteRT.

    Raises:
        DeviceError: it is not installed.
    """
    try:
        return importlib.metadata.version("ai-edge-litert")
    except importlib.metadata.PackageNotFoundError:
        raise DeviceError(
            "ai-edge-litert is not installed", do="pip install ai-edge-litert", step="start"
        ) from None


def load_options(profile: Profile, runtime: str = "interpreter") -> dict[str, Any]:
    """What the load request says of threads, kernels and flags; ``runtime`` where it leaves it."""
    options: dict[str, Any] = {
        "threads": profile.threads,
        "kernels": profile.kernels,
        "runtime": profile.runtime or ("compiled" if profile.xnnpack else runtime),
    }
    if profile.xnnpack_flags is not None:
        options["xnnpack_flags"] = profile.xnnpack_flags
    return options


def state(profile: Profile) -> State:
    """Ready when LiteRT is installed."""
    if importlib.util.find_spec("ai_edge_litert") is None:
        return State(
            kind=StateKind.IMPOSSIBLE, text="ai-edge-litert is not installed: pip install it"
        )
    return State(kind=StateKind.READY, text=f"LiteRT {litert_version()} on {platform.machine()}")


def launch(profile: Profile) -> Launch:
    """The Python worker in this interpreter."""
    return Launch(
        device=profile.name,
        command=tuple(host_command()),
        env=profile.env,
        load=load_options(profile),
        limit_bytes=profile.memory_mb << 20 if profile.memory_mb else None,
        memory_mb=profile.memory_mb,
        versions={
            "litert": litert_version(),
            "machine": platform.machine(),
            "cpu": _cpu(),
        },
    )


def install(profile: Profile, progress: Progress) -> None:
    """Nothing: it comes with the package's own dependencies."""


def _cpu() -> str:
    """The features that decide which kernels are picked; the model's name where there are none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    found = [line.split(":", 1)[1].strip() for line in lines if line[:5] in ("flags", "Featu")]
    return found[0] if found else platform.processor()
