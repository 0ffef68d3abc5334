"""Options as text, and what they come to."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpu2edge.errors import DeviceError, OptionError
from tpu2edge.options import known_devices, parse_dynamic, parse_shapes, ready_devices
from tpu2edge.runtime_check.devices.runners import state_of


def test_dynamic_ranges_are_parsed() -> None:
    parsed = parse_dynamic(("opts.ids.1=2:64", "x.0=1:8"))
    assert (parsed["opts.ids"][1].min, parsed["opts.ids"][1].max) == (2, 64)
    assert (parsed["x"][0].min, parsed["x"][0].max) == (1, 8)


def test_shapes_are_read_from_text() -> None:
    assert parse_shapes(["x=1x3,2x3", "a.b=4,8"]) == {"x": [(1, 3), (2, 3)], "a.b": [(4,), (8,)]}
    for text in ("x", "x=", "x=1x", "x=1,", "x=0x3", "x=1:3"):
        with pytest.raises(OptionError):
            parse_shapes([text])
    with pytest.raises(OptionError, match="twice"):
        parse_shapes(["x=1", "x=2"])


@pytest.fixture
def device_file(tmp_path: Path) -> Path:
    file = tmp_path / "slow-phone.toml"
    file.write_text('description = "one of mine"\nrunner = "host"\nthreads = 2\n')
    return file


def test_devices_are_profiles_by_name_each_once_and_the_host_where_none_is_named() -> None:
    names = [one.name for one in known_devices(["host,arm-v8.0", "arm-v9-i8mm", " host "])]
    assert names == ["host", "arm-v8.0", "arm-v9-i8mm"]
    assert [one.name for one in known_devices([])] == ["host"]
    assert known_devices("arm-v8.0")[0].core == "cortex-a53"


def test_a_device_file_is_meant_as_well_and_can_be_named(device_file: Path) -> None:
    (one,) = known_devices([], [device_file])
    assert (one.name, one.threads) == ("slow-phone", 2)
    names = [one.name for one in known_devices(["slow-phone", "host"], [device_file])]
    assert names == ["slow-phone", "host"]


def test_all_devices_are_those_that_are_ready(
    device_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # nothing is installed there
    found = known_devices(["all"], [device_file])
    names = {one.name for one in found}
    assert {"host", "reference", "slow-phone"} <= names
    assert "arm-v8.0" not in names
    assert all(state_of(one).ready for one in found)


def test_a_device_that_can_never_be_used_here_is_to_be_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no adb there
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert [one.name for one in ready_devices(["host,reference"])] == ["host", "reference"]
    with pytest.raises(DeviceError, match="device 'adb' is not ready: adb is not on the") as error:
        ready_devices(["host,adb"])
    assert error.value.do == "leave out 'adb'; `--device all` takes those that are ready"
    assert error.value.exit_code == 4
    with pytest.raises(DeviceError) as error:
        ready_devices(["arm-v8.0,adb"])
    assert error.value.do.startswith("run `tpu2edge devices install arm-v8.0`, and leave out 'adb'")


def test_an_unknown_device_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(OptionError, match="no device is called 'arm-v8'") as error:
        known_devices(["host,arm-v8"])
    assert "did you mean 'arm-v8.0'?" in error.value.do
    assert "laptop-avx2" in error.value.do


def test_a_device_file_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text('description = "x"\nrunner = "rocket"\n')
    with pytest.raises(OptionError, match=r"runner is 'rocket'") as error:
        known_devices([], [tmp_path / "bad.toml"])
    assert "qemu" in error.value.do
    with pytest.raises(OptionError, match=r"cannot be read"):
        known_devices([], [tmp_path / "none.toml"])
