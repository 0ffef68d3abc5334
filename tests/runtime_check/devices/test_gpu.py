"""LiteRT's GPU accelerator on Mesa's lavapipe: right numbers, what it leaves out, how to get it."""

from __future__ import annotations

import dataclasses
import json
import shutil

import numpy as np
import pytest

from tpu2edge.errors import DeviceError, OptionError, UnwrittenError
from tpu2edge.runtime_check.budget import default_budget
from tpu2edge.runtime_check.devices import gpu, install, runners
from tpu2edge.runtime_check.devices.checks import check_device
from tpu2edge.runtime_check.devices.client import Coverage, Session
from tpu2edge.runtime_check.devices.profiles import profile_named
from tpu2edge.runtime_check.devices.runners import StateKind
from tpu2edge.runtime_check.parity import check_model
from tpu2edge.runtime_check.reference import Reference, ReferenceWriter
from tpu2edge.types import EdgeModel, Sample

needs_apt = pytest.mark.skipif(
    shutil.which("apt-get") is None and gpu._own_driver() is None,
    reason="neither apt nor Mesa 25 is here: a Debian machine would run it",
)
F32 = profile_named("gpu-webgpu-f32")
F16 = profile_named("gpu-webgpu-f16")


@pytest.fixture(scope="session")
def installed():
    """The user's own cache has Mesa in it: it takes seconds once, and shaders are kept there."""
    found = runners.install_device(F32)
    assert found.ready
    assert found.text.startswith("Mesa 2")


@needs_apt
@pytest.mark.parametrize(
    ("recipe", "most"),
    [
        ("float32", 1e-6),  # measured 1.8e-7
        # Measured 5e-3: the GPU does not quantize activations, the CPU does.
        pytest.param("dynamic_wi8_afp32", 2e-2, marks=pytest.mark.slow),
        pytest.param("static_wi8_ai8", 1 / 255, marks=pytest.mark.slow),  # measured 0; one step
    ],
)
def test_outputs_in_float32_are_those_of_this_machine(
    installed, small_files, distance_to_host, recipe, most
):
    found = distance_to_host(small_files[recipe], runners.launch_of(F32))
    assert set(found) == {"logits", "features"}
    assert max(found.values()) <= most


@needs_apt
def test_outputs_in_float16_are_near_those_and_not_the_same(
    installed, small_files, distance_to_host
):
    found = distance_to_host(small_files["float32"], runners.launch_of(F16))
    assert 1e-4 < max(found.values()) < 1e-2  # measured 1.2e-3; one rounding is 5e-4


@needs_apt
def test_an_output_that_the_gpu_leaves_unwritten_is_an_error_of_that_output(
    installed, small_tflite
):
    path = small_tflite.with_name("scaled_output.float32.tflite")
    sample = {"x": np.random.default_rng(0).standard_normal((1, 16)).astype("float32")}
    with Session(path) as host:
        (wanted,) = host.run("serving_default", [sample])
    np.testing.assert_allclose(wanted["half"], wanted["plain"] / 2)
    with (
        Session(path, launch=runners.launch_of(F32)) as session,
        pytest.raises(UnwrittenError, match="left 16 of 16 elements of output 'plain'"),
    ):
        list(session.run("serving_default", [sample]))


@needs_apt
def test_what_only_the_gpu_cannot_do_is_told_as_the_accelerators_limit(
    installed, small_tflite, tmp_path
):
    path = small_tflite.with_name("scaled_output.float32.tflite")
    sample = {"x": np.random.default_rng(0).standard_normal((1, 16)).astype("float32")}
    with Session(path) as host:
        (signature,) = host.signatures
        (outputs,) = host.run("serving_default", [sample])
    with ReferenceWriter(
        tmp_path / "reference", signature, provider="eager", precision="f32", data={"kind": "given"}
    ) as writer:
        writer.add(Sample(id="s0", inputs=sample), outputs)
    model = EdgeModel(path=path, signatures=(), recipe="float32", sha256="", size_bytes=1)
    reference = Reference.load(tmp_path / "reference")
    report = check_model(model, reference, default_budget("float32"), profile=F32)
    for case in report.cases:
        text = case.reasons[0].text
        assert "left 16 of 16 elements of output 'plain'" in text
        assert "the same file runs on this machine: LiteRT's GPU accelerator cannot run it" in text
        assert text.endswith("else run this file on the CPU there")


@needs_apt
def test_operators_that_fall_back_to_the_cpu_are_told_with_the_reason(installed, fallback_tflite):
    launch = runners.launch_of(F32)
    with Session(fallback_tflite, launch=launch) as session:
        (out,) = session.run("serving_default", [{"x": np.float32([[1, 2, 3, -4]])}])
        found = session.coverage()
    np.testing.assert_array_equal(out["w"], [[4, 6, 8, -6]])
    reason = "No support of few identical inputs in the same operation."
    assert found == Coverage(ops=3, left_ops=2, left=(("MAXIMUM", reason),))


@pytest.mark.slow
@needs_apt
def test_the_checks_of_a_device_see_a_whole_graph_on_the_gpu(installed, small_tflite):
    samples = [{"image": np.full((1, 2, 6, 6), 0.5, np.float32)}] * 2
    found = check_device(small_tflite, F32, "serving_default", samples)
    assert found.repeatable
    assert found.emulated
    assert found.delegated
    assert found.coverage is not None
    assert found.coverage.left_ops == 0
    assert found.coverage.ops >= 5


@pytest.mark.slow
@needs_apt
def test_signatures_and_sizes_that_change_run_on_the_gpu(
    installed, two_signatures_tflite, dynamic_tflite
):
    launch = runners.launch_of(F32)
    x = np.array([1, 3], np.float32)
    with Session(two_signatures_tflite, launch=launch) as session:
        (encoded,) = session.run("encode", [{"x": x}])
        (decoded,) = session.run("decode", [{"x": x}])
    np.testing.assert_array_equal(encoded["scaled"], [2, 6])
    np.testing.assert_array_equal(decoded["shifted"], [6, 8])
    samples = [{"x": np.arange(2 * n, dtype=np.float32).reshape(n, 2)} for n in (1, 3, 2)]
    with Session(dynamic_tflite, launch=launch) as session:
        for sample, out in zip(samples, session.run("serving_default", samples), strict=True):
            np.testing.assert_array_equal(out["scaled"], 2 * sample["x"])


@needs_apt
def test_without_a_vulkan_driver_it_fails_and_never_runs_on_the_cpu_instead(
    installed, small_tflite
):
    launch = runners.launch_of(F32)
    blind = dataclasses.replace(
        launch, env={**launch.env, "VK_DRIVER_FILES": "/none", "VK_ICD_FILENAMES": "/none"}
    )
    with pytest.raises(DeviceError, match="No adapters found"):
        Session(small_tflite, launch=blind)


# ------------------------------------------------------------------------------------ the state


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kernels": "reference"}, "no kernels or XNNPACK flags"),
        ({"runtime": "interpreter"}, "for CompiledModel only"),
    ],
)
def test_a_profile_that_a_gpu_cannot_follow_is_told_why(change, words):
    found = gpu.state(dataclasses.replace(F32, **change))
    assert found.kind is StateKind.IMPOSSIBLE
    assert words in found.text


@pytest.mark.parametrize("options", [{"enforce_f32": "yes"}, {"precision": "f16"}])
def test_an_unknown_option_is_refused(options):
    with pytest.raises(OptionError, match=f"options.{next(iter(options))} is not known"):
        gpu.state(dataclasses.replace(F32, options=options))


def test_other_systems_are_told_that_lavapipe_is_for_linux(monkeypatch):
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    found = gpu.state(F32)
    assert found.kind is StateKind.IMPOSSIBLE
    assert "this is Darwin" in found.text


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """A machine with an empty cache, no Mesa, and an apt that offers what a test says."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(gpu, "_own_driver", lambda: None)

    def offer(version: str, distribution: str, codename: str) -> None:
        for name in ("apt-get", "apt-cache"):
            program = tmp_path / name
            program.write_text(f"#!/bin/sh\necho ' mesa-vulkan-drivers | {version} | x y/main z'\n")
            program.chmod(0o755)
        release = {"ID": distribution, "VERSION_CODENAME": codename}
        monkeypatch.setattr(install.platform, "freedesktop_os_release", lambda: release)

    return offer


def test_an_old_mesa_in_debians_sources_names_the_backports(bare):
    bare("22.3.6-1+deb12u2", "debian", "bookworm")
    found = gpu.state(F32)
    assert found.kind is StateKind.MISSING
    assert "your apt sources have 22.3.6-1+deb12u2" in found.text
    assert "bookworm-backports on the same mirror, into the cache only" in found.text
    assert "`deb MIRROR bookworm-backports main`" in found.text
    assert found.how == "tpu2edge devices install gpu-webgpu-f32"


def test_a_new_mesa_in_the_sources_is_simply_to_be_fetched(bare):
    bare("1:25.0.7-2", "debian", "trixie")
    found = gpu.state(F32)
    assert found.kind is StateKind.MISSING
    assert found.text.endswith("is to be fetched, by apt")


def test_an_old_mesa_elsewhere_and_no_apt_at_all_say_what_to_do(bare):
    assert "no apt here" in gpu.state(F32).text
    bare("23.2.1-1ubuntu3", "ubuntu", "jammy")
    found = gpu.state(F32)
    assert found.kind is StateKind.IMPOSSIBLE
    assert "have 23.2.1-1ubuntu3: add a source that has it, or use a newer system" in found.text


@pytest.mark.parametrize(("version", "usable"), [("25.1.2", True), ("22.3.6", False)])
def test_this_machines_own_driver_is_used_when_it_is_new_enough(
    tmp_path, monkeypatch, version, usable
):
    (tmp_path / "libvulkan_lvp.so").write_bytes(b"\0ELF\0Mesa " + version.encode() + b"-1\0")
    icd = tmp_path / "lvp_icd.x86_64.json"
    icd.write_text(json.dumps({"ICD": {"library_path": "./libvulkan_lvp.so"}}))
    monkeypatch.setattr(gpu, "_SYSTEM_FOLDERS", (str(tmp_path),))
    monkeypatch.setattr("ctypes.util.find_library", lambda name: f"lib{name}.so.1")
    assert gpu._own_driver() == ((icd, version) if usable else None)


def test_a_library_of_this_machine_that_is_gone_makes_it_missing(monkeypatch, tmp_path):
    part = install.Part(
        folder=tmp_path,
        source="",
        files={},
        facts={"version": "25.0.7", "icd": "x", "needs": ["/no/libLLVM-15.so.1"]},
    )
    monkeypatch.setattr(gpu, "part_named", lambda name: part)
    found = gpu.state(F32)
    assert found.kind is StateKind.MISSING
    assert "/no/libLLVM-15.so.1 is gone" in found.text
