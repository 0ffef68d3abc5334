"""The tree of errors: exit statuses, words, places, and the way between processes."""

from __future__ import annotations

import copy
import inspect
import json
import pickle

import pytest

from tpu2edge import errors
from tpu2edge.errors import (
    ConversionError,
    DeviceError,
    ExportError,
    InputError,
    LoweringError,
    ParityError,
    Place,
    Tpu2EdgeError,
    error_from_json,
)

CLASSES = [
    cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, Tpu2EdgeError)
]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_each_error_has_the_exit_status_of_its_branch(cls):
    status = {ConversionError: 3, DeviceError: 4, ParityError: 1, InputError: 2}
    (branch,) = [b for b in status if issubclass(cls, b)] or [None]
    assert cls("x").exit_code == (status[branch] if branch else 2)


def test_the_drawing_of_the_tree_shows_every_class_and_all_lists_them():
    for cls in CLASSES:
        assert cls.__name__ in errors.__doc__
    assert set(errors.__all__) == {cls.__name__ for cls in CLASSES} | {"Place"}


def test_a_message_says_what_where_and_what_to_do_next():
    error = LoweringError(
        "no way for sort",
        do="use topk",
        place=Place(module="head", op="aten.sort.default", file="net.py", line=7, code="x.sort()"),
        step="lower",
    )
    assert str(error) == (
        "no way for sort\n"
        "  at op aten.sort.default, module 'head', net.py:7: x.sort()\n"
        "  Next: use topk"
    )


@pytest.mark.parametrize(
    ("place", "text"),
    [
        (Place(module=""), "the top module"),
        (Place(tensor="0.weight"), "tensor '0.weight'"),
        (Place(file="a.py"), "a.py"),
        (Place(module="m", file="a.py", line=1), "module 'm', a.py:1"),
    ],
)
def test_a_place_is_told_in_the_users_words(place, text):
    assert str(place) == text
    assert place


def test_an_empty_place_is_none():
    assert not Place()
    assert not Place(code="x")
    assert ExportError("x", place=Place()).place is None
    assert str(ExportError("x")) == "x"


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
@pytest.mark.parametrize("place", [None, Place(module="", line=3, file="f", tensor="t")])
def test_an_error_is_the_same_after_json_pickle_and_copy(cls, place):
    error = cls("what ✓", do="do", place=place, step="lower")
    for again in (
        error_from_json(json.loads(json.dumps(error.to_json()))),
        pickle.loads(pickle.dumps(error)),
        copy.copy(error),
    ):
        assert type(again) is cls
        assert (again.what, again.do, again.place, again.step) == ("what ✓", "do", place, "lower")
        assert str(again) == str(error)
        assert again.kind == cls.__name__


def test_an_unknown_kind_is_still_an_error_of_ours():
    assert type(error_from_json({"kind": "NewError", "what": "x"})) is Tpu2EdgeError
    assert error_from_json({}).what == ""
