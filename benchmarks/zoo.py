"""Coverage of public model zoos: tpu2edge beside bare litert-torch, each model in its own process.

    python benchmarks/zoo.py [--only PATTERN] [--limit SECONDS] [--table FILE] [--make-venv DIR]

A model counts as ``pass`` when its worst output is at least 100 dB (SQNR) from eager, which itself is
checked against float64; ``refused`` when a Tpu2EdgeError says why; ``fail`` when tpu2edge reports the
wrong numbers itself; ``wrong`` when numbers are wrong without a word; else ``exception``, ``crash`` or
``timeout``. torchvision and timm need another torch: ``--make-venv`` makes an environment for them.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

PASS_DB = 100.0
_VENV = ("torch==2.14.1", "torchvision==0.29.1", "timm", "transformers")


def measure(name: str, side: str) -> dict[str, Any]:
    """In the child: one model through one side."""
    import torch
    from zoo_models import MODELS

    torch.manual_seed(0)
    try:
        module, args = MODELS[name]()
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        return {"state": "absent", "why": f"{type(error).__name__}: {error}"[:160]}
    with tempfile.TemporaryDirectory() as folder:
        return (_ours if side == "ours" else _bare)(module, args, Path(folder))


def _ours(module: Any, args: Any, folder: Path) -> dict[str, Any]:
    import tpu2edge

    try:
        made = tpu2edge.export_model(module, args, output=folder / "out", num_samples=2)
    except tpu2edge.Tpu2EdgeError as error:
        return {"state": "refused", "why": f"{error.what} [{error.place}]"[:240]}
    worst = min(
        (
            c.metrics.sqnr_db_worst
            for c in made.report.cases
            if c.metrics and c.metrics.sqnr_db_worst
        ),
        default=float("inf"),
    )
    if str(made.verdict) != "PASS":
        return {"state": "fail", "why": made.report.cases[0].reasons[0].text[:160], "db": worst}
    return {"state": "pass" if worst >= PASS_DB else "low", "db": worst}


def _bare(module: Any, args: Any, folder: Path) -> dict[str, Any]:
    import litert_torch
    import numpy as np
    import torch

    from tpu2edge.runtime_check.devices.client import Session
    from tpu2edge.runtime_check.metrics import sqnr_db

    with torch.no_grad():
        want = module(*args).numpy()
    try:
        litert_torch.convert(module, args).export(str(folder / "m.tflite"))
        inputs = {
            f"args_{i}": (a.int() if a.dtype is torch.int64 else a).numpy()
            for i, a in enumerate(args)
        }
        with Session(folder / "m.tflite") as session:
            got = next(iter(session.run(session.signatures[0].name, [inputs])))
    except Exception as error:  # noqa: BLE001 - whatever the other side raises is its result
        return {"state": "exception", "why": f"{type(error).__name__}: {error}"[:240]}
    db = float(sqnr_db(want, np.asarray(next(iter(got.values())))))
    return {"state": "pass" if db >= PASS_DB else "wrong", "db": db}


def run(name: str, side: str, limit: float, python: str) -> dict[str, Any]:
    """In the parent: the child's word, or what became of it."""
    begun = time.perf_counter()
    command = [python, "-W", "ignore", __file__, "--child", name, side]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith("@@")]
        found = (
            json.loads(lines[-1][2:]) if lines else {"state": "crash", "why": done.stderr[-200:]}
        )
    except subprocess.TimeoutExpired:
        found = {"state": "timeout"}
    return {**found, "seconds": round(time.perf_counter() - begun, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="*", help="pattern of names, e.g. 'transformers/*'")
    parser.add_argument(
        "--limit", type=float, default=600.0, help="seconds for each model and side"
    )
    parser.add_argument("--table", type=Path, help="write a Markdown table here")
    parser.add_argument("--make-venv", type=Path, help="environment for torchvision and timm")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print("@@" + json.dumps(measure(*options.child)), flush=True)
        return
    python = sys.executable
    if options.make_venv:
        python = str(options.make_venv / "bin" / "python")
        subprocess.run([sys.executable, "-m", "venv", str(options.make_venv)], check=True)
        root = str(Path(__file__).parents[1])
        subprocess.run([python, "-m", "pip", "install", "--quiet", *_VENV, root], check=True)
    from zoo_models import MODELS

    rows = []
    for name in fnmatch.filter(MODELS, options.only):
        sides = {side: run(name, side, options.limit, python) for side in ("ours", "bare")}
        rows.append((name, sides))
        shown = {side: f"{s['state']} {s.get('db', '')}" for side, s in sides.items()}
        print(name, shown, sides["ours"].get("why", ""), flush=True)
    counts: dict[str, dict[str, int]] = {"ours": {}, "bare": {}}
    for _, sides in rows:
        for side, one in sides.items():
            counts[side][one["state"]] = counts[side].get(one["state"], 0) + 1
    print("ours", counts["ours"], "| bare", counts["bare"])
    if options.table:
        options.table.write_text(_table(rows, counts))


def _table(rows: list[tuple[str, dict[str, Any]]], counts: dict[str, dict[str, int]]) -> str:
    def cell(one: dict[str, Any]) -> str:
        db = f" {one['db']:.1f} dB" if "db" in one else ""
        return f"{one['state']}{db}, {one['seconds']} s"

    packages = ", ".join(f"{p} {version(p)}" for p in ("torch", "litert-torch", "transformers"))
    lines = [
        "# Zoo",
        "",
        f"{time.strftime('%Y-%m-%d')}; {packages}. Made by `benchmarks/zoo.py`, which tells what counts.",
        "",
        f"tpu2edge: {counts['ours']}; bare litert-torch: {counts['bare']}",
        "",
        "| model | tpu2edge | bare litert-torch | why |",
        "|---|---|---|---|",
    ]
    for name, sides in rows:
        why = str(sides["ours"].get("why", "")).replace("|", "/").replace("\n", " ")
        lines.append(f"| {name} | {cell(sides['ours'])} | {cell(sides['bare'])} | {why} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
