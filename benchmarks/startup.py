"""``tpu2edge --help`` and ``import tpu2edge``, against an empty Python: ``startup.py [--json FILE]``."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

from measuring import Lines

REPEAT = 9


def seconds(command: list[str]) -> float:
    """Median wall time in fresh processes, after one that warms the file cache."""
    times = []
    for _ in range(REPEAT + 1):
        begun = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - begun)
    return statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    lines = Lines()
    python = seconds([sys.executable, "-c", "pass"])
    print("wanted: under 0.3 s each")
    help_s = seconds([sys.executable, "-m", "tpu2edge", "--help"])
    lines.add("tpu2edge --help", help_s, python, unit="s")
    lines.add(
        "import tpu2edge", seconds([sys.executable, "-c", "import tpu2edge"]), python, unit="s"
    )
    lines.write(args.json)


if __name__ == "__main__":
    main()
