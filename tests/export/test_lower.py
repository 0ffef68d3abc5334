"""Lowering: right numbers, the user's names, nothing lost, and refusals that name the line."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tpu2edge.errors import ConversionError, ExportError, LoweringError
from tpu2edge.export import rewrites
from tpu2edge.export.lower import Lowered, Loweree, lower_isolated, lower_programs
from tpu2edge.export.program import TracedProgram, trace_module
from tpu2edge.export.rewrites import high_rank
from tpu2edge.flatbuffer import read_tflite, signatures_of
from tpu2edge.runtime_check.devices.client import Session

Converted = tuple[TracedProgram, Lowered]


def convert(module: nn.Module, args: tuple[Any, ...], path: Path, **options: Any) -> Converted:
    traced = trace_module(module, args, **options)
    return traced, lower_programs([Loweree(traced.program, traced.signature)], path)


def run(path: Path, inputs: Any, signature: str = "serving_default") -> dict[str, Any]:
    with Session(path) as session:
        return next(iter(session.run(signature, [inputs])))


def worst(traced: TracedProgram, path: Path) -> float:
    """The largest error over the range of the output, over all outputs, on the example."""
    got, want = run(path, traced.example), traced.eager(traced.example)
    assert set(got) == set(want)
    errors = []
    for name, truth in want.items():
        wide = truth.astype(np.float64)
        assert got[name].shape == truth.shape
        spread = float(np.ptp(wide)) or 1.0
        errors.append(float(np.abs(got[name].astype(np.float64) - wide).max()) / spread)
    return max(errors)


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.head = nn.Linear(4, 2)

    def forward(self, image: torch.Tensor, opts: dict[str, torch.Tensor]) -> dict[str, Any]:
        h = torch.relu(self.stem(image)).mean((2, 3))
        return {"z": self.head(h) + opts["k"], "a": {"b.c": h, "d": [h * 2, h * 3]}}


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("named") / "m.tflite"
    return convert(Named(), (torch.randn(1, 3, 8, 8), {"k": torch.ones(2)}), path)


def test_the_file_has_the_names_and_the_order_of_the_model(named: Converted) -> None:
    (signature,) = signatures_of(read_tflite(named[1].path))
    assert [spec.name for spec in signature.inputs] == ["image", "opts.k"]
    assert sorted(spec.name for spec in signature.outputs) == ["a.b.c", "a.d.0", "a.d.1", "z"]
    assert [spec.name for spec in named[0].signature.outputs] == ["z", "a.b.c", "a.d.0", "a.d.1"]
    assert worst(*(named[0], named[1].path)) < 1e-6


def test_litert_tensors_are_mapped_to_module_paths_and_lines(named: Converted) -> None:
    from tpu2edge.bundle import layers_of_tensors

    graph = read_tflite(named[1].path).subgraphs[0]
    layers = layers_of_tensors([tensor.name for tensor in graph.tensors], named[1].nodes)
    conv = next(op for op in graph.operators if op.name == "CONV_2D")
    sources = layers[graph.tensors[conv.outputs[0]].name]
    assert "stem" in {source["module"] for source in sources}
    lines = {source["line"] for source in sources if source["module"] == "stem"}
    source_line = next(
        number
        for number, text in enumerate(Path(__file__).read_text().splitlines(), 1)
        if "h = torch.relu(self.stem(image))" in text
    )
    assert lines == {source_line}


class Block(nn.Module):
    """A transformer block: embedding, layer norm, SDPA with a causal mask, GELU."""

    def __init__(self, d: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, d)
        self.norm = nn.LayerNorm(d)
        self.qkv = nn.Linear(d, 3 * d)
        self.out = nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))
        self.heads = heads

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.embed.weight[torch.arange(ids.shape[1])]
        b, s, d = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        a = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(b, s, d))
        return x + self.mlp(x)


def convnet() -> nn.Module:
    torch.manual_seed(1)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 16, 3, padding=1, groups=4),
        nn.BatchNorm2d(16),
        nn.Hardswish(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 5),
    )
    for child in net:
        if isinstance(child, nn.BatchNorm2d):
            child.running_mean.uniform_(-1, 1)  # type: ignore[union-attr]
            child.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
    return net.eval()


@pytest.mark.parametrize(
    ("make", "args"),
    [
        (convnet, lambda: (torch.randn(1, 3, 16, 16),)),
        (lambda: Block().eval(), lambda: (torch.arange(12)[None] % 50,)),
    ],
    ids=["convnet", "transformer"],
)
def test_outputs_equal_those_of_bare_litert_torch(
    make: Callable[[], nn.Module], args: Callable[[], tuple[Any, ...]], tmp_path: Path
) -> None:
    """Fewer retraces and the fold of batch norms change no number beyond float32 rounding."""
    import litert_torch

    torch.manual_seed(0)
    module, given = make(), args()
    traced, lowered = convert(module, given, tmp_path / "ours.tflite")
    bare_path = tmp_path / "bare.tflite"
    litert_torch.convert(module, given).export(str(bare_path))
    ours = run(lowered.path, traced.example)["output_0"]
    example = dict(zip(["args_0"], traced.example.values(), strict=True))
    bare = run(bare_path, example)["output_0"]
    np.testing.assert_allclose(ours, bare, rtol=0, atol=2e-6 * float(np.ptp(bare)))
    assert len(read_tflite(lowered.path).subgraphs[0].operators) <= len(
        read_tflite(bare_path).subgraphs[0].operators
    )


class Normed(nn.Module):
    def __init__(self, conv: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm = conv, norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x))


@pytest.mark.parametrize(
    ("conv", "norm", "shape"),
    [
        (nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6), (2, 4, 9)),
        (nn.Conv2d(4, 6, (3, 1), bias=False), nn.BatchNorm2d(6), (1, 4, 7, 5)),
        (nn.Conv2d(4, 8, 3, groups=2), nn.BatchNorm2d(8, affine=True), (2, 4, 6, 6)),
        (nn.Conv2d(4, 8, 3, padding="same"), nn.BatchNorm2d(8), (1, 4, 6, 6)),
        (nn.ConvTranspose2d(4, 6, 2, 2), nn.BatchNorm2d(6), (1, 4, 5, 5)),
    ],
    ids=["1d", "2d-no-bias", "groups", "same", "transposed"],
)
def test_a_batch_norm_after_a_convolution_is_folded_exactly(
    conv: nn.Module, norm: nn.Module, shape: tuple[int, ...], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    norm.running_mean.uniform_(-2, 2)  # type: ignore[operator,union-attr]
    norm.running_var.uniform_(0.2, 3)  # type: ignore[operator,union-attr]
    module = Normed(conv, norm).eval()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    traced, lowered = convert(module, (torch.randn(shape),), tmp_path / "m.tflite")
    assert any(note.code == "rewrite-fold-batch-norm" for note in lowered.notes)
    assert worst(traced, lowered.path) < 1e-6
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_a_convolution_that_is_used_twice_is_not_folded(tmp_path: Path) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.conv(x)) + self.conv(x * 2)

    module = Shared().eval()
    module.norm.running_mean.fill_(0.7)  # type: ignore[union-attr]
    traced, lowered = convert(module, (torch.randn(1, 3, 4, 4),), tmp_path / "m.tflite")
    assert worst(traced, lowered.path) < 1e-6


class Tables(nn.Module):
    """Many constants of one shape in the layouts that litert-torch 0.10 exchanges."""

    def __init__(self, count: int = 8) -> None:
        super().__init__()
        for index in range(count):
            self.register_buffer(f"t{index}", torch.randn(40, 24).t())
        self.w = nn.ParameterList(
            nn.Parameter(torch.randn(24, 1).expand(24, 80)[:, ::2]) for _ in range(4)
        )
        self.plain = [view.t() for view in torch.randn(3, 40, 24)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in range(8):
            x = torch.tanh(x * getattr(self, f"t{index}") + 0.1)
        for weight in self.w:
            x = torch.tanh(x + weight)
        for table in self.plain:
            x = torch.tanh(x - table)
        return x


def test_constants_that_are_views_come_out_as_themselves(tmp_path: Path) -> None:
    torch.manual_seed(0)
    traced, lowered = convert(Tables(), (torch.randn(2, 24, 40),), tmp_path / "m.tflite")
    assert worst(traced, lowered.path) < 1e-6


def test_infinities_are_kept_in_the_file_and_in_the_callers_module(tmp_path: Path) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("bias", torch.full((5, 5), float("-inf")).triu(1))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return (x + self.bias).softmax(-1), torch.isinf(self.bias + x * 0)

    module = Masked()
    traced, lowered = convert(module, (torch.randn(1, 5, 5),), tmp_path / "m.tflite")
    got, want = run(lowered.path, traced.example), traced.eager(traced.example)
    np.testing.assert_allclose(got["output_0"], want["output_0"], atol=1e-6)
    np.testing.assert_array_equal(got["output_1"], want["output_1"])
    assert torch.isinf(module.bias).sum() == 10  # type: ignore[arg-type]


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(500, 64)
            self.head = nn.Linear(64, 500, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(ids))

    traced, lowered = convert(Tied(), (torch.tensor([[3, 9]]),), tmp_path / "m.tflite")
    assert worst(traced, lowered.path) < 1e-6
    assert lowered.path.stat().st_size < 1.2 * 500 * 64 * 4


class Echo(nn.Module):
    def forward(self, x: torch.Tensor, n: torch.Tensor) -> dict[str, torch.Tensor]:
        y = x * 2
        total = x.sum()
        return {
            "y": y,
            "again": y,
            "x": x,
            "n": n,
            "mask": n > 1,
            "mask2": n > 1,
            "total": total,
            "total2": total * 1,
        }


def test_returned_inputs_and_repeated_outputs_are_right_on_both_runtimes(tmp_path: Path) -> None:
    """CompiledModel of LiteRT 2.3 reads unwritten memory unless each output has its own tensor."""
    traced, lowered = convert(Echo(), (torch.randn(2, 3), torch.arange(4)), tmp_path / "m.tflite")
    got, want = run(lowered.path, traced.example), traced.eager(traced.example)
    for name, truth in want.items():
        np.testing.assert_array_equal(got[name], truth)
    np.savez(tmp_path / "inputs.npz", **traced.example)
    subprocess.run(
        [sys.executable, "-c", _COMPILED, str(lowered.path), str(tmp_path)],
        check=True,
        capture_output=True,
    )
    compiled = np.load(tmp_path / "outputs.npz")
    assert set(compiled) == set(want)
    for name, truth in want.items():
        np.testing.assert_array_equal(compiled[name], truth, err_msg=name)


_COMPILED = """
import sys, pathlib, numpy as np
from ai_edge_litert.compiled_model import CompiledModel
folder = pathlib.Path(sys.argv[2])
model = CompiledModel.from_buffer(pathlib.Path(sys.argv[1]).read_bytes())
names = model.get_signature_list()["serving_default"]
inputs = {}
for name, value in np.load(folder / "inputs.npz").items():
    inputs[name] = model.create_input_buffer_by_name("serving_default", name)
    inputs[name].write(value)
outputs = {n: model.create_output_buffer_by_name("serving_default", n) for n in names["outputs"]}
model.run_by_name("serving_default", inputs, outputs)
found = {}
for name, buffer in outputs.items():
    details = buffer.get_tensor_details()
    count = int(np.prod(details["shape"]))
    found[name] = np.array(buffer.read(count, details["dtype"])).reshape(details["shape"])
np.savez(folder / "outputs.npz", **found)
"""


def test_half_precision_named_in_forward_is_computed_in_float32(tmp_path: Path) -> None:
    class Casts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Linear(16, 64).half()
            self.conv = nn.Conv1d(4, 4, 3).bfloat16()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = nn.functional.linear(x, self.w.weight.float(), self.w.bias.float())
            ones = torch.ones(64, dtype=torch.bfloat16)
            z = self.conv((y.to(torch.bfloat16) * ones).reshape(1, 4, -1))
            return z.float()

    traced, lowered = convert(Casts(), (torch.randn(2, 16),), tmp_path / "m.tflite")
    assert worst(traced, lowered.path) < 1e-6
    oracle = traced.oracle(traced.example)["output_0"]
    np.testing.assert_allclose(traced.eager(traced.example)["output_0"], oracle, atol=1e-5)


# ---------------------------------------------------------------------------------------- refusals


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x + self.count


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Counter()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * 2


def test_a_program_that_writes_to_its_own_state_is_refused_and_named(tmp_path: Path) -> None:
    """trace_module makes inputs and outputs of it; a program from elsewhere may still write."""
    traced = trace_module(Cell(), (torch.ones(1, 3),))
    own = torch.export.export(Cell(), (torch.ones(1, 3),), strict=False)
    with pytest.raises(
        ConversionError, match=r"writes to its own weights or state \('inner.count'\)|\('count'\)"
    ) as caught:
        lower_programs([Loweree(own, traced.signature)], tmp_path / "m.tflite")
    assert caught.value.place is not None
    assert caught.value.place.code == "self.count += 1"


class Ordered(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.qr(x)[0]


def test_an_operator_without_a_lowering_is_named_with_its_line(tmp_path: Path) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.deep = nn.Sequential(nn.ReLU(), Ordered())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.deep(x)

    with pytest.raises(LoweringError, match="aten.linalg_qr") as caught:
        convert(Outer(), (torch.randn(4, 4),), tmp_path / "m.tflite")
    place = caught.value.place
    assert place is not None
    assert place.module == "deep.1"
    assert place.file is not None
    assert place.file.endswith("test_lower.py")
    assert place.code == "return torch.linalg.qr(x)[0]"


def test_an_operator_that_the_converter_refuses_is_named_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewrites, "REWRITES", ())  # one of them has a form for this

    class Shorts(nn.Module):
        def forward(self, k: torch.Tensor) -> torch.Tensor:
            return torch.maximum(k.to(torch.int16), k.to(torch.int16) * 2).int()

    with pytest.raises(LoweringError, match="tfl.maximum") as caught:
        convert(Shorts(), (torch.arange(5, dtype=torch.int32),), tmp_path / "m.tflite")
    assert caught.value.place is not None
    assert caught.value.place.code == (
        "return torch.maximum(k.to(torch.int16), k.to(torch.int16) * 2).int()"
    )


def test_a_branch_on_values_is_refused_with_its_line(tmp_path: Path) -> None:
    class Branches(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if (x > 1).any():
                return x * 2
            return x + 1

    with pytest.raises(ExportError, match="branches on") as caught:
        trace_module(Branches(), (torch.randn(2, 4),))
    assert caught.value.place is not None
    assert caught.value.place.code == "if (x > 1).any():"


class Bucket(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("big", torch.tensor([1, 2**40]))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return ids + self.big


class Hashed(nn.Module):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return (ids * 2_654_435_761) % 1000


def test_integers_that_32_bits_cannot_hold_are_refused_by_name() -> None:
    ids = torch.tensor([1, 2])
    with pytest.raises(ExportError, match="int64 constant 'big'"):
        trace_module(Bucket(), (ids,))
    with pytest.raises(ExportError, match="2654435761") as caught:
        trace_module(Hashed(), (ids,))
    assert caught.value.place is not None
    assert caught.value.place.code == "return (ids * 2_654_435_761) % 1000"


def test_a_converter_in_its_own_process_gives_the_same_file(
    named: Converted, tmp_path: Path
) -> None:
    traced, _ = named
    stages: list[str] = []

    def progress(stage: str, done: float | None = None, total: float | None = None) -> None:
        stages.append(stage)

    loweree = Loweree(traced.program, traced.signature)
    isolated = lower_isolated([loweree], tmp_path / "m.tflite", progress=progress)
    assert worst(traced, isolated.path) < 1e-6
    assert {"import litert-torch", "convert", "write"} <= set(stages)
    assert any(source.module == "stem" for source in isolated.nodes.values())
    bad = trace_module(Ordered(), (torch.randn(4, 4),))
    with pytest.raises(LoweringError, match="aten.linalg_qr"):
        lower_isolated([Loweree(bad.program, bad.signature)], tmp_path / "bad.tflite")


OTHER_PACKAGE = """
import torch

@torch.library.custom_op("otherpackage_ops::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2

@twice.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)
"""


def test_operators_of_other_packages_reach_the_converters_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "otherpackage.py").write_text(OTHER_PACKAGE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    twice = importlib.import_module("otherpackage").twice

    class Calls(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return twice(x) + 1  # type: ignore[no-any-return]

    traced = trace_module(Calls(), (torch.randn(2, 3),))
    loweree = Loweree(traced.program, traced.signature)
    with pytest.raises(LoweringError, match="no form of the operator otherpackage_ops.twice"):
        lower_isolated([loweree], tmp_path / "m.tflite")


class Wide(nn.Module):
    """Weights above 1 MiB, which are handed to the converter by reference, and a constant of them."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(600, 700)
        self.b = nn.Linear(700, 600)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.b(torch.relu(self.a(x)))
        return y, x, y, self.a.weight.sum(0) + x


def test_large_weights_are_right_and_stored_once(tmp_path: Path) -> None:
    torch.manual_seed(0)
    traced, lowered = convert(Wide(), (torch.randn(2, 600),), tmp_path / "m.tflite")
    assert worst(traced, lowered.path) < 1e-6
    assert lowered.path.stat().st_size < 1.05 * 2 * 600 * 700 * 4


def test_the_same_program_gives_the_same_bytes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Block().eval()
    files = []
    for name in ("a.tflite", "b.tflite"):
        _, lowered = convert(module, (torch.arange(6)[None],), tmp_path / name)
        files.append(lowered.path.read_bytes())
    assert files[0] == files[1]


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.linear(x)) * torch.relu(x)


class Blocks(nn.Module):
    """Three modules of one forward; only the last one works on six dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Shared() for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x.reshape(36, 12)).reshape(1, 2, 3, 6, 12)
        x = self.blocks[1](x).reshape(1, 2, 3, 2, 3, 12)
        return self.blocks[2](x)


def test_what_the_converter_refuses_is_traced_to_the_module_among_those_of_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is refused then: MAXIMUM of a number and six dimensions.
    monkeypatch.setattr(high_rank, "_BOUNDED", frozenset())
    traced = trace_module(Blocks(), (torch.randn(1, 2, 3, 2, 3, 12),))
    with pytest.raises(LoweringError, match=r"tfl\.maximum") as caught:
        lower_programs([Loweree(traced.program, traced.signature)], tmp_path / "m.tflite")
    place = caught.value.place
    assert place is not None
    assert (place.module, place.op) == ("blocks.2", "aten.relu.default")
    assert place.code is not None
    assert place.code.endswith("torch.relu(self.linear(x)) * torch.relu(x)")
