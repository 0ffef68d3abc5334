"""A parity report as JUnit XML (xunit2), which every CI shows.

A FAIL is a ``failure`` (the numbers are outside of the budget), an ERROR an ``error`` (a device or a
tool broke), a device that could not be used here is ``skipped`` with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from tpu2edge.files import write_atomically
from tpu2edge.runtime_check.report.cases import CaseReport, ParityReport
from tpu2edge.types import Verdict

__all__ = ["junit_of", "write_junit"]

# XML 1.0 has no form for most control characters, and an output's name or a message can hold them.
_NO_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def write_junit(
    path: Path, report: ParityReport, *, suite: str, skipped: Mapping[str, str] | None = None
) -> None:
    """Write ``report`` to ``path``; arguments as in :func:`junit_of`."""
    write_atomically(path, junit_of(report, suite=suite, skipped=skipped))


def junit_of(report: ParityReport, *, suite: str, skipped: Mapping[str, str] | None = None) -> str:
    """The XML text: a test case for each case, called ``MODEL.DEVICE`` and ``SIGNATURE:OUTPUT``.

    Args:
        report: the cases.
        suite: name of the suite, a bundle's, say.
        skipped: devices that could not be used, with the reason: one skipped test case each.
    """
    cases = report.cases
    counts = {verdict: sum(case.verdict is verdict for case in cases) for verdict in Verdict}
    skipped = skipped or {}
    attributes = {
        "name": _clean(suite),
        "tests": str(len(cases) + len(skipped)),
        "failures": str(counts[Verdict.FAIL]),
        "errors": str(counts[Verdict.ERROR]),
        "skipped": str(len(skipped)),
        "time": f"{sum(_seconds(times) for times in report.times.values()):.3f}",
    }
    root = ET.Element("testsuites")
    element = ET.SubElement(root, "testsuite", attributes)
    properties = ET.SubElement(element, "properties")
    for name, value in (("reference", report.reference), ("samples", str(report.samples))):
        ET.SubElement(properties, "property", {"name": name, "value": _clean(value)})
    for case in cases:
        _add_case(element, case, report.times)
    for device, reason in skipped.items():
        made = ET.SubElement(
            element, "testcase", {"classname": _clean(device), "name": "device", "time": "0"}
        )
        ET.SubElement(made, "skipped", {"message": _clean(reason)})
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _add_case(suite: ET.Element, case: CaseReport, times: Mapping[str, Any]) -> None:
    key = f"{case.model}@{case.device}"
    found = times.get(f"{key}#{case.signature}") or times.get(key) or {}
    made = ET.SubElement(
        suite,
        "testcase",
        {
            "classname": _clean(f"{case.model.removesuffix('.tflite')}.{case.device}"),
            "name": _clean(f"{case.signature}:{case.output}"),
            "time": f"{_seconds(found):.3f}",
        },
    )
    reasons = [reason.text for reason in case.reasons if not reason.code.startswith("flag-")]
    flags = [reason.text for reason in case.reasons if reason.code.startswith("flag-")]
    numbers = [f"budget: {case.budget}"]
    if case.metrics is not None:
        numbers += [f"{name}: {value}" for name, value in case.metrics.to_json().items()]
    if case.task is not None:
        numbers.append(str(case.task))
    body = _clean("\n".join((*reasons, *numbers, *flags)))
    if case.verdict is Verdict.PASS:
        ET.SubElement(made, "system-out").text = body
        return
    is_error = case.verdict is Verdict.ERROR
    codes = [r.code for r in case.reasons if not r.code.startswith("flag-")]
    fault = ET.SubElement(
        made,
        "error" if is_error else "failure",
        {
            "message": _clean(reasons[0].splitlines()[0] if reasons else str(case.verdict)),
            "type": codes[0] if codes else str(case.verdict),
        },
    )
    fault.text = body


def _seconds(times: Mapping[str, Any]) -> float:
    """Load and run; both signatures of one file share its load."""
    return (float(times.get("load_ms", 0.0)) + float(times.get("total_ms", 0.0))) / 1e3


def _clean(text: str) -> str:
    return _NO_XML.sub("\ufffd", text)
