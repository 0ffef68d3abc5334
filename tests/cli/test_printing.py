from __future__ import annotations

import json
from typing import Any

import pytest

from tpu2edge.cli.printing import print_diagnosis, print_json, print_search, size_text
from tpu2edge.doctor import Diagnosis, Package, Smoke


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (999_960, "1.0 MB"),
        (6_200_000, "6.2 MB"),
        (2_300_000_000, "2.3 GB"),
        (5_000_000_000_000, "5000.0 GB"),
    ],
)
def test_sizes_are_decimal_and_never_show_a_thousand_of_a_unit(size: int, text: str) -> None:
    assert size_text(size) == text


def test_json_has_words_for_what_json_cannot_say(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": float("nan"), "b": [float("inf"), -float("inf")], "c": (1.5,)})
    assert json.loads(capsys.readouterr().out) == {
        "a": "NaN",
        "b": ["Infinity", "-Infinity"],
        "c": [1.5],
    }


def test_a_diagnosis_that_says_no_ends_with_what_to_install(
    capsys: pytest.CaptureFixture[str],
) -> None:
    torch = Package(name="torch", installed=None, tested="2.13.0", needed=True)
    found = Diagnosis(
        version="0",
        python="3",
        platform="",
        packages=(torch,),
        litert=Smoke(ok=True, text=""),
        facilities=(),
    )
    print_diagnosis(found)
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "tpu2edge check, tpu2edge devices and the pytest plugin can run here",
        "tpu2edge export cannot run here: missing torch",
        "next: pip install 'tpu2edge[export]' torch==2.13.0",
    ]


def searched(recipe: str, size: int, **more: Any) -> dict[str, Any]:
    figures = {"margin_db": 1.0, "sqnr_db": 36.0, "latency_ms": 0.5, "metrics": {}}
    row = {
        "recipe": recipe,
        "levels": {},
        "ranges": None,
        "size_bytes": size,
        "searched": figures,
        "held_out": None,
        "met": True,
        "pareto": True,
    }
    return {**row, **more}


def test_the_table_of_a_search_marks_the_one_file_that_was_chosen(
    capsys: pytest.CaptureFixture[str],
) -> None:
    base = searched("float32", 1000, searched={"margin_db": 9, "sqnr_db": "inf", "latency_ms": 1.0})
    failed = {"margin_db": -2.5, "sqnr_db": 32.5, "latency_ms": 0.5, "metrics": {}}
    rows = [
        searched("auto", 200, levels={"int8-weights": 2}, met=False, held_out=failed),
        searched("int8-static", 300, ranges="minmax", held_out={**failed, "margin_db": 0.1}),
        searched("int8-static", 300, ranges="mse"),
        searched("int8", 400, pareto=False),
        base,
    ]
    print_search({"evaluations": 7, "float32": base, "best": rows[1], "rows": rows})
    out = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[0].startswith("7 files were run")
    assert "2 int8-weights 200 B 20.0% 36.0 32.5 0.5 0.50 missed by 2.5 dB" in lines
    assert "→ int8-static (minmax) 300 B 30.0% 36.0 32.5 0.5 0.50 met" in lines
    assert "int8-static (mse) 300 B 30.0% 36.0 – 0.5 0.50 met" in lines
    assert "float32 1.0 kB 100.0% equal – 1 1.00 met" in lines
    assert out.count("→") == 1
    assert "400 B" not in out  # another file beats it in all three
