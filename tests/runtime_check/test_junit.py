"""JUnit XML: what CI systems count, and what a reader of a red build sees."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from tpu2edge.runtime_check.metrics import OutputMeter
from tpu2edge.runtime_check.report.cases import CaseReport, ParityReport, Reason
from tpu2edge.runtime_check.report.junit import junit_of, write_junit
from tpu2edge.types import Verdict


def case(verdict: Verdict, *reasons: Reason, output: str = "logits") -> CaseReport:
    meter = OutputMeter()
    meter.add("s", np.array([3.0, 4.0]), np.array([3.0, 4.5]))
    return CaseReport(
        model="model.int8.tflite",
        recipe="int8",
        device="arm-v8.0",
        signature="serving_default",
        output=output,
        verdict=verdict,
        budget="sqnr>=30dB",
        reasons=reasons,
        metrics=meter.metrics(),
    )


REPORT = ParityReport(
    cases=(
        case(Verdict.PASS, Reason(code="flag-constant", text="proves little")),
        case(Verdict.FAIL, Reason(code="budget", text="sqnr 20 dB, wanted at least 30 dB")),
        case(Verdict.ERROR, Reason(code="device-run", text="died by SIGSEGV\n    tail\x00")),
    ),
    reference="eager",
    data_kind="files",
    samples=1,
    times={"model.int8.tflite@arm-v8.0": {"load_ms": 250.0, "total_ms": 1000.0}},
)


@pytest.fixture
def suite() -> ET.Element:
    root = ET.fromstring(junit_of(REPORT, suite="out", skipped={"adb": "no phone is connected"}))
    found = root.find("testsuite")
    assert found is not None
    return found


def test_the_suite_counts_failures_errors_and_skips(suite):
    counts = {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped", "time")}
    assert counts == {
        "tests": "4",
        "failures": "1",
        "errors": "1",
        "skipped": "1",
        "time": "1.250",
    }


def test_each_case_is_a_test_with_its_device_and_output(suite):
    names = [(c.get("classname"), c.get("name")) for c in suite.iter("testcase")]
    assert names[:3] == [("model.int8.arm-v8.0", "serving_default:logits")] * 3
    assert names[3] == ("adb", "device")


def test_a_failure_tells_wanted_and_got_and_the_numbers(suite):
    failure = suite.find("testcase/failure")
    assert failure is not None
    assert failure.get("message") == "sqnr 20 dB, wanted at least 30 dB"
    assert failure.get("type") == "budget"
    assert "budget: sqnr>=30dB" in (failure.text or "")
    assert "sqnr_db_worst: 20.0" in (failure.text or "")


def test_a_broken_device_is_an_error_and_its_control_characters_do_no_harm(suite):
    error = suite.find("testcase/error")
    assert error is not None
    assert error.get("message") == "died by SIGSEGV"
    assert "tail\ufffd" in (error.text or "")


def test_the_file_is_written(tmp_path: Path):
    write_junit(tmp_path / "report.xml", REPORT, suite="out")
    assert ET.parse(tmp_path / "report.xml").getroot().tag == "testsuites"
