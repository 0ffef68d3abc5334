"""Options as text, and what they come to."""

from __future__ import annotations

import pytest

from tpu2edge.errors import OptionError
from tpu2edge.options import parse_dynamic, parse_shapes


def test_dynamic_ranges_are_parsed() -> None:
    parsed = parse_dynamic(("opts.ids.1=2:64", "x.0=1:8"))
    assert (parsed["opts.ids"][1].min, parsed["opts.ids"][1].max) == (2, 64)
    assert (parsed["x"][0].min, parsed["x"][0].max) == (1, 8)


def test_shapes_are_read_from_text() -> None:
    assert parse_shapes(["x=1x3,2x3", "a.b=4,8"]) == {"x": [(1, 3), (2, 3)], "a.b": [(4,), (8,)]}
    for text in ("x", "x=", "x=1x", "x=1,", "x=0x3", "x=1:3"):
        with pytest.raises(OptionError):
            parse_shapes([text])
    with pytest.raises(OptionError, match="twice"):
        parse_shapes(["x=1", "x=2"])
