"""Folders that appear in one rename when all of them is there, and are never half-written."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from tpu2edge.errors import BundleError

__all__ = ["refuse_existing", "staged"]


def refuse_existing(target: Path, *, force: bool, kind: str = "tpu2edge-bundle") -> None:
    """Refuse to overwrite, and refuse even with ``force`` what is no folder of this ``kind``.

    Raises:
        BundleError: something is there that may not be replaced.
    """
    if not target.exists() and not target.is_symlink():
        return
    empty = target.is_dir() and not any(target.iterdir())
    if empty:
        return
    if not force:
        raise BundleError(f"'{target}' exists", do="use --force to replace it, or another --output")
    if not _is_ours(target, kind):
        word = kind.removeprefix("tpu2edge-")
        raise BundleError(
            f"'{target}' exists and is no {word}, so it is not replaced even with --force",
            do="choose another --output",
        )


def _is_ours(folder: Path, kind: str) -> bool:
    """Whether ``folder`` was made by us; many other things are called manifest.json, too."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(manifest, dict) and manifest.get("kind") == kind


@contextlib.contextmanager
def staged(target: Path, *, force: bool, kind: str = "tpu2edge-bundle") -> Iterator[Path]:
    """A temporary folder beside ``target`` that takes its place in one rename at the end.

    Whatever goes wrong inside leaves ``target`` as it was and nothing behind.
    """
    target = target.absolute()
    refuse_existing(target, force=force, kind=kind)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.parent / f".{target.name}.tmp-{os.getpid()}"
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir()
    try:
        yield temporary
        refuse_existing(target, force=force, kind=kind)
        _move_into_place(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _move_into_place(source: Path, target: Path) -> None:
    if not target.exists():
        source.rename(target)
        return
    if target.is_dir() and not any(target.iterdir()):
        source.rename(target)  # POSIX: an empty folder is replaced
        return
    if _exchange(source, target):
        return  # the old bundle is now the temporary folder, which the caller removes
    old = target.parent / f".{target.name}.old-{os.getpid()}"
    target.rename(old)
    source.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two folders in one step where the system can (Linux renameat2); False elsewhere."""
    try:
        library = ctypes.CDLL(None, use_errno=True)
        at_cwd, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
        result = library.renameat2(
            at_cwd, os.fsencode(first), at_cwd, os.fsencode(second), exchange
        )
    except (OSError, AttributeError):
        return False
    return bool(result == 0)
