"""What only a device shows: repeatability, threads, what the delegate left, times and memory."""

from __future__ import annotations

import json

import numpy as np

from tpu2edge.runtime_check.devices.checks import _range_error, check_device
from tpu2edge.runtime_check.devices.client import Session
from tpu2edge.runtime_check.devices.profiles import profile_named


def test_figures_of_this_machine_and_of_an_emulated_core(ready, dense, dense_samples) -> None:
    host = check_device(dense[0], profile_named("host"), "serving_default", dense_samples[:5])
    arm = check_device(dense[0], ready("arm-v8.0"), "serving_default", dense_samples[:5])
    for found in (host, arm):
        assert found.repeatable
        assert set(found.thread_range_error) == {"y"}
        assert found.thread_range_error["y"] < 1e-6
        assert found.load_ms > 0
        assert found.steady_ms > 0
        assert found.first_ms > 0
        assert found.peak_rss_kb > 10_000
        assert found.delegated is True
        json.dumps(found.to_json(), allow_nan=False)
    assert not host.emulated
    assert arm.emulated
    assert "times are the emulator's, not a device's" in arm.notes
    assert host.coverage is not None
    assert (host.coverage.ops, host.coverage.left) == (10, ())
    assert arm.coverage is None
    assert arm.steady_ms > host.steady_ms


def test_operators_that_the_delegate_left_are_named(write_graph) -> None:
    path = write_graph(
        tensors={name: ("float32", [1, 4]) for name in ("x", "a", "b", "c")},
        ops=[("ADD", ["x", "x"], ["a"]), ("LOG_SOFTMAX", ["a"], ["b"]), ("MUL", ["b", "x"], ["c"])],
        inputs={"x": "x"},
        outputs={"c": "c"},
    )
    with Session(path) as session:
        coverage = session.coverage()
    assert coverage.ops == 3
    assert coverage.left == (("LOG_SOFTMAX", "b"),)
    with Session(path, kernels="builtin") as session:
        assert [op for op, _ in session.coverage().left] == ["ADD", "LOG_SOFTMAX", "MUL"]


def test_a_difference_is_told_over_the_range_and_nan_is_never_averaged_away() -> None:
    one = np.float32([0, 1, 2, 4])
    assert _range_error(one, one) == 0
    assert _range_error(one, one + np.float32([0, 0, 1, 0])) == 0.25
    assert _range_error(one, np.float32([0, 1, np.nan, 4])) == float("inf")
    assert _range_error(np.float32([2, 2]), np.float32([2, 3])) == 0.5
    assert _range_error(np.float32([np.nan]), np.float32([np.nan])) == 0
    assert _range_error(np.zeros((0, 2)), np.zeros((0, 2))) == 0
