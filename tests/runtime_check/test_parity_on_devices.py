"""A file on another device than this machine: what it may add, what it adds, and what it shows."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tpu2edge.files import sha256_of
from tpu2edge.runtime_check.budget import Budget, default_budget
from tpu2edge.runtime_check.devices.client import Session
from tpu2edge.runtime_check.devices.profiles import Profile, load_profile, profile_named
from tpu2edge.runtime_check.parity import ParityReport, check_model
from tpu2edge.runtime_check.reference import Reference, ReferenceWriter
from tpu2edge.types import EdgeModel, Sample, Signature, TensorSpec, Verdict

F = np.float32
# Powers of two: what the file computes is exact.
WEIGHT = np.full((3, 3), 2, F)
SHIFT = np.full((3, 3), 0.5, F)
SAMPLES = (np.random.default_rng(0).integers(-64, 64, (4, 3, 3)) / 64).astype(F)
RANGE = float(np.ptp(2 * SAMPLES))
SPECS = tuple(TensorSpec(name=n, shape=(3, 3), dtype="float32") for n in ("scaled", "shifted"))
X = TensorSpec(name="x", shape=(3, 3), dtype="float32")
FLOAT = default_budget("float32")


def truth(x: np.ndarray) -> dict[str, np.ndarray]:
    return {"scaled": x * WEIGHT, "shifted": x + SHIFT}


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def model(make_affine) -> EdgeModel:
    path = make_affine(WEIGHT, SHIFT)
    return EdgeModel(
        path=path,
        signatures=(),
        recipe="float32",
        sha256=sha256_of(path),
        size_bytes=path.stat().st_size,
    )


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> Reference:
    folder = tmp_path_factory.mktemp("reference")
    signature = Signature(name="serving_default", inputs=(X,), outputs=SPECS)
    with ReferenceWriter(
        folder, signature, provider="eager", precision="f32", data={"kind": "given"}
    ) as writer:
        for index, x in enumerate(SAMPLES):
            writer.add(Sample(id=f"s{index}", inputs={"x": x}), truth(x))
    return Reference.load(folder)


@pytest.fixture
def phone(tmp_path) -> Callable[[float], Profile]:
    """A profile that may add that share of the range to a float file."""

    def make(may_add: float = 0.0, env: str = "") -> Profile:
        file = tmp_path / "phone.toml"
        # Some variable: with the host's own settings it would be the host, and share its outputs.
        file.write_text(
            f'description = "a phone"\nrunner = "host"\n[env]\nPHONE = "1"\n{env}\n'
            f'[tolerance]\nclass = "rounding"\nreason = "a test"\nfloat = {may_add}\n'
        )
        return load_profile(file)

    return make


Change = Callable[[Session, int, np.ndarray], np.ndarray]


@pytest.fixture
def changed(monkeypatch) -> Callable[[Change], list[int]]:
    """Has the phone give other numbers for 'scaled'; the list counts its samples."""
    real = Session.run

    def install(change: Change) -> list[int]:
        seen: list[int] = []

        def run(self: Session, signature: str, samples: Any) -> Iterator[dict[str, Any]]:
            for out in real(self, signature, samples):
                if self.device == "phone":
                    out = {**out, "scaled": change(self, len(seen), out["scaled"])}
                    seen.append(len(seen))
                yield out

        monkeypatch.setattr(Session, "run", run)
        return seen

    return install


def shifted_by(share: float) -> Change:
    return lambda session, index, out: (out + F(share * RANGE)).astype(F)


def share_of_signal(move: float) -> float:
    """The norm of ``move`` of the range in every element, over that of the faintest sample."""
    return max(3 * move * RANGE / float(np.linalg.norm(2 * x)) for x in SAMPLES)


def test_the_budget_gets_what_the_device_may_add(model, reference, phone, changed):
    changed(shifted_by(0.004))
    strict = check_model(model, reference, FLOAT, profile=phone(0.0))
    assert strict.verdict is Verdict.FAIL
    relaxed = check_model(model, reference, FLOAT, profile=phone(0.02))
    assert relaxed.verdict is Verdict.PASS
    # 1e-4 + 0.02 of the range; of the signal it is what the phone really moved it by, 0.004.
    wanted = math.floor(-2000 * math.log10(1e-4 + share_of_signal(0.004))) / 100
    assert 36 < wanted < 40
    case = relaxed.case("scaled", device="phone")
    assert case.budget == f"range_error<=0.0201,sqnr>={wanted:g}dB"
    assert relaxed.case("shifted", device="phone").budget == "range_error<=0.0201,sqnr>=80dB"
    assert check_model(model, reference, FLOAT, profile=phone(0.002)).verdict is Verdict.FAIL


def test_a_device_that_moves_every_element_by_what_it_may_add_passes(
    model, reference, phone, changed
):
    """The range is a few times the signal's size: so much of the range is more of the signal."""
    changed(shifted_by(0.0099))
    report = check_model(model, reference, FLOAT, profile=phone(0.01))
    case = report.case("scaled", device="phone")
    assert case.metrics is not None
    assert case.metrics.sqnr_db_worst == pytest.approx(
        -20 * math.log10(share_of_signal(0.0099)), abs=1e-3
    )
    assert case.metrics.sqnr_db_worst < -20 * math.log10(0.01)
    assert case.verdict is Verdict.PASS


def test_one_element_is_excused_for_no_more_than_the_device_may_add(
    model, reference, phone, changed
):
    """Else one element in a million could be anything: the norm hardly knows of it."""
    sqnr_only = Budget.parse("sqnr>=20dB")

    def moved_by(share: float) -> Change:
        def change(session: Session, index: int, out: np.ndarray) -> np.ndarray:
            out = out.copy()
            out[1, 1] += F(share * RANGE)
            return out

        return change

    noise = -20 * math.log10(share_of_signal(0.3) / 3)
    assert noise < 20
    changed(moved_by(0.3))
    within = check_model(model, reference, sqnr_only, profile=phone(0.3))
    assert within.case("scaled", device="phone").verdict is Verdict.PASS
    beyond = check_model(model, reference, sqnr_only, profile=phone(0.01))
    case = beyond.case("scaled", device="phone")
    assert case.verdict is Verdict.FAIL
    limit = math.floor(-2000 * math.log10(0.1 + share_of_signal(0.01) / 3)) / 100
    assert case.budget == f"sqnr>={limit:g}dB"


def test_the_conversion_is_not_blamed_for_what_a_device_may_add(model, reference, phone, changed):
    """Against a TPU's outputs a float file is held to the float32 module besides."""
    changed(shifted_by(0.001))

    def check(may_add: float) -> ParityReport:
        return check_model(
            model,
            reference,
            Budget.parse("sqnr>=10dB"),
            eager=reference,
            conversion=FLOAT,
            profile=phone(may_add),
        )

    assert check(0.005).verdict is Verdict.PASS
    case = check(0.0).case("scaled", device="phone")
    assert {reason.code for reason in case.reasons} == {"conversion"}


def test_what_a_device_may_add_is_by_the_kind_of_recipe(phone):
    profile = profile_named("arm-v8.2-dotprod")
    added = [profile.tolerance.range_error(r) for r in ("float32", "float16", "dynamic_wi8_afp32")]
    assert added == [1e-5, 1e-5, 2e-2]


def test_a_bound_of_the_users_on_another_figure_stays(model, reference, phone, changed):
    changed(shifted_by(0.004))
    budget = Budget.parse("scaled:max_abs<=0.001", base=FLOAT)
    report = check_model(model, reference, budget, profile=phone(0.02))
    case = report.case("scaled", device="phone")
    assert case.verdict is Verdict.FAIL
    assert "max_abs" in case.reasons[0].text


def test_the_devices_step_is_split_off_with_its_size(model, reference, phone, changed):
    changed(shifted_by(0.004))
    report = check_model(model, reference, FLOAT, oracle=reference, profile=phone(0.02))
    case = report.case("scaled", device="phone")
    signal = float(sum((truth(x)["scaled"].astype(float) ** 2).sum() for x in SAMPLES))
    noise = SAMPLES.size * (0.004 * RANGE) ** 2
    assert case.split is not None
    assert case.split.device_db == pytest.approx(10 * math.log10(signal / noise), abs=1e-3)
    assert case.split.conversion_db == math.inf
    assert case.split.largest == "device"
    assert case.against_host is not None
    assert case.against_host.range_error == pytest.approx(0.004, rel=1e-5)
    other = report.case("shifted", device="phone")
    assert other.split is not None
    assert other.split.device_db == math.inf
    host = check_model(model, reference, FLOAT, oracle=reference, profile=profile_named("host"))
    case = host.case("scaled")
    assert case.against_host is None
    assert case.split is not None
    assert case.split.device_db is None


def test_a_device_that_changes_the_verdict_is_told_in_words(model, reference, phone, changed):
    changed(shifted_by(0.004))
    host = check_model(model, reference, FLOAT, profile=profile_named("host"))
    both = host.merged(check_model(model, reference, FLOAT, profile=phone(0.0)))
    assert both.device_words == (
        "float32, 'scaled': PASS on host, FAIL on phone, whose kernels move it by 0.004 of its range",
    )
    assert both.to_json()["device_words"] == list(both.device_words)
    alike = host.merged(check_model(model, reference, FLOAT, profile=phone(0.02)))
    assert alike.device_words == ()


def test_a_worker_that_dies_at_its_start_is_an_error_for_all_outputs(
    model, reference, phone, tmp_path
):
    (tmp_path / "sitecustomize.py").write_text("import os\nos.kill(os.getpid(), 11)\n")
    profile = phone(env=f'PYTHONPATH = "{tmp_path}"')
    report = check_model(model, reference, FLOAT, profile=profile, device_checks=True)
    assert report.verdict is Verdict.ERROR
    assert report.exit_code == 4
    for case in report.cases:
        assert case.device == "phone"
        assert case.verdict is Verdict.ERROR
        assert case.reasons[0].code == "device-start"
        assert "SIGSEGV" in case.reasons[0].text
    assert check_model(model, reference, FLOAT).verdict is Verdict.PASS


REFUSES = """
import ai_edge_litert.interpreter as module

def refuse(*args, **options):
    raise RuntimeError("Node number 3 (CONV_2D) failed to prepare. Failed to initialize kernel.")

module.Interpreter = refuse
"""


def test_a_device_that_cannot_load_a_good_file_is_told_as_the_devices_fault(
    model, reference, phone, tmp_path
):
    (tmp_path / "sitecustomize.py").write_text(REFUSES)
    profile = phone(env=f'PYTHONPATH = "{tmp_path}"')
    report = check_model(model, reference, FLOAT, profile=profile)
    assert report.exit_code == 4
    for case in report.cases:
        assert (case.verdict, case.reasons[0].code) == (Verdict.ERROR, "device-load")
        first, told, following = case.reasons[0].text.splitlines()
        assert "LiteRT on device 'phone' cannot load" in first
        assert first.endswith("Failed to initialize kernel.")
        assert told == (
            "    the same file runs on this machine: LiteRT on device 'phone' cannot load it, by a "
            "limit or fault of its own; the file is not damaged"
        )
        assert following == "  Next: another recipe may work on 'phone'; else leave it out"


def test_a_file_that_runs_nowhere_is_told_so(reference, phone, tmp_path):
    path = tmp_path / "text.tflite"
    path.write_text("this is no flatbuffer")
    text = EdgeModel(path=path, signatures=(), recipe="float32", sha256="", size_bytes=21)
    (case, _) = check_model(text, reference, FLOAT, profile=phone()).cases
    assert "it does not run on this machine either: LiteRT on device 'host'" in case.reasons[0].text
    assert "not damaged" not in case.reasons[0].text


# ------------------------------------------------------------------------- what only a device shows


def test_figures_of_a_device_are_in_the_report(model, reference, phone):
    report = check_model(model, reference, FLOAT, profile=phone(), device_checks=True)
    (found,) = report.devices.values()
    assert list(report.devices) == list(report.times) == [f"{model.path.name}@phone"]
    assert (found["recipe"], found["signature"]) == ("float32", "serving_default")
    assert found["repeatable"] is True
    assert found["thread_range_error"] == {"scaled": 0.0, "shifted": 0.0}
    assert found["threads"] == 4
    assert found["delegated"] is True
    assert found["load_ms"] > 0
    assert found["steady_ms"] > 0
    data = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert ParityReport.from_json(data).devices == report.devices
    assert "devices" not in report.to_json(times=False)
    assert check_model(model, reference, FLOAT, profile=phone()).devices == {}


def test_an_output_that_is_not_repeated_fails_unless_the_device_may_add_as_much(
    model, reference, phone, changed
):
    changed(lambda session, index, out: (out + F(1e-3 * RANGE * (index == 4))).astype(F))
    report = check_model(model, reference, FLOAT, profile=phone(0.0), device_checks=True)
    case = report.case("scaled", device="phone")
    assert case.verdict is Verdict.FAIL
    assert [reason.code for reason in case.reasons] == ["not-repeatable"]
    assert "the same input gave another output the second time, by 0.0" in case.reasons[0].text
    assert report.case("shifted", device="phone").verdict is Verdict.PASS
    (found,) = report.devices.values()
    assert found["repeatable"] is False


def test_one_that_is_not_repeated_within_what_is_allowed_is_a_note(
    model, reference, phone, changed
):
    changed(lambda session, index, out: (out + F(1e-3 * RANGE * (index == 4))).astype(F))
    report = check_model(model, reference, FLOAT, profile=phone(0.02), device_checks=True)
    case = report.case("scaled", device="phone")
    assert case.verdict is Verdict.PASS
    assert [reason.code for reason in case.reasons] == ["flag-not-repeatable"]


def test_an_output_that_moves_with_the_threads_is_a_note(model, reference, phone, changed):
    changed(lambda session, index, out: out * F(1 + (session._threads == 4)))
    report = check_model(model, reference, FLOAT, profile=phone(0.0), device_checks=True)
    case = report.case("scaled", device="phone")
    assert case.verdict is Verdict.PASS
    assert [reason.code for reason in case.reasons] == ["flag-threads"]
    assert "1 and 4 threads differ by" in case.reasons[0].text


def test_checks_cost_two_samples_once_and_nothing_the_second_time(model, reference, phone, changed):
    seen = changed(lambda session, index, out: out)
    first = check_model(model, reference, FLOAT, profile=phone(), device_checks=True)
    assert len(seen) == len(SAMPLES) + 2
    second = check_model(model, reference, FLOAT, profile=phone(), device_checks=True)
    assert len(seen) == len(SAMPLES) + 2
    assert second.devices == first.devices
    assert second.to_json() == first.to_json()
