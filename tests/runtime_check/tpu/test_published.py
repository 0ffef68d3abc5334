"""Results that others printed from real TPUs come out of the prediction, to the printed digits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tpu2edge.runtime_check.reference.tpu import predict
from tpu2edge.types import StableHlo

Make = Callable[..., StableHlo]

# jax issue 16349: random.normal of PRNGKey(0), split in three, with the generator of that time.
X_16349 = np.array(
    [
        [
            [-1.619368553161621, 1.2838611602783203, -1.136875033378601, -0.4885568618774414],
            [-0.19522805511951447, 1.5411550998687744, -0.37026986479759216, -0.17854981124401093],
        ]
    ],
    np.float32,
)
K_16349 = np.array(
    [
        [-0.38537442684173584, -1.4707388877868652],
        [0.5467919707298279, 2.095505475997925],
        [1.1165616512298584, 0.1611746996641159],
        [-0.5371373891830444, -0.8921382427215576],
    ],
    np.float32,
)


@pytest.mark.parametrize("naive", [False, True])
def test_the_2x2_product_of_jax_issue_9973(
    naive: bool, dot_program: Make, request: pytest.FixtureRequest
) -> None:
    if not naive:
        request.getfixturevalue("libtpu")
    x = np.array([[0.3744, 0.1656], [0.4707, 0.1663]], np.float32)
    y = np.array([[0.3946, 0.1186], [0.1569, 0.3145]], np.float32)
    printed = np.array([[0.17405128, 0.09669876], [0.21180916, 0.10805416]])
    found = predict(dot_program((2, 2), (2, 2)), [[x, y]], generation="v3", naive=naive)
    assert found.plan.modes == ("bf16",)
    np.testing.assert_allclose(found.outputs[0]["out"], printed, rtol=0, atol=6e-9)
    # The check has teeth: float32 is far off what the TPU printed.
    assert np.abs(x @ y - printed).max() > 1e-4


def test_the_matmul_of_jax_issue_16349_on_v3(libtpu: str, dot_program: Make) -> None:
    printed = np.array([[[0.31184387, 5.3089447], [0.5985794, 3.6086464]]])
    program = dot_program((1, 2, 4), (4, 2))
    found = predict(program, [{"a": X_16349, "b": K_16349}], generation="v3")
    assert found.plan.modes == ("bf16",)
    np.testing.assert_allclose(found.outputs[0]["out"], printed, rtol=0, atol=5e-7)


def test_the_row_by_row_products_of_jax_issue_16349_on_v3(libtpu: str, dot_program: Make) -> None:
    # The same product one row at a time printed other numbers: a single row stays in float32.
    printed = np.array([[[0.31908777, 5.3246055], [0.60039854, 3.6162388]]])
    rows = [[X_16349[:, :1], K_16349], [X_16349[:, 1:], K_16349]]
    found = predict(dot_program((1, 1, 4), (4, 2)), rows, generation="v3")
    assert found.plan.modes == ("f32",)
    both = np.concatenate([one["out"] for one in found.outputs], axis=1)
    # Not to the last digit: the compiler of 2023 was some 2e-5 off float32 here. Rounding to
    # bfloat16, as for the product in one piece, is off by 7e-3.
    np.testing.assert_allclose(both, printed, rtol=0, atol=3e-5)
    naive = predict(dot_program((1, 1, 4), (4, 2)), rows, naive=True)
    assert np.abs(naive.outputs[0]["out"] - printed[:, :1]).max() > 1e-3


@pytest.mark.parametrize("naive", [False, True])
def test_the_integers_of_jax_issue_23159(
    naive: bool, dot_program: Make, request: pytest.FixtureRequest
) -> None:
    if not naive:
        request.getfixturevalue("libtpu")
    x = np.arange(4 * 1 * 10, dtype=np.float32).reshape(4, 1, 10)
    y = np.arange(8 * 10 * 4, dtype=np.float32).reshape(8, 10, 4)
    found = predict(
        dot_program((4, 1, 10), (8, 10, 4), axis=1), [[x, y]], generation="v3", naive=naive
    )
    exact = np.einsum("btd,adr->btar", x.astype(np.float64), y.astype(np.float64))
    error = np.abs(found.outputs[0]["out"] - exact)
    # Printed by the failed comparison: 16 / 128 mismatched (rtol 1e-3), these largest errors.
    assert error.max() == 345.0
    relative = (error / np.maximum(np.abs(exact), 1e-30)).max()
    assert relative == pytest.approx(0.00333382, abs=5e-9)
    assert found.plan.modes == ("bf16",)
    assert error.size == 128
    assert int((error > 0).sum()) == 16
