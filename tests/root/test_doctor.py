from __future__ import annotations

import stat
from pathlib import Path

import pytest

from tpu2edge import doctor

ROOT = Path(__file__).parents[2]


def tool(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_the_tested_versions_are_those_of_the_constraints_file() -> None:
    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line and not line.startswith("#")
    )
    assert {name: pins[name] for name in doctor.TESTED} == doctor.TESTED


def test_every_package_that_the_project_depends_on_at_runtime_is_looked_at() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    def names(texts: list[str]) -> set[str]:
        return {text.split(">")[0].split("<")[0].split("=")[0] for text in texts}

    # typer and rich draw this very output: without them nothing would be printed.
    assert names(project["dependencies"]) - {"typer", "rich"} == set(doctor.BASE)
    assert names(project["optional-dependencies"]["export"]) | set(doctor.BASE) <= set(
        doctor.TESTED
    )


def test_this_machine_can_export_and_litert_really_ran() -> None:
    found = doctor.diagnose()
    assert found.litert.ok, found.litert.text
    assert "ran a model of one addition" in found.litert.text
    assert found.can_export
    assert found.exit_code == 0
    assert found.to_json()["can_export"] is True


def test_a_litert_that_dies_is_reported_with_its_signal_and_means_exit_4() -> None:
    smoke = doctor._try_litert(("-c", "import os; os.kill(os.getpid(), 11)"))
    assert not smoke.ok
    assert smoke.text.startswith("killed by SIGSEGV")
    found = doctor.Diagnosis(
        version="0", python="3", platform="", packages=(), litert=smoke, facilities=()
    )
    assert found.exit_code == 4


def test_a_litert_that_cannot_be_imported_gives_its_last_line() -> None:
    smoke = doctor._try_litert(("-c", "import no_such_litert"))
    assert smoke.text == "ModuleNotFoundError: No module named 'no_such_litert'"


def test_a_missing_needed_package_means_exit_4_and_another_version_only_a_warning() -> None:
    ok = doctor.Smoke(ok=True, text="")

    def found(*packages: doctor.Package) -> doctor.Diagnosis:
        return doctor.Diagnosis(
            version="0", python="3", platform="", packages=packages, litert=ok, facilities=()
        )

    missing = doctor.Package(name="torch", installed=None, tested="2.13.0", needed=True)
    other = doctor.Package(name="torch", installed="2.14.1", tested="2.13.0", needed=True)
    build = doctor.Package(name="torch", installed="2.13.0+cpu", tested="2.13.0", needed=True)
    unneeded = doctor.Package(name="libtpu", installed=None, tested=None, needed=False)
    assert [p.state for p in (missing, other, build, unneeded)] == [
        "missing",
        "untested",
        "ok",
        "absent",
    ]
    assert found(missing).exit_code == 4
    assert found(missing).can_check  # files that are there can be run and compared
    litert = doctor.Package(name="ai-edge-litert", installed=None, tested="2.3.0", needed=True)
    assert not found(litert).can_check
    assert found(other, build, unneeded).exit_code == 0


def test_adb_lists_the_phones_and_says_which_are_not_allowed_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor._adb().state == "absent"
    assert "apt install adb" in doctor._adb().how
    tool(tmp_path, "adb", r"printf 'List of devices attached\nR58M\tunauthorized\n\n'")
    waiting = doctor._adb()
    assert (waiting.state, "R58M (unauthorized)" in waiting.text) == ("partly", True)
    assert "confirm this computer's key" in waiting.how
    tool(tmp_path, "adb", r"printf 'List of devices attached\nemulator-5554\tdevice\n\n'")
    assert doctor._adb().state == "ready"
    tool(tmp_path, "adb", "echo 'cannot bind to 127.0.0.1:5037' >&2; exit 1")
    assert "cannot bind" in doctor._adb().text


def test_qemu_is_found_by_either_name_with_its_version_or_its_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor._qemu("aarch64").state == "absent"
    tool(tmp_path, "qemu-aarch64-static", "echo 'qemu-aarch64 version 10.0.2'; echo more")
    assert doctor._qemu("aarch64").state == "ready"
    assert doctor._qemu("aarch64").text.endswith("qemu-aarch64 version 10.0.2")
    tool(tmp_path, "qemu-x86_64", "kill -ILL $$")
    assert "killed by SIGILL" in doctor._qemu("x86_64").text


def test_a_tpu_device_without_its_packages_is_partly_there(tmp_path: Path) -> None:
    assert doctor._tpu(tmp_path).state == "absent"
    (tmp_path / "vfio").mkdir()
    (tmp_path / "vfio" / "vfio").touch()  # the control node: there without any TPU
    assert doctor._tpu(tmp_path).state == "absent"
    (tmp_path / "vfio" / "0").touch()
    partly = doctor._tpu(tmp_path)
    assert partly.state == "partly"
    assert partly.how.startswith("pip install torch_tpu")
