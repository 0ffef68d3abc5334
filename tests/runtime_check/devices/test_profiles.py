"""Profiles: those that ship, a user's own, and every mistake in one told by file, key and values."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tpu2edge.errors import OptionError
from tpu2edge.runtime_check.devices import cores
from tpu2edge.runtime_check.devices.profiles import (
    CORES,
    Profile,
    Tolerance,
    load_profile,
    profile_named,
    profiles,
)

SHIPPED = {
    "adb": "adb",
    "arm-v8.0": "qemu",
    "arm-v8.2-dotprod": "qemu",
    "arm-v9-i8mm": "qemu",
    "gpu-webgpu-f16": "gpu",
    "gpu-webgpu-f32": "gpu",
    "host": "host",
    "laptop-avx2": "isa",
    "laptop-avx512": "isa",
    "laptop-sse41": "isa",
    "reference": "host",
    "web-wasm": "wasm",
}
GOOD = 'description = "mine"\nrunner = "qemu"\ncore = "cortex-a53"\n'


def test_the_profiles_that_ship_are_these_and_say_what_they_stand_for(home: Path) -> None:
    found = profiles()
    assert {name: profile.runner for name, profile in found.items()} == SHIPPED
    assert "Galaxy" in found["arm-v8.0"].description
    assert found["reference"].kernels == "reference"
    assert found["laptop-avx2"].core == "avx2"
    for name, profile in found.items():
        if name != "host":
            assert profile.tolerance.reason, f"{name} adds to a budget without a reason"
    assert found["host"].tolerance == Tolerance()


def test_every_qemu_core_that_a_profile_may_name_is_described() -> None:
    assert set(CORES["qemu"]) == set(cores.CORES)


def test_a_tolerance_goes_by_the_kind_of_recipe() -> None:
    dotprod = profile_named("arm-v8.2-dotprod").tolerance
    assert dotprod.range_error("float32") == 1e-5
    assert dotprod.range_error("float16") == 1e-5
    assert dotprod.range_error("dynamic_wi8_afp32") == 2e-2
    assert dotprod.range_error("static_wi8_ai8") == 2e-2
    assert profile_named("arm-v8.0").tolerance.range_error("dynamic_wi8_afp32") == 1e-5
    assert Tolerance().range_error("dynamic_wi8_afp32") == 0
    assert dotprod.to_json()["class"] == "int8-kernels"


def test_a_users_own_profiles_come_from_a_folder_and_from_files(home: Path) -> None:
    folder = home / "config" / "tpu2edge" / "devices"
    folder.mkdir(parents=True)
    (folder / "till.toml").write_text(
        GOOD
        + 'threads = 2\nmemory_mb = 256\nxnnpack = ["force_fp16"]\nkernels = "builtin"\n'
        + '[env]\nA = "b"\n[options]\nserial = "x1"\nfast = true\n'
        + '[tolerance]\nclass = "half-precision"\nreason = "measured"\nfloat = 1e-3\n'
    )
    given = home / "mine.toml"
    given.write_text('name = "host"\ndescription = "my host"\nrunner = "host"\nthreads = 3\n')
    till = profile_named("till")
    assert till == Profile(
        name="till",
        description="mine",
        runner="qemu",
        core="cortex-a53",
        threads=2,
        memory_mb=256,
        kernels="builtin",
        xnnpack=("force_fp16",),
        env={"A": "b"},
        options={"serial": "x1", "fast": True},
        tolerance=Tolerance(
            name="half-precision",
            reason="measured",
            numbers={"float": 1e-3, "dynamic": 0.0, "static": 0.0},
        ),
        file=folder / "till.toml",
    )
    assert till.xnnpack_flags == 4
    assert profile_named("host").threads == 1
    assert profile_named("host", [given]).threads == 3


def test_an_unknown_name_lists_the_known_ones_and_the_nearest(home: Path) -> None:
    with pytest.raises(OptionError, match="no device is called 'arm-v8'") as error:
        profile_named("arm-v8")
    assert "did you mean 'arm-v8.0'?" in error.value.do
    assert "laptop-sse41" in error.value.do


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("description = 'x'\nrunner = 'qemu'", "core is missing"),
        ("runner = 'host'", "description is missing"),
        ("description = 'x'\nrunner = 'kvm'", "runner is 'kvm'.*host, qemu, isa"),
        (GOOD.replace("a53", "a9"), "core is 'cortex-a9'.*cortex-a76"),
        (GOOD + "cores = 4", "cores is no key of a profile.*threads"),
        (GOOD + "threads = 0", "threads is 0, wanted at least 1"),
        (GOOD + "threads = true", "threads is True, wanted a whole number"),
        (GOOD + "memory_mb = 'much'", "memory_mb is 'much'"),
        (GOOD + "runtime = 'interpreter'", "runtime is 'compiled' under qemu"),
        (GOOD + "runtime = 'jit'", "runtime is 'jit'.*interpreter, compiled"),
        (GOOD + "kernels = 'fast'", "kernels is 'fast'.*reference"),
        (GOOD + "xnnpack = ['fp16']", "xnnpack has the flag 'fp16'.*force_fp16"),
        (GOOD + "[env]\nA = 1", "env.A is 1, wanted text"),
        (GOOD + "[options]\na = []", "options.a is"),
        (GOOD + "[tolerance]\nclass = 'loose'", "tolerance.class is 'loose'.*rounding"),
        (GOOD + "[tolerance]\nclass = 'none'", "tolerance.reason is missing"),
        (
            GOOD + "[tolerance]\nclass = 'none'\nreason = 'r'\nfloat = 20",
            "tolerance.float is 20, wanted a fraction",
        ),
        (
            GOOD + "[tolerance]\nclass = 'none'\nreason = 'r'\nint4 = 0.1",
            "tolerance.int4 is no key.*dynamic",
        ),
        ("description = ' '\nrunner = 'host'", "description is empty"),
        ("description = 'x'\nrunner = 'host'\ncore = 'avx2'", "core is for qemu, isa only"),
        (GOOD + "name = 'a b'", "name is 'a b'"),
        (
            "description = 'x'\nrunner = 'host'\nxnnpack = ['force_fp16']\nruntime='interpreter'",
            "xnnpack needs runtime = 'compiled'",
        ),
        ("runner = ", "is no TOML"),
    ],
)
def test_a_mistake_names_the_file_the_key_and_the_known_values(
    tmp_path: Path, text: str, words: str
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(OptionError) as error:
        load_profile(path)
    message = str(error.value).replace("\n", " ")
    assert str(path) in message
    assert re.search(words, message), message


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"gone\.toml' cannot be read"):
        load_profile(tmp_path / "gone.toml")


def test_the_document_on_devices_names_every_profile_and_its_example_is_one(tmp_path: Path) -> None:
    text = (Path(__file__).parents[3] / "docs" / "devices.md").read_text()
    for name in SHIPPED:
        assert f"`{name}`" in text
    (example,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    path = tmp_path / "camera.toml"
    path.write_text(example)
    profile = load_profile(path)
    assert (profile.name, profile.memory_mb, profile.xnnpack_flags) == ("camera", 256, 4)
    assert profile.tolerance.range_error("float32") == 5e-3
