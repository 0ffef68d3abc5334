"""Compile a StableHLO program for a TPU that is not there, with the TPU's own compiler.

Results are kept by the hash of program, topology, settings and libtpu version: compiling takes
0.2 s for a small network and half a minute for a ResNet-50.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tpu2edge.errors import DeviceError, OptionError, Place
from tpu2edge.runtime_check.reference.tpu.process import Child
from tpu2edge.runtime_check.reference.tpu.topologies import Topology
from tpu2edge.types import StableHlo

__all__ = [
    "PRECISIONS",
    "Compiled",
    "compile_program",
    "default_cache",
    "libtpu_build",
    "libtpu_version",
]

#: Settings of the float32 matmul precision, as JAX names them.
PRECISIONS = ("default", "high", "highest")

#: 1 (2026-11): first. Raise it when what the child returns or how it compiles changes.
_CACHE_FORMAT = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """What the TPU compiler made of a program."""

    generation: str
    topology: str
    precision: str
    hlo: str  # optimized HLO; a matmul's marks are in its metadata
    prelayout: str | None  # HLO before layouts were assigned, when asked for
    matmuls: tuple[Mapping[str, Any], ...]  # in program order, see program.tag_matmuls
    flops: float
    memory: Mapping[str, int]  # bytes: arguments, outputs, temporary, code
    libtpu: str  # version of the package
    libtpu_build: str  # what the compiler says of itself
    device_kind: str
    jax: str
    seconds: float  # of the compilation itself, also when it was done earlier
    cached: bool = False

    @property
    def hbm_bytes(self) -> int:
        """Device memory for arguments, outputs, intermediates and code together."""
        return sum(self.memory.values())


def libtpu_version() -> str | None:
    """The version of the libtpu package, None when it is not installed; nothing is loaded."""
    if importlib.util.find_spec("libtpu") is None:
        return None
    return importlib.metadata.version("libtpu")


def libtpu_build(*, timeout_s: float = 60.0) -> str:
    """What the installed libtpu says of its build; OptionError when there is none."""
    if libtpu_version() is None:
        raise _not_installed()
    with Child("asks libtpu for its build", timeout_s=timeout_s) as child:
        reply, _ = child.ask({"do": "about"})
    if "error" in reply:
        raise DeviceError(f"libtpu does not tell its build: {_first_line(str(reply['text']))}")
    return str(reply["libtpu_build"])


def _not_installed() -> OptionError:
    return OptionError(
        "the TPU compiler (package libtpu) is not installed",
        do="pip install 'tpu2edge[tpu]' on Linux, or use the naive prediction",
    )


def default_cache() -> Path:
    """Where compiled programs are kept: under ``TPU2EDGE_CACHE``, else the user's cache folder."""
    if folder := os.environ.get("TPU2EDGE_CACHE"):
        return Path(folder) / "tpu"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tpu2edge" / "tpu"


def compile_program(
    program: StableHlo,
    topology: Topology,
    *,
    precision: str = "default",
    excess_precision: bool = False,
    timeout_s: float = 600.0,
    prelayout: bool = False,
    cache: Path | None = None,
) -> Compiled:
    """``program`` compiled for ``topology`` in a child process.

    ``excess_precision`` lets the compiler skip roundings between float types; TorchTPU's default is
    not to. ``cache`` is a folder for results, None for none (with ``prelayout`` it is not used).
    OptionError without libtpu, DeviceError when the compiler refuses or ends.
    """
    check_precision(precision)
    libtpu = libtpu_version()
    if libtpu is None:
        raise _not_installed()
    request = {
        "do": "compile",
        "topology": topology.libtpu_name,
        "precision": precision,
        "excess_precision": excess_precision,
        "prelayout": prelayout,
    }
    known: dict[str, Any] = {
        "generation": topology.generation,
        "topology": topology.libtpu_name,
        "precision": precision,
        "libtpu": libtpu,
    }
    entry = None if cache is None or prelayout else _entry(cache, program, request, libtpu)
    if entry is not None and (found := _read(entry)) is not None:
        return Compiled(**known, **found, cached=True)
    with Child(f"compiles for TPU {topology.generation}", timeout_s=timeout_s) as child:
        reply, _ = child.ask(request, [np.frombuffer(program.module, np.uint8)])
    if "error" in reply:
        raise _refusal(topology, reply)
    reply["matmuls"] = tuple(reply["matmuls"])
    compiled = Compiled(**known, **reply)
    if entry is not None:
        _write(entry, compiled)
    return compiled


def check_precision(precision: str) -> None:
    """OptionError unless ``precision`` is a known setting."""
    if precision not in PRECISIONS:
        raise OptionError(f"no precision {precision!r}", do=f"take one of {', '.join(PRECISIONS)}")


# --- the cache -----------------------------------------------------------------------------------


def _entry(cache: Path, program: StableHlo, request: Mapping[str, Any], libtpu: str) -> Path:
    key = hashlib.sha256(program.module)
    key.update(json.dumps([_CACHE_FORMAT, libtpu, request], sort_keys=True).encode())
    return cache / f"{key.hexdigest()}.json.gz"


def _read(entry: Path) -> dict[str, Any] | None:
    """The stored result; None when there is none or it cannot be read (it is then made anew)."""
    try:
        data: dict[str, Any] = json.loads(gzip.decompress(entry.read_bytes()))
    except (OSError, ValueError, EOFError):
        return None
    data["matmuls"] = tuple(data["matmuls"])
    return data


def _write(entry: Path, compiled: Compiled) -> None:
    data = asdict(compiled)
    for name in ("generation", "topology", "precision", "libtpu", "cached"):
        del data[name]
    partial = entry.with_suffix(f".{os.getpid()}")
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(gzip.compress(json.dumps(data).encode(), 3))
        partial.replace(entry)
    except OSError:  # a full or read-only disk costs time on the next run, nothing else
        partial.unlink(missing_ok=True)


# --- refusals ------------------------------------------------------------------------------------


def _refusal(topology: Topology, reply: Mapping[str, Any]) -> DeviceError:
    text, generation = str(reply["text"]), topology.generation
    custom = re.search(r"[Cc]ustom emitter for (\S+) not found", text) or re.search(
        r"(?:custom[- ]call(?: target)?|target)[ '\":]+([\w.$]+)[^\n]*(?:not found|not supported|"
        r"unimplemented|unknown)",
        text,
        re.IGNORECASE,
    )
    if custom:
        return DeviceError(
            f"TPU {generation} has no implementation of the custom call {custom.group(1)!r}",
            do="keep that operation (linear algebra, most likely) out of the exported program",
            place=Place(op=custom.group(1)),
            step="tpu",
        )
    if "HbmOom" in text or "Ran out of memory in memory space hbm" in text:
        used = re.search(r"Used ([\d.]+\w+) of ([\d.]+\w+) hbm", text)
        much = f": it needs {used.group(1)} of {used.group(2)}" if used else ""
        return DeviceError(
            f"the program does not fit the memory of one TPU {generation} chip{much}",
            do="take a smaller batch, or another generation",
            step="tpu",
        )
    if reply["error"] in ("ImportError", "ModuleNotFoundError", "AttributeError"):
        return DeviceError(
            f"this version of jax has not the interface to the TPU compiler used here: {text}",
            do="install the tested versions (constraints.txt)",
            step="tpu",
        )
    return DeviceError(
        f"the TPU compiler refuses the program for {generation}: {_first_line(text)}", step="tpu"
    )


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:400] if lines else "no reason given"
