from __future__ import annotations

import json

import pytest

from tpu2edge.cli.printing import print_diagnosis, print_json, size_text
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
