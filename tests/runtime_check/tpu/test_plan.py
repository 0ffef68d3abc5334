"""Each matmul's precision, as the TPU compiler decided it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from tpu2edge.errors import DeviceError, OptionError
from tpu2edge.runtime_check.reference.tpu import (
    TOPOLOGIES,
    Compiled,
    compile_program,
    libtpu_version,
    plan_from_compiled,
    predict,
    report,
    topology_named,
)
from tpu2edge.types import StableHlo

Make = Callable[..., StableHlo]


@pytest.mark.parametrize(
    ("generation", "mode"), [("v5e", "f32"), ("v6e", "f32"), ("tpu7x", "bf16")]
)
def test_a_single_row_stays_in_float32_except_on_tpu7x(
    generation: str, mode: str, libtpu: str, dot_program: Make
) -> None:
    compiled = compile_program(dot_program((1, 64), (64, 32)), TOPOLOGIES[generation])
    plan = plan_from_compiled(compiled)
    assert plan.modes == (mode,)
    assert plan.matmuls[0].evidence
    assert compiled.flops > 0
    assert compiled.hbm_bytes > 64 * 32 * 4


@pytest.mark.parametrize(("precision", "mode"), [("high", "bf16x3"), ("highest", "bf16x6")])
def test_higher_precision_takes_more_passes_and_is_nearer(
    precision: str, mode: str, libtpu: str, dot_program: Make, sqnr_db: Callable[..., float]
) -> None:
    random = np.random.default_rng(0)
    a = random.standard_normal((8, 64)).astype(np.float32)
    b = random.standard_normal((64, 32)).astype(np.float32)
    program = dot_program((8, 64), (64, 32))
    found = predict(program, [[a, b]], precision=precision)
    assert found.plan.modes == (mode,)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    assert sqnr_db(exact, found.outputs[0]["out"]) > {"high": 95, "highest": 125}[precision]
    assert sqnr_db(exact, predict(program, [[a, b]], naive=True).outputs[0]["out"]) < 60


def _compiled(hlo: str, contraction: int = 4) -> Compiled:
    record = {
        "index": 0,
        "op": "dot_general",
        "module": "head",
        "lhs": "<2x4xf32>",
        "rhs": "<4x3xf32>",
        "out": "<2x3xf32>",
        "elements": ["f32", "f32"],
        "contraction": contraction,
        "precision": "default",
    }
    return Compiled(
        generation="v5e",
        topology="v5e:1x1",
        precision="default",
        hlo=hlo,
        prelayout=None,
        matmuls=(record,),
        flops=1.0,
        memory={},
        libtpu="0",
        libtpu_build="",
        device_kind="",
        jax="",
        seconds=0.0,
    )


MARK = 'metadata={op_name="jit(f)/t2e.matmul.0"}'


@pytest.mark.parametrize(
    ("hlo", "mode"),
    [
        (f"  %c = f32[2,3]{{1,0:T(8,128)}} convolution(%a, %b), dim_labels=x, {MARK}", "bf16"),
        (f"  %c = f32[2,3]{{1,0}} dot(%a, %b), operand_precision={{high,high}}, {MARK}", "bf16x3"),
        (f"  %c = f32[2,3] dot(%a, %b), operand_precision={{highest,highest}}, {MARK}", "bf16x6"),
        (f"  %m = f32[2,3,4] multiply(%a, %b)\n  %r = f32[2,3] reduce(%m, %z), {MARK}", "f32"),
    ],
)  # fmt: skip
def test_the_plan_reads_what_became_of_a_matmul(hlo: str, mode: str) -> None:
    assert plan_from_compiled(_compiled(hlo)).modes == (mode,)


@pytest.mark.parametrize(
    "hlo",
    [
        "",
        "  %c = f32[2,3] convolution(%a, %b), dim_labels=bf_oi->bf",  # not marked
        f"  %c = f32[2,3] broadcast(%a), {MARK}",  # marked, but no product
        f"  %m = bf16[2,3,4] multiply(%a, %b)\n  %r = f32[2,3] reduce(%m, %z), {MARK}",
        f"  %n = bf16[4] convert(%a)\n  %w = f32[4] convert(%n)\n"
        f"  %m = f32[2,3,4] multiply(%w, %b)\n  %r = f32[2,3] reduce(%m, %z), {MARK}",
        f"  %c = f32[2,3] dot(%a, %b), {MARK}\n"
        f"  %d = f32[2,3] dot(%a, %b), operand_precision={{high,high}}, {MARK}",
    ],
)
def test_a_matmul_that_is_not_accounted_for_is_an_error(hlo: str) -> None:
    with pytest.raises(DeviceError, match="does not tell how the dot_general") as caught:
        plan_from_compiled(_compiled(hlo))
    assert caught.value.place is not None
    assert caught.value.place.module == "head"


def test_the_report_groups_generations_and_words_refusals(libtpu: str, dot_program: Make) -> None:
    found = report(dot_program((1, 64), (64, 32)), ["v5e", "v6e", "tpu7x"])
    assert found.groups == (("v5e", "v6e"), ("tpu7x",))
    assert all(one.compiles and one.hbm_bytes for one in found.topologies)
    huge = report(dot_program((1 << 16, 1 << 16), (1 << 16, 1 << 16)), ["v5e"]).topologies[0]
    assert not huge.compiles
    assert "does not fit the memory of one TPU v5e chip" in str(huge.reason)


def test_a_dynamic_shape_ends_the_child_not_this_process(libtpu: str) -> None:
    text = (
        "module { func.func public @main(%a: tensor<?x4xf32>, %b: tensor<4x4xf32>) ->"
        " tensor<?x4xf32> { %0 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0]"
        " : (tensor<?x4xf32>, tensor<4x4xf32>) -> tensor<?x4xf32> return %0 : tensor<?x4xf32> } }"
    )
    program = StableHlo(module=text.encode(), route="", versions={}, arguments=(), outputs=())
    with pytest.raises(DeviceError, match=r"for TPU v5e crashed|refuses the program for v5e"):
        compile_program(program, TOPOLOGIES["v5e"])


def test_an_unknown_custom_call_is_named(libtpu: str) -> None:
    text = (
        "module { func.func public @main(%a: tensor<4x4xf32>) -> tensor<4x4xf32> {"
        " %0 = stablehlo.custom_call @lapack_sgetrf(%a) : (tensor<4x4xf32>) -> tensor<4x4xf32>"
        " return %0 : tensor<4x4xf32> } }"
    )
    program = StableHlo(module=text.encode(), route="", versions={}, arguments=(), outputs=())
    with pytest.raises(DeviceError, match="custom call 'lapack_sgetrf'"):
        compile_program(program, TOPOLOGIES["v5e"])


def test_a_timeout_says_so(libtpu: str, dot_program: Make) -> None:
    with pytest.raises(DeviceError, match=r"compiles for TPU v5e took longer than 0\.01 s"):
        compile_program(dot_program((2, 2), (2, 2)), TOPOLOGIES["v5e"], timeout_s=0.01)


def test_a_compiled_program_is_kept_and_a_damaged_one_made_anew(
    libtpu: str, dot_program: Make, tmp_path
) -> None:
    program, folder = dot_program((4, 4), (4, 4)), tmp_path / "kept"
    first = compile_program(program, TOPOLOGIES["v5e"], cache=folder)
    again = compile_program(program, TOPOLOGIES["v5e"], cache=folder)
    assert not first.cached
    assert dataclasses.replace(again, cached=False) == first
    assert again.cached
    (entry,) = folder.iterdir()
    entry.write_bytes(entry.read_bytes()[:40])
    assert not compile_program(program, TOPOLOGIES["v5e"], cache=folder).cached
    other = compile_program(program, TOPOLOGIES["v5e"], precision="high", cache=folder)
    assert not other.cached


def test_without_libtpu_the_message_says_what_to_install(
    dot_program: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tpu2edge.runtime_check.reference.tpu.compile.libtpu_version", lambda: None)
    with pytest.raises(OptionError, match=r"tpu2edge\[tpu\].*naive"):
        predict(dot_program((2, 2), (2, 2)), [])


def test_names_of_generations() -> None:
    assert topology_named("v5litepod").libtpu_name == "v5e:1x1"
    assert topology_named("ironwood").generation == "tpu7x"
    with pytest.raises(OptionError, match=r"v5e.*tpu7x"):
        topology_named("v9")


def test_libtpu_version_agrees_with_the_import_system() -> None:
    import importlib.util

    assert (libtpu_version() is not None) == (importlib.util.find_spec("libtpu") is not None)
