"""LiteRT.js in Node: right numbers, and what it cannot do told in words."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest

from tpu2edge.errors import DeviceCrashError, DeviceError, DeviceMemoryError, OptionError
from tpu2edge.runtime_check.devices import runners, wasm
from tpu2edge.runtime_check.devices.checks import check_device
from tpu2edge.runtime_check.devices.client import Session
from tpu2edge.runtime_check.devices.install import cache_folder
from tpu2edge.runtime_check.devices.profiles import profile_named
from tpu2edge.runtime_check.devices.runners import StateKind

needs_node = pytest.mark.skipif(
    shutil.which("node") is None or shutil.which("npm") is None,
    reason="Node and npm are not on the PATH: install packages nodejs and npm to run it",
)


@pytest.fixture(scope="session")
def installed(tmp_path_factory):
    """A cache of its own with LiteRT.js in it, fetched by npm, and how it is started."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        profile = profile_named("web-wasm")
        assert runners.state_of(profile).kind is StateKind.MISSING
        stages = []
        found = runners.install_device(profile, lambda stage, *_: stages.append(stage))
        assert found.ready
        assert stages == ["fetch LiteRT.js 2.5.3, by npm", "check LiteRT.js", "LiteRT.js is ready"]
        yield runners.launch_of(profile)


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Only the programs that a test writes are on the PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def write(name: str, text: str) -> Path:
        path = folder / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        wasm._version.cache_clear()
        return path

    return write


@needs_node
@pytest.mark.parametrize(
    ("recipe", "most"),
    [
        ("float32", 1e-6),  # measured 2.2e-7
        ("dynamic_wi8_afp32", 2e-2),  # measured 4e-8; one rounding that flips is 1e-3 to 1e-2
        ("static_wi8_ai8", 1 / 255),  # measured 0; one step
    ],
)
def test_outputs_are_those_of_this_machine_by_recipe(
    small_files, installed, distance_to_host, recipe, most
):
    found = distance_to_host(small_files[recipe], installed)
    assert set(found) == {"logits", "features"}
    assert max(found.values()) <= most


@needs_node
def test_each_of_two_signatures_answers_for_itself(two_signatures_tflite, installed):
    x = np.array([1, 3], np.float32)
    with Session(two_signatures_tflite, launch=installed) as session:
        assert sorted(s.name for s in session.signatures) == ["decode", "encode"]
        for _ in range(2):
            (encoded,) = session.run("encode", [{"x": x}])
            (decoded,) = session.run("decode", [{"x": x}])
            np.testing.assert_array_equal(encoded["scaled"], [2, 6])
            np.testing.assert_array_equal(decoded["shifted"], [6, 8])


@needs_node
def test_many_samples_of_20_mb_come_back_whole_and_in_order(make_affine, installed):
    size = 5_000_000
    path = make_affine(np.float32([2]), np.float32([0]), shape=[size])
    x = np.arange(size, dtype=np.float32)
    with Session(path, launch=installed) as session:
        first, second = (
            out["scaled"] for out in session.run("serving_default", [{"x": x}, {"x": -x}])
        )
    np.testing.assert_array_equal(first, 2 * x)
    np.testing.assert_array_equal(second, -2 * x)


@needs_node
def test_times_memory_and_versions_are_told(small_tflite, installed):
    with Session(small_tflite, launch=installed) as session:
        list(session.run("serving_default", [{"image": np.zeros((1, 2, 6, 6), np.float32)}] * 3))
        assert session.hello["litert"] == "LiteRT.js 2.5.3"
        assert 0 < session.times["first_ms"] <= session.times["total_ms"]
        assert session.times["samples"] == 3
        assert session.peak_rss_kb > 10_000
    assert installed.versions["litert"] == "LiteRT.js 2.5.3"
    assert installed.versions["simd"] in ("relaxed", "compat")


@needs_node
def test_a_file_that_a_web_page_cannot_feed_is_noted(small_files, installed):
    with Session(small_files["float32"], launch=installed) as session:
        assert session.notes == ()
    with Session(small_files["static_wi8_ai8"], launch=installed) as session:
        (note,) = session.notes
    assert "cannot hand over 'image' (int8), 'logits' (int8), 'features' (int8)" in note


@needs_node
def test_the_checks_of_a_device_run_without_threads(small_tflite, installed):
    samples = [{"image": np.full((1, 2, 6, 6), 0.5, np.float32)}] * 2
    found = check_device(small_tflite, profile_named("web-wasm"), "serving_default", samples)
    assert found.repeatable
    assert found.delegated
    assert found.thread_range_error == {}


@needs_node
def test_a_size_that_changes_is_refused_in_words_and_the_files_own_size_runs(
    dynamic_tflite, installed
):
    # The bindings would take it, and give stale memory as the outputs.
    with Session(dynamic_tflite, launch=installed) as session:
        (out,) = session.run("serving_default", [{"x": np.float32([[3, 4]])}])
        np.testing.assert_array_equal(out["scaled"], [[6, 8]])
        with pytest.raises(DeviceError, match=r"\[3,2\] given, \[1,2\] expected: LiteRT.js cannot"):
            list(session.run("serving_default", [{"x": np.zeros((3, 2), np.float32)}]))
        (out,) = session.run("serving_default", [{"x": np.float32([[3, 4]])}])
        np.testing.assert_array_equal(out["shifted"], [[4, 5]])


@needs_node
def test_an_empty_tensor_is_refused_in_words(typed_tflite, installed):
    with Session(typed_tflite, launch=installed) as session:
        sample = {
            spec.name: np.zeros([int(s) for s in spec.shape], spec.dtype)
            for spec in session.signatures[0].inputs
        }
        with pytest.raises(DeviceError, match="'empty' has no elements"):
            list(session.run("serving_default", [sample]))


@needs_node
def test_a_memory_limit_is_the_reason_in_words(make_affine, installed):
    path = make_affine(np.float32([2]), np.float32([0]), shape=[5_000_000])
    limited = dataclasses.replace(installed, limit_bytes=40 << 20)
    with (
        pytest.raises(DeviceMemoryError, match="the memory limit of 40 MiB is reached"),
        Session(path, launch=limited) as session,
    ):
        list(session.run("serving_default", [{"x": np.zeros(5_000_000, np.float32)}]))


@needs_node
def test_a_damaged_file_and_one_that_is_gone_are_refused(tmp_path, small_tflite, installed):
    path = tmp_path / "half.tflite"
    path.write_bytes(small_tflite.read_bytes()[:3000])
    with pytest.raises(DeviceError, match=r"cannot load half\.tflite: Error: Failed to load model"):
        Session(path, launch=installed)
    with pytest.raises(DeviceError, match=r"cannot load gone\.tflite: Error: ENOENT"):
        Session(tmp_path / "gone.tflite", launch=installed)


@needs_node
def test_a_trap_of_the_webassembly_ends_the_process(tmp_path, small_tflite):
    # No file is known that makes LiteRT.js trap, so a package that does so stands in for it.
    core = tmp_path / "@litertjs" / "core"
    (core / "dist").mkdir(parents=True)
    (core / "package.json").write_text('{"version": "2.5.3", "type": "module"}')
    (core / "dist" / "index.js").write_text(
        """
        const trap = () => { throw new WebAssembly.RuntimeError('unreachable'); };
        const wasm = {HEAPU8: new Uint8Array(1 << 20), _malloc: () => 8, loadModel: trap};
        const environment = {liteRtEnvironment: {}};
        export const loadLiteRt = async () =>
          ({liteRtWasm: wasm, getDefaultEnvironment: () => environment});
        """
    )
    command = wasm._command(tmp_path, "compat")
    with pytest.raises(DeviceCrashError, match=r"exit status 70 .*\n +RuntimeError: unreachable"):
        Session(small_tflite, command=command)


@needs_node
def test_a_file_of_litert_js_that_was_changed_makes_it_missing(installed, tmp_path, monkeypatch):
    cache = tmp_path / "tpu2edge" / "devices"
    shutil.copytree(cache_folder().parent, cache)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert wasm.state(profile_named("web-wasm")).ready
    changed = cache_folder() / "litertjs-2.5.3/node_modules/@litertjs/core/dist/index.js"
    changed.write_text(changed.read_text() + " ")
    found = wasm.state(profile_named("web-wasm"))
    assert found.kind is StateKind.MISSING
    assert found.text == f"{changed} is not what was fetched"


@needs_node
@pytest.mark.parametrize(
    ("change", "words"),
    [({"threads": 2}, "one thread"), ({"kernels": "reference"}, "no choice of kernels")],
)
def test_the_worker_refuses_what_litert_js_does_not_have(small_tflite, installed, change, words):
    with pytest.raises(DeviceError, match=words):
        Session(small_tflite, launch=installed, **change)


# ------------------------------------------------------------------------------------ the state


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"threads": 4}, "one thread here: set threads = 1"),
        ({"kernels": "reference"}, "no choice of kernels"),
        ({"runtime": "interpreter"}, "a CompiledModel only"),
    ],
)
def test_a_profile_that_litert_js_cannot_follow_is_told_why(change, words):
    found = wasm.state(dataclasses.replace(profile_named("web-wasm"), **change))
    assert found.kind is StateKind.IMPOSSIBLE
    assert words in found.text


@pytest.mark.parametrize("options", [{"simd": "avx"}, {"simt": "auto"}])
def test_an_unknown_option_is_refused(options):
    with pytest.raises(OptionError, match=f"options.{next(iter(options))} is not known"):
        wasm.state(dataclasses.replace(profile_named("web-wasm"), options=options))


def test_without_node_the_state_says_how_to_get_it(programs):
    found = wasm.state(profile_named("web-wasm"))
    assert found.kind is StateKind.IMPOSSIBLE
    assert "Node 18 or newer is not on the PATH" in found.text
    assert "packages nodejs and npm" in found.text
    programs("node", "echo v16.20.2")
    assert "Node 16 is too old" in wasm.state(profile_named("web-wasm")).text


def test_without_npm_the_state_says_so_before_an_install(programs):
    programs("node", "echo v20.1.0")
    assert "npm is not on the PATH" in wasm.state(profile_named("web-wasm")).text
    programs("npm", "")
    assert wasm.state(profile_named("web-wasm")).kind is StateKind.MISSING


@pytest.mark.parametrize(
    ("version", "asked", "build"),
    [
        ("v20.20.2", "auto", "litert_wasm_compat_internal.js"),
        ("v22.1.0", "auto", "litert_wasm_internal.js"),
        ("v22.1.0", "compat", "litert_wasm_compat_internal.js"),
    ],
)
def test_the_build_is_the_one_that_the_browsers_of_that_engine_take(
    programs, version, asked, build
):
    programs("node", f"echo {version}")
    profile = dataclasses.replace(profile_named("web-wasm"), options={"simd": asked})
    assert wasm._BUILDS[wasm._simd(profile)] == build


def test_relaxed_simd_is_not_to_be_had_from_node_20(programs):
    programs("node", "echo v20.20.2")
    programs("npm", "")
    profile = dataclasses.replace(profile_named("web-wasm"), options={"simd": "relaxed"})
    assert "Node 20 has no relaxed SIMD" in wasm.state(profile).text


def test_an_npm_that_fails_is_told_with_its_last_words_and_leaves_nothing(programs):
    programs("node", "echo v20.20.2")
    programs("npm", "echo 'npm error code E404'; exit 1")
    with pytest.raises(
        DeviceError, match="could not install LiteRT.js 2.5.3\n +npm error code E404"
    ):
        wasm.install(profile_named("web-wasm"), lambda *_: None)
    assert list(cache_folder().iterdir()) == []


def test_other_files_than_the_known_ones_are_refused(programs):
    programs("node", "echo v20.20.2")
    programs(
        "npm",
        'd="$3/node_modules/@litertjs/core/dist"; /bin/mkdir -p "$d"; echo evil > "$d/index.js"',
    )
    with pytest.raises(DeviceError, match="other files than those of LiteRT.js 2.5.3"):
        wasm.install(profile_named("web-wasm"), lambda *_: None)
    assert wasm.state(profile_named("web-wasm")).kind is StateKind.MISSING
