"""Where third-party output and Python warnings go."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

__all__ = ["log_stream", "warnings_to"]


@contextlib.contextmanager
def log_stream(path: Path | None) -> Iterator[IO[bytes]]:
    """The end of the file ``path`` to write to; None for nowhere."""
    with Path(path or os.devnull).open("ab") as stream:
        yield stream


@contextlib.contextmanager
def warnings_to(log: IO[bytes]) -> Iterator[None]:
    """Python warnings that torch raises while it traces go to the log, not to the user's stderr."""

    def show(
        message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None
    ) -> None:
        log.write(warnings.formatwarning(message, category, filename, lineno).encode())

    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.showwarning = show
        yield
