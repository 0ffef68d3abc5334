"""Capturing outputs where the model is: on the CPU and, when torchax is there, on a JAX device."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tpu2edge.errors import DeviceError, OptionError
from tpu2edge.files import sha256_of_arrays
from tpu2edge.runtime_check.reference.capture import capture_outputs
from tpu2edge.types import Sample


class Stateful(nn.Module):
    """Dropout, a counter and randomness: what a capture must hold still and leave alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        self.calls += 1
        self.calls = self.calls + 0
        return {"y": self.dropout(self.linear(x)), "more": [torch.rand(2), self.calls.bfloat16()]}


def samples(count: int = 3) -> list[Sample]:
    random = np.random.default_rng(0)
    return [
        Sample(id=f"s{i}", inputs={"x": random.standard_normal((1, 3)).astype(np.float32)})
        for i in range(count)
    ]


def digest(model: nn.Module) -> str:
    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        found.update(name.encode() + tensor.cpu().numpy().tobytes())
    return found.hexdigest()


def test_outputs_are_the_models_in_evaluation_mode() -> None:
    model = Stateful()
    found = {s.id: o for s, o in capture_outputs(model, samples())}
    model.eval()
    for sample in samples():
        expected = model.linear(torch.from_numpy(sample.inputs["x"]))
        np.testing.assert_array_equal(found[sample.id]["y"], expected.detach().numpy())
        assert list(found[sample.id]) == ["y", "more.0", "more.1"]
        assert found[sample.id]["more.1"].dtype == np.float32  # bfloat16, widened
        assert found[sample.id]["more.1"] == 1  # each sample meets the same buffers
    np.testing.assert_array_equal(found["s0"]["more.0"], found["s1"]["more.0"])


def test_the_model_and_the_process_are_as_before_also_between_samples() -> None:
    model = Stateful().train()
    model.linear.eval()  # a mixture, as in fine-tuning
    before = digest(model)
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(7)
    state = torch.get_rng_state()
    try:
        for _ in capture_outputs(model, samples(), precision="highest"):
            assert model.training
            assert not model.linear.training
            assert torch.get_float32_matmul_precision() == "high"
            assert torch.is_grad_enabled()
            assert torch.equal(torch.get_rng_state(), state)
            assert digest(model) == before
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_failing_forward_leaves_everything_as_before() -> None:
    model = Stateful().train()
    with pytest.raises(RuntimeError):
        list(capture_outputs(model, [Sample(id="bad", inputs={"x": np.ones((1, 5), np.float32)})]))
    assert model.training
    assert model.calls == 0


def test_samples_are_drawn_one_at_a_time() -> None:
    drawn = []

    def stream() -> Iterator[Sample]:
        for sample in samples():
            drawn.append(sample.id)
            yield sample

    captured = iter(capture_outputs(Stateful(), stream()))
    next(captured)
    assert drawn == ["s0"]


def test_the_provenance_is_complete() -> None:
    capture = capture_outputs(Stateful(), samples(), fingerprint=digest)
    with pytest.raises(RuntimeError, match="when all samples"):
        _ = capture.provenance
    results = list(capture)
    found = capture.provenance
    assert (found.provider, found.precision, found.mode) == ("eager", "f32", "eager")
    assert found.samples == 3
    assert found.weights_sha256 == digest(capture.model)
    assert found.versions["torch"] == torch.__version__
    wanted = hashlib.sha256()
    for _, outputs in results:
        wanted.update(sha256_of_arrays(outputs).encode())
    assert found.outputs_sha256 == wanted.hexdigest()
    assert set(found.to_json()) >= {"excess_precision", "device_kind", "inputs_sha256", "machine"}


def test_an_unknown_precision_lists_the_known_ones() -> None:
    with pytest.raises(OptionError, match="default, high, highest"):
        capture_outputs(Stateful(), [], precision="bf16")


def test_weights_on_two_devices_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(DeviceError, match="several devices: cpu, meta"):
        capture_outputs(model, [])


@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_on_a_jax_device_is_captured_there(compiled: bool) -> None:
    if importlib.util.find_spec("torchax") is None:
        pytest.skip("needs torchax: pip install 'tpu2edge[tpu]'")
    # In a process of its own: importing torchax renames a torch backend for good.
    script = f"""
        import numpy as np, torch
        from torch import nn
        from tpu2edge.export.prepare import weights_digest
        from tpu2edge.export.stablehlo import import_torchax
        from tpu2edge.runtime_check.reference.capture import capture_outputs
        from tpu2edge.types import Sample

        torchax = import_torchax()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(), nn.Linear(16, 4))
        digest = weights_digest(model)
        samples = [
            Sample(id=str(i), inputs={{"input": np.random.rand(2, 8).astype("float32")}})
            for i in range(2)
        ]
        eager = [o for _, o in capture_outputs(model, samples)]
        with torchax.default_env():
            model.to("jax")
        key = torchax.default_env().prng_key
        capture = capture_outputs(
            model, samples, precision="high", compiled={compiled}, fingerprint=weights_digest
        )
        for (_, ours), theirs in zip(capture, eager):
            noise = ((ours["output_0"] - theirs["output_0"]).astype("float64") ** 2).sum()
            assert 10 * np.log10((theirs["output_0"] ** 2).sum() / noise) > 115
        found = capture.provenance
        assert found.provider == "torchax" and found.device["platform"] == "cpu", found
        assert found.precision == "f32" and found.weights_sha256 == digest, found
        assert found.mode == ("compiled" if {compiled} else "eager")
        assert model.training and model[1].training
        assert (torchax.default_env().prng_key == key).all()
    """
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)],
        env={**__import__("os").environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
