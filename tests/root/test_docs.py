"""README and docs say what is so: commands parse, marked blocks run, tables agree with the code."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from tpu2edge.cli.app import app
from tpu2edge.quantize.recipes import PLAIN_NAMES, RECIPES
from tpu2edge.runtime_check.budget import default_budget
from tpu2edge.runtime_check.devices.profiles import TOLERANCE_CLASSES, profiles

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "src" / "tpu2edge" / "pytest_plugin.py"
DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    "docs/budgets.md",
    "docs/devices.md",
    "docs/quantization.md",
    "docs/architecture.md",
    "docs/devices.md",
    "docs/tpu.md",
)
_BLOCK = re.compile(
    r"(?:<!-- test: (?P<mark>[^>]*?) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


def blocks(document: str) -> list[re.Match[str]]:
    return list(_BLOCK.finditer((ROOT / document).read_text()))


def commands(document: str) -> list[list[str]]:
    lines = [
        line
        for block in blocks(document)
        if block["language"] == "sh"
        for line in block["text"].replace("\\\n", " ").splitlines()
    ]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_tpu2edge_command_in_the_documents_parses(document: str) -> None:
    group = get_command(app)
    for words in commands(document):
        if words[0] != "tpu2edge":
            continue
        with group.make_context("tpu2edge", words[1:2]) as context:
            command = group.get_command(context, words[1])  # type: ignore[attr-defined]
            command.make_context(words[1], words[2:]).close()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_other_command_in_the_documents_names_files_and_targets_that_exist(
    document: str,
) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for words in commands(document):
        if words[0] == "make":
            assert words[1] in targets
        elif words[0] == "python":
            files = [word for word in words if word.startswith(("examples/", "constraints"))]
            assert files
            assert all((ROOT / file).is_file() for file in files)
        elif words[0] == "pytest":
            options = [word for word in words if word.startswith("--tpu2edge")]
            assert options
            assert all(f'"{option.split("=")[0]}"' in PLUGIN.read_text() for option in options)
        else:
            assert words[0] == "tpu2edge"


def test_the_marked_blocks_of_the_readme_run_in_order(tmp_path: Path) -> None:
    beside = str(Path(sys.executable).parent)
    env = {**os.environ, "PATH": f"{beside}{os.pathsep}{os.environ['PATH']}"}
    if not importlib.metadata.entry_points(group="pytest11", name="tpu2edge"):
        env["PYTEST_PLUGINS"] = "tpu2edge.pytest_plugin"  # a path entry in place of an install
    ran = 0
    for block in blocks("README.md"):
        mark = block["mark"] or ""
        if mark.startswith("file "):
            (tmp_path / mark.removeprefix("file ")).write_text(block["text"])
        elif mark == "run":
            program = ["sh", "-e", "-c"] if block["language"] == "sh" else [sys.executable, "-c"]
            text = block["text"].replace("tpu2edge ", f"{sys.executable} -m tpu2edge ")
            if block["language"] == "python":
                text = block["text"]
            done = subprocess.run(
                [*program, text],
                cwd=tmp_path,
                env=env,
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, done.stdout + done.stderr
            ran += 1
    assert ran == 5
    assert (tmp_path / "out" / "model.dynamic_wi8_afp32.tflite").is_file()
    report = (tmp_path / "report.xml").read_text()
    assert "dynamic_wi8_afp32.arm-v8.2-dotprod" in report
    assert "<failure" not in report
    assert "<error" not in report


def test_files_linked_from_the_documents_exist() -> None:
    for document in DOCUMENTS:
        folder = (ROOT / document).parent
        text = (ROOT / document).read_text()
        for link in re.findall(r"\]\(([^)#]+)\)", text):
            assert link.startswith("http") or (folder / link).exists(), (document, link)


def test_the_table_of_default_budgets_is_that_of_the_code() -> None:
    text = (ROOT / "docs" / "budgets.md").read_text()
    rows = re.findall(r"^\| (`[^|]+`) \| `([^|]+)` \| `([^|]+)` \|$", text, re.MULTILINE)
    told: dict[str, tuple[str, str]] = {}
    for names, floats, integers in rows:
        for name in re.findall(r"`([\w-]+)`", names):
            told[name] = (floats, integers)
    for name in RECIPES:
        budget = default_budget(name)
        assert told[name] == (
            budget.describe("", is_float=True),
            budget.describe("", is_float=False),
        )
    assert set(told) == set(RECIPES)


def test_the_table_of_recipes_has_every_recipe_and_every_other_name_is_told() -> None:
    text = (ROOT / "docs" / "quantization.md").read_text()
    section = text[text.index("## Recipes\n") : text.index("## Recipe files\n")]
    rows = re.findall(r"^\| ([^|]*`[^|]*) \|", section, re.MULTILINE)
    told = {name for row in rows for name in re.findall(r"`([\w-]+)`", row)}
    assert set(RECIPES) <= told <= {*RECIPES, *PLAIN_NAMES}
    assert all(f"`{name}`" in text for name in PLAIN_NAMES)


def test_the_table_of_devices_has_every_profile_and_the_classes_are_those_of_the_code() -> None:
    text = (ROOT / "docs" / "devices.md").read_text()
    rows = re.findall(r"^\| (`[^|]*`) \| [^|]+ \| [^|]+ \|$", text, re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`([^`]+)`", row)} == set(profiles())
    classes = dict(
        re.findall(r"^\| `([\w-]+)` \| ([^|]+) \| [^|]+ \| [^|]+ \| [^|]+ \|$", text, re.M)
    )
    assert classes == dict(TOLERANCE_CLASSES)
