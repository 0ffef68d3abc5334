"""A sample of the zoo that `benchmarks/zoo.py` measures: one-KV-head decoders are wrong without us."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ZOO = Path(__file__).parents[2] / "benchmarks" / "zoo.py"


def zoo(results: Path, *options: str) -> str:
    command = [sys.executable, "-W", "ignore", str(ZOO), "--results", str(results), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def rows(results: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in results.read_text().splitlines()]


def test_models_of_the_zoo_pass_and_are_not_run_twice(tmp_path: Path) -> None:
    results = tmp_path / "zoo.jsonl"
    sample = ("--sides", "ours", "--only", "transformers/GemmaConfig,transformers/FNetConfig")
    zoo(results, *sample)
    found = {row["name"]: row for row in rows(results)}
    assert sorted(found) == ["transformers/FNetConfig", "transformers/GemmaConfig"]
    for row in found.values():
        assert row["state"] == "pass", row
        assert row["db"] >= 100, row
        assert row["floor"] >= 100, row
    assert zoo(results, *sample) == ""
    assert len(rows(results)) == 2


def test_the_table_counts_the_last_row_of_a_model_and_tells_why(tmp_path: Path) -> None:
    results, table = tmp_path / "zoo.jsonl", tmp_path / "zoo.md"
    common = {"date": "2026-12-01", "versions": {"torch": "2.14.1"}, "seconds": 1.0}
    lines = [
        {"name": "timm/a", "side": "ours", "state": "timeout", **common},
        {"name": "timm/a", "side": "ours", "state": "pass", "db": 120.04, "floor": 130.2, **common},
        {"name": "timm/a", "side": "bare", "state": "wrong", "db": 9.0, "floor": 130.2, **common},
        {"name": "timm/b", "side": "ours", "state": "refused", "why": "no | form", **common},
        {"name": "timm/b", "side": "bare", "state": "pass", "db": 110.0, **common},
        {"name": "timm/c", "side": "ours", "state": "low", "db": 90.0, "floor": 91.0, **common},
        {"name": "timm/c", "side": "bare", "state": "crash", **common},
    ]
    results.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"name": "timm/d"')
    zoo(results, "--table", str(table))
    text = table.read_text()
    assert "| timm/a | pass 120.0 dB (130), 1 s | wrong 9.0 dB (130), 1 s |  |" in text
    assert "| timm/b | refused, 1 s | pass 110.0 dB, 1 s | no / form |" in text
    assert "Of the 2 models that bare litert-torch does not pass, tpu2edge passes 1." in text
    assert "Of those that it passes, tpu2edge does not pass 1: timm/b." in text
    assert "torch 2.14.1" in text
