"""A private, export-ready copy of the user's module; the module itself is never touched.

What people forget before exporting is done to the copy, and each thing done is one Note: evaluation
mode, wrappers taken off, half precision computed in float32, tensors brought to the CPU, constants
laid out contiguously. Weights are shared with the original wherever nothing has to change, so the
copy costs no memory.
"""

from __future__ import annotations

import copy
import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tpu2edge.errors import ExportError, InputError, Place
from tpu2edge.types import Note

__all__ = ["PreparedModule", "half_types", "prepare_module", "unwrap", "weights_digest"]

# Floating types that are computed in float32: LiteRT's CPU kernels take no bfloat16 at all, float16
# only as stored weights, and litert-torch 0.10 lowers neither.
_TO_FLOAT32 = (torch.bfloat16, torch.float16, torch.float64)

# Wrapper classes by name, and the attribute that holds the wrapped module. By name, because torch
# imports torch.distributed and torch._dynamo lazily and so do we.
_WRAPPERS: dict[str, tuple[str, str]] = {
    "OptimizedModule": ("_orig_mod", "torch.compile"),
    "DistributedDataParallel": ("module", "DistributedDataParallel"),
    "DataParallel": ("module", "DataParallel"),
    "FullyShardedDataParallel": ("_fsdp_wrapped_module", "FSDP"),
    "XlaFullyShardedDataParallel": ("module", "XlaFSDP"),
    "CheckpointWrapper": ("_checkpoint_wrapped_module", "activation checkpointing"),
    "AveragedModel": ("module", "AveragedModel (SWA/EMA)"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedModule:
    """The copy that is traced and run as the eager reference.

    ``module`` is in evaluation mode, on the CPU, in float32, every tensor contiguous.
    ``half_dtypes`` names the reduced-precision types the original computed in.
    """

    module: nn.Module
    half_dtypes: tuple[str, ...]
    notes: tuple[Note, ...]


def prepare_module(module: nn.Module, *, keep_half: bool = False) -> PreparedModule:
    """A copy of ``module`` that is ready for export.

    Args:
        module: any torch module; it is not changed.
        keep_half: leave bfloat16 and float16 tensors as they are, for a trace that is widened later.

    Raises:
        ExportError: the module cannot be copied, or holds a tensor without data (meta device).
        InputError: the module is sharded in a way that needs its own process group to read.
    """
    notes: list[Note] = []
    inner, taken_off = unwrap(module)
    replaced: Counter[str] = Counter(taken_off)
    store = _TensorStore(keep_half)
    duplicate = _copy_module(inner, store, replaced)
    if replaced:
        names = ", ".join(sorted(replaced))
        notes.append(Note(code="unwrapped", text=f"took off {names} (the copy only)"))
    training = [name for name, child in duplicate.named_modules() if child.training]
    duplicate.eval()
    if training:
        what = "the module was" if "" in training else f"{len(training)} submodules were"
        notes.append(
            Note(code="eval-mode", text=f"{what} in training mode: exported in evaluation mode")
        )
    notes.extend(store.notes())
    for parameter in duplicate.parameters():
        parameter.requires_grad_(False)
    return PreparedModule(module=duplicate, half_dtypes=store.half_dtypes(), notes=tuple(notes))


# ------------------------------------------------------------------------------------- wrappers


def _wrapper_of(module: nn.Module) -> tuple[nn.Module, str] | None:
    for cls in type(module).__mro__:
        found = _WRAPPERS.get(cls.__name__)
        if found is None or not cls.__module__.startswith(("torch", "fairscale")):
            continue
        attribute, label = found
        child = module._modules.get(attribute) or getattr(module, attribute, None)
        if isinstance(child, nn.Module):
            return child, label
    return None


def unwrap(module: nn.Module) -> tuple[nn.Module, list[str]]:
    """What is inside of torch.compile, DDP, FSDP and the like, and what was taken off."""
    taken: list[str] = []
    while (found := _wrapper_of(module)) is not None:
        module, label = found
        taken.append(label)
    return module, taken


def _copy_wrappers(module: nn.Module, memo: dict[int, Any], taken: Counter[str]) -> None:
    """Put into ``memo``, for every wrapper below ``module``, the copy of what it wraps.

    Done before the whole is copied: DistributedDataParallel would start a new reducer in its copy,
    and FSDP2 refuses to be copied at all.
    """
    for child in reversed(list(module.modules())):  # the innermost first
        if child.__dict__.get("_compiled_call_impl") is not None:
            taken["torch.compile"] += 1  # module.compile() in place; the copy is made without it
        inner, labels = unwrap(child)
        if labels:
            memo[id(child)] = copy.deepcopy(inner, memo)
            taken.update(labels)
        elif (original := _class_before_sharding(child)) is not None:
            memo[id(child)] = _unsharded_copy(child, original, memo)
            taken["FSDP2 (fully_shard)"] += 1


def _class_before_sharding(module: nn.Module) -> type[nn.Module] | None:
    """The class that fully_shard or replicate put (FSDPModule, this class) in the place of."""
    first, *others = type(module).__bases__
    if first.__name__ not in ("FSDPModule", "ReplicateModule") or len(others) != 1:
        return None
    return others[0] if first.__module__.startswith("torch.distributed") else None


def _unsharded_copy(
    module: nn.Module, original: type[nn.Module], memo: dict[int, Any]
) -> nn.Module:
    replica = original.__new__(original)
    memo[id(module)] = replica
    state = {
        name: _without_distributed(value) if name.endswith("_hooks") else value
        for name, value in vars(module).items()
        if not name.startswith(("__composable_api_state_key", "_is_fsdp", "_fsdp"))
    }
    vars(replica).update(copy.deepcopy(state, memo))
    return replica


def _without_distributed(hooks: Any) -> Any:
    if not isinstance(hooks, dict):
        return hooks
    kept = {
        key: hook
        for key, hook in hooks.items()
        if not (getattr(hook, "__module__", None) or "").startswith("torch.distributed")
    }
    return type(hooks)(kept)


# -------------------------------------------------------------------------------------- copying


class _TensorStore:
    """Turns each tensor of the original into the one of the copy, once per tensor, with a tally."""

    def __init__(self, keep_half: bool) -> None:
        self._to_float32 = (torch.float64,) if keep_half else _TO_FLOAT32
        self._done: dict[tuple[Any, ...], torch.Tensor] = {}
        self._keep_alive: list[torch.Tensor] = []
        self._moved: dict[str, list[str]] = {}
        self._cast: dict[str, list[str]] = {}
        self._laid_out: list[str] = []
        self._gathered: list[str] = []

    def convert(self, tensor: torch.Tensor, path: str, *, own: bool) -> torch.Tensor:
        """The copy's version of ``tensor``; ``own`` asks for storage of its own (mutable state)."""
        if nn.parameter.is_lazy(tensor):
            raise ExportError(
                "a parameter of a lazy module has no shape and no data yet",
                do="call the model once on example inputs, then export it",
                place=Place(tensor=path),
            )
        key = (*_identity(tensor), own)
        if key in self._done:
            return self._done[key]
        result = self._convert(tensor.detach(), path)
        if own and _identity(result) == _identity(tensor):
            result = result.clone()
        self._done[key] = result
        self._keep_alive.append(tensor)
        return result

    def _convert(self, tensor: torch.Tensor, path: str) -> torch.Tensor:
        if tensor.device.type == "meta":
            raise ExportError(
                "a tensor has no data (it is on the meta device)",
                do="load a checkpoint into the model, or build it on a real device",
                place=Place(tensor=path),
            )
        gather = getattr(tensor, "full_tensor", None)
        if gather is not None:  # a DTensor: sharded by FSDP2 or tensor parallelism
            try:
                tensor = gather()
            except RuntimeError as err:
                raise InputError(
                    f"a sharded tensor cannot be gathered: {err}",
                    do="export on every rank at once, or from a saved checkpoint",
                    place=Place(tensor=path),
                ) from err
            self._gathered.append(path)
        if tensor.device.type != "cpu":
            self._moved.setdefault(str(tensor.device), []).append(path)
            tensor = tensor.cpu()
        if tensor.dtype in self._to_float32:
            self._cast.setdefault(_name(tensor.dtype), []).append(path)
            tensor = _float32(tensor, path)
        # litert-torch 0.10 keys constants by the address of a temporary contiguous copy, so several
        # non-contiguous ones can come out as each other (google-ai-edge/litert-torch#1238).
        if tensor.layout == torch.strided and not tensor.is_contiguous():
            self._laid_out.append(path)
            tensor = tensor.contiguous()
        return tensor

    def half_dtypes(self) -> tuple[str, ...]:
        return tuple(sorted(name for name in self._cast if name != "float64"))

    def notes(self) -> Iterator[Note]:
        for device, paths in sorted(self._moved.items()):
            text = f"{_count(paths)} brought from {device} to the CPU"
            yield Note(code="moved-to-cpu", text=text)
        if self._gathered:
            yield Note(code="gathered", text=f"{_count(self._gathered)} gathered from their shards")
        for dtype, paths in sorted(self._cast.items()):
            yield Note(
                code="narrowed-weights" if dtype == "float64" else "computed-in-float32",
                text=f"{_count(paths)} of {dtype}: exported and computed in float32",
            )
        if self._laid_out:
            yield Note(
                code="made-contiguous",
                text=f"{_count(self._laid_out)} with a non-contiguous layout made contiguous",
            )


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for two tensors that are the same view of the same storage (tied weights)."""
    if tensor.device.type == "cpu" and tensor.layout == torch.strided and tensor.data_ptr():
        return (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
    return (id(tensor),)


def _float32(tensor: torch.Tensor, path: str) -> torch.Tensor:
    result = tensor.to(torch.float32)
    if tensor.dtype == torch.float64 and bool((result.isinf() & ~tensor.isinf()).any()):
        raise ExportError(
            "a float64 constant does not fit into float32",
            do="scale it, or compute this part outside of the model",
            place=Place(tensor=path),
        )
    return result


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _count(paths: list[str]) -> str:
    if len(paths) == 1:
        return f"'{paths[0]}'"
    return f"{len(paths)} tensors ('{paths[0]}', …)"


def _copy_module(module: nn.Module, store: _TensorStore, taken: Counter[str]) -> nn.Module:
    memo: dict[int, Any] = {}
    keep: list[Any] = []
    for path, tensor, kind in _tensors(module):
        if id(tensor) in memo:
            continue
        # Parameters are shared with the original: an export that would write to them is refused
        # before it is run. Buffers and plain attributes get storage of their own, since forward
        # may write there.
        value = store.convert(tensor, path, own=kind != "parameter")
        if isinstance(tensor, nn.Parameter):
            value = nn.Parameter(value, requires_grad=False)
        memo[id(tensor)] = value
        keep.append(tensor)
    try:
        _copy_wrappers(module, memo, taken)
        return copy.deepcopy(module, memo)
    except Exception as err:
        raise ExportError(
            f"the module cannot be copied: {type(err).__name__}: {err}",
            do="keep what cannot be copied (locks, files, process groups) out of the module",
            place=Place(module=_uncopyable(module, memo)),
        ) from err


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor, str]]:
    """Every tensor of the module tree: parameters, buffers, and attributes, in containers too."""
    for prefix, child in module.named_modules(remove_duplicate=True):
        for name, parameter in child._parameters.items():
            if parameter is not None:
                yield _join(prefix, name), parameter, "parameter"
        for name, buffer in child._buffers.items():
            if buffer is not None:
                yield _join(prefix, name), buffer, "buffer"
        for name, value in vars(child).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                yield from _nested(value, _join(prefix, name), 0)


def _nested(value: Any, path: str, depth: int) -> Iterator[tuple[str, torch.Tensor, str]]:
    if isinstance(value, torch.Tensor):
        yield path, value, "parameter" if isinstance(value, nn.Parameter) else "attribute"
    elif depth < 4 and isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _nested(item, f"{path}[{index}]", depth + 1)
    elif depth < 4 and isinstance(value, dict):
        for key, item in value.items():
            yield from _nested(item, f"{path}[{key!r}]", depth + 1)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _uncopyable(module: nn.Module, memo: dict[int, Any]) -> str:
    for prefix, child in module.named_modules():
        for name, value in vars(child).items():
            if name == "_modules":
                continue
            try:
                copy.deepcopy(value, dict(memo))
            except Exception:  # noqa: BLE001 - the search for the culprit, whatever it raises
                return _join(prefix, name)
    return ""


def half_types(module: nn.Module) -> tuple[torch.dtype, ...]:
    """The 16-bit float types among the module's weights: what it computes in."""
    found = {tensor.dtype for tensor in (*module.parameters(), *module.buffers())}
    return tuple(dtype for dtype in (torch.bfloat16, torch.float16) if dtype in found)


def _inner_tensors(tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """The plain tensors that one of torchao's is made of, each with ".name"; a plain one itself."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return [("", tensor)]
    found = [(f".{name}", getattr(tensor, name)) for name in flatten()[0]]
    return [(name + inner, part) for name, held in found for inner, part in _inner_tensors(held)]


def weights_digest(module: nn.Module) -> str:
    """sha256 over the names, types, shapes and bytes of all parameters and buffers, in name order.

    Wrappers (torch.compile, DDP, FSDP) do not change it; neither does the device. Integers count
    as int64, since a JAX device holds an int64 buffer (BatchNorm's counter) as int32.
    """
    inner, _ = unwrap(module)
    digest = hashlib.sha256()
    for name, tensor in sorted(inner.state_dict().items()):
        if not isinstance(tensor, torch.Tensor):
            continue
        wrapping = ("_orig_mod", "_fsdp_wrapped_module")
        clean = ".".join(part for part in name.split(".") if part not in wrapping)
        gather = getattr(tensor, "full_tensor", None)
        whole = (gather() if gather is not None else tensor).detach().cpu()
        for part, piece in _inner_tensors(whole):
            value = piece.contiguous()
            if value.dtype in (torch.int8, torch.int16, torch.int32):
                value = value.to(torch.int64)
            digest.update(f"{clean}{part}|{value.dtype}|{tuple(value.shape)}|".encode())
            if value.numel():
                digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
