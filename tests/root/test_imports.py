"""Who may import whom: stages stand on the root package, never on each other."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STAGES = ("export", "quantize", "runtime_check")
SHARED = {
    "tpu2edge.types",
    "tpu2edge.usercode",
    "tpu2edge.errors",
    "tpu2edge.children",
    "tpu2edge.files",
    "tpu2edge.folders",
    "tpu2edge.flatbuffer",
}
# Loaded in processes of their own only.
CHILDREN = (
    "runtime_check/devices/worker.py",
    "runtime_check/reference/tpu/child.py",
    "runtime_check/reference/tpu/program.py",
    "quantize/child.py",
)
HEAVY = ("torch", "jax", "jaxlib", "litert_torch", "litert_converter", "ai_edge_litert")


def files(folder: str) -> list[Path]:
    # rglob does not follow the links from src/tpu2edge to the stages.
    return sorted((ROOT / folder).rglob("*.py"))


def imports(path: Path, *, at_load: bool = False) -> Iterator[tuple[str, int]]:
    """Names of imported modules; ``at_load``: only what runs when the module is imported."""

    def visit(node: ast.AST) -> Iterator[tuple[str, int]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((alias.name, child.lineno) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path}:{child.lineno}: a relative import"
                for alias in child.names:
                    yield f"{child.module}.{alias.name}", child.lineno
            elif at_load and isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            elif (
                at_load and isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            ):
                yield from (found for other in child.orelse for found in visit(other))
            else:
                yield from visit(child)

    return visit(ast.parse(path.read_text()))


def _for_types(branch: ast.If) -> bool:
    return "TYPE_CHECKING" in ast.unparse(branch.test)


def within(name: str, modules: set[str] | tuple[str, ...]) -> bool:
    return any(name == module or name.startswith(module + ".") for module in modules)


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_imports_the_shared_modules_and_itself_only(stage):
    allowed = SHARED | {f"tpu2edge.{stage}"}
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in files(stage)
        for name, line in imports(path)
        if within(name, ("tpu2edge",)) and not within(name, allowed) and name != "tpu2edge"
    ]
    assert wrong == []


def test_the_command_line_imports_no_stage():
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in files("cli")
        for name, line in imports(path)
        if within(name, tuple(f"tpu2edge.{stage}" for stage in STAGES))
    ]
    assert wrong == []


def test_nothing_imports_the_command_line_but_its_entry_point():
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for folder in (*STAGES, "src")
        for path in files(folder)
        for name, line in imports(path)
        if within(name, ("tpu2edge.cli",)) and path.name != "__main__.py"
    ]
    assert wrong == []


def test_the_shared_modules_import_nothing_but_each_other():
    wrong = [
        f"{name} in {module}:{line}"
        for module in SHARED
        for name, line in imports(ROOT / "src" / f"{module.replace('.', '/')}.py")
        if within(name, ("tpu2edge",)) and not within(name, SHARED)
    ]
    assert wrong == []


@pytest.mark.parametrize("folder", ["src/tpu2edge", "cli", "quantize", "runtime_check"])
def test_no_heavy_package_is_imported_when_a_module_is_loaded(folder):
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in files(folder)
        for name, line in imports(path, at_load=True)
        if within(name, HEAVY) and path.relative_to(ROOT).as_posix() not in CHILDREN
    ]
    assert wrong == []


def test_what_runs_in_a_process_of_its_own_is_imported_by_nothing_else():
    children = tuple(f"tpu2edge.{c.removesuffix('.py').replace('/', '.')}" for c in CHILDREN)
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for folder in (*STAGES, "cli", "src")
        for path in files(folder)
        for name, line in imports(path)
        if within(name, children) and path.relative_to(ROOT).as_posix() not in CHILDREN
    ]
    assert wrong == []


def test_the_export_stage_leaves_jax_and_the_converter_to_the_functions_that_need_them():
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in files("export")
        for name, line in imports(path, at_load=True)
        if within(name, tuple(set(HEAVY) - {"torch"}))
    ]
    assert wrong == []


def test_the_worker_needs_the_standard_library_numpy_and_litert_only():
    import sys

    path = ROOT / "runtime_check" / "devices" / "worker.py"
    others = {name.split(".")[0] for name, _ in imports(path)} - set(sys.stdlib_module_names)
    assert others == {"numpy", "ai_edge_litert"}


def test_the_walk_itself_finds_what_it_should(tmp_path):
    file = tmp_path / "m.py"
    file.write_text(
        "import torch.nn\n"
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import jax\n"
        "try:\n    import numpy\nexcept ImportError:\n    pass\n"
        "def f():\n    from tpu2edge import cli\n"
    )
    everything = {name for name, _ in imports(file)}
    assert everything == {"torch.nn", "typing.TYPE_CHECKING", "jax", "numpy", "tpu2edge.cli"}
    loaded = {name for name, _ in imports(file, at_load=True)}
    assert loaded == {"torch.nn", "typing.TYPE_CHECKING", "numpy"}
    assert within("tpu2edge.cli", ("tpu2edge.cli",))
    assert not within("torchao", HEAVY)
