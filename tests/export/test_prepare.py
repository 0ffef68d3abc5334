"""The private copy: what people forget is done to it, and the caller's own module is untouched."""

from __future__ import annotations

import hashlib
import random
import threading
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from tpu2edge.errors import ExportError
from tpu2edge.export.prepare import prepare_module, weights_digest


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()


X = torch.linspace(-1, 1, 8).reshape(2, 4)


def codes(prepared) -> list[str]:
    return [note.code for note in prepared.notes]


def note(prepared, code: str) -> str:
    (text,) = [n.text for n in prepared.notes if n.code == code]
    return text


def fingerprint(module: nn.Module) -> dict[str, object]:
    """Everything of a module that a caller could miss afterwards."""
    state: dict[str, object] = {"class": [type(m) for m in module.modules()]}
    state["ids"] = [id(m) for m in module.modules()]
    state["training"] = {name: m.training for name, m in module.named_modules()}
    state["attributes"] = {
        name: {key: id(value) for key, value in vars(m).items()}
        for name, m in module.named_modules()
    }
    for kind, tensors in (("p", module.named_parameters()), ("b", module.named_buffers())):
        for name, tensor in tensors:
            raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            grad = None if tensor.grad is None else (id(tensor.grad), tensor.grad.sum().item())
            state[f"{kind} {name}"] = (
                id(tensor),
                tensor.data_ptr(),
                tensor.dtype,
                tensor.stride(),
                tensor.requires_grad,
                grad,
                tensor._version,
                hashlib.sha256(raw).hexdigest(),
            )
    return state


# ------------------------------------------------------------------------------- the caller's own


class Everything(nn.Module):
    """Parts that tempt a preparation to change them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.low = nn.Linear(4, 4).to(torch.bfloat16)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 4)
        self.head.weight = self.frozen.weight
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf, torch.inf, 1.0]))
        self.register_buffer("wide", torch.ones(4, 4).t())
        self.plain = [torch.ones(3), {"k": torch.zeros(2)}]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.low(self.norm(x).to(self.low.weight.dtype)).float()) + self.wide.sum()


def test_the_callers_module_is_bit_identical_and_the_same_objects_afterwards():
    module = Everything().train()
    module.drop.eval()
    module(torch.randn(4, 4)).sum().backward()
    before = fingerprint(module)
    plain = [id(module.plain[0]), id(module.plain[1]["k"])]
    prepared = prepare_module(module)
    prepared.module(X)
    with torch.no_grad():
        for buffer in prepared.module.buffers():
            buffer.zero_()
    assert fingerprint(module) == before
    assert [id(module.plain[0]), id(module.plain[1]["k"])] == plain
    assert module.head.weight is module.frozen.weight
    assert module.norm.weight.grad is not None


def test_random_states_and_the_grad_mode_are_as_before():
    modules = [Everything().train(), net()]  # making them draws numbers
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    for module in modules:
        prepare_module(module)
    assert torch.equal(torch.get_rng_state(), states[0])
    np.testing.assert_array_equal(np.random.get_state()[1], states[1])
    assert random.getstate() == states[2]
    assert torch.is_grad_enabled()


def test_plain_weights_are_shared_and_buffers_are_not():
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    copy = prepare_module(module).module
    assert copy[0].weight is not module[0].weight
    assert copy[0].weight.data_ptr() == module[0].weight.data_ptr()
    assert copy[1].running_mean.data_ptr() != module[1].running_mean.data_ptr()
    assert not copy[0].weight.requires_grad


def test_a_module_that_is_ready_gets_no_note():
    prepared = prepare_module(net())
    assert prepared.notes == ()
    assert prepared.half_dtypes == ()
    torch.testing.assert_close(prepared.module(X), net()(X), rtol=0, atol=0)


# ----------------------------------------------------------------------------------------- mode


def test_training_mode_is_ended_in_the_copy_and_said():
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.9)).train()
    prepared = prepare_module(module)
    assert not any(child.training for child in prepared.module.modules())
    assert note(prepared, "eval-mode").startswith("the module was in training mode")
    torch.testing.assert_close(prepared.module(X), module[0](X), rtol=0, atol=0)


def test_one_submodule_in_training_mode_is_counted():
    module = net()
    module[0].train()
    assert note(prepare_module(module), "eval-mode").startswith("1 submodules were in training")


# ------------------------------------------------------------------------------------- wrappers


def test_torch_compile_is_taken_off_wherever_it_stands():
    whole = torch.compile(net(), backend="eager")
    part = net()
    part[0] = torch.compile(part[0], backend="eager")
    called, called_part = net(), net()
    called.compile(backend="eager")
    called_part[0].compile(backend="eager")
    for module in (whole, part, called, called_part, torch.compile(part, backend="eager")):
        prepared = prepare_module(module)
        assert "torch.compile" in note(prepared, "unwrapped")
        assert [type(m) for m in prepared.module.modules()] == [type(m) for m in net().modules()]
        assert all(m._compiled_call_impl is None for m in prepared.module.modules())
        torch.testing.assert_close(prepared.module(X), net()(X), rtol=0, atol=0)
    assert called._compiled_call_impl is not None
    assert type(part[0]).__name__ == "OptimizedModule"


def test_data_parallel_is_taken_off():
    prepared = prepare_module(nn.DataParallel(net()))
    assert note(prepared, "unwrapped") == "took off DataParallel (the copy only)"
    assert type(prepared.module) is nn.Sequential


def test_distributed_data_parallel_is_taken_off_at_the_top_and_below(gloo):
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.parallel.DistributedDataParallel(net())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x)

    wrapped = nn.parallel.DistributedDataParallel(net())
    prepared = prepare_module(wrapped)
    assert note(prepared, "unwrapped") == "took off DistributedDataParallel (the copy only)"
    assert type(prepared.module) is nn.Sequential
    outer = Outer()
    prepared = prepare_module(outer)
    assert type(prepared.module.body) is nn.Sequential
    assert type(outer.body) is nn.parallel.DistributedDataParallel
    torch.testing.assert_close(prepared.module(X), net()(X), rtol=0, atol=0)


def test_fully_sharded_modules_are_gathered_into_plain_ones(gloo):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,))
    seen: list[int] = []
    module = net()
    module[2].register_forward_hook(lambda *_: seen.append(1))
    fully_shard(module[0], mesh=mesh)
    fully_shard(module, mesh=mesh)
    classes = [type(m) for m in module.modules()]
    for used in (False, True):
        prepared = prepare_module(module)
        assert "fully_shard" in note(prepared, "unwrapped")
        assert "gathered from their shards" in note(prepared, "gathered")
        assert [type(m) for m in prepared.module.modules()] == [type(m) for m in net().modules()]
        assert all(type(p) is nn.Parameter for p in prepared.module.parameters())
        seen.clear()
        torch.testing.assert_close(prepared.module(X), net()(X), rtol=0, atol=0)
        assert seen == [1]  # the user's own hook is still there
        assert [type(m) for m in module.modules()] == classes
        if not used:
            torch.testing.assert_close(module(X), net()(X))


def test_averaged_models_and_checkpoint_wrappers_are_taken_off():
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrapping
    from torch.optim.swa_utils import AveragedModel

    prepared = prepare_module(AveragedModel(net()))
    assert "AveragedModel" in note(prepared, "unwrapped")
    module = net()
    module[0] = wrapping.checkpoint_wrapper(module[0])
    prepared = prepare_module(module)
    assert "activation checkpointing" in note(prepared, "unwrapped")
    assert type(prepared.module[0]) is nn.Linear


def test_a_child_that_is_only_called_module_stays():
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(4, 2)

    prepared = prepare_module(Named().eval())
    assert type(prepared.module) is Named
    assert prepared.notes == ()


# -------------------------------------------------------------------------------------- devices


def test_a_parameter_without_data_is_named():
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(ExportError, match="meta device") as error:
        prepare_module(module)
    assert error.value.place.tensor == "0.weight"


@pytest.mark.parametrize(
    ("put", "path"),
    [
        (lambda m, t: setattr(m[2], "scale", t), "2.scale"),
        (lambda m, t: setattr(m[0], "tables", [torch.ones(1), (t,)]), "0.tables[1][0]"),
        (lambda m, t: setattr(m, "cache", {"k": {"v": t}}), "cache['k']['v']"),
    ],
)
def test_a_plain_attribute_on_another_device_is_an_error_with_its_path(put, path):
    module = net()
    put(module, torch.empty(2, device="meta"))
    with pytest.raises(ExportError) as error:
        prepare_module(module)
    assert error.value.place.tensor == path


def test_a_lazy_parameter_is_refused_with_what_to_do():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(ExportError, match="lazy") as error:
        prepare_module(module)
    assert error.value.place.tensor == "0.weight"
    assert "call the model once" in error.value.do


# --------------------------------------------------------------------------------------- tensors


def test_tied_weights_stay_one_object_and_one_buffer():
    module = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4, bias=False)).eval()
    module[1].weight = module[0].weight
    for cast in (torch.float32, torch.bfloat16):
        copy = prepare_module(module.to(cast)).module
        assert copy[1].weight is copy[0].weight
        assert len(list(copy.parameters())) == 1


def test_two_parameters_on_one_storage_stay_on_one_storage():
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).eval()
    module[1].weight.data = module[0].weight.data
    copy = prepare_module(module).module
    assert copy[0].weight.data_ptr() == copy[1].weight.data_ptr()


def test_an_attribute_that_is_the_buffer_stays_the_buffer():
    module = net()
    module.register_buffer("cache", torch.zeros(3))
    module.also = [module.cache]
    copy = prepare_module(module).module
    assert copy.also[0] is copy.cache
    assert copy.cache is not module.cache


LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "transposed": lambda: torch.arange(6.0).reshape(2, 3).t(),
    "channels_last": lambda: torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "expanded": lambda: torch.arange(3.0).expand(2, 3),
    "expanded scalar": lambda: torch.tensor(2.0).expand(3, 3),
    "strided": lambda: torch.arange(10.0)[::2],
    "sliced": lambda: torch.arange(12.0).reshape(3, 4)[:, 1:3],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_non_contiguous_tensors_get_storage_of_their_own(layout):
    value = LAYOUTS[layout]()
    module = net()
    module.weight = nn.Parameter(value)
    module.register_buffer("buffer", LAYOUTS[layout]())
    module.listed = [LAYOUTS[layout]()]
    prepared = prepare_module(module)
    copies = [prepared.module.weight, prepared.module.buffer, prepared.module.listed[0]]
    originals = [module.weight, module.buffer, module.listed[0]]
    for copy, original in zip(copies, originals, strict=True):
        assert copy.is_contiguous()
        assert torch.equal(copy, original)
        assert copy.untyped_storage().nbytes() == copy.numel() * copy.element_size()
    assert len({copy.data_ptr() for copy in copies}) == 3
    assert "3 tensors ('weight', …)" in note(prepared, "made-contiguous")
    assert module.weight.data_ptr() == value.data_ptr()


def test_infinite_constants_are_kept_in_both():
    module = net()
    module.register_buffer("mask", torch.tensor([-torch.inf, 0.0, torch.inf]))
    module.bias = nn.Parameter(torch.tensor([torch.inf, -torch.inf]))
    copy = prepare_module(module).module
    assert copy.mask.tolist() == [-torch.inf, 0.0, torch.inf]
    assert copy.bias.tolist() == [torch.inf, -torch.inf]
    assert module.mask.tolist() == [-torch.inf, 0.0, torch.inf]


# ------------------------------------------------------------------------------------ precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32_from_the_same_weights(dtype):
    module = net().to(dtype)
    prepared = prepare_module(module)
    name = str(dtype).removeprefix("torch.")
    assert prepared.half_dtypes == (name,)
    assert f"4 tensors ('0.weight', …) of {name}: exported and computed in float32" == note(
        prepared, "computed-in-float32"
    )
    for copy, original in zip(prepared.module.parameters(), module.parameters(), strict=True):
        assert copy.dtype is torch.float32
        assert torch.equal(copy.to(dtype), original)
        assert original.dtype is dtype


def test_a_float64_module_is_narrowed_and_said():
    module = net().double()
    prepared = prepare_module(module)
    assert prepared.half_dtypes == ()
    assert "of float64" in note(prepared, "narrowed-weights")
    assert prepared.module[0].weight.dtype is torch.float32
    assert module[0].weight.dtype is torch.float64


def test_a_float64_constant_beyond_float32_is_refused_by_name_and_an_infinite_one_is_not():
    module = net()
    module.register_buffer("big", torch.tensor([1e300], dtype=torch.float64))
    with pytest.raises(ExportError, match="does not fit into float32") as error:
        prepare_module(module)
    assert error.value.place.tensor == "big"
    module.big = torch.tensor([torch.inf], dtype=torch.float64)
    assert prepare_module(module).module.big.tolist() == [torch.inf]


def test_integers_and_booleans_stay_what_they_are():
    module = net()
    module.register_buffer("ids", torch.tensor([1, 2**40]))
    module.register_buffer("flags", torch.tensor([True]))
    copy = prepare_module(module).module
    assert copy.ids.tolist() == [1, 2**40]
    assert copy.flags.dtype is torch.bool


# ------------------------------------------------------------------------- hooks, parametrizations


def test_hooks_come_along_and_a_bound_one_is_bound_to_the_copy():
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)
            self.calls = 0
            self.layer.register_forward_pre_hook(self.count)

        def count(self, *_: object) -> None:
            self.calls += 1

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

    module = Counting().eval()
    copy = prepare_module(module).module
    copy(X)
    assert (module.calls, copy.calls) == (0, 1)


def test_parametrized_weights_give_the_same_numbers():
    for wrap in (parametrizations.weight_norm, parametrizations.spectral_norm):
        torch.manual_seed(0)
        module = nn.Sequential(wrap(nn.Linear(4, 3))).eval()
        wanted = module(X)
        copy = prepare_module(module).module
        torch.testing.assert_close(copy(X), wanted, rtol=0, atol=0)
        assert copy[0].parametrizations.weight[0] is not module[0].parametrizations.weight[0]


def test_the_old_weight_norm_with_its_computed_attribute_gives_the_same_numbers():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 3))).train()
    wanted = module(X)  # the attribute now hangs on the autograd graph
    prepared = prepare_module(module)
    torch.testing.assert_close(prepared.module(X), wanted, rtol=0, atol=0)
    assert module[0].weight.requires_grad


def test_a_module_that_cannot_be_copied_is_refused_with_the_attribute():
    module = net()
    module[2].lock = threading.Lock()
    with pytest.raises(ExportError, match="cannot be copied") as error:
        prepare_module(module)
    assert error.value.place.module == "2.lock"
    assert "keep what cannot be copied" in error.value.do


def test_a_module_that_holds_itself_in_a_list_is_copied_once():
    module = net()
    module.all = [module]
    copy = prepare_module(module).module
    assert copy.all[0] is copy


# --------------------------------------------------------------------------------------- digest


def test_the_digest_sees_each_bit_of_the_weights_and_no_wrapper(gloo):
    digest = weights_digest(net())
    assert digest == weights_digest(net())
    assert digest == weights_digest(net().train())
    assert digest == weights_digest(torch.compile(net(), backend="eager"))
    assert digest == weights_digest(nn.DataParallel(net()))
    assert digest == weights_digest(nn.parallel.DistributedDataParallel(net()))
    part = net()
    part[0] = torch.compile(part[0], backend="eager")
    assert digest == weights_digest(part)
    other = net()
    with torch.no_grad():
        other[2].bias[1] = torch.nextafter(other[2].bias[1], torch.tensor(9.0))
    assert digest != weights_digest(other)
    assert digest != weights_digest(net().bfloat16())


def test_the_digest_takes_scalars_empty_and_half_precision_tensors():
    module = nn.Module()
    module.register_buffer("scalar", torch.tensor(3))
    module.register_buffer("empty", torch.zeros(0, 2))
    module.register_buffer("low", torch.ones(2, dtype=torch.bfloat16))
    first = weights_digest(module)
    module.scalar += 1
    assert weights_digest(module) != first
