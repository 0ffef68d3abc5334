"""The public names are there, and importing the package costs nothing."""

from __future__ import annotations

import ast
import importlib
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import tpu2edge

HEAVY = ("torch", "jax", "jaxlib", "litert_torch", "ai_edge_litert", "ai_edge_quantizer", "numpy")
MODULES = [
    info.name
    for info in pkgutil.walk_packages(tpu2edge.__path__, "tpu2edge.")
    # Without the scripts that are started and never imported.
    if not info.name.endswith(("__main__", "devices.worker", "quantize.child"))
]


def test_all_is_sorted_and_every_name_is_there():
    assert list(tpu2edge.__all__) == sorted(tpu2edge.__all__)
    for name in tpu2edge.__all__:
        assert getattr(tpu2edge, name) is not None
    assert set(tpu2edge.__all__) == set(tpu2edge._HOME) | {"__version__"}
    assert set(dir(tpu2edge)) == set(tpu2edge.__all__)


def test_every_public_name_is_known_to_type_checkers_under_the_same_home():
    source = ast.parse(Path(tpu2edge.__file__).read_text())
    (block,) = [
        node
        for node in source.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    homes = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert homes == tpu2edge._HOME


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'convert'"):
        tpu2edge.convert  # noqa: B018 - the look-up is the test


def test_stages_stay_modules():
    for stage in ("export", "quantize", "runtime_check", "cli"):
        assert type(importlib.import_module(f"tpu2edge.{stage}")).__name__ == "module"
        assert stage not in tpu2edge.__all__


@pytest.mark.parametrize("name", MODULES)
def test_every_module_has_the_names_it_lists(name):
    module = importlib.import_module(name)
    assert module.__doc__
    for public in getattr(module, "__all__", ()):
        assert hasattr(module, public), f"{name}.{public}"


def run(*command: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(Path(tpu2edge.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False, env=env
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "code",
    [
        "import tpu2edge",
        "import tpu2edge; tpu2edge.Tpu2EdgeError, tpu2edge.Signature, tpu2edge.Verdict",
        "import tpu2edge.types, tpu2edge.errors, tpu2edge.files, tpu2edge.bundle",
        "import tpu2edge.cli, tpu2edge.cli.app",
        "import tpu2edge.pipeline, tpu2edge.checking, tpu2edge.requests",
        "import tpu2edge.quantize.recipes",
    ],
)
def test_an_import_loads_none_of_the_heavy_packages(code):
    script = f"{code}\nimport sys\nprint([m for m in {HEAVY!r} if m in sys.modules])"
    assert run("-c", script).strip() == "[]"


def test_help_loads_none_of_them_either():
    script = (
        "import sys\n"
        "sys.argv = ['tpu2edge', 'export', '--help']\n"
        "from tpu2edge.cli import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules])"
    )
    assert run("-c", script).strip().endswith("[]")
