"""LiteRT's WebGPU accelerator on a GPU in software: Mesa's lavapipe, a Vulkan driver for the CPU.

The profile's ``[options]``: ``enforce_f32 = true`` computes in float32; without it the accelerator
computes in float16, as apps do that do not ask for more. Operators that the GPU cannot take run on
the CPU, as in an app; `Session.coverage` tells which. Int8 weights are computed with in float: on a
GPU a dynamic int8 file gives the outputs of a weight-only one (measured, 1e-7).

Mesa 25 or newer is needed (22.3 is refused by the accelerator): this machine's own where it is new
enough, else the driver and what it needs from the user's apt sources, unpacked into the cache.
"""

from __future__ import annotations

import ctypes.util
import json
import os
import platform
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from tpu2edge.errors import DeviceError, OptionError
from tpu2edge.files import canonical_json
from tpu2edge.runtime_check.devices import host
from tpu2edge.runtime_check.devices.host import litert_version, load_options
from tpu2edge.runtime_check.devices.install import (
    Part,
    apt_closure,
    apt_newer,
    apt_offers,
    apt_packages,
    backports_suite,
    cache_folder,
    forget_part,
    new_part,
    part_named,
)
from tpu2edge.runtime_check.devices.profiles import Profile
from tpu2edge.runtime_check.devices.runners import Launch, State, StateKind, missing
from tpu2edge.types import Progress

__all__ = ["OLDEST_MESA", "install", "launch", "state"]

OLDEST_MESA = 25

_PART = "mesa"
_PACKAGE = "mesa-vulkan-drivers"
# libdrm comes from the same suite as the driver; the loader finds the driver.
_PACKAGES = (_PACKAGE, "libvulkan1", "libdrm2")
_DRIVER = "libvulkan_lvp.so"
_ACCELERATOR = "libLiteRtWebGpuAccelerator.so"
_SYSTEM_FOLDERS = ("/etc/vulkan/icd.d", "/usr/local/share/vulkan/icd.d", "/usr/share/vulkan/icd.d")
_PROBE = Path(__file__).with_name("native") / "probe.tflite"  # y = x + x on four floats
_TRIAL_S = 180.0


def state(profile: Profile) -> State:
    """Ready when a new enough lavapipe is there and has run a file once."""
    if why := _cannot(profile):
        return State(kind=StateKind.IMPOSSIBLE, text=why)
    part = part_named(_PART)
    if part is None:
        return _without_part(profile)
    if why := part.damaged():
        return missing(profile, why)
    if gone := _gone(part):
        return missing(profile, f"{gone} is gone, which Mesa's driver needs")
    return State(
        kind=StateKind.READY,
        text=f"Mesa {part.facts['version']} lavapipe, LiteRT {litert_version()}",
        slow="a GPU in software; a model's shaders are compiled at its first run (seconds to a "
        "minute and a half) and kept",
    )


def launch(profile: Profile) -> Launch:
    """The Python worker, which sees no other Vulkan driver than lavapipe."""
    part = part_named(_PART)
    assert part is not None
    return _launch(profile, part)


def install(profile: Profile, progress: Progress) -> None:
    """This machine's Mesa where it is new enough, else one from the user's apt sources.

    Raises:
        DeviceError: there is none, or it does not run.
    """
    forget_part(_PART)
    progress("look for Mesa's driver", 0, 3)
    with new_part(_PART) as (folder, record), tempfile.TemporaryDirectory() as place:
        own = _own_driver()
        if own is not None:
            icd, version = own
            record["source"] = "on this machine"
            record["facts"] = {"version": version, "icd": str(icd), "needs": [str(icd)]}
        else:
            options = apt_newer(_PACKAGE, OLDEST_MESA)
            progress("fetch Mesa, by apt", 1, 3)
            unpacked = Path(place) / "root"
            packages = [*_PACKAGES, *apt_closure(_PACKAGES, options)]
            versions = apt_packages(sorted(set(packages)), unpacked, options=options)
            needs = _gather(unpacked, folder)
            version = versions[_PACKAGE].split(":")[-1].split("-")[0]
            record["source"] = ", ".join(f"{k} {v}" for k, v in versions.items()) + " by apt"
            record["facts"] = {"version": version, "icd": "lvp_icd.json", "needs": needs}
        progress(f"try Mesa {version}", 2, 3)
        # Before the part is in place: one that does not run is none.
        trial = Part(folder=folder, source="", files={}, facts=record["facts"])
        _try(_launch(profile, trial))
    progress("the GPU is ready", 3, 3)


# ------------------------------------------------------------------------------------ the state


def _cannot(profile: Profile) -> str:
    """Why this profile cannot run here, or nothing."""
    unknown = set(profile.options) - {"enforce_f32"}
    if unknown or not isinstance(profile.options.get("enforce_f32", False), bool):
        raise OptionError(
            f"device '{profile.name}': options.{next(iter(unknown), 'enforce_f32')} is not known",
            do="a GPU has `enforce_f32`, true or false",
        )
    if profile.kernels != "default" or profile.xnnpack:
        return "a GPU has no kernels or XNNPACK flags to choose"
    if profile.runtime == "interpreter":
        return "LiteRT's GPU accelerator is for CompiledModel only"
    if platform.system() != "Linux":
        return f"Mesa's lavapipe is for Linux, this is {platform.system()}"
    litert = host.state(profile)
    if not litert.ready:
        return litert.text
    if not (_litert_folder() / _ACCELERATOR).is_file():
        return f"LiteRT {litert_version()} for {platform.machine()} has no WebGPU accelerator"
    return ""


def _without_part(profile: Profile) -> State:
    need = f"Mesa {OLDEST_MESA} or newer (lavapipe, a Vulkan driver for the CPU)"
    if _own_driver() is not None:
        return missing(profile, f"{need} is on this machine and was not tried yet")
    if shutil.which("apt-get") is None:
        return State(
            kind=StateKind.IMPOSSIBLE,
            text=f"{need} is not on this machine, and there is no apt here to fetch it with: "
            "install it with your package manager",
        )
    offered = apt_offers(_PACKAGE)
    number = offered.split(":")[-1].split(".")[0]
    if not offered or (number.isdigit() and int(number) >= OLDEST_MESA):
        return missing(profile, f"{need} is to be fetched, by apt")
    has = f"{need} is needed, your apt sources have {offered}"
    suite = backports_suite()
    if not suite:
        return State(
            kind=StateKind.IMPOSSIBLE,
            text=f"{has}: add a source that has it, or use a newer system",
        )
    return missing(
        profile,
        f"{has}: it is taken from {suite} on the same mirror, into the cache only (to have it "
        f"yourself, add a source `deb MIRROR {suite} main`)",
    )


def _litert_folder() -> Path:
    import importlib.util

    spec = importlib.util.find_spec("ai_edge_litert")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations)))


def _gone(part: Part) -> str:
    """The first of this machine's own files that the driver needs and that is not there any more."""
    return next((path for path in part.facts["needs"] if not Path(path).exists()), "")


# ----------------------------------------------------------------------------------- the driver


def _own_driver() -> tuple[Path, str] | None:
    """lavapipe's description and version on this machine, when it is new enough to be used."""
    if ctypes.util.find_library("vulkan") is None:
        return None
    for folder in map(Path, _SYSTEM_FOLDERS):
        for icd in sorted(folder.glob("lvp_icd*.json")):
            version = _version_of(icd)
            if version and int(version.split(".")[0]) >= OLDEST_MESA:
                return icd, version
    return None


def _version_of(icd: Path) -> str:
    """The version that the driver of a description has in it; empty when it is not to be had."""
    try:
        name = json.loads(icd.read_text())["ICD"]["library_path"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    path = Path(name) if "/" not in name else icd.parent / name
    if "/" not in name:
        places = [*Path("/usr/lib").glob(f"*/{name}"), *Path("/usr/lib64").glob(name)]
        path = next(iter([*places, *Path("/usr/lib").glob(name)]), path)
    try:
        found = re.search(rb"Mesa (\d+\.\d+\.\d+)", path.read_bytes())
    except OSError:
        return ""
    return found[1].decode() if found else ""


def _gather(unpacked: Path, folder: Path) -> list[str]:
    """Copy the driver, the loader and what they need out of packages; gives this machine's part.

    Packages hold drivers for real GPUs as well, 60 MB that are of no use here.
    """
    libraries = {path.name: path for path in sorted(unpacked.rglob("*.so*"))}
    for name in (_DRIVER, "libvulkan.so.1"):
        if name not in libraries:
            raise DeviceError(f"{_PACKAGE} holds no {name}", step="install")
    search = ":".join(sorted({str(path.parent) for path in libraries.values()}))
    ours, theirs = {_DRIVER, "libvulkan.so.1"}, set[str]()
    for name in tuple(ours):
        done = subprocess.run(
            ["ldd", str(libraries[name])],
            env={"PATH": os.environ.get("PATH", ""), "LD_LIBRARY_PATH": search, "LC_ALL": "C"},
            capture_output=True,
            text=True,
            check=False,
        )
        for line in done.stdout.splitlines():
            library, arrow, path = line.strip().partition(" => ")
            if not arrow:
                continue
            if path == "not found" or "not found" in done.stderr:
                raise DeviceError(
                    f"Mesa's driver does not fit this system: {line.strip()}{done.stderr.strip()}",
                    step="install",
                )
            place = path.split(" (")[0]
            if Path(place).is_relative_to(unpacked):
                ours.add(library)
            else:
                theirs.add(place)
    target = folder / "lib"
    target.mkdir()
    for name in sorted(ours):
        shutil.copy(libraries[name].resolve(), target / name)
    description = {
        "file_format_version": "1.0.0",
        "ICD": {"library_path": f"./lib/{_DRIVER}", "api_version": "1.4.305"},
    }
    (folder / "lvp_icd.json").write_text(canonical_json(description))
    return sorted(theirs)


def _launch(profile: Profile, part: Part) -> Launch:
    icd = str(part.folder / part.facts["icd"])  # this machine's own is absolute and stays
    env = {
        "VK_DRIVER_FILES": icd,
        "VK_ICD_FILENAMES": icd,  # the loader's older name for it
        "VK_LOADER_LAYERS_DISABLE": "~implicit~",
        "MESA_SHADER_CACHE_DIR": str(cache_folder() / "shaders"),
        "MESA_SHADER_CACHE_MAX_SIZE": "2G",
    }
    libraries = part.folder / "lib"
    if libraries.is_dir():
        before = os.environ.get("LD_LIBRARY_PATH")
        env["LD_LIBRARY_PATH"] = f"{libraries}:{before}" if before else str(libraries)
    local = host.launch(profile)
    return Launch(
        device=profile.name,
        command=local.command,
        env={**env, **profile.env},
        load={
            **load_options(profile, "compiled"),
            "accelerators": ["GPU", "CPU"],
            "gpu": {"enforce_f32": bool(profile.options.get("enforce_f32", False))},
        },
        limit_bytes=local.limit_bytes,
        memory_mb=profile.memory_mb,
        emulated=True,
        versions={**local.versions, "mesa": part.facts["version"]},
    )


def _try(launch: Launch) -> None:
    """Run the probe on the GPU; what it gives must be right, and be the GPU's."""
    from tpu2edge.runtime_check.devices.client import Session

    x = np.array([1.5, -2.0, 0.25, 3.0], np.float32)
    try:
        with Session(_PROBE, launch=launch, timeout_s=_TRIAL_S) as session:
            (outputs,) = session.run("serving_default", [{"x": x}])
            left = session.coverage().left_ops
    except DeviceError as err:
        raise DeviceError(
            f"LiteRT's GPU accelerator does not run: {err.what}", step="install"
        ) from err
    if left or not np.array_equal(outputs["y"], 2 * x):
        raise DeviceError(
            f"the GPU computes {outputs['y']} for {2 * x}, {left} operators on the CPU",
            step="install",
        )
