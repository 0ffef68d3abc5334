"""Models quantized in PyTorch: the file has their integers, scales and zero points, and their numbers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tpu2edge.errors import ExportError
from tpu2edge.export import quantized
from tpu2edge.export.lower import Loweree, lower_isolated, lower_programs
from tpu2edge.export.prepare import weights_digest
from tpu2edge.export.program import TracedProgram, trace_module
from tpu2edge.export.stablehlo import _decomposed
from tpu2edge.flatbuffer import TfliteFile, read_tflite
from tpu2edge.runtime_check.devices.client import Session

tq: Any = pytest.importorskip("torchao.quantization")

# torch.ao, which people still have models of.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.ao.quantization is deprecated")

DECOMPOSED = torch.ops.quantized_decomposed
INT4: Any = torch.int4  # type: ignore[attr-defined]


class Net(nn.Module):
    """A convolution with a batch norm, a depthwise one, a 1 x 1 one, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.wise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.point = nn.Conv2d(8, 4, 1)
        self.head = nn.Linear(4 * 4 * 4, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norm(self.stem(x)))
        y = torch.max_pool2d(torch.relu(self.point(y + torch.relu(self.wise(y)))), 2)
        return self.head(y.flatten(1))


def net() -> tuple[nn.Module, tuple[torch.Tensor]]:
    torch.manual_seed(0)
    module = Net()
    assert module.norm.running_mean is not None
    assert module.norm.running_var is not None
    module.norm.running_mean.uniform_(-1, 1)
    module.norm.running_var.uniform_(0.5, 2)
    return module.eval(), (torch.randn(2, 3, 8, 8),)


def mlp() -> tuple[nn.Module, tuple[torch.Tensor]]:
    torch.manual_seed(0)
    layers = (nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    return nn.Sequential(*layers).eval(), (torch.randn(8, 32),)


def edge_quantizer(*, per_channel: bool, dynamic: bool = False) -> Any:
    """litert-torch's own."""
    from litert_torch.quantize.pt2e_quantizer import (
        PT2EQuantizer,
        get_symmetric_quantization_config,
    )

    config = get_symmetric_quantization_config(is_per_channel=per_channel, is_dynamic=dynamic)
    return PT2EQuantizer().set_global(config)


def other_quantizer(*, dynamic: bool = False, qat: bool = False) -> Any:
    """One that marks activations quantized at run time in the graph."""
    from torchao.testing.pt2e._xnnpack_quantizer import (
        XNNPACKQuantizer,
        get_symmetric_quantization_config,
    )

    config = get_symmetric_quantization_config(is_per_channel=True, is_dynamic=dynamic, is_qat=qat)
    return XNNPACKQuantizer().set_global(config)


def pt2e(
    model: tuple[nn.Module, tuple[torch.Tensor]], quantizer: Any, *, fold: bool = True
) -> tuple[nn.Module, tuple[torch.Tensor]]:
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e

    return convert_pt2e(prepared(model, quantizer), fold_quantize=fold), model[1]


def prepared(model: tuple[nn.Module, tuple[torch.Tensor]], quantizer: Any) -> Any:
    from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e

    module, args = model
    observed = prepare_pt2e(torch.export.export(module, args).module(), quantizer)
    with torch.no_grad():
        for _ in range(3):
            observed(*args)
    return observed


def convert(
    module: nn.Module, args: tuple[Any, ...], path: Path
) -> tuple[TracedProgram, TfliteFile]:
    traced = trace_module(module, args)
    lower_programs([Loweree(traced.program, traced.signature)], path)
    return traced, read_tflite(path)


def sqnr_db(truth: Any, found: Any) -> float:
    noise = np.sum((np.float64(truth) - found) ** 2)
    return float(10 * np.log10(np.sum(np.float64(truth) ** 2) / max(float(noise), 1e-30)))


def outputs(traced: TracedProgram, path: Path) -> tuple[Any, Any]:
    """The module's own output on the example, and the file's."""
    (name,) = [spec.name for spec in traced.signature.outputs]
    with Session(path) as session:
        found = next(iter(session.run("serving_default", [traced.example])))
    return traced.eager(traced.example)[name], found[name]


def activations_in_graph(module: Any) -> set[tuple[float, int]]:
    """Scale and zero point of each activation of a PT2E graph module, scales in float32."""
    return {
        (float(np.float32(node.args[1])), node.args[2])
        for node in module.graph.nodes
        if node.target is DECOMPOSED.quantize_per_tensor.default and node.args[0].op != "get_attr"
    }


def activations_in_file(file: TfliteFile) -> set[tuple[float, int]]:
    return {
        (tensor.quantization.scales[0], tensor.quantization.zero_points[0])
        for graph in file.subgraphs
        for tensor in graph.tensors
        if tensor.quantization is not None and tensor.dtype == "int8" and not tensor.is_constant
    }


def weights_in_file(file: TfliteFile, dtype: str = "int8") -> list[tuple[Any, Any]]:
    """Integers and scales of each constant of a type."""
    found = []
    for graph in file.subgraphs:
        for tensor in graph.tensors:
            if tensor.is_constant and tensor.dtype == dtype and tensor.quantization is not None:
                assert not any(tensor.quantization.zero_points)
                scales = np.asarray(tensor.quantization.scales, np.float32)
                found.append((file.constant(tensor.index, graph.index), scales))
    return found


def weights_in_graph(module: Any) -> list[tuple[Any, Any]]:
    """The same of a folded PT2E graph module, convolutions in LiteRT's layout."""
    found = []
    for node in module.graph.nodes:
        if "dequantize_per" not in str(node.target) or node.args[0].op != "get_attr":
            continue
        values = getattr(module, node.args[0].target).detach()
        scale = node.args[1]
        scales = getattr(module, scale.target).numpy() if hasattr(scale, "target") else [scale]
        if values.dim() == 4:
            order = (1, 2, 3, 0) if values.shape[1] == 1 else (0, 2, 3, 1)
            values = values.permute(order)
        found.append((values.numpy(), np.asarray(scales, np.float32)))
    return found


def assert_same_weights(ours: list[tuple[Any, Any]], theirs: list[tuple[Any, Any]]) -> None:
    assert len(ours) == len(theirs) > 0
    left = list(ours)
    for values, scales in theirs:
        match = [
            i
            for i, (found, own) in enumerate(left)
            if found.shape == values.shape
            and np.array_equal(found, values)
            and np.array_equal(own, scales)
        ]
        assert match, f"no weight of the file has the integers and scales of {values.shape}"
        del left[match[0]]


@pytest.mark.parametrize("per_channel", [True, False])
def test_a_static_pt2e_model_keeps_every_scale_zero_point_and_integer(
    per_channel: bool, tmp_path: Path
) -> None:
    module, args = pt2e(net(), edge_quantizer(per_channel=per_channel))
    traced, file = convert(module, args, tmp_path / "m.tflite")
    assert traced.quantization == "as_quantized_static"
    assert_same_weights(weights_in_file(file), weights_in_graph(module))
    in_graph, in_file = activations_in_graph(module), activations_in_file(file)
    assert len(in_graph) >= 5
    # The converter moves a RELU into the operator before it, whose own scale is then not needed.
    assert in_file <= in_graph
    assert len(in_file) >= 4
    # Integers all the way: one QUANTIZE at the start, one DEQUANTIZE at the end.
    ops = file.op_histogram
    assert ops["QUANTIZE"] == ops["DEQUANTIZE"] == 1
    for spec, tensor in zip(
        (*traced.signature.inputs, *traced.signature.outputs),
        (file.subgraphs[0].inputs[0], file.subgraphs[0].outputs[0]),
        strict=True,
    ):
        assert file.tensor(tensor).dtype == spec.dtype == "float32"
    # Within a step here and there of the quantized module, which is 30 dB off the float one.
    eager, found = outputs(traced, tmp_path / "m.tflite")
    assert sqnr_db(eager, found) > 35


def test_folded_and_unfolded_weights_give_the_same_file(tmp_path: Path) -> None:
    files = []
    for fold in (True, False):
        module, args = pt2e(mlp(), edge_quantizer(per_channel=True), fold=fold)
        _, file = convert(module, args, tmp_path / f"{fold}.tflite")
        files.append(file)
    assert_same_weights(weights_in_file(files[0]), weights_in_file(files[1]))
    assert files[0].op_histogram == files[1].op_histogram


@pytest.mark.parametrize("make", [mlp, net])
def test_quantized_weights_alone_stay_integers_and_compute_as_the_module(
    make: Any, tmp_path: Path
) -> None:
    # litert-torch's "dynamic" quantizer marks the weights only.
    module, args = pt2e(make(), edge_quantizer(per_channel=True, dynamic=True))
    traced, file = convert(module, args, tmp_path / "m.tflite")
    assert traced.quantization == "as_quantized_weights"
    assert_same_weights(weights_in_file(file), weights_in_graph(module))
    ops = file.op_histogram
    assert ops["DEQUANTIZE"] == len(weights_in_graph(module))
    eager, found = outputs(traced, tmp_path / "m.tflite")
    assert sqnr_db(eager, found) > 110


def test_activations_quantized_at_run_time_use_the_kernels_that_do_so(tmp_path: Path) -> None:
    module, args = pt2e(mlp(), other_quantizer(dynamic=True))
    traced, file = convert(module, args, tmp_path / "m.tflite")
    assert traced.quantization == "as_quantized_dynamic"
    assert dict(file.op_histogram) == {"FULLY_CONNECTED": 2}
    assert_same_weights(weights_in_file(file), weights_in_graph(module))
    eager, found = outputs(traced, tmp_path / "m.tflite")
    assert sqnr_db(eager, found) > 33
    # The oracle does what the module does, in float64.
    assert sqnr_db(eager, next(iter(traced.oracle(traced.example).values()))) > 110


def test_large_constants_keep_their_integers(tmp_path: Path) -> None:
    # Above 1 MiB constants are handed to the converter by reference.
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1100, 1000)).eval(), (torch.randn(2, 1100),)
    module, args = pt2e(model, edge_quantizer(per_channel=True))
    traced, file = convert(module, args, tmp_path / "m.tflite")
    assert_same_weights(weights_in_file(file), weights_in_graph(module))
    assert file.size_bytes < 1.2 * 1100 * 1000
    eager, found = outputs(traced, tmp_path / "m.tflite")
    assert sqnr_db(eager, found) > 35


CONFIGS: dict[str, tuple[Any, str, str, float]] = {
    "int8 weights": (lambda: tq.Int8WeightOnlyConfig(), "int8", "as_quantized_weights", 110),
    "int4 weights by row": (
        lambda: tq.IntxWeightOnlyConfig(weight_dtype=INT4, granularity=tq.PerAxis(0)),
        "int4",
        "as_quantized_weights",
        110,
    ),
    "int4 weights in groups": (
        lambda: tq.IntxWeightOnlyConfig(weight_dtype=INT4, granularity=tq.PerGroup(32)),
        "int4",
        "as_quantized_weights",
        110,
    ),
    "int8 weights and activations": (
        lambda: tq.Int8DynamicActivationInt8WeightConfig(),
        "int8",
        "as_quantized_dynamic",
        30,
    ),
    "int4 weights, int8 activations": (
        lambda: tq.Int8DynamicActivationIntxWeightConfig(
            weight_dtype=INT4, weight_granularity=tq.PerAxis(0)
        ),
        "int4",
        "as_quantized_dynamic",
        30,
    ),
    "int4 weights in groups, int8 activations": (
        lambda: tq.Int8DynamicActivationIntxWeightConfig(
            weight_dtype=INT4, weight_granularity=tq.PerGroup(32)
        ),
        "int4",
        "as_quantized_dynamic",
        30,
    ),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_tensors_of_torchao_keep_their_integers(kind: str, tmp_path: Path) -> None:
    make, dtype, name, least_db = CONFIGS[kind]
    module, args = mlp()
    tq.quantize_(module, make())
    theirs = []
    for layer in (module[0], module[2]):  # type: ignore[index]
        values, scales = layer.weight.qdata.numpy(), layer.weight.scale.detach().float().numpy()
        rows = scales.size if "groups" in kind else len(values)
        theirs.append((values.reshape(rows, -1), scales.reshape(-1)))
    traced, file = convert(module, args, tmp_path / "m.tflite")
    assert traced.quantization == name
    assert_same_weights(weights_in_file(file, dtype), theirs)
    eager, found = outputs(traced, tmp_path / "m.tflite")
    assert sqnr_db(eager, found) > least_db
    assert not any(hasattr(v, "__tensor_flatten__") for v in traced.program.state_dict.values())


def test_groups_and_activations_at_run_time_are_said_to_stay_float(tmp_path: Path) -> None:
    module, args = mlp()
    tq.quantize_(module, CONFIGS["int4 weights in groups, int8 activations"][0]())
    traced = trace_module(module, args)
    lowered = lower_programs([Loweree(traced.program, traced.signature)], tmp_path / "m.tflite")
    (note,) = [note for note in lowered.notes if note.code == "float-activations"]
    assert "stay float32" in note.text


def test_a_quantized_embedding_is_looked_up_in_integers(tmp_path: Path) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(50, 16)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.table(ids)

    torch.manual_seed(0)
    module = Words().eval()
    config = tq.IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=tq.PerAxis(0))
    tq.quantize_(module, config, lambda child, _: isinstance(child, nn.Embedding))
    traced, file = convert(module, (torch.arange(8)[None],), tmp_path / "m.tflite")
    assert "EMBEDDING_LOOKUP" in file.op_histogram
    ((values, _),) = weights_in_file(file)
    assert np.array_equal(values, module.table.weight.qdata.numpy())  # type: ignore[union-attr]
    eager, found = outputs(traced, tmp_path / "m.tflite")
    assert sqnr_db(eager, found) > 110


def test_fake_quantization_of_eager_qat_keeps_what_it_learned(tmp_path: Path) -> None:
    module, args = mlp()
    module.train()
    module.qconfig = torch.ao.quantization.get_default_qat_qconfig("qnnpack")  # type: ignore[assignment]
    torch.ao.quantization.prepare_qat(module, inplace=True)
    for _ in range(3):
        module(*args)
    module.eval()
    traced, file = convert(module, args, tmp_path / "m.tflite")
    assert traced.quantization == "as_quantized_static"
    learned: Any = module[0].weight_fake_quant  # type: ignore[index]
    assert learned.observer_enabled[0] == 1  # the module itself is as it was
    scales = [float(own[0]) for _, own in weights_in_file(file)]
    assert float(learned.scale) in scales
    frozen = copy.deepcopy(module).apply(torch.ao.quantization.disable_observer)
    eager, found = outputs(traced, tmp_path / "m.tflite")
    assert np.array_equal(eager, frozen(*args).detach().numpy())
    assert sqnr_db(eager, found) > 33


@pytest.mark.slow
def test_a_pt2e_model_after_qat_keeps_its_scales(tmp_path: Path) -> None:
    from torchao.quantization.pt2e import move_exported_model_to_eval, move_exported_model_to_train
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_qat_pt2e

    module, args = mlp()
    graph = torch.export.export(module.train(), args).module()
    trained: Any = prepare_qat_pt2e(graph, other_quantizer(qat=True))
    move_exported_model_to_train(trained)
    optimizer = torch.optim.SGD(trained.parameters(), 1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        trained(*args).square().mean().backward()
        optimizer.step()
    done = convert_pt2e(trained)
    move_exported_model_to_eval(done)
    traced, file = convert(done, args, tmp_path / "m.tflite")
    assert_same_weights(weights_in_file(file), weights_in_graph(done))
    assert activations_in_file(file) <= activations_in_graph(done)
    eager, found = outputs(traced, tmp_path / "m.tflite")
    assert sqnr_db(eager, found) > 35


def test_unsigned_integers_become_signed_by_a_shift() -> None:
    class Unsigned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Buffer(torch.tensor([[0, 128, 255]], dtype=torch.uint8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            args = (0.5, 100, 0, 255, torch.uint8)
            w = DECOMPOSED.dequantize_per_tensor.default(self.w, *args)
            levels = DECOMPOSED.quantize_per_tensor.default(x, *args)
            return DECOMPOSED.dequantize_per_tensor.default(levels, *args) @ w.t()

    x = torch.tensor([[-60.0, 1.3, 80.0]])  # below, within and above what 0 to 255 stand for
    traced = trace_module(Unsigned(), (x,))
    nodes = [n for n in traced.program.graph.nodes if n.target is quantized.QUANTIZE]
    assert [node.args[1:] for node in nodes] == [(0.5, -28, -128, 127, torch.int8)]
    (constant,) = [v for v in traced.program.state_dict.values() if v.dtype is torch.int8]
    assert constant.tolist() == [[-128, 0, 127]]
    # -50, 1.5 and 77.5 times -50, 14 and 77.5, by hand.
    (output,) = traced.oracle(traced.example).values()
    assert output.tolist() == [[2500.0 + 21.0 + 77.5 * 77.5]]


def test_a_limit_within_the_range_is_said_to_be_wider_in_the_file() -> None:
    class Narrow(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            args = (0.5, 0, 0, 100, torch.int8)
            levels = DECOMPOSED.quantize_per_tensor.default(x, *args)
            return DECOMPOSED.dequantize_per_tensor.default(levels, *args)

    traced = trace_module(Narrow(), (torch.randn(3),))
    assert "wider-range" in [note.code for note in traced.notes]


def test_the_oracle_rounds_and_limits_as_the_definition_says() -> None:
    # scale 0.1 as a float64, not as a float32: 0.1 * 3 is 0.30000000000000004.
    class One(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            levels = DECOMPOSED.quantize_per_tensor.default(x, 0.1, 5, -128, 127, torch.int8)
            return DECOMPOSED.dequantize_per_tensor.default(levels, 0.1, 5, -128, 127, torch.int8)

    traced = trace_module(One(), (torch.tensor([0.26, -100.0, 100.0]),))
    (output,) = traced.oracle(traced.example).values()
    assert output.tolist() == [3 * 0.1, -133 * 0.1, 122 * 0.1]
    assert traced.oracle_exceptions == ()


def test_a_tpu_predicts_a_quantized_model_in_core_operators() -> None:
    module, args = pt2e(mlp(), other_quantizer(dynamic=True))
    traced = trace_module(module, args)
    plain = _decomposed(traced.program, "torchax")
    assert not any("quant" in str(n.target) for n in plain.graph.nodes if n.op == "call_function")
    (found,) = (
        plain.module()(*args)
        if isinstance(plain.module()(*args), tuple)
        else (plain.module()(*args),)
    )
    assert sqnr_db(module(*args).detach().numpy(), found.detach().numpy()) > 100


def test_the_converters_process_takes_a_quantized_program(tmp_path: Path) -> None:
    module, args = mlp()
    tq.quantize_(module, tq.Int8DynamicActivationInt8WeightConfig())
    traced = trace_module(module, args)
    path = tmp_path / "m.tflite"
    lower_isolated([Loweree(traced.program, traced.signature)], path)
    assert len(weights_in_file(read_tflite(path))) == 2


def test_the_weights_of_torchaos_tensors_have_a_digest() -> None:
    module, _ = mlp()
    other = copy.deepcopy(module)
    for each in (module, other):
        tq.quantize_(each, tq.Int8WeightOnlyConfig())
    assert weights_digest(module) == weights_digest(other)
    other[0].weight.qdata[0, 0] += 1  # type: ignore[index]
    assert weights_digest(module) != weights_digest(other)


# ------------------------------------------------------------------------------------- refusals


def packed() -> tuple[Any, str, str]:
    module, args = mlp()
    torch.backends.quantized.engine = "qnnpack"
    module = torch.ao.quantization.quantize_dynamic(module, {nn.Linear}, dtype=torch.qint8)
    return (module, args), "packed weights have no graph", "0"


def observed_by_pt2e() -> tuple[Any, str, str]:
    _, args = model = mlp()
    module = prepared(model, edge_quantizer(per_channel=True))
    return (module, args), "was not converted", "activation_post_process_1"


def observed_by_eager() -> tuple[Any, str, str]:
    module, args = mlp()
    module.qconfig = torch.ao.quantization.get_default_qconfig("qnnpack")  # type: ignore[assignment]
    torch.ao.quantization.prepare(module, inplace=True)
    module(*args)
    return (module, args), "prepared and not converted", "0.activation_post_process"


def prepared_by_torchao() -> tuple[Any, str, str]:
    from torchao.quantization.qat import QATConfig

    module, args = mlp()
    base = tq.Int8DynamicActivationIntxWeightConfig(
        weight_dtype=INT4, weight_granularity=tq.PerGroup(32)
    )
    step: Any = "prepare"
    tq.quantize_(module, QATConfig(base, step=step))
    return (module, args), "not converted", "0"


def unseen_fake_quant() -> tuple[Any, str, str]:
    module, args = mlp()
    module.qconfig = torch.ao.quantization.get_default_qat_qconfig("qnnpack")  # type: ignore[assignment]
    torch.ao.quantization.prepare_qat(module.train(), inplace=True)
    return (module.eval(), args), "has not seen a value", "0.weight_fake_quant"


def eight_bit_floats() -> tuple[Any, str, str]:
    module, args = mlp()
    tq.quantize_(module, tq.Float8WeightOnlyConfig())
    return (module, args), "float8_e4m3fn", ""


@pytest.fixture
def engine() -> Iterator[None]:
    before = torch.backends.quantized.engine
    yield
    torch.backends.quantized.engine = before


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(
    "make",
    [
        packed,
        observed_by_pt2e,
        observed_by_eager,
        prepared_by_torchao,
        unseen_fake_quant,
        eight_bit_floats,
    ],
)
def test_what_cannot_be_carried_is_refused_with_its_module(make: Any) -> None:
    (module, args), words, place = make()
    with pytest.raises(ExportError) as caught:
        trace_module(module, args)
    assert words in str(caught.value)
    assert caught.value.place is not None
    assert (caught.value.place.module or "") == place
    assert caught.value.do


def test_activations_with_a_scale_for_each_channel_are_refused() -> None:
    class Channels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Buffer(torch.tensor([0.1, 0.2]))
            self.zero = nn.Buffer(torch.zeros(2, dtype=torch.int64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            args = (self.scale, self.zero, 1, -128, 127, torch.int8)
            levels = DECOMPOSED.quantize_per_channel.default(x, *args)
            return DECOMPOSED.dequantize_per_channel.default(levels, *args)

    with pytest.raises(ExportError, match="activations with a scale for each channel"):
        trace_module(Channels(), (torch.randn(3, 2),))
