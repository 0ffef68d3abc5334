"""x86 levels: CPUID says what it is told to say, and numbers follow."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from tpu2edge.errors import DeviceCrashError
from tpu2edge.runtime_check.devices import isa, qemu
from tpu2edge.runtime_check.devices.client import Session
from tpu2edge.runtime_check.devices.profiles import profile_named
from tpu2edge.runtime_check.devices.runners import StateKind, install_device, launch_of, state_of

# What NumPy reads from CPUID: the levels' own features, in words.
SHOWN = """
from numpy._core._multiarray_umath import __cpu_features__ as f
print(*(f[name] for name in ("SSE41", "AVX", "AVX2", "FMA3", "AVX512F")))
"""

needs_faulting = pytest.mark.skipif(
    not isa.can_fault_on_cpuid(),
    reason="this machine cannot fault on CPUID; the test under QEMU runs in its place",
)


@needs_faulting
@pytest.mark.parametrize(
    ("level", "words"),
    [
        ("sse41", "True False False False False"),
        ("avx", "True True False False False"),
        ("avx2", "True True True True False"),
    ],
)
def test_a_process_sees_the_features_of_its_level_only(level: str, words: str) -> None:
    launch = launch_of(profile_named("laptop-avx2"))
    env = {**os.environ, **launch.env, "TPU2EDGE_ISA": level}
    done = subprocess.run(
        [sys.executable, "-c", SHOWN], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == words


@needs_faulting
def test_other_kernels_give_other_float_numbers_and_the_same_level_the_same(
    ready, dense, dense_samples, run_on
) -> None:
    samples = dense_samples[:4]
    host = run_on(dense[0], samples)
    sse = run_on(dense[0], samples, launch_of(ready("laptop-sse41")))
    again = run_on(dense[0], samples, launch_of(ready("laptop-sse41")))
    for one, other, same in zip(host, sse, again, strict=True):
        error = np.abs(one["y"] - other["y"]).max() / np.ptp(one["y"])
        assert 0 < error < 1e-5  # without FMA each product is rounded
        assert other["y"].tobytes() == same["y"].tobytes()


@needs_faulting
def test_an_unknown_level_ends_the_worker_with_a_word(small_tflite) -> None:
    launch = launch_of(profile_named("laptop-avx2"))
    launch = replace(launch, env={**launch.env, "TPU2EDGE_ISA": "mmx"})
    with pytest.raises(DeviceCrashError, match="exit status 97") as error:
        Session(small_tflite, launch=launch)
    assert "unknown level 'mmx'" in str(error.value)


def test_a_level_that_the_cpu_itself_lacks_is_impossible(monkeypatch) -> None:
    monkeypatch.setattr(isa, "can_fault_on_cpuid", lambda: True)
    monkeypatch.setattr(isa, "_cpu_flags", lambda: {"avx2", "fma", "f16c", "avx512f"})
    state = state_of(profile_named("laptop-avx512"))
    assert state.kind is StateKind.IMPOSSIBLE
    assert "this CPU itself has no avx512bw, avx512dq, avx512vl" in state.text
    assert state_of(profile_named("laptop-avx2")).ready


def test_where_qemu_stands_in_a_memory_limit_is_refused_since_nothing_would_hold_it(
    monkeypatch,
) -> None:
    monkeypatch.setattr(isa, "can_fault_on_cpuid", lambda: False)
    state = state_of(replace(profile_named("laptop-avx2"), memory_mb=256))
    assert state.kind is StateKind.IMPOSSIBLE
    assert "QEMU cannot hold an x86-64 process to memory_mb" in state.text


@pytest.mark.slow
def test_where_cpuid_cannot_be_answered_qemu_stands_in_with_a_word(
    monkeypatch, dynamic_tflite, run_on
) -> None:
    monkeypatch.setattr(isa, "can_fault_on_cpuid", lambda: False)
    assert state_of(profile_named("laptop-avx512")).kind is StateKind.IMPOSSIBLE
    profile = profile_named("laptop-sse41")
    assert "3,000 times slower" in state_of(profile).slow
    assert install_device(profile).ready
    launch = launch_of(profile)
    assert launch.emulated
    assert launch.command[0] == qemu.emulator("qemu-x86_64")["path"]
    (outputs,) = run_on(dynamic_tflite, [{"x": np.float32([[1, 2]])}], launch, timeout_s=200)
    np.testing.assert_array_equal(outputs["scaled"], [[2, 4]])
