"""Coverage of public model zoos: tpu2edge beside bare litert-torch, each model in its own process.

    python benchmarks/zoo.py [--only PATTERN] [--sides ours,bare] [--results FILE] [--again]
                             [--limit SECONDS] [--make-venv DIR] [--table FILE]

One row a model and side is appended to the results (JSON lines) as it comes, and a model that has a
row is not run again unless ``--again`` is given, so a run may be killed and started anew. The last row
of a model and side counts. ``--table`` writes the table of what the results hold, and runs nothing.

pass: the worst output on two inputs is at least 100 dB (SQNR) from eager, which is itself held to
float64 (``floor``). low: below that, but not further from eager than eager is from float64. refused: a
Tpu2EdgeError says why. fail: tpu2edge says itself that the numbers are wrong. wrong: wrong numbers
without a word. does not run: LiteRT refuses the file. absent: the model cannot be built or run here.
Else exception, crash or timeout.

torchvision and timm need another torch: ``--make-venv`` makes an environment for them, or takes the one
that is there, and measures in it.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SIDES = ("ours", "bare")
_VENV = ("torch==2.14.1", "torchvision==0.29.1", "timm", "transformers")
_OTHER_TORCH = re.compile(r"(torch|torchax|torchvision)==")
_VERSIONS = ("torch", "torchvision", "timm", "transformers", "litert-torch", "ai-edge-litert")
_PRELOAD = (
    "torch",
    "torchvision",
    "timm",
    "transformers",
    "litert_torch",
    "zoo_models",
    "tpu2edge",
)

Row = dict[str, Any]


def in_venv(folder: Path) -> None:
    """Go on as the same command in the environment ``folder``, which is made if it is not there."""
    python = folder / "bin" / "python"
    if Path(sys.prefix).resolve() == folder.resolve():
        return
    imports = "import torch, torchvision, timm, transformers, litert_torch"
    known = (
        python.exists()
        and not subprocess.run(
            [python, "-W", "ignore", "-c", imports], capture_output=True, check=False
        ).returncode
    )
    if not known:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
            lines = (ROOT / "constraints.txt").read_text().splitlines(keepends=True)
            constraints.writelines(line for line in lines if not _OTHER_TORCH.match(line))
            constraints.flush()
            install = [python, "-m", "pip", "install", "--quiet", "-c", constraints.name]
            subprocess.run([*install, *_VENV, "-e", f"{ROOT}[export]"], check=True)
    # What is measured is this checkout, whichever the environment was made for.
    os.environ["PYTHONPATH"] = str(ROOT / "src")
    os.execv(python, [str(python), "-W", "ignore", str(Path(__file__).resolve()), *sys.argv[1:]])


def _child(name: str, side: str, answer: str, log: str) -> None:
    os.setsid()  # so that a timeout ends the processes of this one, too
    with Path(log).open("ab") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    from zoo_child import measure

    row = measure(name, side)
    Path(answer).write_text(json.dumps(row))
    os._exit(0)  # no time for the exit handlers of five frameworks


def run(name: str, side: str, limit: float) -> Row:
    """The child's word, or what became of it."""
    context = multiprocessing.get_context("forkserver")
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        answer, log = Path(folder) / "answer.json", Path(folder) / "log.txt"
        child = context.Process(target=_child, args=(name, side, str(answer), str(log)))
        child.start()
        child.join(limit)
        late = child.is_alive()
        if child.pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
        child.join()
        if late:
            row: Row = {"state": "timeout"}
        elif answer.exists():
            row = json.loads(answer.read_text())
        else:
            last = log.read_bytes()[-300:].decode(errors="replace") if log.exists() else ""
            row = {"state": "crash", "why": f"exit status {child.exitcode}: {last}"}
    return {"name": name, "side": side, **row, "seconds": round(time.perf_counter() - begun, 1)}


def read_results(path: Path) -> dict[tuple[str, str], Row]:
    """The last row of each model and side."""
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]  # a kill may cut the last one
    return {(row["name"], row["side"]): row for row in rows}


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _VERSIONS:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _wanted(only: str, sides: list[str], known: set[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    from zoo_models import MODELS

    for name in MODELS:
        if any(fnmatch.fnmatch(name, pattern) for pattern in only.split(",")):
            for side in sides:
                if (name, side) not in known:
                    yield name, side


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="*", help="patterns of names, e.g. 'timm/*,torch*/r*'")
    parser.add_argument("--sides", default="ours,bare", help="ours, bare or both")
    parser.add_argument("--results", type=Path, default=Path("zoo.jsonl"), help="one row a line")
    parser.add_argument("--again", action="store_true", help="run what has a row already, too")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds a model and side")
    parser.add_argument("--table", type=Path, help="write a Markdown table of the results here")
    parser.add_argument("--make-venv", type=Path, help="environment for torchvision and timm")
    options = parser.parse_args()
    if options.table:
        options.table.write_text(table(read_results(options.results)))
        return
    if options.make_venv:
        in_venv(options.make_venv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(_PRELOAD))
    sides = [side for side in SIDES if side in options.sides.split(",")]
    known = set() if options.again else set(read_results(options.results))
    todo = list(_wanted(options.only, sides, known))
    common = {"date": time.strftime("%Y-%m-%d"), "versions": _versions(), "commit": _commit()}
    for index, (name, side) in enumerate(todo, 1):
        row = {**run(name, side, options.limit), **common}
        with options.results.open("a") as stream:
            stream.write(json.dumps(row) + "\n")
        numbers = f"{row['db']:.1f} dB " if "db" in row else ""
        shown = f"{side} {name}: {row['state']} {numbers}{row['seconds']} s {row.get('why', '')}"
        print(f"[{index}/{len(todo)}] {shown}"[:300], flush=True)


def table(rows: dict[tuple[str, str], Row]) -> str:
    """The results as Markdown: the counts by zoo, then one line a model."""
    versions = {
        package: number for row in rows.values() for package, number in row["versions"].items()
    }
    dates = sorted({row["date"] for row in rows.values()})
    names = list(dict.fromkeys(name for name, _ in rows))
    lines = [
        "# Zoo",
        "",
        f"{' to '.join(dict.fromkeys((dates[0], dates[-1])))}; "
        f"{', '.join(f'{p} {v}' for p, v in versions.items())}; CPU. Random weights from a fixed seed, "
        "deep stages cut to two blocks, small images. Made by `benchmarks/zoo.py`, which tells what "
        "the words mean; dB is the worst output's SQNR against eager, in brackets eager's own "
        "against float64.",
        "",
        "| zoo | models | side | " + " | ".join(_STATES) + " |",
        "|---" * (3 + len(_STATES)) + "|",
    ]
    for zoo in (*dict.fromkeys(name.split("/")[0] for name in names), "all"):
        for side in SIDES:
            mine = [
                row
                for (name, s), row in rows.items()
                if s == side and zoo in ("all", name.split("/")[0])
            ]
            counts = Counter(row["state"] for row in mine)
            cells = " | ".join(str(counts[state] or "") for state in _STATES)
            lines.append(f"| {zoo} | {len(mine)} | {_SHOWN[side]} | {cells} |")
    both = [(rows[n, "ours"], rows[n, "bare"]) for n in names if all((n, s) in rows for s in SIDES)]
    failed = [(a, b) for a, b in both if b["state"] not in ("pass", "absent")]
    recovered = sum(a["state"] == "pass" for a, _ in failed)
    lost = [a["name"] for a, b in both if b["state"] == "pass" and a["state"] != "pass"]
    lines += [
        "",
        f"Of the {len(failed)} models that bare litert-torch does not pass, tpu2edge passes {recovered}. "
        f"Of those that it passes, tpu2edge does not pass {len(lost)}"
        + (f": {', '.join(lost)}." if lost else "."),
        "",
        "| model | tpu2edge | bare litert-torch | why tpu2edge does not pass |",
        "|---|---|---|---|",
    ]
    for name in sorted(names):
        ours, bare = (rows.get((name, side)) for side in SIDES)
        passed = ours is not None and ours["state"] == "pass"
        why = "" if ours is None or passed else str(ours.get("why", ""))
        why = why.replace("|", "/").replace("\n", " ")
        why = re.sub(
            r"\S*/(?:site-packages|benchmarks)/", "", why
        )  # whose machine it was is no matter
        lines.append(f"| {name} | {_cell(ours)} | {_cell(bare)} | {why} |")
    return "\n".join(lines) + "\n"


_STATES = (
    "pass",
    "low",
    "refused",
    "fail",
    "wrong",
    "does not run",
    "exception",
    "crash",
    "timeout",
    "absent",
)
_SHOWN = {"ours": "tpu2edge", "bare": "bare litert-torch"}


def _cell(row: Row | None) -> str:
    if row is None:
        return "not run"
    db = f" {row['db']:.1f} dB" if "db" in row else ""
    floor = f" ({row['floor']:.0f})" if db and row.get("floor") is not None else ""
    return f"{row['state']}{db}{floor}, {row['seconds']:.0f} s"


if __name__ == "__main__":
    main()
