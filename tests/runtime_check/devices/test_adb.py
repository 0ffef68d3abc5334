"""A phone by adb, played by fake_adb.py: the real pack under QEMU, in a folder for a phone's storage.

It was not run on a phone yet.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from tpu2edge.errors import DeviceError, DeviceMemoryError, OptionError
from tpu2edge.runtime_check.devices import adb
from tpu2edge.runtime_check.devices.client import Session
from tpu2edge.runtime_check.devices.profiles import profile_named
from tpu2edge.runtime_check.devices.runners import StateKind, launch_of, state_of

PHONE = profile_named("adb")
PROPERTIES = {
    "ro.product.model": "Pixel 4a",
    "ro.build.version.release": "13",
    "ro.product.cpu.abi": "arm64-v8a",
    "ro.build.fingerprint": "google/sunfish/sunfish:13/TQ3A/1:user/release-keys",
}


class Fake:
    """The phones, the storage and the processor that the stand-in for adb plays."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "phone"
        self.storage = self.root / "data" / "local" / "tmp"
        self.storage.mkdir(parents=True)
        self.file = folder / "adb.json"
        self.config: dict[str, object] = {
            "phones": {"0A1B": "device"},
            "root": str(self.root),
            "properties": PROPERTIES,
            "features": ["shell_v2", "cmd", "stat_v2"],
            "free_kb": 1_000_000,
            "qemu": [],
        }
        self.set()

    def set(self, **changes: object) -> None:
        self.config |= changes
        self.file.write_text(json.dumps(self.config))

    def folders(self) -> list[str]:
        return [path.name for path in self.storage.iterdir()]


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A program `adb` on the PATH, and what it plays."""
    program = tmp_path / "bin" / "adb"
    program.parent.mkdir()
    script = Path(__file__).with_name("fake_adb.py")
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -S {script} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.delenv("ANDROID_SERIAL", raising=False)
    made = Fake(tmp_path)
    monkeypatch.setenv("FAKE_ADB", str(made.file))
    return made


@pytest.fixture
def phone(fake, ready):
    """The same with the processor of the profile arm-v8.0."""
    launch = launch_of(ready("arm-v8.0"))
    start = launch.command[: launch.command.index("-cpu") + 2]
    env = [f"{name}={value}" for name, value in launch.env.items()]
    fake.set(qemu=["env", *env, *start, "-U", "LD_LIBRARY_PATH"])
    return fake


@pytest.mark.parametrize("recipe", ["float32", "static_wi8_ai8"])
def test_outputs_are_to_the_bit_those_of_the_same_core_without_adb(
    phone, ready, small_files, recipe
):
    rng = np.random.default_rng(0)
    with Session(small_files[recipe], launch=launch_of(ready("arm-v8.0"))) as session:
        (spec,) = session.signatures[0].inputs
        whole = rng.integers(-128, 128, (5, 1, 2, 6, 6)).astype(spec.dtype)
        samples = [{"image": one} for one in whole]
        wanted = list(session.run("serving_default", samples))
    with Session(small_files[recipe], launch=launch_of(PHONE)) as session:
        got = list(session.run("serving_default", samples))
        assert len(phone.folders()) == 1
    assert phone.folders() == []
    for one, other in zip(wanted, got, strict=True):
        assert set(one) == set(other) == {"logits", "features"}
        for name, array in one.items():
            np.testing.assert_array_equal(other[name], array)


def test_every_byte_passes_unchanged_both_ways(phone, make_affine):
    # Among them line ends, ends of file and the escape of adb's shell, "~." at a line's start.
    odd = b"\n~.\r\r\n~.\x04\x03\x1a\0"
    data = np.frombuffer(bytes(range(256)) + odd + b"\n~.\r\n", np.uint8).reshape(-1, 3)
    data = np.concatenate([data, np.full((len(data), 1), 0x40, np.uint8)], axis=1)  # 2 to 8 and on
    x = np.ascontiguousarray(data).view(np.float32).reshape(-1)
    path = make_affine(np.ones(1), np.zeros(1), shape=[len(x)])
    with Session(path, launch=launch_of(PHONE)) as session:
        for out in session.run("serving_default", [{"x": x}, {"x": -x}]):
            np.testing.assert_array_equal(np.abs(out["scaled"]), x)


def test_one_launch_serves_two_sessions_and_leaves_nothing_after_a_failure(
    phone, small_tflite, tmp_path
):
    launch = launch_of(PHONE)
    sample = {"image": np.ones((1, 2, 6, 6), np.float32)}
    for _ in range(2):
        with Session(small_tflite, launch=launch) as session:
            assert len(list(session.run("serving_default", [sample]))) == 1
        assert phone.folders() == []
    with pytest.raises(DeviceError, match="cannot load gone.tflite"):
        Session(tmp_path / "gone.tflite", launch=launch)
    assert phone.folders() == []


def test_a_worker_that_dies_on_the_phone_is_an_error_and_the_folder_goes(phone, small_tflite):
    # The processor ends with a signal before the worker says hello.
    phone.set(qemu=["sh", "-c", "'echo Illegal instruction >&2; kill -4 $$'"])
    with pytest.raises(DeviceError, match=r"died by signal SIGILL .*\n +Illegal instruction"):
        Session(small_tflite, launch=launch_of(PHONE))
    assert phone.folders() == []


def test_a_file_that_comes_through_damaged_is_refused(phone, small_tflite):
    phone.set(damage=True)
    with pytest.raises(DeviceError, match="did not come through to device 'adb' whole"):
        Session(small_tflite, launch=launch_of(PHONE))
    assert phone.folders() == []


def test_a_model_larger_than_the_room_is_refused_before_it_is_sent(phone, small_tflite, tmp_path):
    big = tmp_path / "big.tflite"
    big.touch()
    with big.open("r+b") as stream:
        stream.truncate(200 << 20)
    phone.set(free_kb=100 << 10)
    with pytest.raises(DeviceMemoryError, match="big.tflite needs 216 MB .* has 100 MB free"):
        Session(big, launch=launch_of(PHONE))
    assert phone.folders() == []


def test_the_phone_is_told_with_its_state(phone):
    found = state_of(PHONE)
    assert found.kind is StateKind.READY
    assert found.text.startswith("Pixel 4a (0A1B), Android 13, 976 MB free (not run on a phone yet")
    assert launch_of(PHONE).versions["phone"] == "Pixel 4a"
    assert launch_of(PHONE).versions["build"] == PROPERTIES["ro.build.fingerprint"]


# ------------------------------------------------------------------------------ not usable, in words


def test_without_adb_the_state_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    found = adb.state(PHONE)
    assert found.kind is StateKind.IMPOSSIBLE
    assert "adb is not on the PATH: install it (package adb" in found.text
    assert "not run on a phone yet" in found.text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"phones": {}}, "no phone is connected: plug one in with USB debugging on"),
        ({"phones": {"A": "unauthorized"}}, "'unauthorized': allow this computer on its screen"),
        ({"phones": {"A": "offline"}}, "'offline': unplug it and plug it in again"),
        (
            {"phones": {"A": "no permissions (missing udev rules?)"}},
            "the system does not let this user use it",
        ),
        (
            {"phones": {"A": "device", "B": "offline"}},
            "2 phones are connected: A (device), B (offline); say which by ANDROID_SERIAL",
        ),
        (
            {"properties": {**PROPERTIES, "ro.product.cpu.abi": "x86_64"}},
            "the ABI 'x86_64', the worker is for arm64-v8a",
        ),
        ({"features": ["cmd"]}, "Android 13: 7 or newer passes raw bytes"),
        ({"free_kb": 20_000}, "has 19 MB free in /data/local/tmp"),
    ],
)
def test_a_phone_that_cannot_be_used_is_told_why(fake, changes, words):
    fake.set(**changes)
    found = adb.state(PHONE)
    assert found.kind is StateKind.IMPOSSIBLE
    assert words in found.text


def test_one_of_several_phones_is_chosen_by_the_profile_before_the_environment(fake, monkeypatch):
    fake.set(phones={"A": "offline", "B": "device", "C": "device"})
    monkeypatch.setenv("ANDROID_SERIAL", "B")
    assert adb._phone(PHONE).serial == "B"
    chosen = dataclasses.replace(PHONE, options={"serial": "C"})
    assert adb._phone(chosen).serial == "C"
    gone = dataclasses.replace(PHONE, options={"serial": "D"})
    assert "the phone 'D' is not connected, but A (offline), B" in adb.state(gone).text


def test_an_unknown_option_is_refused(fake):
    with pytest.raises(OptionError, match="options.phone is not known"):
        adb.state(dataclasses.replace(PHONE, options={"phone": "A"}))


def test_the_files_for_the_phone_are_to_be_fetched_on_a_new_machine(fake, home):
    found = adb.state(PHONE)
    assert found.kind is StateKind.MISSING
    assert found.how == "tpu2edge devices install adb"
    assert shutil.which("adb")
