"""What is installed here, what of it was tested together, and what other devices would need.

Versions come from the packages' metadata: nothing heavy is imported. LiteRT alone is tried for
real, in a child process of its own, since a wheel that does not fit the machine ends it by a
signal.
"""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tpu2edge
from tpu2edge.children import signal_name

__all__ = [
    "BASE",
    "TESTED",
    "Diagnosis",
    "Facility",
    "Package",
    "Smoke",
    "diagnose",
]

#: The versions that were tested together; equal to constraints.txt (a test holds this).
TESTED = {
    "torch": "2.13.0",
    "litert-torch": "0.10.0",
    "litert-converter": "0.5.0",
    "ai-edge-litert": "2.3.0",
    "ai-edge-quantizer": "0.10.0",
    "jax": "0.10.2",
    "jaxlib": "0.10.2",
    "numpy": "2.4.6",
    "safetensors": "0.8.0",
    "flatbuffers": "25.12.19",
}

#: What checking and running files needs of these; the others come with the extra "export".
BASE = ("ai-edge-litert", "flatbuffers", "numpy", "safetensors")

# On the training host only; none is needed to export.
_TPU_PACKAGES = ("torch_tpu", "torch_xla", "torchax", "libtpu")

_SMOKE_TIMEOUT_S = 60.0  # a cold import on a busy machine takes some seconds
_TOOL_TIMEOUT_S = 15.0  # `adb devices` starts its server first


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """One package: the version here, the tested one, and whether the main job needs it."""

    name: str
    installed: str | None
    tested: str | None
    needed: bool

    @property
    def state(self) -> str:
        """One of "ok", "missing" (and needed), "absent" (and not needed) or "untested"."""
        if self.installed is None:
            return "missing" if self.needed else "absent"
        # A local label ("2.13.0+cpu") is another build of the same version.
        if self.tested is not None and self.installed.split("+")[0] != self.tested:
            return "untested"
        return "ok"


@dataclass(frozen=True, kw_only=True, slots=True)
class Smoke:
    """Whether LiteRT ran a model of one addition in a child process, and what it said if not."""

    ok: bool
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Facility:
    """Something outside of Python packages: a TPU, adb, an emulator."""

    name: str
    state: str  # "ready", "partly", "absent"
    text: str
    how: str  # one line on how to get it; empty when ready


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """All that ``tpu2edge doctor`` found."""

    version: str
    python: str
    platform: str
    packages: tuple[Package, ...]
    litert: Smoke
    facilities: tuple[Facility, ...]

    @property
    def can_export(self) -> bool:
        """Whether the main job can run: all it needs is installed, and LiteRT runs."""
        return self.litert.ok and not any(p.state == "missing" for p in self.packages)

    @property
    def can_check(self) -> bool:
        """Whether files can be run and checked: torch and the converter are not needed for it."""
        return self.litert.ok and not any(
            p.state == "missing" and p.name in BASE for p in self.packages
        )

    @property
    def exit_code(self) -> int:
        """0 when the main job can run, 4 when not."""
        return 0 if self.can_export else 4

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "version": self.version,
            "python": self.python,
            "platform": self.platform,
            "can_export": self.can_export,
            "can_check": self.can_check,
            "packages": [
                {
                    "name": p.name,
                    "installed": p.installed,
                    "tested": p.tested,
                    "needed": p.needed,
                    "state": p.state,
                }
                for p in self.packages
            ],
            "litert": {"ok": self.litert.ok, "text": self.litert.text},
            "facilities": [
                {"name": f.name, "state": f.state, "text": f.text, "how": f.how}
                for f in self.facilities
            ],
        }


def diagnose() -> Diagnosis:
    """The state of this machine; takes about a second, for the trial of LiteRT."""
    return Diagnosis(
        version=tpu2edge.__version__,
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        packages=(
            *(
                Package(name=name, installed=_version(name), tested=tested, needed=True)
                for name, tested in TESTED.items()
            ),
            *(
                Package(name=name, installed=_version(name), tested=None, needed=False)
                for name in _TPU_PACKAGES
            ),
        ),
        litert=_try_litert(),
        facilities=(_tpu(), _adb(), _qemu("aarch64"), _qemu("x86_64")),
    )


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _try_litert(command: tuple[str, ...] = ("-P", "-m", "tpu2edge._smoke")) -> Smoke:
    try:
        done = subprocess.run(
            [sys.executable, *command],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SMOKE_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Smoke(ok=False, text=f"gave no answer within {_SMOKE_TIMEOUT_S:.0f} s")
    if done.returncode == 0:
        return Smoke(ok=True, text=done.stdout.strip())
    last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "")
    if done.returncode < 0:
        return Smoke(ok=False, text=f"killed by {signal_name(-done.returncode)}: {last}")
    return Smoke(ok=False, text=last.strip() or f"ended with exit status {done.returncode}")


def _tpu(dev: Path = Path("/dev")) -> Facility:
    devices = sorted(str(p) for p in (*dev.glob("accel*"), *dev.glob("vfio/*")) if p.name != "vfio")
    libtpu = _version("libtpu")
    routes = [n for n in ("torch_tpu", "torch_xla", "torchax") if _version(n) is not None]
    text = "; ".join(
        (
            f"devices {', '.join(devices)}" if devices else "no device /dev/accel* or /dev/vfio/*",
            f"libtpu {libtpu}" if libtpu else "no libtpu",
            " and ".join(f"{n} {_version(n)}" for n in routes)
            or "no torch_tpu, torch_xla, torchax",
        )
    )
    if devices and libtpu and routes:
        return Facility(name="tpu", state="ready", text=text, how="")
    how = (
        "pip install torch_tpu (it brings libtpu)"
        if devices
        else "capture the reference on a TPU VM; exporting and checking need no TPU"
    )
    return Facility(
        name="tpu", state="partly" if devices or libtpu or routes else "absent", text=text, how=how
    )


def _adb() -> Facility:
    path = shutil.which("adb")
    if path is None:
        return Facility(
            name="adb",
            state="absent",
            text="no adb on PATH",
            how="install Android's platform tools (Debian: apt install adb)",
        )
    said, problem = _run(path, "devices")
    if problem:
        return Facility(
            name="adb", state="partly", text=f"{path}: {problem}", how="try: adb kill-server"
        )
    rows = [line.split() for line in said.splitlines()[1:] if line.strip()]
    rows = [row for row in rows if len(row) >= 2 and not row[0].startswith("*")]
    ready = [row[0] for row in rows if row[1] == "device"]
    listed = ", ".join(f"{row[0]} ({row[1]})" for row in rows) or "no phone or emulator attached"
    how = (
        "allow USB debugging on the phone, and confirm this computer's key there"
        if rows
        else "attach a phone with USB debugging switched on, or start an Android emulator"
    )
    return Facility(
        name="adb",
        state="ready" if ready else "partly",
        text=f"{path}: {listed}",
        how="" if ready else how,
    )


def _qemu(machine: str, which: Callable[[str], str | None] = shutil.which) -> Facility:
    name = f"qemu-{machine}"
    path = which(name) or which(f"{name}-static")
    if path is None:
        return Facility(
            name=name,
            state="absent",
            text=f"no {name} on PATH",
            how="install QEMU's user mode (Debian: apt install qemu-user)",
        )
    said, problem = _run(path, "--version")
    if problem:
        return Facility(
            name=name,
            state="partly",
            text=f"{path}: {problem}",
            how="install QEMU's user mode again (Debian: apt install --reinstall qemu-user)",
        )
    return Facility(
        name=name, state="ready", text=f"{path}: {said.splitlines()[0] if said else '?'}", how=""
    )


def _run(*command: str) -> tuple[str, str]:
    """What the tool printed, and what went wrong (one of them empty)."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TOOL_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "", f"no answer within {_TOOL_TIMEOUT_S:.0f} s"
    except OSError as err:
        return "", err.strerror or str(err)
    if done.returncode < 0:
        return "", f"killed by {signal_name(-done.returncode)}"
    if done.returncode:
        words = (done.stderr or done.stdout).strip().splitlines()
        return "", words[-1] if words else f"exit status {done.returncode}"
    return done.stdout.strip(), ""
