"""Child processes: what is said of how they ended."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tpu2edge.children import ending, signal_name
from tpu2edge.errors import DataError, error_from_json


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (0, "exit status 0"),
        (3, "exit status 3"),
        (-11, "signal SIGSEGV"),
        (-9, "signal SIGKILL"),
        (-40, "signal 40"),  # a real-time signal has no name
    ],
)
def test_every_ending_of_a_process_has_words(status, words):
    assert ending(status) == words


def test_a_process_that_a_nameless_signal_ends_is_told_by_number():
    code = "import os; os.kill(os.getpid(), 40)"
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert signal_name(-done.returncode) == "signal 40"


CHILD = """
from tpu2edge.children import run_child
from tpu2edge.errors import DataError

def counts(progress):
    print("native code prints")
    progress("count", 1, 2)
    return {"found": 3}

def refuses(progress):
    raise DataError("no sample", do="give one")

run_child(%s)
"""


def _events(work: str) -> list[Any]:
    done = subprocess.run(
        [sys.executable, "-c", CHILD % work], capture_output=True, text=True, check=True
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_child_sends_its_stages_and_its_result_and_nothing_else():
    assert _events("counts") == [
        {"event": "stage", "stage": "count", "done": 1, "total": 2},
        {"event": "result", "found": 3},
    ]


def test_a_childs_own_error_is_its_last_line():
    (event,) = _events("refuses")
    assert event.pop("event") == "error"
    error = error_from_json(event)
    assert isinstance(error, DataError)
    assert (error.what, error.do) == ("no sample", "give one")
