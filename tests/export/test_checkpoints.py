"""Weights go into the module whole and in place, or not at all."""

from __future__ import annotations

import json
import os
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file, save_model
from torch import nn

from tpu2edge.errors import CheckpointError
from tpu2edge.export.checkpoints import checkpoint_digest, load_checkpoint


class Net(nn.Module):
    """Has a child that is really called ``module``."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.f = nn.Linear(6, 5)
        self.bn = nn.BatchNorm1d(5)
        self.module = nn.Linear(5, 3)

    def forward(self, x):
        return self.module(torch.relu(self.bn(self.f(x))))


class Tied(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.emb = nn.Embedding(20, 4)
        self.head = nn.Linear(4, 20, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids):
        return self.head(self.emb(ids))


def trained() -> Net:
    net = Net(1).eval()
    net.bn.running_mean.normal_()
    return net


def assert_same(a: nn.Module, b: nn.Module) -> None:
    left, right = a.state_dict(), b.state_dict()
    assert list(left) == list(right)
    for key in left:
        assert torch.equal(left[key], right[key]), key


def codes(notes) -> list[str]:
    return [note.code for note in notes]


def refusal(module: nn.Module, path: Path, **options) -> CheckpointError:
    before = {k: v.clone() for k, v in module.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(module, path, **options)
    for key, value in module.state_dict().items():
        assert torch.equal(value, before[key]), f"{key} was changed by a refused checkpoint"
    return caught.value


def save_distributed(state, folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.mark.parametrize("legacy", [False, True])
def test_a_file_of_torch_save_is_loaded(tmp_path, legacy):
    torch.save(
        trained().state_dict(), tmp_path / "w.pth", _use_new_zipfile_serialization=not legacy
    )
    net = Net()
    assert load_checkpoint(net, tmp_path / "w.pth") == ()
    assert_same(net, trained())


def test_safetensors_are_loaded(tmp_path):
    save_file(trained().state_dict(), tmp_path / "w.safetensors")
    net = Net()
    assert load_checkpoint(net, tmp_path / "w.safetensors") == ()
    assert_same(net, trained())


def sharded(folder: Path) -> Path:
    state = trained().state_dict()
    parts = {"model-00001-of-00002.safetensors": {}, "model-00002-of-00002.safetensors": {}}
    for i, (key, value) in enumerate(state.items()):
        parts[list(parts)[i % 2]][key] = value
    for name, part in parts.items():
        save_file(part, folder / name)
    weight_map = {key: name for name, part in parts.items() for key in part}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return folder


def test_a_folder_of_sharded_safetensors_is_loaded(tmp_path):
    net = Net()
    load_checkpoint(net, sharded(tmp_path))
    assert_same(net, trained())


def test_a_folder_with_one_file_says_which_it_was(tmp_path):
    save_file(trained().state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    net = Net()
    (note,) = load_checkpoint(net, tmp_path)
    assert "model.safetensors" in note.text
    assert_same(net, trained())


def test_a_missing_or_cut_shard_is_refused_by_name(tmp_path):
    shard = sharded(tmp_path) / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-20])
    assert shard.name in refusal(Net(), tmp_path).what
    shard.unlink()
    error = refusal(Net(), tmp_path)
    assert "1 of 2 shards" in error.what
    assert shard.name in error.what


def test_a_distributed_checkpoint_is_loaded_without_a_process_group(tmp_path):
    net = trained()
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": 12}
    save_distributed(state, tmp_path / "dcp")
    other = Net()
    notes = load_checkpoint(other, tmp_path / "dcp")
    assert_same(other, net)
    assert "'model' of dcp" in str(notes[0])


def save_as_two_ranks(state: dict[str, torch.Tensor], folder: Path) -> None:
    """A checkpoint whose matrices are cut into two chunks, as two hosts write them."""
    import io
    import pickle

    from torch.distributed.checkpoint import metadata as md
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    folder.mkdir()
    items, storage = {}, {}
    files = [bytearray(), bytearray()]
    for key, value in state.items():
        pieces = value.chunk(2) if value.ndim == 2 else (value,)
        chunks, start = [], 0
        for rank, piece in enumerate(pieces):
            offsets = torch.Size([start] + [0] * (value.ndim - 1) if value.ndim else [])
            buffer = io.BytesIO()
            torch.save(piece.clone(), buffer)
            data = buffer.getvalue()
            storage[md.MetadataIndex(key, offsets)] = _StorageInfo(
                f"__{rank}_0.distcp", len(files[rank]), len(data)
            )
            files[rank] += data
            chunks.append(md.ChunkStorageMetadata(offsets=offsets, sizes=piece.shape))
            start += piece.shape[0] if value.ndim else 0
        items[key] = md.TensorStorageMetadata(
            md.TensorProperties(dtype=value.dtype), value.shape, chunks
        )
    for rank, data in enumerate(files):
        (folder / f"__{rank}_0.distcp").write_bytes(data)
    metadata = md.Metadata(state_dict_metadata=items, planner_data={}, storage_data=storage)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_chunks_of_two_hosts_are_put_together(tmp_path):
    save_as_two_ranks(trained().state_dict(), tmp_path / "dcp")
    reference = {k: torch.zeros_like(v) for k, v in trained().state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(reference, checkpoint_id=tmp_path / "dcp", no_dist=True)
    net = Net()
    load_checkpoint(net, tmp_path / "dcp")
    assert_same(net, trained())
    assert torch.equal(net.f.weight, reference["f.weight"])


def test_a_distributed_checkpoint_that_lacks_something_is_refused_in_words(tmp_path):
    folder = tmp_path / "dcp"
    save_as_two_ranks(trained().state_dict(), folder)
    whole = (folder / "__1_0.distcp").read_bytes()
    (folder / "__1_0.distcp").write_bytes(whole[:-100])
    assert "__1_0.distcp of dcp is cut off" in refusal(Net(), folder).what
    (folder / "__1_0.distcp").unlink()
    error = refusal(Net(), folder)
    assert "1 of 2 shards of dcp are missing: __1_0.distcp" in error.what
    (folder / ".metadata").rename(folder / ".metadata.tmp")
    assert "the save did not finish" in refusal(Net(), folder).what
    (folder / ".metadata.tmp").unlink()
    assert ".metadata is missing beside 1 .distcp" in refusal(Net(), folder).what


def test_a_flipped_byte_of_a_shard_is_refused(tmp_path):
    folder = tmp_path / "dcp"
    save_distributed(trained().state_dict(), folder)
    shard = folder / "__0_0.distcp"
    data = bytearray(shard.read_bytes())
    data[data.index(trained().f.weight.detach().numpy().tobytes()) + 3] ^= 0x41
    shard.write_bytes(data)
    with pytest.raises(CheckpointError, match="wrong checksum"):
        load_checkpoint(Net(), folder)


def test_a_flipped_byte_of_a_pth_is_refused(tmp_path):
    path = tmp_path / "w.pth"
    torch.save(trained().state_dict(), path)
    data = bytearray(path.read_bytes())
    data[data.index(trained().f.weight.detach().numpy().tobytes()) + 3] ^= 0x41
    path.write_bytes(data)
    assert "wrong checksum" in refusal(Net(), path).what


class Evil:
    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self):
        return (os.mkdir, (self.folder,))


def test_pickled_code_is_refused_and_not_run(tmp_path):
    ran = tmp_path / "ran"
    torch.save({"model": trained().state_dict(), "args": Evil(str(ran))}, tmp_path / "w.pt")
    error = refusal(Net(), tmp_path / "w.pt")
    assert "posix.mkdir" in error.what
    assert "re-save" in error.do
    import pickle

    folder = save_distributed(trained().state_dict(), tmp_path / "dcp")
    (folder / ".metadata").write_bytes(pickle.dumps(Evil(str(ran))))
    assert "posix.mkdir" in refusal(Net(), folder).what
    assert not ran.exists()


def rewritten(path: Path, change) -> None:
    """Exchanges the pickle of a file of torch.save."""
    with zipfile.ZipFile(path) as old:
        records = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(path, "w") as new:
        for name, data in records.items():
            new.writestr(name, change(data) if name.endswith("data.pkl") else data)


def test_storages_that_are_tagged_for_a_tpu_come_to_the_cpu(tmp_path):
    path = tmp_path / "w.pt"
    torch.save(trained().state_dict(), path)
    rewritten(path, lambda data: data.replace(b"X\x03\0\0\0cpu", b"X\x05\0\0\0xla:0"))
    with pytest.raises(RuntimeError, match="xla"):
        torch.load(path, weights_only=True)
    net = Net()
    load_checkpoint(net, path)
    assert_same(net, trained())


def test_the_present_layout_of_torch_xla_comes_to_the_cpu(tmp_path):
    class OnXla:
        def __init__(self, value) -> None:
            self.value = value

        def __reduce__(self):
            build = torch._utils._rebuild_device_tensor_from_cpu_tensor
            return (build, (self.value, self.value.dtype, "xla:0", False))

    state = {key: OnXla(value) for key, value in trained().state_dict().items()}
    torch.save(state, tmp_path / "w.pt")
    net = Net()
    load_checkpoint(net, tmp_path / "w.pt")
    assert_same(net, trained())


def test_the_numpy_layout_of_old_torch_xla_is_refused_with_what_to_do(tmp_path):
    class OnXla:
        def __reduce__(self):
            build = torch._utils._rebuild_device_tensor_from_numpy
            return (build, (np.ones((5, 6), np.float32), torch.float32, "xla:0", False))

    torch.save({**trained().state_dict(), "f.weight": OnXla()}, tmp_path / "w.pt")
    error = refusal(Net(), tmp_path / "w.pt")
    assert "numpy" in error.what
    assert "map_location='cpu'" in error.do


def test_a_whole_pickled_module_is_refused_with_what_to_do(tmp_path):
    torch.save(nn.Linear(2, 2), tmp_path / "w.pt")
    error = refusal(Net(), tmp_path / "w.pt")
    assert "torch.nn.modules.linear.Linear" in error.what
    assert "map_location='cpu'" in error.do


@pytest.mark.parametrize("name", ["w.pt", "w.safetensors"])
def test_a_cut_or_foreign_file_is_refused_in_words(tmp_path, name):
    path = tmp_path / name
    if name.endswith("pt"):
        torch.save(trained().state_dict(), path)
    else:
        save_file(trained().state_dict(), path)
    path.write_bytes(path.read_bytes()[:-300])
    assert "cut off" in str(refusal(Net(), path))
    path.write_bytes(b"not a checkpoint at all" * 20)
    assert name in refusal(Net(), path).what
    path.unlink()
    assert "there is no checkpoint" in refusal(Net(), path).what


PREFIXES = [
    "_orig_mod.",
    "module.",
    "_orig_mod.module.",
    "module._orig_mod.",
    "model.",
    "_fsdp_wrapped_module.",
    "_forward_module.",
    "net._orig_mod.",
    "model.module.",
]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_front_that_wrappers_made_is_taken_off_and_the_child_module_stays(tmp_path, prefix):
    state = {prefix + key: value for key, value in trained().state_dict().items()}
    torch.save(state, tmp_path / "w.pth")
    net = Net()
    notes = load_checkpoint(net, tmp_path / "w.pth")
    assert_same(net, trained())
    assert codes(notes) == ["checkpoint-keys"]


def test_wrappers_inside_are_taken_out(tmp_path):
    state = {
        key.replace("f.", "f._checkpoint_wrapped_module.").replace("bn.", "_orig_mod.bn."): value
        for key, value in trained().state_dict().items()
    }
    torch.save(state, tmp_path / "w.pth")
    net = Net()
    load_checkpoint(net, tmp_path / "w.pth")
    assert_same(net, trained())


def test_module_in_the_middle_is_taken_out_of_one_key_and_kept_in_another(tmp_path):
    state = {key.replace("f.", "f.module."): v for key, v in trained().state_dict().items()}
    torch.save(state, tmp_path / "w.pth")
    net = Net()
    load_checkpoint(net, tmp_path / "w.pth")
    assert_same(net, trained())


def test_a_bare_checkpoint_goes_into_a_wrapped_module(tmp_path):
    torch.save(trained().state_dict(), tmp_path / "w.pth")
    compiled = torch.compile(Net(), backend="eager")
    load_checkpoint(compiled, tmp_path / "w.pth")
    assert_same(compiled._orig_mod, trained())
    wrapped = nn.DataParallel(Net())
    load_checkpoint(wrapped, tmp_path / "w.pth")
    assert_same(wrapped.module, trained())


def test_a_front_is_never_mixed_with_a_child_of_the_same_name(tmp_path):
    class Two(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((2,), value))
            self.module = nn.ParameterDict({"weight": nn.Parameter(torch.full((2,), value + 1))})

    state = {f"module.{key}": value for key, value in Two(5.0).state_dict().items()}
    torch.save(state, tmp_path / "w.pth")
    two = Two(0.0)
    load_checkpoint(two, tmp_path / "w.pth")
    assert two.weight.tolist() == [5.0, 5.0]
    assert two.module["weight"].tolist() == [6.0, 6.0]


@pytest.mark.parametrize("name", ["model", "state_dict", "model_state_dict", "app.model"])
def test_a_known_container_is_looked_into_and_noted(tmp_path, name):
    checkpoint: dict = trained().state_dict()
    for part in reversed(name.split(".")):
        checkpoint = {part: checkpoint, "epoch": 3, "optimizer": {"lr": torch.ones(())}}
    torch.save(checkpoint, tmp_path / "w.pth")
    net = Net()
    notes = load_checkpoint(net, tmp_path / "w.pth")
    assert_same(net, trained())
    assert f"'{name}' of w.pth" in str(notes[0])


def test_two_state_dicts_that_fit_are_refused_until_one_is_named(tmp_path):
    state = {"model": Net(3).state_dict(), "ema": trained().state_dict()}
    torch.save(state, tmp_path / "w.pth")
    error = refusal(Net(), tmp_path / "w.pth")
    assert "'model', 'ema'" in error.what
    net = Net()
    load_checkpoint(net, tmp_path / "w.pth", entry="ema")
    assert_same(net, trained())
    assert "it has ema, model" in refusal(Net(), tmp_path / "w.pth", entry="swa").what


def test_of_two_state_dicts_the_one_that_fits_is_taken(tmp_path):
    state = {"model": nn.Linear(2, 2).state_dict(), "net": trained().state_dict()}
    torch.save(state, tmp_path / "w.pth")
    net = Net()
    load_checkpoint(net, tmp_path / "w.pth")
    assert_same(net, trained())


def test_an_unknown_container_is_refused_with_what_is_there(tmp_path):
    torch.save({"generator": trained().state_dict()}, tmp_path / "w.pth")
    error = refusal(Net(), tmp_path / "w.pth")
    assert "its tensors are under generator" in error.what


def test_missing_and_unexpected_keys_are_listed_with_the_closest(tmp_path):
    state = trained().state_dict()
    state["f.weights"] = state.pop("f.weight")
    torch.save(state, tmp_path / "w.pth")
    text = refusal(Net(), tmp_path / "w.pth").what
    assert "1 are missing, 1 unexpected, 8 of 9 matched" in text
    assert "f.weight   (closest in the checkpoint: f.weights)" in text
    assert "f.weights   (closest in the model: f.weight)" in text


def test_a_missing_running_mean_is_refused_but_a_missing_counter_is_not(tmp_path):
    state = trained().state_dict()
    del state["bn.num_batches_tracked"]
    torch.save(state, tmp_path / "w.pth")
    net = Net()
    assert codes(load_checkpoint(net, tmp_path / "w.pth")) == ["checkpoint-counters"]
    assert torch.equal(net.bn.running_mean, trained().bn.running_mean)
    del state["bn.running_mean"]
    torch.save(state, tmp_path / "w.pth")
    assert "bn.running_mean" in refusal(Net(), tmp_path / "w.pth").what


def test_shapes_that_differ_are_listed_and_a_transposed_one_is_recognised(tmp_path):
    state = trained().state_dict()
    state["f.weight"] = state["f.weight"].t().contiguous()
    state["module.bias"] = torch.zeros(4)
    torch.save(state, tmp_path / "w.pth")
    text = refusal(Net(), tmp_path / "w.pth").what
    assert "f.weight: expected 5x6, got 6x5 (the transposed shape" in text
    assert "module.bias: expected 3, got 4" in text


def test_tied_weights_stay_tied_and_a_dropped_copy_is_not_missed(tmp_path):
    save_model(Tied(1), str(tmp_path / "w.safetensors"))
    model = Tied()
    notes = load_checkpoint(model, tmp_path / "w.safetensors")
    assert model.head.weight is model.emb.weight
    assert torch.equal(model.emb.weight, Tied(1).emb.weight)
    assert codes(notes) == ["checkpoint-tied"]
    torch.save(Tied(2).state_dict(), tmp_path / "w.pth")
    load_checkpoint(model, tmp_path / "w.pth")
    assert model.head.weight is model.emb.weight
    assert torch.equal(model.head.weight, Tied(2).emb.weight)


def test_two_stored_copies_of_a_tied_weight_that_differ_are_refused(tmp_path):
    state = {key: value.clone() for key, value in Tied(1).state_dict().items()}
    state["head.weight"] += 1
    torch.save(state, tmp_path / "w.pth")
    assert "stores different values" in refusal(Tied(), tmp_path / "w.pth").what


@pytest.mark.parametrize("model", [Net, Tied])
def test_a_module_on_the_meta_device_gets_memory_and_keeps_its_ties(tmp_path, model):
    torch.save(model(1).state_dict(), tmp_path / "w.pth")
    with torch.device("meta"):
        empty = model()
    load_checkpoint(empty, tmp_path / "w.pth")
    assert_same(empty, model(1))
    assert all(isinstance(p, nn.Parameter) for p in empty.parameters())
    if model is Tied:
        assert empty.head.weight is empty.emb.weight


def test_a_buffer_on_the_meta_device_that_no_checkpoint_has_is_refused(tmp_path):
    torch.save(trained().state_dict(), tmp_path / "w.pth")
    net = Net()
    net.register_buffer("mask", torch.ones(2, device="meta"), persistent=False)
    with pytest.raises(CheckpointError, match="buffer mask is on the meta device"):
        load_checkpoint(net, tmp_path / "w.pth")


def test_bfloat16_weights_are_widened_exactly_with_a_note(tmp_path):
    save_file(trained().bfloat16().state_dict(), tmp_path / "w.safetensors")
    net = Net()
    notes = load_checkpoint(net, tmp_path / "w.safetensors")
    assert codes(notes) == ["checkpoint-dtype"]
    assert "stored as bfloat16 and loaded as float32, no value changed" in str(notes[0])
    assert net.f.weight.dtype == torch.float32
    assert torch.equal(net.f.weight, trained().f.weight.bfloat16().float())


def test_a_rounding_narrowing_is_noted_loudly(tmp_path):
    torch.save(trained().state_dict(), tmp_path / "w.pth")
    net = Net().bfloat16()
    notes = load_checkpoint(net, tmp_path / "w.pth")
    assert "checkpoint-narrowed" in codes(notes)
    assert "WEIGHTS WERE ROUNDED" in " ".join(map(str, notes))
    assert net.f.weight.dtype == torch.bfloat16


def test_integers_in_place_of_floats_are_refused(tmp_path):
    state = trained().state_dict()
    state["f.weight"] = (state["f.weight"] * 100).to(torch.int8)
    torch.save(state, tmp_path / "w.pth")
    assert "f.weight: expected float32, got int8" in refusal(Net(), tmp_path / "w.pth").what


def test_nan_and_infinity_are_noted_by_name(tmp_path):
    state = trained().state_dict()
    state["f.bias"][:2] = torch.tensor([float("nan"), float("inf")])
    torch.save(state, tmp_path / "w.pth")
    (note,) = load_checkpoint(Net(), tmp_path / "w.pth")
    assert note.code == "checkpoint-nonfinite"
    assert "f.bias (1 NaN, 1 infinite)" in note.text


def test_a_buffer_that_is_no_longer_saved_is_left_out_only_if_it_is_the_same(tmp_path):
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = nn.Linear(2, 2)
            self.register_buffer("positions", torch.arange(4), persistent=False)

    state = {**Positions().state_dict(), "positions": torch.arange(4)}
    torch.save(state, tmp_path / "w.pth")
    load_checkpoint(Positions(), tmp_path / "w.pth")
    torch.save({**state, "positions": torch.arange(4) + 1}, tmp_path / "w.pth")
    assert "positions" in refusal(Positions(), tmp_path / "w.pth").what


def test_the_modules_own_load_hooks_are_respected(tmp_path):
    from torch.nn.utils.parametrizations import weight_norm

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        old = torch.nn.utils.weight_norm(nn.Linear(4, 3))
    torch.save(old.state_dict(), tmp_path / "w.pth")
    assert "weight_g" in old.state_dict()
    new = weight_norm(nn.Linear(4, 3))
    notes = load_checkpoint(new, tmp_path / "w.pth")
    assert "checkpoint-hooks" in codes(notes)
    x = torch.randn(2, 4)
    torch.testing.assert_close(new(x), old(x))


def test_the_digest_changes_with_every_byte_and_every_name(tmp_path):
    a = tmp_path / "a"
    save_distributed(trained().state_dict(), a)
    first = checkpoint_digest(a)
    assert first == checkpoint_digest(a)
    assert len(first) == 64
    (a / "__0_0.distcp").rename(a / "__0_1.distcp")
    second = checkpoint_digest(a)
    (a / ".metadata").write_bytes((a / ".metadata").read_bytes() + b"\0")
    assert len({first, second, checkpoint_digest(a)}) == 3
    (tmp_path / "abc").write_bytes(b"abc")
    assert checkpoint_digest(tmp_path / "abc").startswith("ba7816bf8f01cfea")
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        checkpoint_digest(tmp_path / "none")
