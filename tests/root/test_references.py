"""What the numbers are held to: words, golden outputs, predictions, and the proof of the weights."""

from __future__ import annotations

import copy
import dataclasses
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tpu2edge
from tpu2edge import pipeline, references
from tpu2edge.capturing import describe_reference, import_reference
from tpu2edge.errors import BundleError, DataError, DeviceError, OptionError
from tpu2edge.export.program import trace_module
from tpu2edge.references import ReferenceChoice, prove_reference, replay
from tpu2edge.requests import ExportRequest, ImportRequest
from tpu2edge.runtime_check.budget import UNPROVED_LEAST_DB, budget_against_tpu
from tpu2edge.runtime_check.metrics import sqnr_db
from tpu2edge.runtime_check.parity import noise_floor
from tpu2edge.runtime_check.reference import Reference, ReferenceWriter
from tpu2edge.runtime_check.reference.tpu import PrecisionPlan, Prediction, libtpu_version, predict
from tpu2edge.types import Dim, Note, Sample, Signature, StableHlo, TensorSpec

# ------------------------------------------------------------------------------------------ words


@pytest.mark.parametrize(
    ("text", "kind", "generation", "precision"),
    [
        (None, "auto", "v5e", "default"),
        ("auto", "auto", "v5e", "default"),
        ("eager", "eager", "v5e", "default"),
        ("f64", "f64", "v5e", "default"),
        ("tpu-emulated", "tpu-emulated", "v5e", "default"),
        ("tpu-emulated:tpu7x@highest", "tpu-emulated", "tpu7x", "highest"),
        ("tpu-emulated@high", "tpu-emulated", "v5e", "high"),
        ("tpu-emulated-naive@high", "tpu-emulated-naive", "v5e", "high"),
    ],
)
def test_the_words_of_a_reference_are_read(
    text: str | None, kind: str, generation: str, precision: str
) -> None:
    choice = ReferenceChoice.parse(text)
    assert (choice.kind, choice.generation, choice.precision) == (kind, generation, precision)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tpu-emulated:v9", "v5e, v5p, v6e, tpu7x"),
        ("tpu-emulated@bf16", "default, high, highest"),
        ("tpu-emulated-naive:v5e", "knows no TPU generation"),
        ("no-such-folder", "neither a folder nor a known word"),
    ],
)
def test_other_words_are_refused_with_the_known_ones(text: str, words: str) -> None:
    with pytest.raises(OptionError) as caught:
        ReferenceChoice.parse(text)
    assert words in str(caught.value)


def test_a_folder_is_a_given_reference(tmp_path: Path) -> None:
    assert ReferenceChoice.parse(tmp_path) == ReferenceChoice(kind="given", path=tmp_path)


# ---------------------------------------------------------------------------------- golden outputs


def arrays(count: int = 3) -> tuple[dict[str, Any], dict[str, Any]]:
    random = np.random.default_rng(0)
    x = random.standard_normal((count, 2, 4))
    return {"x": x, "n": np.arange(count)[:, None]}, {"y": (x.sum(-1)).astype(np.float32)}


def test_golden_outputs_become_a_reference(tmp_path: Path) -> None:
    inputs, outputs = arrays()
    made = Reference.from_arrays(
        tmp_path / "ref", inputs=inputs, outputs=outputs, precision="bf16-default"
    )
    assert (made.provider, made.precision, len(made)) == ("external", "bf16-default", 3)
    assert made.weights_sha256 is None
    assert [str(s) for s in made.signature.inputs] == ["x: float32[2x4]", "n: int32[1]"]
    assert made.inputs(2)["x"].dtype == np.float32  # 64 bits narrowed, as an export does
    np.testing.assert_array_equal(made.outputs(2)["y"], outputs["y"][2])


def test_rows_are_cut_into_batches_and_mappings_taken_one_by_one(tmp_path: Path) -> None:
    inputs, outputs = {"x": np.ones((6, 4), np.float32)}, {"y": np.ones((6, 3), np.float32)}
    common: dict[str, Any] = {"precision": "f32"}
    made = Reference.from_arrays(
        tmp_path / "rows", inputs=inputs, outputs=outputs, batch=2, **common
    )
    assert (len(made), made.signature.inputs[0].shape) == (3, (2, 4))
    made = Reference.from_arrays(
        tmp_path / "each",
        inputs=[{"x": np.ones((n, 4), np.float32)} for n in (1, 3)],
        outputs=[{"y": np.ones((n, 3), np.float32)} for n in (1, 3)],
        sample_ids=("one", "three"),
        **common,
    )
    assert made.sample_ids == ("one", "three")
    size = made.signature.inputs[0].shape[0]
    assert isinstance(size, Dim)
    assert (size.min, size.max) == (1, 3)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"precision": "bf16"}, OptionError, "known: f32, f64, bf16-default"),
        ({"provider": "tpu"}, OptionError, "known: eager"),
        ({"outputs": {"y": np.ones((2, 3))}}, DataError, "3 samples of inputs and 2 of outputs"),
        ({"inputs": {"x": np.ones((3, 1)), "z": np.ones((2, 1))}}, DataError, "x: 3, z: 2"),
        ({"batch": 2}, DataError, "no multiple of 2"),
        ({"inputs": {}}, DataError, "no sample"),
        ({"inputs": {"x": np.array(["a", "b", "c"])}}, DataError, "which LiteRT does not have"),
        ({"inputs": {"x": np.full((3, 1), 2**40)}}, DataError, "do not fit into int32"),
        ({"sample_ids": ("a", "a", "b")}, DataError, "different names"),
    ],
)
def test_golden_outputs_that_cannot_be_right_are_refused(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    inputs, outputs = arrays()
    given: dict[str, Any] = {"inputs": inputs, "outputs": outputs, "precision": "f32", **changes}
    with pytest.raises(error) as caught:
        Reference.from_arrays(tmp_path / "ref", **given)
    assert words in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_files_are_imported_by_name_and_shown(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    inputs, outputs = arrays()
    np.savez(tmp_path / "x.npz", **inputs)
    save_file(outputs, tmp_path / "y.safetensors")
    request = ImportRequest(
        output=tmp_path / "ref",
        inputs=tmp_path / "x.npz",
        outputs=tmp_path / "y.safetensors",
        precision="bf16-default",
        device_kind="TPU v6 lite",
    )
    made = import_reference(request)
    assert references.generation_of(made) == "v6e"
    shown = describe_reference(tmp_path / "ref")
    assert shown["outputs"] == ["y: float32[2]"]
    assert [file["name"] for file in shown["data"]["files"]] == ["x.npz", "y.safetensors"]
    with pytest.raises(BundleError, match="exists"):
        import_reference(request)
    with pytest.raises(DataError, match="no file"):
        import_reference(dataclasses.replace(request, inputs=tmp_path / "z.npz", force=True))
    with pytest.raises(BundleError, match="is no reference"):
        describe_reference(tmp_path)


# ------------------------------------------------------------------------- does it fit the model?


def spec(name: str, *shape: int | Dim, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(name=name, shape=shape, dtype=dtype)


@pytest.mark.parametrize(
    ("inputs", "outputs", "words"),
    [
        ([spec("x", 2, 4)], [spec("y", 2)], None),
        ([spec("x", Dim(name="b", min=1, max=8), 4)], [spec("y", 2)], None),
        ([spec("x", Dim(name="b", min=3, max=8), 4)], [spec("y", 2)], "other shapes"),
        ([spec("z", 2, 4)], [spec("y", 2)], "the inputs"),
        ([spec("x", 2, 4)], [spec("z", 2)], "the outputs"),
        ([spec("x", 2, 5)], [spec("y", 2)], "other shapes"),
        ([spec("x", 1, 2, 4)], [spec("y", 2)], "other shapes"),
        ([spec("x", 2, 4)], [spec("y", 3)], "other shapes"),
        ([spec("x", 2, 4, dtype="int32")], [spec("y", 2)], "is float32, the model's int32"),
    ],
)
def test_other_names_shapes_and_types_than_the_models_are_refused(
    tmp_path: Path, inputs: list[TensorSpec], outputs: list[TensorSpec], words: str | None
) -> None:
    made = Reference.from_arrays(
        tmp_path / "ref",
        inputs={"x": np.ones((1, 2, 4), np.float32)},
        outputs={"y": np.ones((1, 2), np.float32)},
        precision="f32",
    )
    signature = Signature(name="s", inputs=tuple(inputs), outputs=tuple(outputs))
    if words is None:
        samples, notes = replay(made, signature, "0" * 64)
        assert len(samples) == 1
        assert [note.code for note in notes] == ["unknown-weights"]
        return
    with pytest.raises(DataError) as caught:
        replay(made, signature, None)
    assert words in str(caught.value)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(64, 64)
        self.second = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": self.second(torch.relu(self.first(x)))}


def rows(count: int = 3) -> list[dict[str, Any]]:
    random = np.random.default_rng(0)
    return [{"x": random.standard_normal((8, 64)).astype(np.float32)} for _ in range(count)]


def test_an_export_passes_against_a_capture_and_refuses_one_of_other_weights(
    tmp_path: Path,
) -> None:
    model = Plain().train()
    made = tpu2edge.capture(model, rows(), output=tmp_path / "ref")
    bundle = tpu2edge.export_model(
        model, torch.ones(8, 64), output=tmp_path / "out", reference=made
    )
    assert str(bundle.verdict) == "PASS"
    assert bundle.reference().sample_ids == made.sample_ids
    assert bundle.reference().extra["outputs_sha256"] == made.extra["outputs_sha256"]
    proof = bundle.report.case("y", recipe="reference", device="the module on this CPU")
    assert proof.budget == "sqnr>=90dB"
    with torch.no_grad():
        model.second.bias[0] += 1e-6
    with pytest.raises(DataError, match="made from other weights"):
        tpu2edge.export_model(model, torch.ones(8, 64), output=tmp_path / "no", reference=made)
    assert not (tmp_path / "no").exists()


def test_an_export_proves_captured_tpu_outputs_below_the_tpus_own_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer off by 0.2 % is at 49.8 dB, as the TPU's noise (50.5 dB): the budget lets it pass.

    What the prediction can repeat of itself is far above in a network of two layers: 66 dB.
    """
    if libtpu_version() is None:
        pytest.skip("needs the TPU compiler: pip install 'tpu2edge[tpu]'")
    monkeypatch.setenv("TPU2EDGE_CACHE", str(tmp_path / "cache"))
    model = Plain().eval()
    traced = trace_module(model, (torch.ones(8, 64),))
    samples = [Sample(id=f"s{i}", inputs=inputs) for i, inputs in enumerate(rows(4))]
    predicted = references.predict_isolated(
        traced.program,
        traced.signature,
        samples,
        ReferenceChoice(kind="tpu-emulated", generation="v6e"),
        progress=lambda *_: None,
    )
    reference = Reference.from_arrays(
        tmp_path / "ref",
        inputs=[sample.inputs for sample in samples],
        outputs=predicted.outputs,
        precision="bf16-default",
        extra={"device_kind": "TPU v6 lite"},
    )
    common: dict[str, Any] = {"args": torch.ones(8, 64), "reference": reference}
    right = tpu2edge.export_model(model, output=tmp_path / "right", **common)
    label = "this CPU with TPU v6e numerics"
    assert str(right.verdict) == "PASS"
    assert str(right.report.case("y", recipe="reference", device=label).verdict) == "PASS"
    assert "unknown-weights" in {note.code for note in right.notes}
    with torch.no_grad():
        model.second.weight *= 1.002
    wrong = tpu2edge.export_model(model, output=tmp_path / "wrong", **common)
    assert str(wrong.verdict) == "FAIL"
    assert str(wrong.report.case("y").verdict) == "PASS"
    (reason,) = wrong.report.case("y", recipe="reference", device=label).reasons
    assert reason.code == "weights"
    assert "weights, inputs or precision are not those of this model" in reason.text


# ---------------------------------------------------------------------------- which one is the usual


def lowered_stub(**_: Any) -> StableHlo:
    return StableHlo(module=b"", route="by hand", versions={}, arguments=(), outputs=())


@pytest.mark.parametrize("libtpu", [None, "0.0.52"])
def test_the_usual_reference_is_predicted_and_naive_without_the_tpu_compiler(
    monkeypatch: pytest.MonkeyPatch, libtpu: str | None
) -> None:
    asked: dict[str, Any] = {}

    def fake(program: StableHlo, inputs: Any, **options: Any) -> Prediction:
        asked.update(options)
        naive = options["naive"]
        return Prediction(
            outputs=({"y": np.ones(2, np.float32)},),
            plan=PrecisionPlan(matmuls=(), precision="default", generation=None, naive=naive),
            label="predicted (naive)" if naive else "predicted",
            provider="tpu-emulated-naive" if naive else "tpu-emulated",
            precision_label="bf16-default",
            topology=None,
            libtpu=libtpu,
            libtpu_build=None,
            jax="0",
            route="by hand",
            not_modelled=("the order of additions",),
            seconds={},
            peak_bytes=0,
        )

    tpu = "tpu2edge.runtime_check.reference.tpu"
    monkeypatch.setattr(f"{tpu}.compile.libtpu_version", lambda: libtpu)
    monkeypatch.setattr(f"{tpu}.emulate.predict", fake)
    monkeypatch.setattr(
        "tpu2edge.export.stablehlo.stablehlo_from_program", lambda *_, **more: lowered_stub(**more)
    )
    signature = Signature(name="s", inputs=(spec("x", 2),), outputs=(spec("y", 2),))
    found = references.predict_outputs(
        None,  # type: ignore[arg-type]
        signature,
        [Sample(id="a", inputs={"x": np.ones(2, np.float32)})],
        ReferenceChoice.parse(None),
        progress=lambda *_: None,
    )
    assert (asked["generation"], asked["precision"]) == ("v5e", "default")
    assert asked["naive"] is (libtpu is None)
    codes = [note.code for note in found.notes]
    assert codes == ["predicted-reference"] + ["naive-reference"] * (libtpu is None)
    assert "not measured" in found.notes[0].text
    assert found.extra["not_modelled"] == ["the order of additions"]


SOURCE = """
import torch
from torch import nn

def get_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

def get_args():
    return (torch.ones(2, 4),)
"""


def test_a_prediction_that_fails_is_an_error_only_when_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise DeviceError("the TPU compiler refuses the program")

    monkeypatch.setattr(references, "predict_outputs", broken)
    (tmp_path / "net.py").write_text(SOURCE)
    request = ExportRequest(source=str(tmp_path / "net.py"), output=tmp_path / "out")
    with pytest.raises(DeviceError, match="refuses the program"):
        pipeline.export_source(dataclasses.replace(request, reference="tpu-emulated"))
    assert not (tmp_path / "out").exists()
    notes: list[Note] = []
    made = pipeline.export_source(request, on_note=notes.append)
    assert made.reference().provider == "eager"
    (note,) = [note for note in notes if note.code == "no-prediction"]
    assert "the TPU compiler refuses the program" in note.text


def test_a_prediction_leaves_jax_out_of_the_callers_process(tmp_path: Path) -> None:
    script = f"""
        import sys, torch, tpu2edge
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
        made = tpu2edge.export_model(
            model, torch.ones(8, 64), output={str(tmp_path / "out")!r},
            reference="tpu-emulated-naive", num_samples=3,
        )
        assert str(made.verdict) == "PASS", made.report
        assert made.reference().provider == "tpu-emulated-naive"
        assert made.reference().precision == "bf16-default"
        codes = [note.code for note in made.notes]
        assert "predicted-reference" in codes and "naive-reference" in codes, codes
        print(sorted(set(sys.modules) & {{"jax", "jaxlib", "litert_torch", "torchax"}}))
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)],
        env={**os.environ, "TPU2EDGE_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "[]"


# ----------------------------------------------------------------- faults below the TPU's own noise


class Block(nn.Module):
    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        parts = self.qkv(self.before(x)).reshape(b, t, 3, self.heads, d // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        weights = torch.softmax(q @ k.transpose(-1, -2) * (d // self.heads) ** -0.5, -1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(b, t, d))
        return x + self.down(nn.functional.gelu(self.up(self.between(x))))


class Transformer(nn.Module):
    def __init__(self, width: int = 64, layers: int = 12, words: int = 16, length: int = 8) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width)
        self.places = nn.Parameter(torch.randn(length, width))
        self.layers = nn.ModuleList([Block(width) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.table(tokens) + self.places
        for layer in self.layers:
            x = layer(x)
        return {"logits": self.head(self.norm(x))}


State = Mapping[str, torch.Tensor]


def trained(steps: int = 240) -> tuple[Transformer, State, State]:
    """A transformer that learned to tell the token before; its weights, and those 100 steps ago."""
    torch.manual_seed(0)
    model, draws = Transformer(), torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps)
    earlier: State = {}
    for step in range(steps):
        if step == steps - 100:
            earlier = copy.deepcopy(model.state_dict())
        tokens = torch.randint(0, 16, (16, 8), generator=draws)
        found = model(tokens)["logits"]
        loss = nn.functional.cross_entropy(found.flatten(0, 1), tokens.roll(1, 1).flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    return model.eval(), copy.deepcopy(model.state_dict()), earlier


def test_weights_that_differ_below_the_tpus_noise_are_found_by_the_first_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in for the TPU is the emulator (with the TPU compiler's decisions if it is there).

    Its weights are changed; the device's outputs are those of the right model in float32. Measured
    on 2026-11-30 (worst sample; the bound of the proof was 49.8 dB, the floor 51.8 dB):

        captured from            proof    device    proof   budget   budget without the proof
        right                      inf      51.8    PASS    PASS     PASS
        right, other additions    54.1      51.9    PASS    PASS     PASS
        right, other exp          52.4      51.9    PASS    PASS     PASS
        matrix exchanged          12.8      12.8    FAIL    FAIL     FAIL
        layer 0 * 1.01            38.0      38.0    FAIL    FAIL     PASS
        layer 6 * 1.01            43.2      42.6    FAIL    FAIL     PASS
        layer 11 * 1.01           48.7      47.5    FAIL    FAIL     PASS
        100 steps earlier         22.6      22.6    FAIL    FAIL     PASS

    The last column is the budget between TPU and device when nothing predicts what the TPU's noise
    should be: the reference's own distance from float64 then counts as its noise, down to 20 dB.
    """
    from tpu2edge.export.stablehlo import stablehlo_from_program

    monkeypatch.setenv("TPU2EDGE_CACHE", str(tmp_path / "cache"))
    model, right, earlier = trained()
    example = torch.arange(8)[None]
    traced = trace_module(model, (example,))
    lowered = stablehlo_from_program(
        traced.program, route="litert-torch", input_names=["tokens"], output_names=["logits"]
    )
    random = np.random.default_rng(0)
    samples = [
        Sample(id=f"s{i}", inputs={"tokens": random.integers(0, 16, (1, 8), np.int32)})
        for i in range(8)
    ]

    def on_tpu(program: StableHlo) -> list[Mapping[str, Any]]:
        inputs = [sample.inputs for sample in samples]
        return list(predict(program, inputs, naive=libtpu_version() is None).outputs)

    def with_weights(state: State) -> StableHlo:
        def changed(argument: Any) -> Any:
            tensor = state.get(argument.name.removeprefix("inner."))
            if not argument.is_weight or tensor is None:
                return argument
            return dataclasses.replace(argument, array=tensor.detach().contiguous().numpy)

        return dataclasses.replace(lowered, arguments=tuple(map(changed, lowered.arguments)))

    def scaled(state: State, prefix: str, by: float) -> State:
        return {k: v * by if k.startswith(prefix) else v for k, v in state.items()}

    def off_by(size: float) -> State:
        # What the order of additions does on another machine, and the TPU's own exp.
        draws = torch.Generator().manual_seed(2)
        return {k: v * (1 + size * torch.randn(v.shape, generator=draws)) for k, v in right.items()}

    captured: dict[str, State] = {
        "right": right,
        "right, other additions": off_by(1e-7),
        "right, other exp": off_by(1e-5),
        "matrix exchanged": {**right, "layers.5.out.weight": right["layers.6.out.weight"]},
        "layer 0 * 1.01": scaled(right, "layers.0.", 1.01),
        "layer 6 * 1.01": scaled(right, "layers.6.", 1.01),
        "layer 11 * 1.01": scaled(right, "layers.11.", 1.01),
        "100 steps earlier": earlier,
    }
    near = on_tpu(lowered)
    twin = on_tpu(references._disturbed(lowered))
    with ReferenceWriter(
        tmp_path / "oracle", traced.signature, provider="oracle-f64", precision="f64", data={}
    ) as writer:
        for sample in samples:
            writer.add(sample, traced.oracle(sample.inputs))
    oracle = Reference.load(tmp_path / "oracle")
    eager = [traced.eager(sample.inputs)["logits"] for sample in samples]
    table: dict[str, tuple[float, float, str, str, str]] = {}
    bounds: set[str] = set()
    for number, (name, state) in enumerate(captured.items()):
        reference = Reference.from_arrays(
            tmp_path / f"ref-{number}",
            inputs=[sample.inputs for sample in samples],
            outputs=on_tpu(with_weights(state)),
            precision="bf16-default",
        )
        (proof,) = prove_reference(reference, near, "this CPU", twin=twin)
        floor = noise_floor(reference, oracle, outputs=near)
        (bound,) = budget_against_tpu("float32", [floor]).outputs["logits"]
        (alone,) = budget_against_tpu(
            "float32", [noise_floor(reference, oracle)], least_db=UNPROVED_LEAST_DB
        ).outputs["logits"]
        device = min(sqnr_db(reference.outputs(i)["logits"], eager[i]) for i in range(len(samples)))
        assert proof.metrics is not None
        assert proof.metrics.sqnr_db_worst is not None
        bounds.add(f"proof {proof.budget}, budget {bound}")
        table[name] = (
            proof.metrics.sqnr_db_worst,
            device,
            str(proof.verdict),
            "PASS" if device >= bound.value else "FAIL",
            "PASS" if device >= alone.value else "FAIL",
        )
    lines = [f"{n:24} {p:6.1f} {d:6.1f} {' '.join(v)}" for n, (p, d, *v) in table.items()]
    text = "\n".join([*bounds, *lines])
    for name, (_, _, verdict, _, _) in table.items():
        assert verdict == ("PASS" if name.startswith("right") else "FAIL"), text
    # The budget between TPU and device alone lets all of these pass.
    passed = {name for name, (*_, alone) in table.items() if alone == "PASS"}
    assert passed >= {name for name in captured if "1.01" in name or "earlier" in name}, text
