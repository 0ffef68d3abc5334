"""Device profiles: what ``--device NAME`` stands for, as TOML files that ship with the package.

A profile says which kernels LiteRT will pick (that decides the numbers), not which phone it is; the
phones it stands for are in its description. One file a profile, named by the file's stem::

    description = "..."       one line: the kernel class and phones or laptops it stands for
    runner = "qemu"           what runs it: host, qemu, isa, gpu, wasm, adb
    core = "cortex-a53"       the emulated core (qemu) or the x86 level (isa)
    threads = 1
    memory_mb = 512           largest memory of the process; left out: no limit
    runtime = "compiled"      LiteRT's Interpreter or CompiledModel; left out: the runner's own
    kernels = "default"       default (XNNPACK where it applies), builtin, reference
    xnnpack = ["force_fp16"]  flags of the XNNPACK delegate; CompiledModel only

    [env]                     environment variables of the worker
    [options]                 what only this runner knows
    [tolerance]               what the device may add to the distance from the host
    class = "int8-kernels"
    reason = "..."
    float = 1e-5              largest difference over the output's range, by kind of recipe
    dynamic = 2e-2
    static = 2e-2
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tpu2edge.errors import OptionError

__all__ = [
    "CORES",
    "RUNNERS",
    "XNNPACK_FLAGS",
    "Profile",
    "Tolerance",
    "is_found_by_name",
    "load_profile",
    "profile_named",
    "profiles",
    "user_folder",
]

#: runner -> the ``core`` values it knows; empty: it takes none.
CORES: Mapping[str, tuple[str, ...]] = {
    "host": (),
    "qemu": (
        "cortex-a53",
        "cortex-a55",
        "cortex-a57",
        "cortex-a72",
        "cortex-a76",
        "cortex-a710",
        "neoverse-n1",
    ),
    "isa": ("sse41", "avx", "avx2", "avx512"),
    "gpu": (),
    "wasm": (),
    "adb": (),
}
RUNNERS = tuple(CORES)
RUNTIMES = ("interpreter", "compiled")
KERNELS = ("default", "builtin", "reference")

#: Flags of TfLiteXNNPackDelegateOptions (tflite/delegates/xnnpack/xnnpack_delegate.h) by short name.
XNNPACK_FLAGS: Mapping[str, int] = {"force_fp16": 0x4}

#: What a tolerance class means; the profile's ``reason`` says why it has it.
TOLERANCE_CLASSES: Mapping[str, str] = {
    "none": "the same kernels as the host: the same numbers",
    "rounding": "other float kernels: sums in another order",
    "int8-kernels": "other int8 kernels too: dynamic int8 rounds its activations elsewhere",
    "half-precision": "arithmetic in float16 where the model says float32",
}
_KINDS = ("float", "dynamic", "static")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_FOLDER = Path(__file__).with_name("profiles")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tolerance:
    """How far a device's outputs may be from the host's, over the output's range.

    One number for each kind of recipe: ``float`` (float32 and float16 weights), ``dynamic``
    (activations quantized at run time) and ``static``.
    """

    name: str = "none"
    reason: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)

    def range_error(self, recipe: str) -> float:
        """The number for a recipe by its name: "float32", "dynamic_wi8_afp32", "static_wi8_ai8"."""
        kind = recipe.split("_")[0]
        return self.numbers.get(kind if kind in _KINDS else "float", 0.0)

    def to_json(self) -> dict[str, Any]:
        """Plain data, for reports."""
        return {
            "class": self.name,
            "means": TOLERANCE_CLASSES[self.name],
            "reason": self.reason,
            **{kind: self.numbers.get(kind, 0.0) for kind in _KINDS},
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """One device; see the module's text for the fields."""

    name: str
    description: str
    runner: str
    core: str = ""
    threads: int = 1
    memory_mb: int | None = None
    runtime: str = ""  # empty: the runner's own
    kernels: str = "default"
    xnnpack: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    tolerance: Tolerance = Tolerance()
    file: Path | None = None

    @property
    def xnnpack_flags(self) -> int | None:
        """The flags as LiteRT takes them; None when the profile sets none."""
        return sum(XNNPACK_FLAGS[flag] for flag in self.xnnpack) if self.xnnpack else None

    def to_json(self) -> dict[str, Any]:
        """Plain data without the file, the same wherever the profile lies."""
        return {
            "name": self.name,
            "description": self.description,
            "runner": self.runner,
            "core": self.core,
            "threads": self.threads,
            "memory_mb": self.memory_mb,
            "runtime": self.runtime,
            "kernels": self.kernels,
            "xnnpack": list(self.xnnpack),
            "env": dict(self.env),
            "options": dict(self.options),
            "tolerance": self.tolerance.to_json(),
        }


def user_folder() -> Path:
    """Where a user's own profiles lie: ``$XDG_CONFIG_HOME/tpu2edge/devices``."""
    base = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(base) / "tpu2edge" / "devices"


def profiles(files: Sequence[Path] = ()) -> dict[str, Profile]:
    """All profiles by name: the package's, then the user's folder, then ``files``; later ones win.

    Raises:
        OptionError: a file cannot be read, or has an unknown key or value.
    """
    paths = [*sorted(_FOLDER.glob("*.toml")), *sorted(user_folder().glob("*.toml")), *files]
    return {profile.name: profile for profile in map(load_profile, paths)}


def is_found_by_name(profile: Profile) -> bool:
    """Whether its file lies where profiles are looked for, so that its name is enough."""
    return profile.file is None or profile.file.parent in (_FOLDER, user_folder())


def profile_named(name: str, files: Sequence[Path] = ()) -> Profile:
    """The profile called ``name``.

    Raises:
        OptionError: there is none; the message lists the known ones.
    """
    known = profiles(files)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean '{near[0]}'? " if near else ""
        raise OptionError(
            f"no device is called '{name}'",
            do=f"{hint}known: {', '.join(known)}; own ones as TOML in {user_folder()}",
        )
    return known[name]


def load_profile(path: Path) -> Profile:
    """The profile that a TOML file describes.

    Raises:
        OptionError: names the file, the key and the known values.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as err:
        raise OptionError(f"device file '{path}' cannot be read: {err.strerror}") from err
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as err:
        raise OptionError(f"device file '{path}' is no TOML: {err}") from err
    return _Reader(path, data).profile()


class _Reader:
    """Takes one table key by key; what is left over at the end is unknown."""

    def __init__(self, path: Path, data: dict[str, Any], table: str = "") -> None:
        self.path = path
        self.data = dict(data)
        self.table = table

    def profile(self) -> Profile:
        runner = self.one_of("runner", RUNNERS)
        profile = Profile(
            name=self.name(),
            description=self.text("description"),
            runner=runner,
            core=self.core(runner),
            threads=self.count("threads", 1) or 1,
            memory_mb=self.count("memory_mb", None),
            runtime=self.one_of("runtime", RUNTIMES, ""),
            kernels=self.one_of("kernels", KERNELS, "default"),
            xnnpack=self.flags(),
            env=self.strings("env"),
            options=self.scalars("options"),
            tolerance=self.tolerance(),
            file=self.path,
        )
        self.nothing_left()
        if profile.xnnpack and profile.runtime == "interpreter":
            self.fail("xnnpack", "needs runtime = 'compiled': the Interpreter takes no flags")
        if runner == "qemu" and profile.runtime == "interpreter":
            self.fail("runtime", "is 'compiled' under qemu: there is no Python on the device")
        return profile

    def fail(self, key: str, text: str, known: Iterable[str] = ()) -> None:
        names = list(known)
        raise OptionError(
            f"device file '{self.path}': {self.table}{key} {text}",
            do=f"known: {', '.join(names)}" if names else "see docs/devices.md",
        )

    def take(self, key: str, kind: type | tuple[type, ...], what: str, default: Any = ...) -> Any:
        if key not in self.data:
            if default is ...:
                self.fail(key, "is missing")
            return default
        value = self.data.pop(key)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            self.fail(key, f"is {value!r}, wanted {what}")
        return value

    def name(self) -> str:
        name: str = self.take("name", str, "a name", self.path.stem)
        if not _NAME.fullmatch(name):
            self.fail("name", f"is '{name}', wanted letters, digits, '.', '_' and '-'")
        return name

    def text(self, key: str) -> str:
        text: str = self.take(key, str, "text")
        if not text.strip():
            self.fail(key, "is empty")
        return text

    def one_of(self, key: str, known: Sequence[str], default: Any = ...) -> str:
        value: str = self.take(key, str, "one of the known names", default)
        if value not in known and value != default:
            self.fail(key, f"is '{value}'", known)
        return value

    def core(self, runner: str) -> str:
        known = CORES[runner]
        if not known:
            if "core" in self.data:
                self.fail("core", f"is for {', '.join(r for r in RUNNERS if CORES[r])} only")
            return ""
        return self.one_of("core", known)

    def count(self, key: str, default: int | None) -> int | None:
        value: int | None = self.take(key, int, "a whole number", default)
        if value is not None and value < 1:
            self.fail(key, f"is {value}, wanted at least 1")
        return value

    def flags(self) -> tuple[str, ...]:
        flags: list[Any] = self.take("xnnpack", list, "a list of flags", [])
        for flag in flags:
            if flag not in XNNPACK_FLAGS:
                self.fail("xnnpack", f"has the flag {flag!r}", XNNPACK_FLAGS)
        return tuple(flags)

    def strings(self, key: str) -> dict[str, str]:
        table: dict[str, Any] = self.take(key, dict, "a table", {})
        for name, value in table.items():
            if not isinstance(value, str):
                self.fail(f"{key}.{name}", f"is {value!r}, wanted text in quotes")
        return table

    def scalars(self, key: str) -> dict[str, Any]:
        table: dict[str, Any] = self.take(key, dict, "a table", {})
        for name, value in table.items():
            if not isinstance(value, (str, int, float, bool)):
                self.fail(f"{key}.{name}", f"is {value!r}, wanted text, a number or true/false")
        return table

    def tolerance(self) -> Tolerance:
        if "tolerance" not in self.data:
            return Tolerance()
        reader = _Reader(self.path, self.take("tolerance", dict, "a table"), "tolerance.")
        name = reader.one_of("class", tuple(TOLERANCE_CLASSES))
        reason = reader.text("reason")
        numbers = {kind: float(reader.take(kind, (int, float), "a number", 0.0)) for kind in _KINDS}
        reader.nothing_left()
        for kind, number in numbers.items():
            if not 0 <= number < 1:
                reader.fail(kind, f"is {number:g}, wanted a fraction of the range, 0 to 1")
        return Tolerance(name=name, reason=reason, numbers=numbers)

    def nothing_left(self) -> None:
        if self.data:
            known = _TOLERANCE_KEYS if self.table else _KEYS
            self.fail(next(iter(self.data)), "is no key of a profile", known)


_KEYS = (
    "name",
    "description",
    "runner",
    "core",
    "threads",
    "memory_mb",
    "runtime",
    "kernels",
    "xnnpack",
    "env",
    "options",
    "tolerance",
)
_TOLERANCE_KEYS = ("class", "reason", *_KINDS)
