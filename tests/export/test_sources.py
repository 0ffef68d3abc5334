"""From MODEL, as the user writes it, to a module with its example inputs."""

from __future__ import annotations

import hashlib
import os
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from tpu2edge.errors import DataError, ModelSourceError
from tpu2edge.export.sources import load_source

NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self, width=3):
        super().__init__()
        self.f = torch.nn.Linear(width, 2)

    def forward(self, x, scale=None):
        y = self.f(x)
        return y if scale is None else y * scale
"""


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        home = getattr(sys.modules[name], "__file__", None) or ""
        if home.startswith(str(tmp_path)):
            del sys.modules[name]


def write(name: str, text: str) -> str:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return name


def refusal(spec: str) -> ModelSourceError:
    with pytest.raises(ModelSourceError) as caught:
        load_source(spec)
    return caught.value


def test_a_function_may_return_a_model_alone():
    write("net.py", NET + "def make():\n    return Net()\n")
    source = load_source("net.py:make")
    assert isinstance(source.module, torch.nn.Module)
    assert source.program is None
    assert source.args is None
    assert source.kwargs == {}
    assert source.origin == "net.py:make"
    assert source.sha256 == hashlib.sha256(Path("net.py").read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("returned", "args", "kwargs"),
    [
        ("Net(), torch.ones(1, 3)", [(1, 3)], {}),
        ("Net(), (torch.ones(1, 3), torch.ones(2))", [(1, 3), (2,)], {}),
        ("Net(), [torch.ones(1, 3)]", [(1, 3)], {}),
        ("Net(), {'x': torch.ones(1, 3)}", [], {"x": (1, 3)}),
        ("Net(), (torch.ones(1, 3),), {'scale': torch.ones(2)}", [(1, 3)], {"scale": (2,)}),
        ("[Net(), None, {'x': torch.ones(1, 3)}]", [], {"x": (1, 3)}),
        ("{'model': Net(), 'args': (torch.ones(1, 3),)}", [(1, 3)], {}),
        ("{'model': Net(), 'kwargs': {'x': torch.ones(4, 3)}}", [], {"x": (4, 3)}),
    ],
)
def test_inputs_are_taken_in_each_form_they_are_returned_in(returned, args, kwargs):
    write("net.py", NET + f"def make():\n    return {returned}\n")
    source = load_source("net.py:make")
    assert source.args is not None
    assert [tuple(a.shape) for a in source.args] == args
    assert {name: tuple(a.shape) for name, a in source.kwargs.items()} == kwargs


def test_a_module_instance_and_a_class_without_arguments_are_models():
    write("net.py", NET + "net7 = Net(7)\n")
    assert load_source("net.py:net7").module.f.in_features == 7
    assert load_source("net.py:Net").module.f.in_features == 3


def test_a_plain_file_is_searched_for_litert_clis_names():
    write(
        "net.py",
        NET
        + "def get_model():\n    return Net()\n"
        + "def get_args():\n    return (torch.ones(2, 3),)\n"
        + "def get_kwargs():\n    return {'scale': torch.ones(1)}\n",
    )
    source = load_source("net.py")
    assert tuple(source.args[0].shape) == (2, 3)
    assert tuple(source.kwargs["scale"].shape) == (1,)
    assert source.origin == "net.py:get_model"
    assert "get_args and get_kwargs" in " ".join(map(str, source.notes))


def test_inputs_of_the_function_come_before_those_beside_it_and_a_note_says_so():
    write(
        "net.py",
        NET + "def make():\n    return Net(), torch.ones(5, 3)\n"
        "def get_args():\n    return torch.ones(9, 3)\n",
    )
    source = load_source("net.py:make")
    assert tuple(source.args[0].shape) == (5, 3)
    assert "get_args of net.py not used" in str(source.notes[0])


def test_a_file_with_two_possible_models_is_refused_with_both_names():
    write("net.py", NET + "def make():\n    return Net()\ndef build_model():\n    return Net()\n")
    assert "make and build_model" in refusal("net.py").what


def test_a_file_without_a_known_name_lists_what_it_defines():
    write("net.py", (NET + "def digits():\n    return Net()\n").replace("Net", "DigitsNet"))
    error = refusal("net.py")
    assert "digits (function), DigitsNet (nn.Module class)" in error.what
    assert "net.py:digits" in error.do


def test_an_unknown_name_is_refused_with_the_closest():
    write("net.py", NET + "def make_digits():\n    return Net()\n")
    assert "the closest is make_digits" in refusal("net.py:make_digit").what


def test_a_missing_file_is_refused_with_the_closest_file():
    write("digits.py", NET)
    assert "the closest is digits.py" in refusal("digit.py:make").what


def test_a_package_of_the_current_folder_is_importable():
    write("zoo_pkg/__init__.py", "")
    write("zoo_pkg/nets.py", NET + "def small():\n    return Net(5), torch.ones(1, 5)\n")
    source = load_source("zoo_pkg.nets:small")
    assert source.module.f.in_features == 5
    assert source.origin == "zoo_pkg.nets:small"
    assert "zoo_pkg.nets:small" in refusal("zoo_pkg.nets.small").do


def test_an_unknown_module_is_refused_in_words():
    assert "no module 'no_such_pkg'" in refusal("no_such_pkg.nets:small").what


def test_a_file_in_a_package_may_use_relative_imports():
    write("pkg_r/__init__.py", "")
    write("pkg_r/width.py", "WIDTH = 6\n")
    write(
        "pkg_r/net.py", "from .width import WIDTH\n" + NET + "def make():\n    return Net(WIDTH)\n"
    )
    assert load_source("pkg_r/net.py:make").module.f.in_features == 6


def test_neighbours_are_found_even_when_they_are_imported_late():
    write("deep/late_width.py", "WIDTH = 4\n")
    write(
        "deep/net.py",
        NET + "def make():\n    import late_width\n    return Net(late_width.WIDTH)\n",
    )
    assert load_source("deep/net.py:make").module.f.in_features == 4


def test_a_file_that_is_named_like_a_library_does_not_hide_it():
    write("json.py", NET + "def make():\n    return Net()\n")
    import json

    assert isinstance(load_source("json.py:make").module, torch.nn.Module)
    assert sys.modules["json"] is json


def test_an_edited_file_is_read_anew():
    write("net.py", NET + "def make():\n    return Net(4)\n")
    assert load_source("net.py:make").module.f.in_features == 4
    stat = Path("net.py").stat()
    write("net.py", NET + "def make():\n    return Net(5)\n")
    os.utime("net.py", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert load_source("net.py:make").module.f.in_features == 5


def test_an_error_of_the_users_code_names_their_innermost_line():
    write("helper_w.py", "def width():\n    return int('three')\n")
    write("net.py", NET + "import helper_w\ndef make():\n    return Net(helper_w.width())\n")
    error = refusal("net.py:make")
    assert "ValueError: invalid literal" in error.what
    assert (error.place.file, error.place.line) == ("helper_w.py", 2)
    assert error.place.code == "return int('three')"
    assert isinstance(error.__cause__, ValueError)


def test_an_error_inside_torch_names_the_users_line_that_called_it():
    write("net.py", NET + "def make():\n    return Net(torch.ones(2) @ torch.ones(3))\n")
    error = refusal("net.py:make")
    assert error.place.code == "return Net(torch.ones(2) @ torch.ones(3))"


def test_a_syntax_error_names_its_line():
    write("net.py", "import torch\ndef make(:\n")
    error = refusal("net.py")
    assert (error.place.file, error.place.line) == ("net.py", 2)
    assert "SyntaxError" in error.what


def test_a_missing_package_of_the_users_code_is_named():
    write("net.py", "import no_such_library.x\n")
    assert "install 'no_such_library'" in refusal("net.py:make").do


def test_a_script_that_parses_arguments_does_not_see_ours_or_end_the_program(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["tpu2edge", "export", "net.py", "--recipe", "x"])
    write(
        "net.py",
        NET + "import argparse\np = argparse.ArgumentParser()\np.add_argument('--width', type=int, "
        "default=8)\nwidth = p.parse_args().width\ndef make():\n    return Net(width)\n",
    )
    assert load_source("net.py:make").module.f.in_features == 8
    assert sys.argv[0] == "tpu2edge"
    write("stop.py", "raise SystemExit(3)\n")
    assert "SystemExit: 3" in refusal("stop.py:make").what


def test_a_function_that_needs_arguments_is_refused_with_their_names():
    write("net.py", NET + "def make(width, depth=2, *, heads):\n    return Net(width)\n")
    error = refusal("net.py:make")
    assert "needs arguments (width, heads)" in error.what
    assert error.place.code.startswith("def make(width")


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ("None", "gives None"),
        ("Net", "the class Net"),
        ("Net().state_dict()", "a dict with the keys"),
        ("Net(), torch.ones(1), torch.ones(1)", "kwargs is a Tensor"),
        ("Net(), 3.0", "are a float"),
        ("{'model': Net(), 'inputs': 1}", "'inputs'"),
        ("Net(), {'x': 1}, {'x': 2}", "given twice"),
        ("Net(), 1, {}, 4", "4 things"),
    ],
)
def test_what_is_no_model_or_no_inputs_is_refused_in_words(returned, words):
    write("net.py", NET + f"def make():\n    return {returned}\n")
    assert words in refusal("net.py:make").what


@pytest.mark.parametrize("name", ["w.pth", "w.safetensors", "m.tflite"])
def test_a_file_that_belongs_to_another_option_is_refused_with_that_option(name):
    Path(name).write_bytes(b"x")
    error = refusal(name)
    assert "--checkpoint" in error.do or "tpu2edge check" in error.do


def test_an_absolute_path_is_not_kept(tmp_path):
    write("net.py", NET + "def make():\n    return Net()\n")
    assert load_source(f"{tmp_path}/net.py:make").origin == "net.py:make"
    other = tmp_path / "elsewhere"
    other.mkdir()
    os.chdir(other)
    assert load_source(f"{tmp_path}/net.py:make").origin == "net.py:make"


class Sized(torch.nn.Module):
    def forward(self, x, scale):
        return x.reshape(x.shape[0] * 2, -1).sum(1) * scale


def saved(name: str = "net.pt2") -> str:
    batch = torch.export.Dim("batch", min=1, max=16)
    program = torch.export.export(
        Sized(),
        (torch.arange(8.0).reshape(2, 4),),
        {"scale": torch.tensor(2.0)},
        dynamic_shapes={"x": {0: batch}, "scale": None},
    )
    torch.export.save(program, name)
    return name


def test_a_saved_program_comes_with_its_example_inputs():
    source = load_source(saved())
    assert source.module is None
    (x,) = source.args
    y = source.program.module()(x, **source.kwargs)
    assert y.tolist() == [2.0, 10.0, 18.0, 26.0]
    assert source.sha256 == hashlib.sha256(Path("net.pt2").read_bytes()).hexdigest()
    assert source.origin == "net.pt2"


def test_a_module_without_inputs_is_refused_where_they_are_needed_a_program_is_not():
    load_source(saved()).refuse_without_inputs("net.pt2")
    write("net.py", NET + "def make():\n    return Net(), None, {'x': torch.ones(1, 3)}\n")
    load_source("net.py:make").refuse_without_inputs("net.py:make")
    write("bare.py", NET + "def get_model():\n    return Net()\n")
    with pytest.raises(DataError, match="'bare.py' gives no example inputs") as caught:
        load_source("bare.py").refuse_without_inputs("bare.py")
    assert "get_args()" in caught.value.do


def test_a_cut_or_foreign_pt2_is_refused_in_words():
    data = Path(saved()).read_bytes()
    Path("cut.pt2").write_bytes(data[: len(data) // 2])
    assert "cut.pt2 is no saved ExportedProgram, or is damaged" in refusal("cut.pt2").what
    torch.save({"w": torch.ones(2)}, "weights.pt2")
    assert "--checkpoint" in refusal("weights.pt2").do
    assert "no file" in refusal("absent.pt2").what


def test_a_pt2_with_a_flipped_byte_is_refused():
    data = bytearray(Path(saved()).read_bytes())
    data[data.index(b'"graph_module"') + 40] ^= 0x11
    Path("flip.pt2").write_bytes(data)
    assert "checksum" in refusal("flip.pt2").what


def rewritten(change) -> str:
    """The saved program with one record exchanged."""
    with zipfile.ZipFile(saved()) as old, zipfile.ZipFile("evil.pt2", "w") as new:
        for name in old.namelist():
            new.writestr(name, change(name, old.read(name)))
    return "evil.pt2"


class Evil:
    def __reduce__(self):
        return (os.mkdir, ("ran",))


def test_a_pt2_that_would_run_pickled_code_is_refused_and_not_run():
    import io

    buffer = io.BytesIO()
    torch.save((Evil(),), buffer)
    name = rewritten(lambda n, d: buffer.getvalue() if n.endswith("sample_inputs/model.pt") else d)
    assert "could run code" in refusal(name).what
    assert not Path("ran").exists()


def test_a_pt2_with_code_for_a_size_is_refused_and_not_run():
    code = b"\"expr_str\": \"__import__('os').mkdir('ran')\""

    def change(name: str, data: bytes) -> bytes:
        import re

        return re.sub(rb'"expr_str": "[^"]*"', code, data) if "models/" in name else data

    assert "could run code" in refusal(rewritten(change)).what
    assert not Path("ran").exists()
