"""x86 laptops on this x86 machine: the Python worker, shown fewer CPU features than there are.

A preloaded library (native/cpuid_level.c, its binary beside it) answers CPUID, so that LiteRT picks
the kernels of an older CPU and they run at native speed. Where the CPU or the system cannot fault on
CPUID, QEMU's user mode stands in, which is slow: thousands of times for float with FMA.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path

from tpu2edge.errors import DeviceError
from tpu2edge.files import sha256_of
from tpu2edge.runtime_check.devices import qemu
from tpu2edge.runtime_check.devices.host import host_command, litert_version, load_options
from tpu2edge.runtime_check.devices.install import needs_linux_x86, part_named
from tpu2edge.runtime_check.devices.profiles import Profile
from tpu2edge.runtime_check.devices.runners import Launch, State, StateKind, missing
from tpu2edge.types import Progress

__all__ = ["can_fault_on_cpuid", "install", "launch", "state"]

_SHIM = Path(__file__).with_name("native") / "cpuid_level.x86_64.so"
_EMULATOR = "qemu-x86_64"

# level -> flags of /proc/cpuinfo that the CPU itself needs, QEMU's name for such a CPU.
_LEVELS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "sse41": (("sse4_1", "sse4_2"), "Nehalem"),
    "avx": (("avx",), "SandyBridge"),
    "avx2": (("avx2", "fma", "f16c"), "Haswell"),
    "avx512": (("avx512f", "avx512bw", "avx512dq", "avx512vl"), ""),
}

_SYS_ARCH_PRCTL, _ARCH_SET_CPUID = 158, 0x1012  # asm/unistd_64.h, asm/prctl.h


def can_fault_on_cpuid() -> bool:
    """Whether this machine lets a process answer CPUID itself (setting what is set changes nothing)."""
    try:
        libc = ctypes.CDLL(None)
        return bool(libc.syscall(_SYS_ARCH_PRCTL, _ARCH_SET_CPUID, 1) == 0)
    except (OSError, AttributeError):
        return False


def state(profile: Profile) -> State:
    """Ready where the CPU has the level and can fault on CPUID, or QEMU is there."""
    if why := needs_linux_x86():
        return State(kind=StateKind.IMPOSSIBLE, text=why)
    if can_fault_on_cpuid():
        lacks = sorted(set(_LEVELS[profile.core][0]) - _cpu_flags())
        if lacks:
            return State(
                kind=StateKind.IMPOSSIBLE, text=f"this CPU itself has no {', '.join(lacks)}"
            )
        if any(sign in str(_SHIM) for sign in " :"):
            return State(
                kind=StateKind.IMPOSSIBLE,
                text=f"'{_SHIM.parent}' has a space or colon in it, which LD_PRELOAD cannot take",
            )
        return State(
            kind=StateKind.READY, text=f"this CPU as {profile.core}, LiteRT {litert_version()}"
        )
    if not _LEVELS[profile.core][1]:
        return State(
            kind=StateKind.IMPOSSIBLE,
            text=f"this machine cannot fault on CPUID, and QEMU has no {profile.core}",
        )
    if profile.memory_mb:
        # Measured with QEMU 7.2: RLIMIT_DATA of the process is not held, with -R none starts.
        return State(
            kind=StateKind.IMPOSSIBLE,
            text="this machine cannot fault on CPUID, and QEMU cannot hold an x86-64 process to "
            "memory_mb: leave it out, or take a machine that can",
        )
    slow = "this machine cannot fault on CPUID: QEMU stands in, up to 3,000 times slower"
    if part_named(_EMULATOR) is None:
        return missing(profile, "QEMU to fetch", slow=slow)
    version = qemu.emulator(_EMULATOR)["version"]
    return State(
        kind=StateKind.READY,
        text=f"{_LEVELS[profile.core][1]} by QEMU {version}, LiteRT {litert_version()}",
        slow=slow,
    )


def launch(profile: Profile) -> Launch:
    """The Python worker under the preloaded library, or under QEMU."""
    versions = {"litert": litert_version(), "level": profile.core}
    if can_fault_on_cpuid():
        return Launch(
            device=profile.name,
            command=tuple(host_command()),
            env={**profile.env, "LD_PRELOAD": str(_SHIM), "TPU2EDGE_ISA": profile.core},
            load=load_options(profile),
            limit_bytes=profile.memory_mb << 20 if profile.memory_mb else None,
            memory_mb=profile.memory_mb,
            versions={**versions, "shim": sha256_of(_SHIM)},
        )
    emulator = qemu.emulator(_EMULATOR)
    libraries = emulator["libraries"]
    command = (emulator["path"], "-cpu", _LEVELS[profile.core][1], "-U", "LD_LIBRARY_PATH")
    return Launch(
        device=profile.name,
        command=(*command, *host_command()),
        env={**profile.env, **({"LD_LIBRARY_PATH": libraries} if libraries else {})},
        load=load_options(profile),
        emulated=True,
        versions={**versions, "qemu": emulator["version"]},
    )


def install(profile: Profile, progress: Progress) -> None:
    """Fetch QEMU, where it has to stand in, and try the level."""
    import numpy as np

    from tpu2edge.runtime_check.devices.client import Session

    if not can_fault_on_cpuid() and part_named(_EMULATOR) is None:
        progress("fetch QEMU", 0, 2)
        qemu.install_emulator(_EMULATOR)
    progress(f"try {profile.core}", 1, 2)
    x = np.array([1.5, -2.0, 0.25, 3.0], np.float32)
    with Session(qemu.PROBE, launch=launch(profile), timeout_s=300) as session:
        (outputs,) = session.run("serving_default", [{"x": x}])
    if not np.array_equal(outputs["y"], 2 * x):
        raise DeviceError(f"{profile.core} computes {outputs['y']} for {2 * x}", step="install")
    progress(f"{profile.core} is ready", 2, 2)


def _cpu_flags() -> set[str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((set(line.split()[2:]) for line in lines if line.startswith("flags")), set())
