"""What the benchmarks share: a command's wall time, CPU time and peak memory, and the report line."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Cost", "Lines", "cost_of"]

SAMPLE_EVERY_S = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """What a command and all its descendants took."""

    wall_s: float
    cpu_s: float
    peak_mb: float  # the largest sum of PSS over the process tree


def cost_of(command: Sequence[str], *, env: Mapping[str, str] | None = None) -> Cost:
    """Run ``command`` to its end, which must be exit status 0, and measure it.

    Memory is the sum of PSS (shared pages counted once over the tree) from smaps_rollup, taken
    every 50 ms; where the system does not tell PSS, resident memory.
    """
    before = os.times()
    begun = time.perf_counter()
    process = subprocess.Popen(
        command,
        env={**os.environ, **(env or {})},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    peak = [0]
    done = threading.Event()

    def watch() -> None:
        while not done.wait(SAMPLE_EVERY_S):
            peak[0] = max(peak[0], sum(_memory_kb(pid) for pid in _tree(process.pid)))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    _, said = process.communicate()
    wall = time.perf_counter() - begun
    done.set()
    watcher.join()
    after = os.times()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: exit {process.returncode}\n{said.decode()[-3000:]}")
    cpu = (after.children_user + after.children_system) - (
        before.children_user + before.children_system
    )
    return Cost(wall_s=wall, cpu_s=cpu, peak_mb=peak[0] / 1024)


def _tree(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended
                continue
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, ahead = [], [root]
    while ahead:
        pid = ahead.pop()
        found.append(pid)
        ahead += children.get(pid, [])
    return found


def _memory_kb(pid: int) -> int:
    for name, key in (("smaps_rollup", "Pss:"), ("status", "VmRSS:")):
        try:
            for line in Path(f"/proc/{pid}/{name}").read_text().splitlines():
                if line.startswith(key):
                    return int(line.split()[1])
        except OSError:
            continue
    return 0


class Lines:
    """Prints one line a figure and keeps them for ``--json``."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add(
        self,
        name: str,
        ours: float,
        bare: float,
        *,
        unit: str,
        at_most: float | None = None,
        at_least: float | None = None,
    ) -> None:
        """``ours`` beside ``bare``; what was wanted is told, not asserted."""
        ratio = ours / bare
        wanted = ""
        if at_most is not None:
            wanted = f" (wanted <= {at_most:g})"
        elif at_least is not None:
            wanted = f" (wanted >= {at_least:g})"
        print(
            f"{name}: ours {ours:.4g} {unit}, bare {bare:.4g} {unit}, ratio {ratio:.2f}{wanted}",
            flush=True,
        )
        self.rows.append(
            {
                "name": name,
                "unit": unit,
                "ours": ours,
                "bare": bare,
                "ratio": ratio,
                "at_most": at_most,
                "at_least": at_least,
            }
        )

    def write(self, path: Path | None) -> None:
        """All figures as JSON, if a path was given."""
        if path is not None:
            path.write_text(json.dumps(self.rows, indent=1) + "\n")
