"""Where third-party output and Python warnings go, and how long each stage took."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from tpu2edge.types import Progress

__all__ = ["Stages", "log_stream", "warnings_to"]


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


class Stages:
    """Passes progress on and keeps the seconds of each stage for the manifest."""

    def __init__(self, sink: Progress) -> None:
        self._sink = sink
        self._stage: str | None = None
        self._since = 0.0
        self.seconds: dict[str, float] = {}

    def __call__(self, stage: str, done: float | None = None, total: float | None = None) -> None:
        """A :class:`tpu2edge.types.Progress`."""
        now = time.perf_counter()
        if stage != self._stage:
            self._close(now)
            self._stage, self._since = stage, now
        self._sink(stage, done, total)

    def _close(self, now: float) -> None:
        if self._stage is not None:
            spent = self.seconds.get(self._stage, 0.0)
            self.seconds[self._stage] = round(spent + now - self._since, 3)

    def end(self) -> None:
        """The last stage is over."""
        self._close(time.perf_counter())
        self._stage = None
