"""Names of inputs and outputs come from the model, in its own order, and never repeat."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch

from tpu2edge.errors import DataError, ExportError, ModelSourceError
from tpu2edge.export.names import call_layout, output_layout


def t(value: float = 0.0) -> torch.Tensor:
    return torch.tensor([value])


class Box(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class State:
    hidden: Any
    cell: Any = None


A, B, C, D = t(1), t(2), t(3), t(4)


# ---------------------------------------------------------------------------------------- inputs


def positional(a, b): ...
def defaults(a, b=None, scale=1.0): ...
def starred(a, *rest): ...
def keyworded(a, **options): ...
def keyword_only(a, *, b): ...
def positional_only(a, /, **options): ...


@pytest.mark.parametrize(
    ("forward", "args", "kwargs", "names", "tensors"),
    [
        (positional, (A, B), {}, ["a", "b"], [A, B]),
        (positional, (A,), {"b": B}, ["a", "b"], [A, B]),
        (positional, (), {"b": B, "a": A}, ["a", "b"], [A, B]),
        (defaults, (A,), {}, ["a"], [A]),
        (defaults, (A, None, B), {}, ["a", "scale"], [A, B]),
        (starred, (A, B, C), {}, ["a", "rest.0", "rest.1"], [A, B, C]),
        (keyworded, (A,), {"z": B, "y": C}, ["a", "z", "y"], [A, B, C]),
        (keyword_only, (A,), {"b": B}, ["a", "b"], [A, B]),
        (positional_only, (A,), {"a": B, "b": C}, ["a", "a#2", "b"], [A, B, C]),
        (positional, ([A, B], (C,)), {}, ["a.0", "a.1", "b.0"], [A, B, C]),
        (positional, ({"q": A, "k": {"v": B}}, C), {}, ["a.q", "a.k.v", "b"], [A, B, C]),
        (positional, (Box(A, B), State(C, D)), {}, ["a.left", "a.right", "b.hidden", "b.cell"], 4),
        (positional, (Box(A, None), State([B, C])), {}, ["a.left", "b.hidden.0", "b.hidden.1"], 3),
        (positional, (A, A), {}, ["a", "b"], [A, A]),
        (positional, ({1: A, "1": B}, C), {}, ["a.1", "a.1#2", "b"], [A, B, C]),
        (
            positional,
            ({"x.y": A, "x": {"y": B}, "x.y#2": C}, D),
            {},
            ["a.x.y", "a.x.y#3", "a.x.y#2", "b"],
            [A, B, C, D],
        ),
    ],
)
def test_inputs_are_called_as_forwards_arguments(forward, args, kwargs, names, tensors):
    layout = call_layout(forward, args, kwargs)
    assert list(layout.names) == names
    assert len(set(layout.names)) == len(layout.names)
    if isinstance(tensors, list):
        assert [id(x) for x in layout.tensors] == [id(x) for x in tensors]
    else:
        assert len(layout.tensors) == tensors


def back(forward_args: tuple, forward_kwargs: dict, forward=None) -> Any:
    """What forward gets when the layout's own tensors are put back."""
    got = {}

    def record(*args: Any, **kwargs: Any) -> None:
        got["args"], got["kwargs"] = args, kwargs

    layout = call_layout(forward or record, forward_args, forward_kwargs)
    layout.call(record, layout.tensors)
    return got["args"], got["kwargs"]


def test_a_call_puts_the_tensors_back_where_they_were():
    hidden = collections.OrderedDict(h=A, c=[B, (C, None)])
    args, kwargs = back((hidden, Box(D, 3)), {"state": State(A, "text"), "flag": True})
    assert type(args[0]) is collections.OrderedDict
    assert args[0]["h"] is A
    assert args[0]["c"][0] is B
    assert args[0]["c"][1] == (C, None)
    assert args[1] == Box(D, 3)
    assert kwargs["state"] == State(A, "text")
    assert kwargs["flag"] is True


def test_a_call_with_other_tensors_changes_those_only():
    layout = call_layout(positional, (A, {"k": B, "n": 2}), {})
    got = layout.call(lambda a, b: (a, b), (C, D))
    assert got[0] is C
    assert got[1] == {"k": D, "n": 2}


def test_a_default_dict_keeps_its_factory_and_int_keys_stay_ints():
    made = collections.defaultdict(list, {0: A})
    args, _ = back((made,), {})
    assert args[0].default_factory is list
    assert list(args[0]) == [0]


def test_arguments_go_back_as_they_were_given_for_every_kind_of_parameter():
    assert back((A,), {"b": B}, positional) == ((A,), {"b": B})
    assert back((A, B, C), {}, starred) == ((A, B, C), {})
    assert back((A,), {"z": B}, keyworded) == ((A,), {"z": B})
    assert back((A,), {"a": B}, positional_only) == ((A,), {"a": B})


def test_numbers_and_flags_are_fixed_and_told_by_name():
    def forward(x, steps, ratio, causal, mode, mask=None, size=None): ...

    layout = call_layout(
        forward, (A, 3, 0.5, True, "mean"), {"mask": None, "size": torch.Size([2, 3])}
    )
    assert layout.names == ("x",)
    assert layout.constants == {
        "steps": "3",
        "ratio": "0.5",
        "causal": "True",
        "mode": "'mean'",
        "mask": "None",
        "size.0": "2",
        "size.1": "3",
    }


def test_a_fixed_object_is_told_without_its_address_which_changes_from_run_to_run():
    class Options: ...

    layout = call_layout(positional, (A, Options()), {})
    assert "0x" not in layout.constants["b"]
    assert "Options" in layout.constants["b"]


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        ((), {}, "missing a required argument: 'a'"),
        ((A, B, C), {}, "too many positional arguments"),
        ((A,), {"c": B}, r"missing a required argument: 'b'|unexpected keyword argument 'c'"),
        ((A,), {"a": B, "b": C}, "multiple values for argument 'a'"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_with_what_forward_takes(args, kwargs, words):
    with pytest.raises(ModelSourceError, match=words) as error:
        call_layout(positional, args, kwargs)
    assert "forward takes (a, b)" in error.value.do


def test_a_call_without_tensors_is_refused():
    with pytest.raises(DataError, match="no tensor"):
        call_layout(positional, (1, [2.0]), {})


# --------------------------------------------------------------------------------------- outputs


@pytest.mark.parametrize(
    ("result", "names", "tensors"),
    [
        (A, ["output_0"], [A]),
        ((A, B), ["output_0", "output_1"], [A, B]),
        ([A], ["output_0"], [A]),
        ({"logits": A, "boxes": B}, ["logits", "boxes"], [A, B]),
        ({"z": A, "a": B}, ["z", "a"], [A, B]),  # not sorted
        (Box(A, B), ["left", "right"], [A, B]),
        (State(A, B), ["hidden", "cell"], [A, B]),
        ({"h": (A, [B, C]), "s": State(D, A)}, ["h.0", "h.1.0", "h.1.1", "s.hidden", "s.cell"], 5),
        (
            (A, {"k": B}, Box(C, D)),
            ["output_0", "output_1.k", "output_2.left", "output_2.right"],
            4,
        ),
        ((A, A), ["output_0", "output_1"], [A, A]),
        ({"a": {"b_c": A}, "a_b": {"c": B}}, ["a.b_c", "a_b.c"], [A, B]),
        ({"a.b": A, "a": {"b": B}}, ["a.b", "a.b#2"], [A, B]),
        ({0: A, 1: B}, ["0", "1"], [A, B]),
    ],
)
def test_outputs_are_called_as_their_keys(result, names, tensors):
    layout = output_layout(result)
    assert list(layout.names) == names
    assert layout.left_out == ()
    if isinstance(tensors, list):
        assert [id(x) for x in layout.tensors] == [id(x) for x in tensors]
    else:
        assert len(layout.tensors) == tensors


def test_model_outputs_of_transformers_keep_their_keys():
    from transformers.modeling_outputs import BaseModelOutput, SequenceClassifierOutput

    found = output_layout(SequenceClassifierOutput(logits=A, hidden_states=(B, C)))
    assert found.names == ("logits", "hidden_states.0", "hidden_states.1")
    assert found.left_out == ()  # ModelOutput itself has no None
    nested = output_layout({"encoder": BaseModelOutput(last_hidden_state=A), "x": B})
    assert nested.names == ("encoder.last_hidden_state", "x")


def test_eleven_outputs_stay_in_order():
    layout = output_layout(tuple(t(i) for i in range(11)))
    assert layout.names[-2:] == ("output_9", "output_10")
    assert [int(x) for x in layout.tensors] == list(range(11))


def test_what_is_no_tensor_is_left_out_in_words():
    layout = output_layout({"logits": A, "loss": None, "count": 3, "rate": 0.5, "how": "mean"})
    assert layout.names == ("logits",)
    assert [note.text for note in layout.left_out] == [
        f"output '{name}' is the value {value}, not a tensor: it is not in the file"
        for name, value in [("loss", "None"), ("count", "3"), ("rate", "0.5"), ("how", "'mean'")]
    ]
    assert {note.code for note in layout.left_out} == {"output-left-out"}


def test_the_place_of_a_left_out_output_stays_in_the_names():
    assert output_layout((A, None, B)).names == ("output_0", "output_2")


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (None, "returned the value None, not a tensor"),
        (3.0, "returned the value 3.0"),
        ([], "returned no tensor"),
        ({"a": None}, "returned no tensor"),
        ({A}, "a builtins.set"),
        ({"a": A, "past": object()}, "output 'past' is a builtins.object"),
    ],
)
def test_what_cannot_be_exported_is_refused_with_its_name(result, words):
    with pytest.raises(ExportError, match=words):
        output_layout(result)


def test_a_cache_object_is_refused_with_the_option_that_turns_it_off():
    from transformers import DynamicCache

    with pytest.raises(ExportError, match="'past_key_values' is a transformers") as error:
        output_layout({"logits": A, "past_key_values": DynamicCache()})
    assert "use_cache=False" in error.value.do
