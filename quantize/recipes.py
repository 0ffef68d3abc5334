"""Which recipes there are, by ai-edge-quantizer's own names, and what each one does."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tpu2edge.errors import OptionError

__all__ = ["RECIPES", "RecipeInfo", "known_recipe"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeInfo:
    """One recipe: ``upstream`` is the function of ``ai_edge_quantizer.recipe`` that makes it."""

    name: str
    about: str
    upstream: str | None = None


RECIPES: Mapping[str, RecipeInfo] = {
    info.name: info
    for info in (
        RecipeInfo(name="float32", about="nothing is quantized"),
        RecipeInfo(
            name="float16", about="weights stored in float16, computed in float32: half the size"
        ),
        RecipeInfo(
            name="dynamic_wi8_afp32",
            upstream="dynamic_wi8_afp32",
            about="int8 weights per channel, activations quantized at run time: small and fast",
        ),
        RecipeInfo(
            name="dynamic_wi4_afp32",
            upstream="dynamic_wi4_afp32",
            about="int4 weights per channel, activations quantized at run time",
        ),
        RecipeInfo(
            name="dynamic_legacy_wi8_afp32",
            upstream="dynamic_legacy_wi8_afp32",
            about="as dynamic_wi8_afp32, for layers of at least 1024 weights",
        ),
        RecipeInfo(
            name="dynamic_wi8b32_afp32",
            upstream="dynamic_wi8b32_afp32",
            about="int8 weights in blocks of 32 (ai-edge-quantizer 0.10 changes nothing)",
        ),
        RecipeInfo(
            name="dynamic_wi4b32_afp32",
            upstream="dynamic_wi4b32_afp32",
            about="int4 weights in blocks of 32",
        ),
        RecipeInfo(
            name="dynamic_wi4b64_afp32",
            upstream="dynamic_wi4b64_afp32",
            about="int4 weights in blocks of 64",
        ),
        RecipeInfo(
            name="weight_only_wi8_afp32",
            upstream="weight_only_wi8_afp32",
            about="int8 weights per channel, computed in float32: small, not faster",
        ),
        RecipeInfo(
            name="weight_only_wi4_afp32",
            upstream="weight_only_wi4_afp32",
            about="int4 weights per channel, computed in float32",
        ),
    )
}


def known_recipe(name: str) -> RecipeInfo:
    """The recipe called ``name``.

    Raises:
        OptionError: there is none; the message lists the known ones and the closest.
    """
    if name in RECIPES:
        return RECIPES[name]
    if name.startswith("static_"):
        raise OptionError(
            f"recipe '{name}' needs calibration, which this version does not do yet",
            do=f"known without calibration: {_listed(list(RECIPES))}",
        )
    close = difflib.get_close_matches(name, RECIPES, n=1, cutoff=0.4)
    hint = f"the closest is '{close[0]}'; " if close else ""
    raise OptionError(f"unknown recipe '{name}'", do=f"{hint}known: {_listed(list(RECIPES))}")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names)
