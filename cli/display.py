"""What the user sees while a job runs: stages with their times, notes, and the log if asked for.

All of it goes to stderr. On a terminal the stages are live lines; elsewhere each finished stage is
one plain line.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from tpu2edge.types import Note

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

__all__ = ["Display"]


class Display:
    """Shows a job's course; used as a context manager.

    Args:
        quiet: show nothing but the log (if ``verbose``).
        verbose: show the log as it is written.
    """

    def __init__(self, *, quiet: bool = False, verbose: bool = False) -> None:
        self._quiet = quiet
        self._verbose = verbose
        self._is_live = not quiet and sys.stderr.isatty()
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._stage: str | None = None
        self._since = 0.0

    def __enter__(self) -> Self:
        if self._is_live:
            self._progress = _live()
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._finish(is_done=kind is None)
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def stage(self, name: str, done: float | None = None, total: float | None = None) -> None:
        """The job is at the stage ``name``, and (if known) at ``done`` of ``total``."""
        if name != self._stage:
            self._finish()
            self._stage, self._since = name, time.monotonic()
            if self._progress is not None:
                self._task = self._progress.add_task(name, total=None)
        if self._progress is not None and self._task is not None and total is not None:
            self._progress.update(self._task, completed=done or 0, total=total, counts=True)

    def note(self, note: Note) -> None:
        """Something that the user should know."""
        if not self._quiet:
            self._line(f"note: {note.text}")

    def log(self, data: bytes) -> None:
        """What the job's libraries wrote."""
        if self._verbose and data:
            self._line(data.decode(errors="replace").rstrip("\n"))

    def stopping(self) -> None:
        """Ctrl-C was seen; the child cleans up."""
        if not self._quiet:
            self._line("stopping …")

    def tick(self) -> None:
        """Called about ten times a second; the live lines move by themselves."""

    def _finish(self, *, is_done: bool = True) -> None:
        if self._stage is None:
            return
        if self._progress is not None and self._task is not None:
            if is_done:
                task = self._progress.tasks[self._task]
                total = task.total or 1
                self._progress.update(self._task, completed=total, total=total, counts=False)
            else:
                self._progress.stop_task(self._task)
        elif not self._quiet and is_done:
            self._line(f"{self._stage}: {time.monotonic() - self._since:.1f} s")
        self._stage = self._task = None

    def _line(self, text: str) -> None:
        if self._progress is not None:
            self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=sys.stderr, flush=True)


def _live() -> Progress:
    """A line for each stage: a spinner (then a tick), its name, seconds, and a count if known."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        SpinnerColumn,
        Task,
        TextColumn,
    )
    from rich.text import Text

    class Seconds(ProgressColumn):
        def render(self, task: Task) -> Text:
            seconds = task.finished_time if task.finished else task.elapsed
            return Text(f"{seconds or 0:.1f} s")

    class Bar(BarColumn):
        def render(self, task: Task) -> Any:
            return super().render(task) if task.fields.get("counts") else ""

    class Count(MofNCompleteColumn):
        def render(self, task: Task) -> Any:
            return super().render(task) if task.fields.get("counts") else ""

    return Progress(
        SpinnerColumn(finished_text="[green]✓[/]"),
        TextColumn("{task.description}", markup=False),
        Seconds(),
        Bar(bar_width=20),
        Count(),
        console=Console(stderr=True),
    )
