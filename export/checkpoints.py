"""Loading trained weights into a module: all of them, in their right places, or an error.

Formats: ``.safetensors``, a folder of sharded safetensors (or ``.bin``) with its index, files of
``torch.save``, and PyTorch Distributed Checkpoint folders. Nothing here runs code from a
checkpoint: ``torch.load`` is called with ``weights_only=True`` only, and the ``.metadata`` pickle
of a distributed checkpoint is read with the few plain data classes of :data:`_METADATA_CLASSES`
and nothing else. What remains trusted is those readers themselves, and that the numbers are the
ones that were trained. torch's files carry a CRC-32 of each tensor, which is checked; safetensors
carry none, so there a flipped byte shows only in :func:`checkpoint_digest`.

Values are loaded in the module's dtype. A note says when the checkpoint's is another one, and says
so loudly when values changed by it.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import itertools
import json
import math
import pickle
import re
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpu2edge.errors import CheckpointError, Place
from tpu2edge.files import SAFETENSORS_DTYPES, sha256_of_path
from tpu2edge.types import Note

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

__all__ = [
    "CONTAINER_NAMES",
    "FRONT_PARTS",
    "WRAPPER_PARTS",
    "checkpoint_digest",
    "load_checkpoint",
]

#: Names under which trainers put the model's state dict, also inside each other (``app.model``).
#: Anything else (``optimizer``, ``lr_scheduler`` …) is not looked into, unless it is asked for.
CONTAINER_NAMES = (
    "model",
    "state_dict",
    "model_state_dict",
    "model_state",
    "module",
    "net",
    "network",
    "weights",
    "params",
    "app",
    "ema",
    "model_ema",
    "ema_model",
    "ema_state_dict",
    "state_dict_ema",
)

#: Parts of a key that only wrappers make (torch.compile, FSDP, activation checkpointing, DeepSpeed
#: and Lightning): taken out wherever they stand, in the checkpoint and in the module.
WRAPPER_PARTS = (
    "_orig_mod",
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
    "_forward_module",
)

#: Parts that a wrapper puts in front (DDP's ``module``, Lightning's ``model``), but that can also
#: be real children: taken off or put on only if every key finds its place by it.
FRONT_PARTS = ("module", "model", "net")

#: Last parts of keys that are no weights: a counter of torch.optim.swa_utils.AveragedModel, and
#: what modules save by get_extra_state.
_IGNORED_KEYS = ("n_averaged", "_extra_state")

#: Of so many parts ``module`` in one key each may be real: all choices are tried, 2 to this power.
_MOST_MODULES = 6

#: How many names an error or note lists before it goes over to a count.
_LISTED = 10

#: The classes a distributed checkpoint's ``.metadata`` may hold; dtypes of torch beside them.
_METADATA_CLASSES: dict[str, frozenset[str]] = {
    "torch.distributed.checkpoint.metadata": frozenset(
        {
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        }
    ),
    "torch.distributed.checkpoint.filesystem": frozenset({"_StorageInfo", "_StoragePrefix"}),
    "torch.serialization": frozenset({"_get_layout"}),
    "torch": frozenset({"Size"}),
    "collections": frozenset({"OrderedDict"}),
    "pathlib": frozenset({"Path", "PosixPath", "PurePath", "PurePosixPath"}),
}

_RESAVE = (
    "if you trust the file, re-save its tensors once, where it was made: "
    "c = torch.load(path, map_location='cpu', weights_only=False); "
    "torch.save({k: v.cpu() for k, v in model_state_dict.items()}, 'weights.pt') "
    "with model_state_dict the part of c that holds the model's weights"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    """One stored tensor that is read when its turn comes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]


#: A place in nested dicts, and the tensor there.
_Stored = dict[tuple[str, ...], _Entry]


def checkpoint_digest(path: Path) -> str:
    """SHA-256 in hex of a checkpoint file, or of all files of a folder (see sha256_of_path).

    Raises CheckpointError when there is nothing at ``path``.
    """
    if not path.is_file() and not path.is_dir():
        raise CheckpointError(f"there is no checkpoint {path}")
    return sha256_of_path(path)


def load_checkpoint(module: nn.Module, path: Path, *, entry: str | None = None) -> tuple[Note, ...]:
    """Notes on how the weights at ``path`` came into ``module``, which is changed in place.

    Every parameter and persistent buffer is loaded, by copying into the one that is there: ties
    stay ties, devices and dtypes stay. Parameters on the meta device get CPU storage first. Keys
    are matched exactly, else without what wrappers add (:data:`WRAPPER_PARTS`,
    :data:`FRONT_PARTS`), and then one to one. ``entry`` names the part of the checkpoint to take
    ("ema", dotted when nested) where several would fit.

    Raises CheckpointError, before anything is loaded, when the file cannot be read safely, when a
    key is missing or left over, when a shape or a kind of dtype (float, integer, bool) does not
    fit, or when two stored copies of a tied weight differ. Only a shard that turns out to be
    damaged in its middle, an integer that is too large for the module's dtype, or a load hook of
    the module's own can leave a module half loaded.
    """
    path = Path(path)
    try:
        return _load(module, path, entry)
    except OSError as err:
        raise CheckpointError(f"{path.name} cannot be read: {_first_line(err)}") from err


def _load(module: nn.Module, path: Path, entry: str | None) -> tuple[Note, ...]:
    notes: list[Note] = []
    with _open(path, notes) as stored:
        _refuse_lazy(module)
        entries = _container(module, stored, path.name, entry, notes)
        target = _Target(module)
        plan = _match(target, entries)
        hooked = _has_load_hooks(module)
        if not hooked:
            _refuse_misfits(target, plan, entries, path.name)
        # A hook may bring old shapes into the present ones; load_state_dict then judges them.
        _refuse_unlike(target, plan, entries, path.name, shapes=not hooked)
        _refuse_unlike_copies(target, plan, entries, path.name)
        _note_match(target, plan, notes)
        _materialise(module, target)
        if hooked:
            _load_by_hooks(module, plan, entries, path.name, notes)
        else:
            _copy(target, plan, entries, notes)
    _note_nonfinite(module, notes)
    return tuple(notes)


# ---- reading: each format to a flat dict of places and entries ---------------------------------


@contextlib.contextmanager
def _open(path: Path, notes: list[Note]) -> Iterator[_Stored]:
    with contextlib.ExitStack() as stack:
        if path.is_dir():
            yield _open_folder(path, stack, notes)
        elif path.suffix == ".safetensors":
            yield _open_safetensors(path, stack)
        elif path.is_file():
            yield _open_torch(path)
        else:
            near = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
            raise CheckpointError(f"there is no checkpoint {path.name}{_closest(path.name, near)}")


def _open_folder(path: Path, stack: contextlib.ExitStack, notes: list[Note]) -> _Stored:
    files = sorted(p.name for p in path.iterdir())
    if ".metadata" in files:
        return _open_distributed(path)
    shards = [name for name in files if name.endswith(".distcp")]
    if shards:
        if ".metadata.tmp" in files:
            what = "the save did not finish (.metadata.tmp is there, .metadata is not)"
        else:
            what = f".metadata is missing beside {len(shards)} .distcp files"
        raise CheckpointError(
            f"{path.name} is not a whole distributed checkpoint: {what}",
            do="copy the folder with its hidden files (.metadata is written last, by rank 0)",
        )
    indices = [n for n in files if n.endswith((".safetensors.index.json", ".bin.index.json"))]
    if len(indices) > 1:
        safe = [name for name in indices if name.endswith(".safetensors.index.json")]
        indices = safe if len(safe) == 1 else indices
    if len(indices) > 1:
        raise CheckpointError(
            f"{path.name} has several indices: {_listed(indices)}",
            do="pass a folder with one of them",
        )
    if indices:
        return _open_index(path / indices[0], stack)
    for ending in (".safetensors", ".bin", ".pt", ".pth", ".ckpt"):
        single = [name for name in files if name.endswith(ending)]
        if len(single) == 1:
            text = f"weights are taken from the file {single[0]} of {path.name}"
            notes.append(Note(code="checkpoint-file", text=text))
            if ending == ".safetensors":
                return _open_safetensors(path / single[0], stack)
            return _open_torch(path / single[0])
        if single:
            raise CheckpointError(
                f"{path.name} has {len(single)} {ending} files and no index: {_listed(single)}",
                do="pass the one to load, or add the model.safetensors.index.json they came with",
            )
    if {"_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt"} & set(files):
        raise CheckpointError(
            f"{path.name} is an Orbax checkpoint of JAX",
            do="restore it with orbax and save the arrays as .safetensors under the module's keys",
        )
    below = [p.name for p in path.iterdir() if (p / ".metadata").is_file()]
    raise CheckpointError(
        f"{path.name} holds no checkpoint (in it: {_listed(files) or 'nothing'})",
        do=f"pass one of its folders: {path.name}/{sorted(below)[-1]}" if below else "",
    )


def _open_safetensors(path: Path, stack: contextlib.ExitStack) -> _Stored:
    if not path.is_file():
        near = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise CheckpointError(f"there is no checkpoint {path.name}{_closest(path.name, near)}")
    from safetensors import SafetensorError, safe_open

    try:
        file = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
        stored: _Stored = {}
        for key in file.keys():  # noqa: SIM118 - safe_open has no __iter__
            part = file.get_slice(key)
            stored[(key,)] = _Entry(
                shape=tuple(part.get_shape()),
                dtype=_safetensors_dtype(part.get_dtype(), key, path.name),
                read=lambda key=key: file.get_tensor(key),  # type: ignore[misc]
            )
    except (SafetensorError, OSError) as err:
        raise CheckpointError(
            f"{path.name} cannot be read as safetensors: {_first_line(err)}",
            do="it is cut off, damaged or of another format: copy it again",
        ) from err
    return stored


def _safetensors_dtype(name: str, key: str, file: str) -> torch.dtype:
    import torch

    dtype = getattr(torch, SAFETENSORS_DTYPES.get(name, ""), None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(
            f"{file} stores {key} as {name}, which is not supported", place=Place(tensor=key)
        )
    return dtype


def _open_index(index: Path, stack: contextlib.ExitStack) -> _Stored:
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        by_file: dict[str, list[str]] = defaultdict(list)
        for key, name in weight_map.items():
            by_file[name].append(key)
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as err:
        raise CheckpointError(f"{index.name} is no index of shards: {_first_line(err)}") from err
    outside = [name for name in by_file if Path(name).name != name]
    if outside:
        raise CheckpointError(f"{index.name} names files outside of its folder: {outside[0]}")
    gone = sorted(name for name in by_file if not (index.parent / name).is_file())
    if gone:
        raise CheckpointError(
            f"{len(gone)} of {len(by_file)} shards of {index.name} are missing: {_listed(gone)}",
            do="copy all of them beside the index",
        )
    stored: _Stored = {}
    for name in sorted(by_file):
        shard = index.parent / name
        opened = (
            _open_safetensors(shard, stack) if name.endswith(".safetensors") else _open_torch(shard)
        )
        for key in by_file[name]:
            if (key,) not in opened:
                raise CheckpointError(
                    f"{name} does not hold {key}, which {index.name} says it does",
                    do="index and shards are of different saves, or the shard is damaged",
                )
            stored[(key,)] = opened[(key,)]
    return stored


def _open_torch(path: Path) -> _Stored:
    import torch

    with path.open("rb") as file:
        start = file.read(8)
    zipped = zipfile.is_zipfile(path)
    if start[:4] == b"PK\x03\x04" and not zipped:
        raise CheckpointError(f"{path.name} is cut off: its end is missing", do="copy it again")
    if start[:6] == b"\x89HDF\r\n":
        raise CheckpointError(f"{path.name} is an HDF5 file (Keras), no PyTorch checkpoint")
    if zipped:
        with zipfile.ZipFile(path) as archive:
            if any(name.partition("/")[2] == "constants.pkl" for name in archive.namelist()):
                raise CheckpointError(
                    f"{path.name} is a TorchScript program, no checkpoint",
                    do="save its weights: torch.save(torch.jit.load(path).state_dict(), …)",
                )
            fault = _fault(archive)
            if fault:
                raise CheckpointError(f"{path.name} is damaged: {fault}", do="copy it again")
    try:
        # mmap leaves the file's pages on disk until they are copied; only zip files allow it.
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except pickle.UnpicklingError as err:
        needed = _needed_names(path, err)
        if needed:
            raise CheckpointError(
                f"{path.name} holds more than tensors and plain data: opening it would run "
                f"{_listed(needed)}, so it was not opened",
                do=_RESAVE,
            ) from err
        raise CheckpointError(
            f"{path.name} cannot be read as a file of torch.save ({_first_line(err)})",
            do="it is damaged or of another format: copy it again",
        ) from err
    except Exception as err:  # torch raises many classes on a damaged file
        raise CheckpointError(
            f"{path.name} cannot be read as a file of torch.save: "
            f"{type(err).__name__}: {_first_line(err)}",
            do="it is cut off, damaged or of another format: copy it again",
        ) from err
    if isinstance(loaded, torch.Tensor) or not isinstance(loaded, Mapping):
        raise CheckpointError(
            f"{path.name} holds a {type(loaded).__name__}; a state dict was expected",
            do="save it with torch.save(model.state_dict(), …)",
        )
    return dict(_flattened(loaded, ()))


def _needed_names(path: Path, err: Exception) -> list[str]:
    """The functions and classes that unpickling would call, read from the file without a call."""
    import torch

    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
    except (RuntimeError, ValueError, OSError, pickle.UnpicklingError):
        names = []  # not a zip file
    return sorted(names) or re.findall(r"GLOBAL (\w[\w.]+)", str(err))[:1]


def _flattened(node: Any, at: tuple[str, ...]) -> Iterable[tuple[tuple[str, ...], _Entry]]:
    import torch

    if isinstance(node, torch.Tensor):
        yield at, _Entry(shape=tuple(node.shape), dtype=node.dtype, read=lambda: node)
    elif isinstance(node, Mapping):
        for key, value in node.items():
            yield from _flattened(value, (*at, str(key)))


# ---- PyTorch Distributed Checkpoint -------------------------------------------------------------


class _MetadataUnpickler(pickle.Unpickler):
    """Knows the plain classes of a checkpoint's ``.metadata``, and refuses every other name."""

    def find_class(self, module: str, name: str) -> Any:
        import importlib

        import torch

        if name in _METADATA_CLASSES.get(module, ()):
            return getattr(importlib.import_module(module), name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise CheckpointError(
            f".metadata holds {module}.{name}, which is not part of a plain distributed "
            "checkpoint, so it was not opened",
            do="where the checkpoint was made: torch.distributed.checkpoint.format_utils."
            "dcp_to_torch_save(folder, 'weights.pt'), and pass that file",
        )


def _open_distributed(path: Path) -> _Stored:
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

    try:
        metadata = _MetadataUnpickler(io.BytesIO((path / ".metadata").read_bytes())).load()
    except CheckpointError:
        raise
    except Exception as err:  # a pickle that is cut can raise nearly anything
        raise CheckpointError(
            f"{path.name}/.metadata cannot be read: {type(err).__name__}: {_first_line(err)}",
            do="it is cut off or damaged: copy the folder again",
        ) from err
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise CheckpointError(f"{path.name}/.metadata describes no distributed checkpoint")
    _refuse_missing_shards(path, metadata.storage_data.values())
    places = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
    stored: _Stored = {}
    for fqn, item in metadata.state_dict_metadata.items():
        if isinstance(item, TensorStorageMetadata):
            at = tuple(str(part) for part in places.get(fqn, (fqn,)))
            stored[at] = _Entry(
                shape=tuple(item.size),
                dtype=item.properties.dtype,
                read=lambda fqn=fqn, item=item: _assembled(  # type: ignore[misc]
                    path, fqn, item, metadata.storage_data
                ),
            )
    return stored


def _refuse_missing_shards(path: Path, infos: Iterable[Any]) -> None:
    ends: dict[str, int] = defaultdict(int)
    for info in infos:
        name = info.relative_path
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise CheckpointError(f"{path.name}/.metadata names a file outside of it: {name}")
        if getattr(info, "transform_descriptors", None):
            raise CheckpointError(
                f"{path.name} is stored with {', '.join(info.transform_descriptors)}, "
                "which is not supported",
                do="save it without stream extensions",
            )
        ends[name] = max(ends[name], info.offset + info.length)
    gone = sorted(name for name in ends if not (path / name).is_file())
    if gone:
        raise CheckpointError(
            f"{len(gone)} of {len(ends)} shards of {path.name} are missing: {_listed(gone)}",
            do="each host writes its own: copy the files of all of them into one folder",
        )
    cut = sorted(name for name, end in ends.items() if (path / name).stat().st_size < end)
    if cut:
        name = cut[0]
        raise CheckpointError(
            f"shard {name} of {path.name} is cut off: {(path / name).stat().st_size} bytes, "
            f"at least {ends[name]} were written",
            do="copy it again",
        )


def _assembled(path: Path, fqn: str, item: Any, storage: Mapping[Any, Any]) -> Tensor:
    """One tensor of a distributed checkpoint, put together from its chunks on the CPU."""
    import torch
    from torch.distributed.checkpoint.metadata import MetadataIndex

    whole: Tensor | None = None
    filled = 0
    for chunk in item.chunks:
        info = storage.get(MetadataIndex(fqn, chunk.offsets))
        if info is None:
            raise _damaged(path, fqn, f"the chunk at {tuple(chunk.offsets)} is not in .metadata")
        with (path / info.relative_path).open("rb") as file:
            file.seek(info.offset)
            data = file.read(info.length)
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                fault = _fault(archive)
            part = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as err:  # torch raises many classes on a damaged file
            raise _damaged(path, fqn, f"{info.relative_path}: {_first_line(err)}") from err
        if fault:
            raise _damaged(path, fqn, f"{info.relative_path}: {fault}")
        if not isinstance(part, torch.Tensor) or part.dtype != item.properties.dtype:
            raise _damaged(path, fqn, f"{info.relative_path} holds something else at its place")
        if tuple(part.shape) != tuple(chunk.sizes):
            raise _damaged(
                path,
                fqn,
                f"{info.relative_path} holds shape {tuple(part.shape)}, "
                f".metadata says {tuple(chunk.sizes)}",
            )
        if tuple(chunk.sizes) == tuple(item.size):
            return part
        if whole is None:
            whole = torch.empty(item.size, dtype=item.properties.dtype)
        window = tuple(
            slice(start, start + size)
            for start, size in zip(chunk.offsets, chunk.sizes, strict=True)
        )
        whole[window].copy_(part)
        filled += part.numel()
    if whole is None or filled != whole.numel():
        raise _damaged(path, fqn, f"{filled} of {math.prod(item.size)} values are stored")
    return whole


def _damaged(path: Path, fqn: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"{path.name}: {fqn} cannot be put together: {why}",
        do="copy the checkpoint again",
        place=Place(tensor=fqn),
    )


def _fault(file: zipfile.ZipFile) -> str | None:
    """The record of a file of torch.save whose CRC-32 is wrong, or None.

    With torch.serialization.set_crc32_options(False) all of them are, ``data.pkl`` first: then
    nothing can be said.
    """
    try:
        name = file.testzip()
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError, NotImplementedError) as err:
        return _first_line(err)
    return None if name is None or name.endswith("data.pkl") else f"{name} has a wrong checksum"


# ---- which part of the checkpoint ---------------------------------------------------------------


def _container(
    module: nn.Module, stored: _Stored, file: str, wanted: str | None, notes: list[Note]
) -> dict[str, _Entry]:
    """The state dict in the checkpoint that is meant, as key -> entry."""
    groups: dict[tuple[str, ...], dict[str, _Entry]] = defaultdict(dict)
    for at, entry in stored.items():
        if not _is_ignored(at[-1]):
            groups[at[:-1]][at[-1]] = entry
    if wanted is not None:
        found = [at for at in groups if ".".join(at) == wanted]
        if not found:
            known = sorted(".".join(at) for at in groups if at)
            raise CheckpointError(
                f"{file} has no entry {wanted!r}; it has {_listed(known) or 'no nested entries'}"
            )
        return groups[found[0]]
    candidates = [at for at in groups if all(part in CONTAINER_NAMES for part in at)]
    if not candidates:
        if not stored:
            raise CheckpointError(f"{file} holds no tensors")
        known = sorted(".".join(at) for at in groups)
        raise CheckpointError(
            f"{file} has no state dict under a known name ({', '.join(CONTAINER_NAMES)}); "
            f"its tensors are under {_listed(known)}",
            do="save the model's part alone: torch.save(checkpoint['…'], 'weights.pt')",
        )
    if len(candidates) > 1:
        target = _Target(module)
        fits = [at for at in candidates if _match(target, groups[at]).fits(target, groups[at])]
        names = ", ".join(repr(".".join(at) or "(top)") for at in (fits or candidates))
        if len(fits) > 1:
            first = ".".join(fits[-1])
            raise CheckpointError(
                f"{file} holds several state dicts that fit: {names}",
                do="say which one is meant, or save it alone: "
                f"torch.save(checkpoint[{first!r}], 'weights.pt')",
            )
        candidates = fits or candidates
        if not fits:
            # None fits: the error to come is about the one that comes nearest.
            candidates = [max(candidates, key=lambda at: len(_match(target, groups[at]).sources))]
    taken = candidates[0]
    if taken:
        left = sorted({".".join(at) or "(top)" for at in groups if at != taken})
        rest = f"; not used: {_listed(left)}" if left else ""
        notes.append(
            Note(
                code="checkpoint-entry",
                text=f"weights are taken from {'.'.join(taken)!r} of {file}{rest}",
            )
        )
    return groups[taken]


# ---- matching keys ------------------------------------------------------------------------------


class _Target:
    """What a module wants loaded: its tensors by key, and which keys are one tensor."""

    def __init__(self, module: nn.Module) -> None:
        import torch

        state = module.state_dict(keep_vars=True)
        self.tensors: dict[str, Tensor] = {
            key: value
            for key, value in state.items()
            if isinstance(value, torch.Tensor) and not _is_ignored(key)
        }
        #: Buffers that are not saved: a checkpoint of an older version may hold them.
        self.unsaved: dict[str, Tensor] = {
            key: value for key, value in module.named_buffers() if key not in self.tensors
        }
        self.ties: list[list[str]] = []
        self.tied_to: dict[str, list[str]] = {}
        groups: dict[Any, list[str]] = defaultdict(list)
        for key, tensor in self.tensors.items():
            groups[_identity(tensor)].append(key)
        for keys in groups.values():
            for key in keys:
                self.tied_to[key] = keys
            if len(keys) > 1:
                self.ties.append(keys)


def _identity(tensor: Tensor) -> Any:
    """Equal for tensors that are the same values in the same memory."""
    if tensor.device.type == "meta" or not tensor.numel():
        return id(tensor)
    return (
        str(tensor.device),
        tensor.data_ptr(),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """Module key -> checkpoint key, and what found no partner."""

    sources: dict[str, str]
    missing: list[str]
    unexpected: list[str]
    counters: list[str]  # num_batches_tracked that the checkpoint does not have
    how: str = ""

    def fits(self, target: _Target, entries: Mapping[str, _Entry]) -> bool:
        """Whether nothing is missing or left over, and all shapes agree."""
        return (
            not self.missing
            and not self.unexpected
            and all(
                entries[source].shape == tuple(target.tensors[key].shape)
                for key, source in self.sources.items()
            )
        )


def _is_ignored(key: str) -> bool:
    return key.rpartition(".")[2] in _IGNORED_KEYS


def _parts(key: str) -> tuple[str, ...]:
    return tuple(part for part in key.split(".") if part not in WRAPPER_PARTS)


def _match(target: _Target, entries: Mapping[str, _Entry]) -> _Plan:
    """The first way of reading the keys by which all find a place; else the one that comes nearest.

    Ways, in this order: as they are; without what only wrappers add; with the same parts taken off
    (or put on) at the front of every key; last each key by itself, with ``module`` taken out of its
    middle. A front is changed for all keys or for none, so a child really called ``module`` stays.
    """
    plans: list[_Plan] = []
    for sources, how in _readings(target, entries):
        plan = _plan(target, entries, sources, how)
        if not plan.missing and not plan.unexpected:
            return plan
        plans.append(plan)
    return max(plans, key=lambda plan: len(plan.sources) - len(plan.unexpected))


def _readings(
    target: _Target, entries: Mapping[str, _Entry]
) -> Iterator[tuple[dict[str, str], str]]:
    wanted = set(target.tensors)
    yield {key: key for key in entries if key in wanted}, ""

    ours = {_parts(key): key for key in wanted}
    theirs = {_parts(key): key for key in entries}
    if len(ours) != len(wanted) or len(theirs) != len(entries):
        return  # two keys differ only in a wrapper's part: nothing can be taken out safely
    for off, on in itertools.product(_fronts(theirs), _fronts(ours)):
        if off and off == on:
            continue
        words = []
        if off:
            words.append(f"{'.'.join(off)!r} taken off the front of the keys")
        if on:
            words.append(f"{'.'.join(on)!r} put before the keys")
        yield (
            {
                ours[on + parts[len(off) :]]: key
                for parts, key in theirs.items()
                if on + parts[len(off) :] in ours
            },
            ", ".join(words) or "parts that wrappers add taken out of the keys",
        )

    each: dict[str, str] = {}
    for parts, key in theirs.items():
        found = {ours[reading] for reading in _without_module(parts) if reading in ours}
        if len(found) == 1 and (name := found.pop()) not in each:
            each[name] = key
        else:
            return
    yield each, "'module' taken out of the keys"


def _fronts(keys: Mapping[tuple[str, ...], str]) -> list[tuple[str, ...]]:
    """The empty front, and each longer one that all keys share and that wrappers can have made."""
    fronts: list[tuple[str, ...]] = [()]
    if keys:
        first = next(iter(keys))
        for length in range(1, len(first)):
            front = first[:length]
            if front[-1] not in FRONT_PARTS or any(
                len(key) <= length or key[:length] != front for key in keys
            ):
                break
            fronts.append(front)
    return fronts


def _without_module(parts: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """``parts`` with each choice of the parts called ``module`` taken out."""
    places = [i for i, part in enumerate(parts[:-1]) if part == "module"][:_MOST_MODULES]
    for count in range(len(places) + 1):
        for chosen in itertools.combinations(places, count):
            yield tuple(part for i, part in enumerate(parts) if i not in chosen)


def _plan(
    target: _Target, entries: Mapping[str, _Entry], sources: dict[str, str], how: str
) -> _Plan:
    used = set(sources.values())
    missing = [
        key
        for key in target.tensors
        if key not in sources and not any(tied in sources for tied in target.tied_to[key])
    ]
    counters = [key for key in missing if key.rpartition(".")[2] == "num_batches_tracked"]
    return _Plan(
        sources=sources,
        missing=[key for key in missing if key not in counters],
        unexpected=[
            key
            for key in entries
            if key not in used and not _same_unsaved(target, key, entries[key])
        ],
        counters=counters,
        how=how if sources else "",
    )


def _same_unsaved(target: _Target, key: str, entry: _Entry) -> bool:
    """Whether a left-over key is a buffer that is no longer saved, with the value it has anyway."""
    import torch

    held = target.unsaved.get(key)
    if held is None or held.device.type == "meta" or tuple(held.shape) != entry.shape:
        return False
    return bool(torch.equal(entry.read().to(held.dtype), held.detach().cpu()))


# ---- refusing -----------------------------------------------------------------------------------


def _refuse_lazy(module: nn.Module) -> None:
    from torch.nn.parameter import is_lazy

    for name, value in itertools.chain(module.named_parameters(), module.named_buffers()):
        if is_lazy(value):
            raise CheckpointError(
                f"{name} has no shape yet (a lazy module)",
                do="run the model once on its example inputs before it is returned",
                place=Place(tensor=name),
            )


def _refuse_misfits(
    target: _Target,
    plan: _Plan,
    entries: Mapping[str, _Entry],
    file: str,
    state: str = "nothing was loaded",
) -> None:
    if not plan.missing and not plan.unexpected:
        return
    lines = [
        f"{file} does not fit the model. Of its keys {len(plan.missing)} are missing, "
        f"{len(plan.unexpected)} unexpected, {len(plan.sources)} of {len(target.tensors)} matched"
    ]
    if plan.missing:
        lines.append(f"  missing ({len(plan.missing)}):")
        free = plan.unexpected or list(entries)
        lines += _with_closest(plan.missing, free, "in the checkpoint")
    if plan.unexpected:
        lines.append(f"  unexpected ({len(plan.unexpected)}):")
        free = plan.missing or [*target.tensors, *target.unsaved]
        lines += _with_closest(plan.unexpected, free, "in the model")
    raise CheckpointError(
        "\n".join(lines),
        do="build the model with the options it was trained with, or rename the keys; " + state,
    )


def _with_closest(keys: list[str], known: list[str], where: str) -> list[str]:
    lines = []
    for key in keys[:_LISTED]:
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
        lines.append(f"    {key}" + (f"   (closest {where}: {near[0]})" if near else ""))
    if len(keys) > _LISTED:
        lines.append(f"    and {len(keys) - _LISTED} more")
    return lines


def _refuse_unlike(
    target: _Target, plan: _Plan, entries: Mapping[str, _Entry], file: str, *, shapes: bool
) -> None:
    """Refuses tensors of another kind of dtype, and with ``shapes`` those of another shape."""
    wrong: list[str] = []
    for key, source in plan.sources.items():
        expected, got = tuple(target.tensors[key].shape), entries[source].shape
        if shapes and expected != got:
            hint = ""
            if len(got) > 1 and got == tuple(reversed(expected)):
                hint = " (the transposed shape: a kernel of JAX or TensorFlow?)"
            elif sorted(got) == sorted(expected):
                hint = " (the same sizes in another order: a kernel of JAX or TensorFlow?)"
            elif math.prod(got) == math.prod(expected):
                hint = " (as many values in another shape)"
            wrong.append(f"    {key}: expected {_shape(expected)}, got {_shape(got)}{hint}")
        mine, stored = target.tensors[key].dtype, entries[source].dtype
        if _kind(mine) != _kind(stored):
            wrong.append(f"    {key}: expected {_name(mine)}, got {_name(stored)}")
    if wrong:
        more = [f"    and {len(wrong) - _LISTED} more"] if len(wrong) > _LISTED else []
        lines = [f"{file} does not fit the model: {len(wrong)} tensors differ", *wrong[:_LISTED]]
        raise CheckpointError(
            "\n".join(lines + more),
            do="build the model with the sizes it was trained with; nothing was loaded",
        )


def _refuse_unlike_copies(
    target: _Target, plan: _Plan, entries: Mapping[str, _Entry], file: str
) -> None:
    import torch

    for keys in target.ties:
        stored = [plan.sources[key] for key in keys if key in plan.sources]
        if len(stored) < 2:
            continue
        first = entries[stored[0]].read()
        for other in stored[1:]:
            second = entries[other].read()
            if first.dtype != second.dtype or not torch.equal(
                torch.nan_to_num(first), torch.nan_to_num(second)
            ):
                raise CheckpointError(
                    f"{' and '.join(keys)} are one tied weight of the model, but {file} stores "
                    f"different values as {stored[0]} and {other}",
                    do="the checkpoint was trained untied: build the model without the tie",
                    place=Place(tensor=keys[0]),
                )


# ---- loading ------------------------------------------------------------------------------------


def _note_match(target: _Target, plan: _Plan, notes: list[Note]) -> None:
    if plan.how:
        notes.append(Note(code="checkpoint-keys", text=f"checkpoint: {plan.how}"))
    if plan.counters:
        notes.append(
            Note(
                code="checkpoint-counters",
                text="checkpoint: it has no num_batches_tracked (a counter that evaluation does "
                f"not use) for {_listed(plan.counters)}",
            )
        )
    once = [keys for keys in target.ties if sum(key in plan.sources for key in keys) == 1]
    if once:
        text = _listed([" = ".join(keys) for keys in once])
        notes.append(
            Note(code="checkpoint-tied", text=f"checkpoint: tied weights stay tied: {text}")
        )


def _materialise(module: nn.Module, target: _Target) -> None:
    """Gives tensors on the meta device memory on the CPU; tied ones get one and the same."""
    import torch

    stuck = [key for key, buffer in target.unsaved.items() if buffer.device.type == "meta"]
    if stuck:
        raise CheckpointError(
            f"the buffer {stuck[0]} is on the meta device and is in no checkpoint "
            "(it is not persistent)",
            do="build the model on the CPU, not under torch.device('meta')",
            place=Place(tensor=stuck[0]),
        )
    made: dict[int, Tensor] = {}
    for owner in module.modules():
        for held in (owner._parameters, owner._buffers):
            for name, value in held.items():
                if value is None or value.device.type != "meta":
                    continue
                if id(value) not in made:
                    # zeros: a counter that the checkpoint lacks starts where it does in torch
                    empty: Tensor = torch.zeros_like(value, device="cpu")
                    if isinstance(value, torch.nn.Parameter):
                        empty = torch.nn.Parameter(empty, requires_grad=value.requires_grad)
                    made[id(value)] = empty
                held[name] = made[id(value)]  # type: ignore[assignment]
    for key, tensor in target.tensors.items():
        if id(tensor) in made:
            target.tensors[key] = made[id(tensor)]


def _copy(target: _Target, plan: _Plan, entries: Mapping[str, _Entry], notes: list[Note]) -> None:
    import torch

    exact: dict[tuple[str, str], list[str]] = defaultdict(list)
    lossy: dict[tuple[str, str], list[str]] = defaultdict(list)
    done: set[int] = set()
    for key, source in plan.sources.items():
        mine = target.tensors[key]
        if id(mine) in done:
            continue
        done.add(id(mine))
        values = entries[source].read()
        if values.is_quantized or values.layout != torch.strided:
            raise CheckpointError(
                f"{source} is stored as a quantized or sparse tensor; a plain one was expected",
                place=Place(tensor=source),
            )
        with torch.no_grad():
            try:
                mine.copy_(values)
            except RuntimeError as err:
                raise CheckpointError(
                    f"{source} cannot be copied into {key}: {_first_line(err)}",
                    place=Place(tensor=key),
                ) from err
            if mine.dtype != values.dtype:
                pair = (_name(values.dtype), _name(mine.dtype))
                same = _unchanged(values, mine)
                if not same and not (values.is_floating_point() or values.is_complex()):
                    raise CheckpointError(
                        f"{source} has values that do not fit into {pair[1]} (stored: {pair[0]})",
                        place=Place(tensor=source),
                    )
                (exact if same else lossy)[pair].append(key)
    for (stored, held), keys in exact.items():
        notes.append(
            Note(
                code="checkpoint-dtype",
                text=f"checkpoint: {len(keys)} tensors are stored as {stored} and loaded as "
                f"{held}, no value changed",
            )
        )
    for (stored, held), keys in lossy.items():
        notes.append(
            Note(
                code="checkpoint-narrowed",
                text=f"checkpoint: WEIGHTS WERE ROUNDED: {len(keys)} tensors are stored as {stored}"
                f" but the module holds {held} ({_listed(keys)}); build it in {stored} to keep "
                "what was trained",
            )
        )


def _unchanged(stored: Tensor, held: Tensor) -> bool:
    """Whether every stored value came through the change of dtype (NaN counts as itself)."""
    back = held.detach().cpu().to(stored.dtype)
    return bool(((back == stored) | ((back != back) & (stored != stored))).all())


def _has_load_hooks(module: nn.Module) -> bool:
    """Whether loading is more than copying: own hooks, or an own ``_load_from_state_dict``."""
    for child in module.modules():
        if child._load_state_dict_pre_hooks or child._load_state_dict_post_hooks:
            return True
        method = type(child)._load_from_state_dict
        if not method.__module__.startswith("torch."):
            return True
    return False


def _load_by_hooks(
    module: nn.Module,
    plan: _Plan,
    entries: Mapping[str, _Entry],
    file: str,
    notes: list[Note],
) -> None:
    """Loads by ``load_state_dict``, so that what the module does to old keys and values is done."""
    tensors = {key: entries[source].read() for key, source in plan.sources.items()}
    tensors.update({key: entries[key].read() for key in plan.unexpected if key not in tensors})
    try:
        result = module.load_state_dict(tensors, strict=False)
    except Exception as err:  # hooks are the user's code
        raise CheckpointError(
            f"{file}: the module's own load hooks stop: {type(err).__name__}: {err}"
        ) from err
    target = _Target(module)
    left = {key: entries[key] for key in result.unexpected_keys if key in entries}
    missing = [
        key
        for key in result.missing_keys
        if key in target.tensors
        and key not in plan.counters
        and not any(tied not in result.missing_keys for tied in target.tied_to[key])
    ]
    after = _Plan(
        sources=plan.sources, missing=missing, unexpected=list(left), counters=plan.counters
    )
    _refuse_misfits(target, after, entries, file, "the module is loaded in part")
    notes.append(
        Note(code="checkpoint-hooks", text="checkpoint: loaded through the module's own hooks")
    )
    other = [
        f"{key} ({_name(entries[source].dtype)} as {_name(target.tensors[key].dtype)})"
        for key, source in plan.sources.items()
        if entries[source].dtype != target.tensors[key].dtype
    ]
    if other:
        text = f"checkpoint: stored in another dtype than the module's: {_listed(other)}"
        notes.append(Note(code="checkpoint-dtype", text=text))


def _note_nonfinite(module: nn.Module, notes: list[Note]) -> None:
    import torch

    found: list[str] = []
    seen: set[int] = set()
    for key, value in module.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor) or id(value) in seen:
            continue
        seen.add(id(value))
        if not (value.is_floating_point() or value.is_complex()):
            continue
        with torch.no_grad():
            nans, infs = int(value.isnan().sum()), int(value.isinf().sum())
        if nans or infs:
            found.append(f"{key} ({nans} NaN, {infs} infinite)")
    if found:
        notes.append(
            Note(
                code="checkpoint-nonfinite",
                text=f"checkpoint: {len(found)} tensors hold NaN or infinity: {_listed(found)}",
            )
        )


# ---- words --------------------------------------------------------------------------------------


def _kind(dtype: torch.dtype) -> str:
    import torch

    if dtype.is_complex:
        return "complex"
    if dtype.is_floating_point:
        return "float"
    return "bool" if dtype == torch.bool else "integer"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def _closest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, sorted(known), n=1)
    return f"; the closest is {near[0]}" if near else ""


def _first_line(err: BaseException) -> str:
    return (str(err).strip() or type(err).__name__).splitlines()[0]
