"""The pytest plugin, by making it fail: wrong files, damaged bundles, devices that break."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from tpu2edge.runtime_check.devices.client import Session

pytest_plugins = ["pytester"]

# Loaded by its module's name, whether an installed tpu2edge brings the entry point or not.
PLUGIN = ("-p", "no:tpu2edge", "-p", "tpu2edge.pytest_plugin", "-p", "no:anyio")
WEIGHT = np.random.default_rng(0).standard_normal((3, 3)).astype("float32")  # as in conftest.py


@pytest.fixture
def broken_device(tmp_path):
    """A device file: the worker's Python runs this code before anything else."""

    def make(code: str, name: str = "broken") -> Path:
        folder = tmp_path / f"{name}-site"
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(code)
        file = tmp_path / f"{name}.toml"
        file.write_text(
            f'description = "breaks"\nrunner = "host"\n[env]\nPYTHONPATH = "{folder}"\n'
        )
        return file

    return make


@pytest.fixture
def suite(pytester, monkeypatch, tmp_path):
    """Runs pytest on a bundle, in this process; nothing is kept in the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def run(bundle: Path, *args: str) -> pytest.RunResult:
        return pytester.runpytest_inprocess(*PLUGIN, f"--tpu2edge-bundle={bundle}", *args)

    return run


def names_of(result: pytest.RunResult) -> list[str]:
    return [line.partition("::")[2] for line in result.outlines if "::" in line]


def test_each_file_device_and_output_is_a_test_and_outputs_share_a_run(
    affine_bundle, suite, monkeypatch
):
    runs: list[str] = []
    real = Session.run

    def counted(self, signature, samples):
        samples = list(samples)
        if len(samples) == 3:
            runs.append(f"{self.model.name}@{self.device}")
        return real(self, signature, samples)

    monkeypatch.setattr(Session, "run", counted)
    result = suite(affine_bundle(), "-v", "-p", "no:cacheprovider", "-p", "no:xdist")
    result.assert_outcomes(passed=4)
    assert runs == ["model.float32.tflite@host", "model.float16.tflite@host"]
    found = [line.split(" ")[0] for line in names_of(result)]
    assert found == [
        f"{recipe}:host::serving_default:{output}"
        for recipe in ("float32", "float16")
        for output in ("scaled", "shifted")
    ]


def test_a_wrong_file_fails_with_wanted_and_got_and_only_where_it_is_wrong(affine_bundle, suite):
    result = suite(affine_bundle(WEIGHT * np.float32(1.01)), "--junitxml=report.xml")
    result.assert_outcomes(passed=3, failed=1)
    text = result.stdout.str()
    assert "float16 on host, output 'scaled': FAIL" in text
    assert "sqnr 40 dB, wanted at least 80 dB (worst sample 's" in text
    assert "budget: range_error<=0.0001,sqnr>=80dB" in text
    assert "Traceback" not in text
    cases = {
        case.get("name"): case
        for case in ET.parse("report.xml").iter("testcase")
        if "float16" in str(case.get("classname"))
    }
    assert cases["serving_default:shifted"].find("failure") is None
    failure = cases["serving_default:scaled"].find("failure")
    assert failure is not None
    assert "wanted at least 80 dB" in str(failure.text)
    assert result.ret == 1


def test_a_choice_by_k_runs_these_alone_and_x_stops_at_the_first(affine_bundle, suite):
    bundle = affine_bundle(WEIGHT * 2)
    chosen = suite(bundle, "-k", "float16:host and shifted")
    chosen.assert_outcomes(passed=1, deselected=3)
    stopped = suite(bundle, "-x", "-k", "float16")
    stopped.assert_outcomes(failed=1, deselected=2)


def test_a_device_that_dies_is_an_error_at_the_setup_and_the_next_one_runs(
    affine_bundle, suite, broken_device
):
    device = broken_device("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    result = suite(
        affine_bundle(),
        f"--tpu2edge-device-file={device}",
        "--tpu2edge-device=host",
        "-k",
        "float32",
    )
    result.assert_outcomes(passed=2, errors=2, deselected=4)
    text = result.stdout.str()
    assert "float32 on broken, output 'scaled': ERROR" in text
    assert "SIGSEGV" in text
    assert "Traceback" not in text


def test_a_device_that_does_not_speak_the_protocol_is_an_error(affine_bundle, suite, broken_device):
    device = broken_device("import os\nos.write(1, b'hello, I am a phone')\nos._exit(0)\n")
    result = suite(affine_bundle(), f"--tpu2edge-device-file={device}", "-k", "float32 and scaled")
    result.assert_outcomes(errors=1, deselected=3)
    assert "float32 on broken, output 'scaled': ERROR" in result.stdout.str()


def test_a_device_that_is_not_installed_is_skipped_with_how_to_get_it(affine_bundle, suite):
    result = suite(affine_bundle(), "--tpu2edge-device=host,arm-v8.0", "-rs", "-k", "float32")
    result.assert_outcomes(passed=2, skipped=2, deselected=4)
    assert "tpu2edge devices install arm-v8.0" in result.stdout.str()


def test_a_device_that_is_not_installed_is_an_error_when_strict(affine_bundle, suite):
    result = suite(
        affine_bundle(), "--tpu2edge-device=arm-v8.0", "--tpu2edge-strict", "-k", "float32"
    )
    result.assert_outcomes(errors=2, deselected=2)
    assert "device 'arm-v8.0' is not ready" in result.stdout.str()


def test_a_damaged_bundle_is_an_error_of_the_collection_that_names_the_file(affine_bundle, suite):
    bundle = affine_bundle()
    file = bundle / "model.float16.tflite"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    result = suite(bundle)
    result.assert_outcomes(errors=1)
    assert "model.float16.tflite was changed" in result.stdout.str()
    assert result.ret == pytest.ExitCode.INTERRUPTED


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--tpu2edge-device=arm-v8"], "no device is called 'arm-v8'"),
        (["--tpu2edge-device-file=missing.toml"], "missing.toml' cannot be read"),
        (["--tpu2edge-threads=0"], "--threads 0 makes no sense"),
    ],
)
def test_a_wrong_option_is_a_usage_error(affine_bundle, suite, args, words):
    result = suite(affine_bundle(), *args)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert words in result.stderr.str()


def test_a_folder_that_is_no_bundle_is_a_usage_error(suite, tmp_path):
    result = suite(tmp_path)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "is no bundle" in result.stderr.str()


def test_a_device_without_a_bundle_is_a_usage_error(pytester):
    result = pytester.runpytest_inprocess(*PLUGIN, "--tpu2edge-device=host")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "need --tpu2edge-bundle" in result.stderr.str()


OWN = """
    import numpy as np
    import pytest
    from tpu2edge import Tpu2EdgeError

    def test_own(edge_model, reference, device):
        assert edge_model.device is device
        assert reference.sample_ids == ("s0", "s1", "s2")
        for index in range(len(reference)):
            got = edge_model.run(reference.inputs(index))
            assert set(got) == {"scaled", "shifted"}
            np.testing.assert_allclose(got["scaled"], reference.outputs(index)["scaled"], rtol=1e-5)

    def test_wrong_inputs(edge_model):
        with pytest.raises(Tpu2EdgeError, match="takes"):
            edge_model.run({"y": np.zeros((3, 3), "float32")})
        assert edge_model.run({"x": np.zeros((3, 3), "float32")})

    def test_devices_alone(device):
        assert device.name in ("host", "reference")
"""


def test_tests_of_ones_own_run_for_each_file_and_device(affine_bundle, suite, pytester):
    pytester.makepyfile(test_mine=OWN)
    bundle = affine_bundle(WEIGHT * 2)
    result = suite(bundle, "--tpu2edge-device=host,reference", "-v", "-k", "test_mine")
    result.assert_outcomes(passed=2 + 4 + 2, failed=2, deselected=8)
    failed = [line for line in result.outlines if line.startswith("FAILED")]
    assert all("float16" in line for line in failed)
    names = {name.split(" ")[0] for name in names_of(result)}
    for one in ("test_own[float32-reference]", "test_devices_alone[host]"):
        assert one in names


def test_without_a_bundle_tests_of_ones_own_are_skipped_and_nothing_is_imported(pytester):
    pytester.makepyfile(test_mine="def test_own(edge_model, reference): assert False")
    code = (
        "import sys, pytest\n"
        f"status = pytest.main([*{PLUGIN!r}, '-rs', '-q'])\n"
        "print(sorted(n for n in sys.modules if n.startswith('tpu2edge')))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=pytester.path
    )
    assert "1 skipped" in done.stdout, done.stdout + done.stderr
    assert "pytest --tpu2edge-bundle DIR" in done.stdout
    assert "['tpu2edge', 'tpu2edge.pytest_plugin']" in done.stdout


def test_ones_own_fixture_of_the_same_name_wins(pytester):
    pytester.makepyfile(
        """
        import pytest

        @pytest.fixture(params=["cpu", "cuda"])
        def device(request):
            return request.param

        def test_mine(device):
            assert device in ("cpu", "cuda")
        """
    )
    pytester.runpytest_inprocess(*PLUGIN).assert_outcomes(passed=2)


def test_the_wheel_names_the_plugin_as_pytest_looks_for_it():
    import tomllib

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"tpu2edge": "tpu2edge.pytest_plugin"}
    assert json.dumps(project["optional-dependencies"]["device"])
