"""What is built, not what is checked out: the wheel, the sdist, and an install of it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STAGES = ("export", "quantize", "runtime_check", "cli")


def test_the_links_to_the_stages_are_real_links():
    """A checkout without symlinks (git's core.symlinks=false) would build an empty package."""
    for stage in STAGES:
        link = ROOT / "src" / "tpu2edge" / stage
        assert link.is_symlink()
        assert os.readlink(link) == f"../../{stage}"  # noqa: PTH115 - the text as it is stored
        assert (link / "__init__.py").is_file()


def modules() -> set[str]:
    """Every module of the checkout as a path inside of the package."""
    found = {f"tpu2edge/{p.name}" for p in (ROOT / "src" / "tpu2edge").glob("*.py")}
    for stage in STAGES:
        for path in (ROOT / stage).rglob("*.py"):
            found.add(f"tpu2edge/{path.relative_to(ROOT).as_posix()}")
    return found


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, source = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("source") / "copy"
    # A copy, so that nothing of an earlier build comes along and nothing is left in the checkout.
    left = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "demo-out")
    shutil.copytree(ROOT, source, symlinks=True, ignore=left)
    # Without isolation: setuptools is that of this environment, and nothing is downloaded.
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (path,) = built.glob("*.whl")
    return path


@pytest.mark.slow
def test_the_wheel_holds_every_module_and_the_marker_for_type_checkers(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name for name in names if name.endswith(".py")} == modules()
    assert "tpu2edge/py.typed" in names
    assert "tpu2edge/runtime_check/devices/worker.py" in names
    assert "tpu2edge/quantize/child.py" in names
    devices = ROOT / "runtime_check" / "devices"
    kept = [*devices.glob("profiles/*.toml"), *devices.glob("native/*"), *devices.glob("web/*")]
    assert len(kept) > 12
    for path in kept:
        assert f"tpu2edge/{path.relative_to(ROOT).as_posix()}" in names
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"tpu2edge"}


@pytest.mark.slow
def test_the_wheel_says_its_licence_and_its_command(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [n for n in archive.namelist() if n.endswith("METADATA")]
        (points,) = [n for n in archive.namelist() if n.endswith("entry_points.txt")]
        text = archive.read(metadata).decode()
        assert "tpu2edge = tpu2edge.cli:main" in archive.read(points).decode()
    assert "License-Expression: Apache-2.0" in text
    assert "Requires-Python: >=3.11" in text


@pytest.mark.slow
def test_torch_and_the_converter_come_with_the_extra_export_alone(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [n for n in archive.namelist() if n.endswith("METADATA")]
        text = archive.read(metadata).decode()
    needed = re.findall(
        r"^Requires-Dist: ([\w-]+)[^;\n]*(?:; extra == '(\w+)')?$", text.replace('"', "'"), re.M
    )
    base = {name for name, extra in needed if not extra}
    assert base == {"ai-edge-litert", "flatbuffers", "numpy", "rich", "safetensors", "typer"}
    heavy = {"torch", "litert-torch", "ai-edge-quantizer", "jax", "jaxlib"}
    assert {name for name, extra in needed if extra == "export"} == heavy
    assert {name for name, extra in needed if extra == "device"} == {"pytest"}


@pytest.mark.slow
def test_the_extra_device_is_enough_to_check_a_bundle_without_torch(wheel, tmp_path, affine_bundle):
    """What a CI without torch does: install, check, run the bundle as tests."""
    bundle = affine_bundle()
    home = tmp_path / "venv"
    venv.create(home, with_pip=False)
    python, command = home / "bin" / "python", home / "bin" / "tpu2edge"
    keep = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    env = {**keep, "XDG_CACHE_HOME": str(tmp_path / "cache")}

    def run(*words: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            list(map(str, words)),
            capture_output=True,
            text=True,
            check=False,
            env=env,
            cwd=tmp_path,
        )

    install = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet")
    constraints = ("--constraint", ROOT / "constraints.txt")
    done = run(*install, *constraints, f"tpu2edge[device] @ {wheel.as_uri()}")
    assert done.returncode == 0, done.stderr[-3000:]
    for module in ("torch", "jax", "litert_torch", "ai_edge_quantizer"):
        missing = run(python, "-c", f"import {module}")
        assert f"No module named '{module}'" in missing.stderr
    checked = run(command, "check", bundle, "--device", "host,reference")
    assert checked.returncode == 0, checked.stderr
    assert "8 outputs" in checked.stdout
    assert run(command, "devices").returncode == 0
    options = ("--tpu2edge-bundle", bundle, "--tpu2edge-device", "host,reference")
    tested = run(python, "-m", "pytest", *options)
    assert tested.returncode == 0, tested.stdout
    assert "8 passed" in tested.stdout
    refused = run(command, "export", "model.py", "-o", "made")
    assert refused.returncode == 4
    assert "pip install 'tpu2edge[export]'" in refused.stderr
    doctor = run(command, "doctor")
    assert doctor.returncode == 4
    assert "tpu2edge check, tpu2edge devices and the pytest plugin can run here" in doctor.stdout


@pytest.mark.slow
def test_the_sdist_holds_the_stages_the_tests_and_the_examples(built):
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    for module in modules():
        assert f"src/{module}" in names
    kept = [*ROOT.glob("*.md"), *ROOT.glob("*.toml"), *ROOT.glob("*.txt"), ROOT / "LICENSE"]
    for folder in ("tests", "examples", "benchmarks", "docs"):
        kept += [path for path in (ROOT / folder).rglob("*.*") if "__pycache__" not in str(path)]
    missing = {path.relative_to(ROOT).as_posix() for path in kept if path.is_file()} - names
    assert missing == set()
    assert "tests/data/small.float32.tflite" in names


@pytest.mark.slow
def test_the_installed_wheel_runs_outside_of_the_checkout(wheel, tmp_path):
    home = tmp_path / "venv"
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = home / "lib" / version / "site-packages"
    # The dependencies are those of this environment: only the package itself is installed anew.
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    options = ["--no-deps", "--no-index", "--ignore-installed", str(wheel)]
    subprocess.run([*install, *options], check=True, env=env)

    def run(*command: str) -> str:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=env, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    text = run(str(home / "bin" / "tpu2edge"), "--help")
    for command in ("export", "check", "inspect", "doctor"):
        assert command in text
    where = run(str(python), "-c", "import tpu2edge.runtime_check.devices as d; print(d.__file__)")
    assert Path(where.strip()).is_relative_to(site)
    model = ROOT / "tests" / "data" / "small.float32.tflite"
    script = (
        "import sys, pathlib\n"
        "from tpu2edge.runtime_check.devices.client import Session\n"
        "with Session(pathlib.Path(sys.argv[1])) as s:\n"
        "    print([spec.name for spec in s.signatures[0].inputs])\n"
    )
    assert run(str(python), "-c", script, str(model)).strip() == "['image']"
