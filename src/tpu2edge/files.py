"""Small helpers for files: digests, atomic writes, canonical JSON."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = [
    "SAFETENSORS_DTYPES",
    "canonical_json",
    "named_digest",
    "sha256_of",
    "sha256_of_arrays",
    "sha256_of_path",
    "temporary_beside",
    "write_atomically",
]

#: safetensors' names of dtypes, and those that torch, and NumPy with ml_dtypes, have for them.
SAFETENSORS_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}


def sha256_of(path: Path) -> str:
    """Hex digest of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sha256_of_path(path: Path) -> str:
    """The same for a file or a folder: of its files' names (relative, sorted) and their digests.

    A file that is missing, renamed or changed changes a folder's digest.
    """
    if not path.is_dir():
        return sha256_of(path)
    digest = hashlib.sha256()
    files = {p.relative_to(path).as_posix(): p for p in path.rglob("*") if p.is_file()}
    for name in sorted(files):
        digest.update(f"{name}\0{sha256_of(files[name])}\n".encode())
    return digest.hexdigest()


def named_digest(path: Path) -> dict[str, str]:
    """What a manifest says of a file or folder that was given: its name and digest."""
    return {"name": path.name, "sha256": sha256_of_path(path)}


def sha256_of_arrays(arrays: Any) -> str:
    """Hex digest over names, dtypes, shapes and bytes of a mapping of arrays, in name order."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"{name}|{array.dtype.str}|{array.shape}|".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def canonical_json(data: Any) -> str:
    """JSON text that is the same for the same data: sorted keys, two spaces, a final newline.

    NaN and infinity are refused, since they are no JSON.
    """
    return json.dumps(data, indent=2, sort_keys=True, allow_nan=False, ensure_ascii=False) + "\n"


def write_atomically(path: Path, data: str | bytes) -> None:
    """Write beside ``path``, then rename: a reader sees the old file or the whole new one."""
    raw = data.encode() if isinstance(data, str) else data
    with temporary_beside(path) as temporary:
        temporary.write_bytes(raw)
        temporary.replace(path)


@contextlib.contextmanager
def temporary_beside(path: Path) -> Iterator[Path]:
    """An empty file beside ``path``, to be written and renamed; gone afterwards if it was not."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    temporary.chmod(0o644)
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)
