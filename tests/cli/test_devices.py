"""``tpu2edge devices`` and what ``tpu2edge check`` prints of devices."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tpu2edge.cli.app import run
from tpu2edge.cli.printing import print_parity
from tpu2edge.runtime_check.devices.profiles import profiles


@pytest.fixture(autouse=True)
def nothing_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def test_devices_as_json_have_profile_state_and_how_to_get_them(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('description = "one of mine"\nrunner = "host"\nthreads = 3\n')
    assert run(["devices", "--json", "--device-file", str(file)]) == 0
    found = {one["name"]: one for one in json.loads(capsys.readouterr().out)["devices"]}
    assert set(found) == {*profiles(), "mine"}
    assert found["host"]["state"] == "ready"
    assert (found["mine"]["threads"], found["mine"]["file"]) == (3, "mine.toml")
    arm = found["arm-v8.2-dotprod"]
    assert (arm["runner"], arm["core"]) == ("qemu", "cortex-a76")
    assert arm["state"] in ("missing", "impossible")
    assert arm["tolerance"]["dynamic"] == 2e-2
    assert "7.7e-3" in arm["tolerance"]["reason"]


def test_a_device_of_the_users_folder_is_listed_without_being_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "config" / "tpu2edge" / "devices"
    folder.mkdir(parents=True)
    (folder / "mine.toml").write_text('description = "one of mine"\nrunner = "host"\n')
    assert run(["devices"]) == 0
    assert any("mine" in line and "ready" in line for line in capsys.readouterr().out.splitlines())


def test_an_unknown_device_is_refused_before_anything_is_fetched(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["devices", "install", "arm-v7", "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["what"] == "no device is called 'arm-v7'"


@pytest.mark.parametrize(
    "command",
    [
        ["check", "gone.tflite", "--reference", "gone"],
        ["export", "gone.py", "-o", "out", "--recipe", "float32"],
        ["quantize", "gone", "-o", "out", "--recipe", "int8"],
    ],
)
def test_devices_that_are_not_installed_are_told_with_what_to_type_before_any_work(
    command: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The files do not exist: whatever were done first would be told first."""
    file = tmp_path / "till 2.toml"
    file.write_text('name = "till"\ndescription = "x"\nrunner = "qemu"\ncore = "cortex-a72"\n')
    options = ["--device", "host,arm-v8.0", "--device-file", str(file), "--json"]
    assert run([*command, *options]) == 4
    error = json.loads(capsys.readouterr().out)["error"]
    assert [line.split(":")[0] for line in error["what"].splitlines()] == [
        "device 'arm-v8.0' is not ready",
        "device 'till' is not ready",
    ]
    typed = f"run `tpu2edge devices install arm-v8.0 till --device-file '{file}'`"
    assert error["do"] == f"{typed}; `--device all` takes those that are ready"


def figures(**more: object) -> dict[str, object]:
    return {
        "recipe": "float32",
        "signature": "serving_default",
        "device": "arm-v8.0",
        "repeatable": True,
        "thread_range_error": {"y": 0.0},
        "load_ms": 76.2,
        "first_ms": 46.3,
        "steady_ms": None,
        "peak_rss_kb": 42_400,
        "emulated": True,
        "delegated": True,
        "ops": None,
        "left_ops": None,
        "left": None,
        **more,
    }


def test_figures_of_devices_are_a_table_and_emulated_times_are_said_to_be_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    left = {"ops": 10, "left_ops": 1, "left": [["LOG_SOFTMAX", "c"]], "delegated": False}
    report = {
        "reference": "eager",
        "cases": [],
        "devices": {
            "a": figures(),
            "b": figures(device="host", emulated=False, steady_ms=0.0814, **left),
            "c": figures(
                device="web-wasm",
                repeatable=False,
                thread_range_error={"y": "inf", "z": 0.0},
                delegated=None,
            ),
        },
    }
    print_parity(report)
    lines = capsys.readouterr().out.splitlines()
    (arm,) = (line.split() for line in lines if "float32" in line and "arm-v8.0" in line)
    assert arm == [
        "float32",
        "arm-v8.0",
        "76.2",
        "46.3",
        "–",
        "43.4",
        "MB",
        "same",
        "bits",
        "same",
        "all",
    ]
    (host,) = (line for line in lines if " host " in line)
    assert "0.0814" in host
    assert host.rstrip().endswith("9 of 10 ops, not LOG_SOFTMAX")
    (web,) = (line.split() for line in lines if "float32" in line and "web-wasm" in line)
    assert web[-3:] == ["differs", "inf", "–"]
    assert "emulated: times of arm-v8.0, web-wasm are no device's times" in lines
    print_parity(report, table=False)
    assert "arm-v8.0" not in capsys.readouterr().out
