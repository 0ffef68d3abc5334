"""What each command was asked for, as plain data that crosses to another process as JSON.

The types of the fields say what becomes of them: paths are written as text, tuples as lists, and
:meth:`Request.from_json` makes them paths and tuples again.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

__all__ = [
    "CaptureRequest",
    "CheckRequest",
    "ExportRequest",
    "FamilyRequest",
    "ImportRequest",
    "InstallRequest",
    "QuantizeRequest",
    "Request",
    "SurveyRequest",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What the requests have in common."""

    def to_json(self) -> dict[str, Any]:
        """Plain data; paths as text."""
        return {name: _plain(value) for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of :meth:`to_json`."""
        kinds = typing.get_type_hints(cls)
        return cls(**{name: _typed(value, kinds.get(name)) for name, value in data.items()})


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _typed(value: Any, kind: Any) -> Any:
    """``value``, read from JSON, as a field of the type ``kind`` has it."""
    if isinstance(kind, types.UnionType):
        if value is None:
            return None
        (kind,) = (each for each in typing.get_args(kind) if each is not type(None))
    if typing.get_origin(kind) is tuple:
        return tuple(_typed(item, typing.get_args(kind)[0]) for item in value)
    return Path(value) if kind is Path else value


@dataclass(frozen=True, kw_only=True, slots=True)
class FamilyRequest(Request):
    """What the commands that make a family of files have in common."""

    output: Path
    recipes: tuple[str, ...] = ("float32",)
    recipe_files: tuple[Path, ...] = ()
    keep_float: tuple[str, ...] = ()
    calibration: tuple[str, ...] = ()
    estimator: str = "minmax"
    metric: str | None = None
    optimize: str = "size"
    levels: tuple[str, ...] = ()
    max_size: str | None = None
    max_latency: str | None = None
    time_limit_s: float | None = None
    budgets: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    device_files: tuple[Path, ...] = ()
    threads: int | None = None
    inputs: tuple[Path, ...] = ()
    num_samples: int | None = None  # None: by the size of the weights
    seed: int = 0
    force: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizeRequest(FamilyRequest):
    """What ``tpu2edge quantize`` was asked for."""

    source: Path  # a .tflite or a bundle
    reference: Path | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportRequest(FamilyRequest):
    """What ``tpu2edge export`` was asked for."""

    source: str
    checkpoint: Path | None = None
    dynamic: tuple[str, ...] = ()
    shapes: tuple[str, ...] = ()
    channels_last: tuple[str, ...] = ()
    channels_last_output: tuple[str, ...] = ()
    signature_name: str = "serving_default"
    reference: str | None = None  # a word or a path, see references.py; None: the usual one


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckRequest(Request):
    """What ``tpu2edge check`` was asked for."""

    target: Path
    reference: Path | None = None
    budgets: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    device_files: tuple[Path, ...] = ()
    threads: int | None = None
    signature: str | None = None
    metric: str | None = None
    junit: Path | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class InstallRequest(Request):
    """What ``tpu2edge devices install`` was asked for."""

    names: tuple[str, ...] = ()
    device_files: tuple[Path, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptureRequest(Request):
    """What ``tpu2edge capture`` was asked for."""

    source: str
    output: Path
    checkpoint: Path | None = None
    inputs: tuple[Path, ...] = ()
    num_samples: int = 8
    device: str | None = None
    precision: str | None = None
    compiled: bool = False
    signature_name: str | None = None  # of several, the one that is meant
    seed: int = 0
    force: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportRequest(Request):
    """What ``tpu2edge reference import`` was asked for."""

    output: Path
    inputs: Path
    outputs: Path
    precision: str
    provider: str = "external"
    batch: int | None = None
    device_kind: str | None = None
    signature_name: str = "serving_default"
    force: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class SurveyRequest(Request):
    """What ``tpu2edge doctor --tpu`` was asked for."""

    source: str
    generations: tuple[str, ...] = ()
    precision: str = "default"
    signature_name: str | None = None  # of several, the one that is meant
