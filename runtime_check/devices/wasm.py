"""LiteRT.js, LiteRT's WebAssembly build for browsers, run in Node: what a web page computes.

The profile's ``[options]``: ``simd = "auto"`` takes the build that LiteRT.js picks by itself there,
``"relaxed"`` the one of browsers with relaxed SIMD (Chrome, Edge), ``"compat"`` the one of others
(Safari). Node has relaxed SIMD from version 21 on. With Node 20's experimental switch for it, static
int8 was measured to be wrong by 14 % of the range, and right with Node 22; so it is not used.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
import struct
import subprocess
from pathlib import Path

from tpu2edge.errors import DeviceError, OptionError
from tpu2edge.files import sha256_of, sha256_of_path
from tpu2edge.runtime_check.devices.install import new_part, part_named
from tpu2edge.runtime_check.devices.profiles import Profile
from tpu2edge.runtime_check.devices.runners import Launch, State, StateKind, missing
from tpu2edge.types import Progress

__all__ = ["VERSION", "install", "launch", "state"]

#: LiteRT.js's version; its files' digests are below.
VERSION = "2.5.3"
_PACKAGES = (f"@litertjs/core@{VERSION}", f"@litertjs/wasm-utils@{VERSION}")
_DIGESTS = {
    "@litertjs/core/dist": "27aced183ac5d2dbd5be3e6ce71d8417c995ca5c65e365a4e167bfb547925ffb",
    "@litertjs/core/wasm": "ddbd155b29b00e278ba51809424c22f4c56360c8b7dea00a073479e4d6089217",
    "@litertjs/wasm-utils/dist": "bc43a95f3e9c1e3e792f92f8800038cf1b469eae401eb8a8a8c3b83e9a1da87e",
}
_PART = f"litertjs-{VERSION}"
_WORKER = Path(__file__).with_name("web") / "worker.mjs"
_BUILDS = {"relaxed": "litert_wasm_internal.js", "compat": "litert_wasm_compat_internal.js"}
_OLDEST = 18
_RELAXED_FROM = 21
_GET_NODE = "install it with your system's package manager (packages nodejs and npm) or with nvm"
_NPM_S = 600.0


def state(profile: Profile) -> State:
    """Ready when Node is on the PATH and LiteRT.js in the cache."""
    if why := _cannot(profile):
        return State(kind=StateKind.IMPOSSIBLE, text=why)
    part = part_named(_PART)
    why = "" if part is None else part.damaged()
    if part is None or why:
        if shutil.which("npm") is None:
            return State(
                kind=StateKind.IMPOSSIBLE,
                text=f"npm is not on the PATH, and it fetches LiteRT.js: {_GET_NODE}",
            )
        return missing(profile, why or f"LiteRT.js {VERSION} (40 MB, by npm) is to be fetched")
    node = ".".join(map(str, _version(_node())))
    return State(
        kind=StateKind.READY, text=f"LiteRT.js {VERSION} ({_simd(profile)} SIMD) in Node {node}"
    )


def launch(profile: Profile) -> Launch:
    """The Node worker."""
    build = _simd(profile)
    part = part_named(_PART)
    assert part is not None
    return Launch(
        device=profile.name,
        command=_command(part.folder / "node_modules", build),
        env=profile.env,
        limit_bytes=profile.memory_mb << 20 if profile.memory_mb else None,
        memory_mb=profile.memory_mb,
        versions={
            "litert": f"LiteRT.js {VERSION}",
            "machine": "wasm32",
            "simd": build,
            "worker": sha256_of(_WORKER),
            "node": ".".join(map(str, _version(_node()))),
        },
    )


def install(profile: Profile, progress: Progress) -> None:
    """LiteRT.js from the user's own npm registry into the cache, checked and started once.

    Raises:
        DeviceError: npm fails, or brings other files than the ones known.
    """
    npm = shutil.which("npm")
    if npm is None:
        raise DeviceError("npm is not on the PATH", do=_GET_NODE, step="install")
    with new_part(_PART) as (folder, record):
        progress(f"fetch LiteRT.js {VERSION}, by npm", 0, 2)
        _fetch(npm, folder)
        progress("check LiteRT.js", 1, 2)
        modules = folder / "node_modules"
        for name, wanted in _DIGESTS.items():
            if not (modules / name).is_dir() or sha256_of_path(modules / name) != wanted:
                raise DeviceError(
                    f"npm brought other files than those of LiteRT.js {VERSION} in '{name}'",
                    do="look at npm's registry setting: `npm config get registry`",
                    step="install",
                )
        _start_once(_command(modules, _simd(profile)))
        record["source"] = f"{', '.join(_PACKAGES)} by npm"
    progress("LiteRT.js is ready", 2, 2)


def _cannot(profile: Profile) -> str:
    """Why this profile cannot run here, or nothing."""
    unknown = set(profile.options) - {"simd"}
    simd = profile.options.get("simd", "auto")
    if unknown or simd not in ("auto", *_BUILDS):
        raise OptionError(
            f"device '{profile.name}': options.{next(iter(unknown), 'simd')} is not known",
            do="LiteRT.js has `simd`, one of auto, relaxed and compat",
        )
    if profile.threads != 1:
        return "LiteRT.js runs one thread here: set threads = 1"
    if profile.kernels != "default" or profile.xnnpack:
        return "LiteRT.js has no choice of kernels or XNNPACK flags"
    if profile.runtime == "interpreter":
        return "LiteRT.js has a CompiledModel only"
    if shutil.which("node") is None:
        return f"Node {_OLDEST} or newer is not on the PATH: {_GET_NODE}"
    version = _version(_node())
    if version[0] < _OLDEST:
        return f"Node {version[0]} is too old, {_OLDEST} or newer is needed: {_GET_NODE}"
    if simd == "relaxed" and version[0] < _RELAXED_FROM:
        return f"Node {version[0]} has no relaxed SIMD: Node {_RELAXED_FROM} or newer has"
    return ""


def _simd(profile: Profile) -> str:
    asked = str(profile.options.get("simd", "auto"))
    if asked != "auto":
        return asked
    return "relaxed" if _version(_node())[0] >= _RELAXED_FROM else "compat"


def _command(modules: Path, build: str) -> tuple[str, ...]:
    return (_node(), str(_WORKER), str(modules), _BUILDS[build])


def _node() -> str:
    node = shutil.which("node")
    if node is None:
        raise DeviceError("Node is not on the PATH", do=_GET_NODE, step="start")
    return node


@functools.cache
def _version(node: str) -> tuple[int, ...]:
    """(20, 20, 2); (0,) when it does not tell."""
    try:
        done = subprocess.run(
            [node, "--version"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return (0,)
    found = re.match(r"v(\d+)\.(\d+)\.(\d+)", done.stdout)
    return tuple(map(int, found.groups())) if found else (0,)


def _fetch(npm: str, folder: Path) -> None:
    # npm checks the packages against the digests that its registry tells.
    options = ("--no-save", "--no-package-lock", "--no-audit", "--no-fund", "--ignore-scripts")
    command = [npm, "install", "--prefix", str(folder), *options, *_PACKAGES]
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_NPM_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise DeviceError(f"npm was not done in {_NPM_S:.0f} s", step="install") from None
    if done.returncode:
        lines = [line for line in done.stdout.splitlines() if line.strip()]
        tail = "".join(f"\n    {line}" for line in lines[-5:])
        raise DeviceError(
            f"npm could not install LiteRT.js {VERSION}{tail}",
            do="`npm ping` tells whether npm reaches its registry",
            step="install",
        )


def _start_once(command: tuple[str, ...]) -> None:
    """The worker says hello and ends by itself, as its input is closed."""
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, timeout=120, check=False
    )
    if len(done.stdout) > 4:
        (length,) = struct.unpack("<I", done.stdout[:4])
        if json.loads(done.stdout[4 : 4 + length])["ok"]:
            return
    tail = done.stderr.decode(errors="replace").strip()[-500:]
    raise DeviceError(f"LiteRT.js does not start in Node: {tail}", step="install")
