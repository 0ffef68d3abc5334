"""A phone, or an Android emulator, by adb: the C worker of emulated ARM cores without the emulator.

Each session has a folder of its own under /data/local/tmp, where the shell's user may execute files;
the worker, its C library and LiteRT (25 MB) are carried there, and the folder goes when it ends.
Android has another C library than the one LiteRT's wheel is built for, so that one's program loader
is carried along and starts the worker.

Written from adb's own sources and documents and run against a stand-in for adb only, under QEMU: it
was not run on a phone yet.

The profile's ``[options]``: ``serial`` names the phone where `adb devices` lists several; without it
the environment variable ANDROID_SERIAL does.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import shutil
import subprocess
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tpu2edge.errors import DeviceError, DeviceMemoryError, OptionError
from tpu2edge.files import sha256_of
from tpu2edge.runtime_check.devices.host import litert_version, load_options
from tpu2edge.runtime_check.devices.install import part_named
from tpu2edge.runtime_check.devices.profiles import Profile
from tpu2edge.runtime_check.devices.qemu import LIBRARIES, LITERT, install_pack, pack_paths
from tpu2edge.runtime_check.devices.runners import Launch, State, StateKind, missing
from tpu2edge.types import Progress

__all__ = ["install", "launch", "state"]

_PLACE = "/data/local/tmp"
_LOADER = "ld-linux-aarch64.so.1"
_ABI = "arm64-v8a"
_PROPERTIES = (
    "ro.product.model",
    "ro.build.version.release",
    "ro.product.cpu.abi",
    "ro.build.fingerprint",
)
_NOT_TRIED = "not run on a phone yet, only against a stand-in for adb"

# Room that LiteRT and the file system need beside the files.
_SPARE_BYTES = 16 << 20
_ASK_S = 30.0
_PUSH_S = 900.0

# What `adb devices` says of a phone that cannot be used, and what helps.
_TROUBLES = {
    "unauthorized": 'allow this computer on its screen ("Allow USB debugging?")',
    "offline": "unplug it and plug it in again, or run `adb reconnect`",
    "authorizing": "wait a moment and try again",
    "recovery": "start it normally",
    "sideload": "start it normally",
    "bootloader": "start it normally",
    "no permissions": "the system does not let this user use it: see `adb devices -l`",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Phone:
    """What a phone says of itself."""

    serial: str
    model: str
    android: str
    abi: str
    fingerprint: str  # the build's, by which kernel and features are the same
    free_bytes: int
    features: frozenset[str]


class _Trouble(Exception):
    """There is no phone to use; the text says why and what to do."""


def state(profile: Profile) -> State:
    """Ready when one arm64 phone is there, authorized and with room, and the pack is in the cache."""
    try:
        phone = _phone(profile)
    except _Trouble as trouble:
        return State(kind=StateKind.IMPOSSIBLE, text=f"{trouble} ({_NOT_TRIED})")
    parts = [part_named(name) for name in (LITERT, LIBRARIES)]
    if None in parts:
        return missing(
            profile, f"LiteRT for arm64 and its C library are to be fetched ({_NOT_TRIED})"
        )
    for part in parts:
        if part is not None and (why := part.damaged()):
            return missing(profile, why)
    return State(
        kind=StateKind.READY,
        text=f"{phone.model} ({phone.serial}), Android {phone.android}, "
        f"{phone.free_bytes >> 20} MB free ({_NOT_TRIED})",
    )


def launch(profile: Profile) -> Launch:
    """The C worker on the phone; the session carries it there and removes it.

    Raises:
        DeviceError: the phone is gone.
    """
    try:
        phone = _phone(profile)
    except _Trouble as trouble:
        raise DeviceError(f"device '{profile.name}': {trouble}", step="start") from None
    folder = _Folder(profile.name, phone.serial)
    _, worker, litert = pack_paths()
    # By this shell protocol bytes pass unchanged both ways, and the worker's stderr and status come
    # too. Without "-T" a terminal would change them, without "-e none" a "~." would end the session.
    here = folder.path
    start = (
        f"cd {here} && unset LD_PRELOAD LD_LIBRARY_PATH && exec {here}/{_LOADER} "
        f"--library-path {here} {here}/{worker.name} {here}/{litert.name} {litert_version()}"
    )
    return Launch(
        device=profile.name,
        command=(_adb(), "-s", phone.serial, "shell", "-e", "none", "-T", start),
        env=profile.env,
        load=load_options(profile, "compiled"),
        limit_bytes=profile.memory_mb << 20 if profile.memory_mb else None,
        memory_mb=profile.memory_mb,
        versions={
            "litert": litert_version(),
            "worker": sha256_of(worker),
            "phone": phone.model,
            "build": phone.fingerprint,
        },
        shell_status=True,
        prepare=folder.fill,
        path_on_device=folder.carry,
        cleanup=folder.remove,
    )


def install(profile: Profile, progress: Progress) -> None:
    """Fetch LiteRT for arm64 and the C library; the phone itself is the user's."""
    install_pack(progress)
    progress("the files for the phone are there", 3, 3)


# ------------------------------------------------------------------------------------ the phone


def _adb() -> str:
    adb = shutil.which("adb")
    if adb is None:
        raise _Trouble(
            "adb is not on the PATH: install it (package adb, or Android's platform-tools)"
        )
    return adb


def _ask(serial: str | None, *words: str, timeout_s: float = _ASK_S) -> str:
    """What an adb command prints.

    Raises:
        _Trouble: it fails; adb's own words.
    """
    command = [_adb(), *(["-s", serial] if serial else []), *words]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise _Trouble(f"`adb {words[0]}` gave no answer in {timeout_s:.0f} s") from None
    except OSError as err:
        raise _Trouble(f"adb cannot be run: {err}") from err
    if done.returncode:
        lines = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        raise _Trouble(f"`adb {' '.join(words)[:60]}` failed: {' / '.join(lines[-3:])}")
    return done.stdout


def _serial(profile: Profile) -> str:
    """The one phone that is meant and can be used."""
    unknown = set(profile.options) - {"serial"}
    if unknown or not isinstance(profile.options.get("serial", ""), str):
        raise OptionError(
            f"device '{profile.name}': options.{next(iter(unknown), 'serial')} is not known",
            do='adb has `serial = "..."`, as `adb devices` lists it',
        )
    found: dict[str, str] = {}
    for line in _ask(None, "devices").splitlines()[1:]:
        serial, _, status = line.strip().partition("\t")
        if status:
            found[serial] = status.strip()
    wanted = str(profile.options.get("serial", "")) or os.environ.get("ANDROID_SERIAL", "")
    if not found:
        raise _Trouble(
            "no phone is connected: plug one in with USB debugging on, or start an Android emulator"
        )
    listed = ", ".join(f"{serial} ({status})" for serial, status in found.items())
    if wanted and wanted not in found:
        raise _Trouble(f"the phone '{wanted}' is not connected, but {listed}")
    if not wanted and len(found) > 1:
        raise _Trouble(
            f"{len(found)} phones are connected: {listed}; say which by ANDROID_SERIAL or by "
            "`serial` in the profile's options"
        )
    serial = wanted or next(iter(found))
    status = found[serial]
    if status != "device":
        word = next((word for word in _TROUBLES if status.startswith(word)), "")
        help_text = _TROUBLES.get(word, "see `adb devices -l`")
        raise _Trouble(f"the phone {serial} is '{status}': {help_text}")
    return serial


def _phone(profile: Profile) -> _Phone:
    """The phone, if the pack can run on it.

    Raises:
        _Trouble: there is none, or it cannot.
    """
    serial = _serial(profile)
    asked = [f"getprop {name}" for name in _PROPERTIES]
    lines = _ask(serial, "shell", "; ".join([*asked, f"df -k {_PLACE}"])).splitlines()
    model, android, abi, fingerprint = (line.strip() for line in [*lines, *[""] * 4][:4])
    phone = _Phone(
        serial=serial,
        model=model or "a phone",
        android=android,
        abi=abi,
        fingerprint=fingerprint,
        free_bytes=_free_bytes(serial, lines[4:]),
        features=frozenset(_ask(serial, "features").split()),
    )
    if abi != _ABI:
        raise _Trouble(
            f"{phone.model} ({serial}) has the ABI '{abi}', the worker is for {_ABI}: use a 64-bit "
            "ARM phone, or an emulator image for arm64"
        )
    if "shell_v2" not in phone.features:
        raise _Trouble(
            f"{phone.model} ({serial}) has Android {android}: 7 or newer passes raw bytes through "
            "adb's shell"
        )
    need = _pack_bytes() + _SPARE_BYTES
    if phone.free_bytes < need:
        raise _Trouble(
            f"{phone.model} ({serial}) has {phone.free_bytes >> 20} MB free in {_PLACE}, "
            f"{need >> 20} MB are needed"
        )
    return phone


def _free_bytes(serial: str, table: Sequence[str]) -> int:
    """Toybox's and BusyBox's df have the free kilobytes in the column before the percentage."""
    last = table[-1].split() if table else []
    at = next((place for place, word in enumerate(last) if word.endswith("%")), 0)
    if at < 1 or not last[at - 1].isdigit():
        raise _Trouble(f"`df -k {_PLACE}` on {serial} tells no free space: {' '.join(last)}")
    return int(last[at - 1]) << 10


def _pack_files() -> list[Path]:
    libraries, worker, litert = pack_paths()
    return [worker, litert, *sorted(libraries.iterdir())]


def _pack_bytes() -> int:
    """About 25 MB before the parts are there."""
    if part_named(LITERT) is None or part_named(LIBRARIES) is None:
        return 25 << 20
    return sum(path.stat().st_size for path in _pack_files())


class _Folder:
    """A folder on a phone: filled for a session, removed after it, and filled again for the next."""

    def __init__(self, device: str, serial: str) -> None:
        self.device = device
        self.serial = serial
        self.path = f"{_PLACE}/tpu2edge-{uuid.uuid4().hex[:12]}"

    def fill(self) -> None:
        """Carry the worker and its libraries there."""
        # What a killed session of days ago left behind.
        stale = f"find {_PLACE} -maxdepth 1 -name 'tpu2edge-*' -mtime +1 -exec rm -rf {{}} +"
        self._shell(f"{stale} 2>/dev/null; mkdir -p {self.path}")
        try:
            self._push(_pack_files())
        except BaseException:
            self.remove()
            raise

    def carry(self, model: Path) -> str:
        """Carry a file there; its name in the folder, in which the worker runs."""
        digest = hashlib.sha256(str(model.resolve()).encode()).hexdigest()[:12]
        name = f"{digest}.tflite"
        if not model.is_file():
            return name  # the worker says that there is none, as it does elsewhere
        need = model.stat().st_size + _SPARE_BYTES
        try:
            table = _ask(self.serial, "shell", f"df -k {_PLACE}").splitlines()
            free = _free_bytes(self.serial, table)
        except _Trouble as trouble:
            raise self._error(trouble) from None
        if free < need:
            raise DeviceMemoryError(
                f"{model.name} needs {need >> 20} MB on device '{self.device}', which has "
                f"{free >> 20} MB free in {_PLACE}",
                do="free some storage of the phone",
                step="load",
            )
        self._push([model], name)
        return name

    def remove(self) -> None:
        """Remove the folder, and what still runs in it; a phone that is gone keeps it."""
        name = Path(self.path).name
        with contextlib.suppress(_Trouble):
            # The brackets keep the pattern from finding the command that has it.
            _ask(self.serial, "shell", f"pkill -9 -f '[/]{name}/' || true")
            _ask(self.serial, "shell", f"rm -rf {self.path}")

    def _push(self, files: Sequence[Path], name: str = "") -> None:
        """Carry files there and compare their digests: a damaged model can run and be wrong."""
        target = f"{self.path}/{name}"
        try:
            _ask(self.serial, "push", *map(str, files), target, timeout_s=_PUSH_S)
        except _Trouble as trouble:
            raise self._error(trouble) from None
        names = [name] if name else [path.name for path in files]
        quoted = " ".join(shlex.quote(name) for name in names)
        lines = self._shell(
            f"cd {self.path} && chmod 755 {quoted} && sha256sum {quoted}"
        ).splitlines()
        pairs = [line.split(None, 1) for line in lines if line.strip()]
        there = {pair[-1].strip(): pair[0] for pair in pairs}
        for path, known in zip(files, names, strict=True):
            if there.get(known) != sha256_of(path):
                raise DeviceError(
                    f"{path.name} did not come through to device '{self.device}' whole",
                    do="try another cable or port",
                    step="start",
                )

    def _shell(self, command: str) -> str:
        try:
            return _ask(self.serial, "shell", command)
        except _Trouble as trouble:
            raise self._error(trouble) from None

    def _error(self, trouble: _Trouble) -> DeviceError:
        return DeviceError(
            f"device '{self.device}': {trouble}", do="see `adb devices -l`", step="start"
        )
