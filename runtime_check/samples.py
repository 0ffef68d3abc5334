"""Sets of inputs that a model is run on: the user's own, or variations of the example inputs.

Zeros or a constant prove little: any permutation, dropped bias or wrong axis gives the same
output. So the variations keep the scale and range of the example and are otherwise as uneven as
real data; real samples are better, and the report says which were used.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, overload

import numpy as np

from tpu2edge.errors import DataError, Place
from tpu2edge.files import SAFETENSORS_DTYPES
from tpu2edge.types import Array, Dim, Note, NoteSink, Sample, Tensors, TensorSpec

__all__ = ["SampleSet", "load_samples", "read_arrays", "synthetic_samples"]

#: Changes of dtype that are made, with a note: (given, wanted). All others are refused.
_NARROWED = {("float64", "float32"), ("int64", "int32")}
_WIDENED = {
    ("float16", "float32"),
    ("bfloat16", "float32"),
    ("int8", "int32"),
    ("uint8", "int32"),
    ("int16", "int32"),
    ("uint16", "int32"),
    ("int32", "int64"),
    ("float32", "float64"),
}


# ---- samples of the user's ----------------------------------------------------------------------


class SampleSet(Sequence[Sample]):
    """Samples that are read from their files when they are asked for.

    One file at a time is held in memory (an ``.npz`` member is decompressed whole).
    """

    def __init__(self, files: Sequence[_File], inputs: Sequence[TensorSpec]) -> None:
        self._files = tuple(files)
        self._inputs = tuple(inputs)
        self._starts: list[int] = []
        total = 0
        for file in self._files:
            self._starts.append(total)
            total += file.count
        self._length = total
        self._held: tuple[int, Mapping[str, Array]] | None = None

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> Sample: ...

    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...

    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(index)
        place = int(np.searchsorted(self._starts, index, side="right")) - 1
        file, number = self._files[place], index - self._starts[place]
        arrays = self._arrays(place)
        picked: dict[str, Array] = {}
        for spec in self._inputs:
            part = file.layouts[spec.name].sample(arrays[spec.name], number)
            picked[spec.name] = np.ascontiguousarray(_converted(part, spec))
        return Sample(id=f"{file.label}#{number}", inputs=picked)

    def __iter__(self) -> Iterator[Sample]:
        return (self[i] for i in range(len(self)))

    def _arrays(self, place: int) -> Mapping[str, Array]:
        if self._held is None or self._held[0] != place:
            self._held = None  # so that two files are never in memory together
            self._held = (place, _read(self._files[place].path))
        return self._held[1]


def load_samples(
    paths: Sequence[Path], inputs: Sequence[TensorSpec], on_note: NoteSink
) -> SampleSet:
    """The samples in ``.npz`` and ``.safetensors`` files, or folders of them, read lazily.

    A file holds one array per input, by the input's name. An array has the input's own shape (one
    sample), one axis more in front (N samples), or, where the input's first dimension is a fixed B,
    N·B rows (N samples). All arrays of a file have the same N. A sample is called ``file.npz#3``;
    files of a folder come in natural order (``s2`` before ``s10``). Every sample has exactly the
    input's dtype and shape (a dynamic dimension: any size within its bounds).

    float64 and int64 are narrowed to a float32 and int32 input, 16-bit floats widened, with one
    note per input; integers only if every value fits. NaN and infinity are kept and noted.

    Raises DataError for files that are missing, damaged, pickled or empty, and for missing or
    unknown names, shapes, dtypes and values that the model cannot take. All files are looked
    through before this returns.
    """
    files: list[_File] = []
    told: set[tuple[str, str]] = set()

    def note(code: str, name: str, text: str) -> None:
        if (code, name) not in told:
            told.add((code, name))
            on_note(Note(code=code, text=text))

    for path, label in _labelled(_files_of(paths)):
        arrays = _read(path)
        _refuse_names(path, arrays, inputs)
        layouts = {spec.name: _layout(path, arrays[spec.name].shape, spec) for spec in inputs}
        counts = {name: layout.count for name, layout in layouts.items()}
        if len(set(counts.values())) > 1:
            listed = ", ".join(f"{name}: {count}" for name, count in counts.items())
            raise DataError(
                f"{path.name} holds different numbers of samples ({listed})",
                do="give every input as many samples (np.repeat one that is the same in all)",
            )
        _refuse_unlike_sizes(
            path.name,
            {
                name: arrays[name].shape[1:] if layout.kind == "stacked" else arrays[name].shape
                for name, layout in layouts.items()
            },
            inputs,
        )
        for spec in inputs:
            _check_values(path, arrays[spec.name], spec, note)
        count = next(iter(counts.values()), 0)
        if count == 0:
            raise DataError(f"{path.name} holds no sample (an axis of size 0)")
        files.append(_File(path=path, label=label, count=count, layouts=layouts))
        del arrays
    return SampleSet(files, inputs)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layout:
    """How the samples lie in one array: ``rows`` per sample, or one whole array."""

    count: int
    kind: str  # "one", "stacked", "rows"
    rows: int = 1

    def sample(self, array: Array, number: int) -> Array:
        if self.kind == "one":
            return array
        if self.kind == "stacked":
            return array[number, ...]
        return array[number * self.rows : (number + 1) * self.rows]


@dataclass(frozen=True, kw_only=True, slots=True)
class _File:
    path: Path
    label: str  # what its samples are called by
    count: int
    layouts: Mapping[str, _Layout]


def _files_of(paths: Sequence[Path]) -> list[Path]:
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = [p for p in path.iterdir() if p.suffix in (".npz", ".safetensors")]
            if not inside:
                others = sorted(p.name for p in path.iterdir())[:5]
                raise DataError(
                    f"the folder {path.name} holds no .npz or .safetensors file "
                    f"(in it: {', '.join(others) or 'nothing'})"
                )
            found += sorted(inside, key=_natural)
        elif not path.is_file():
            near = (
                difflib.get_close_matches(path.name, [p.name for p in path.parent.iterdir()], n=1)
                if path.parent.is_dir()
                else []
            )
            raise DataError(
                f"there is no file {path.name}" + (f"; the closest is {near[0]}" if near else "")
            )
        elif path.suffix not in (".npz", ".safetensors"):
            raise DataError(
                f"{path.name} is neither .npz nor .safetensors",
                do="save the arrays by input name: np.savez('inputs.npz', x=array)",
            )
        else:
            found.append(path)
    if not found:
        raise DataError("no file with samples was given")
    return found


def _labelled(files: Sequence[Path]) -> list[tuple[Path, str]]:
    """Each file with its name, and its folder's before it where two have the same name."""
    names = [path.name for path in files]
    longer = [f"{path.parent.name}/{path.name}" for path in files]
    labels = [
        long if names.count(name) > 1 else name for name, long in zip(names, longer, strict=True)
    ]
    for place, label in enumerate(labels):
        if label in labels[:place]:
            raise DataError(
                f"two files are called {label}",
                do="give each file with samples once, and name them apart",
            )
    return list(zip(files, labels, strict=True))


def _natural(path: Path) -> list[tuple[int, int, str]]:
    parts = re.split(r"(\d+)", path.name)
    return [(1, int(part), "") if part.isdigit() else (0, 0, part) for part in parts]


def read_arrays(path: Path) -> Mapping[str, Array]:
    """All arrays of one ``.npz`` or ``.safetensors`` file by name.

    Raises:
        DataError: there is no such file, it is of another kind, pickled or damaged.
    """
    if path.is_dir():
        raise DataError(f"{path.name} is a folder", do="give one .npz or .safetensors file")
    (file,) = _files_of([path])
    return _read(file)


def _read(path: Path) -> Mapping[str, Array]:
    try:
        return _read_npz(path) if path.suffix == ".npz" else _read_safetensors(path)
    except (
        OSError,
        ValueError,
        KeyError,
        EOFError,
        TypeError,
        zipfile.BadZipFile,
        zlib.error,
        struct.error,
    ) as err:
        what = "pickled objects" if "allow_pickle" in str(err) or "pickle" in str(err) else ""
        if what:
            raise DataError(
                f"{path.name} holds pickled objects, or is no {path.suffix} file; it was not "
                "opened, because that could run code",
                do="save plain arrays: np.savez('inputs.npz', x=np.asarray(x, dtype=np.float32))",
            ) from err
        first = (str(err).strip() or type(err).__name__).splitlines()[0]
        raise DataError(
            f"{path.name} cannot be read: {first}",
            do="it is cut off, damaged or of another format: save it again",
        ) from err


def _read_npz(path: Path) -> dict[str, Array]:
    # np.load leaves the file open when it stops half-way, so it is handed an open one.
    with path.open("rb") as raw:
        file = np.load(raw, allow_pickle=False)
        if not isinstance(file, np.lib.npyio.NpzFile):
            raise ValueError("it is a single array (.npy), no .npz archive")
        with file:
            return {name: file[name] for name in file.files}


def _read_safetensors(path: Path) -> dict[str, Array]:
    """Memory-mapped arrays; safetensors' own NumPy reader has no bfloat16 and reads all."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start, header = _safetensors_header(file, size)
    arrays: dict[str, Array] = {}
    for name, item in header.items():
        if name == "__metadata__":
            continue
        begin, end = item["data_offsets"]
        if item["dtype"] not in SAFETENSORS_DTYPES:
            raise ValueError(f"the dtype {item['dtype']} of {name} is not supported")
        dtype = _dtype(SAFETENSORS_DTYPES[item["dtype"]])
        shape = tuple(int(n) for n in item["shape"])
        if end - begin != int(np.prod(shape, dtype=np.int64)) * dtype.itemsize:
            raise ValueError(f"{name} has another number of bytes than its shape needs")
        if start + end > size or begin < 0:
            raise ValueError(f"the values of {name} are beyond the end of the file")
        if end == begin:
            arrays[name] = np.zeros(shape, dtype)
            continue
        raw = np.memmap(path, dtype=np.uint8, mode="r", offset=start + begin, shape=(end - begin,))
        arrays[name] = raw.view(np.ndarray).view(dtype).reshape(shape)
    return arrays


def _safetensors_header(file: IO[bytes], size: int) -> tuple[int, dict[str, Any]]:
    (length,) = struct.unpack("<Q", file.read(8))
    if length > size - 8:
        raise ValueError("its header is longer than the file")
    header = json.loads(file.read(length))
    if not isinstance(header, dict):
        raise ValueError("its header is no table")
    return 8 + length, header


def _dtype(name: str) -> np.dtype[Any]:
    if name == "bfloat16" or name.startswith("float8"):
        import ml_dtypes

        own: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return own
    return np.dtype(name)


# ---- checking -----------------------------------------------------------------------------------


def _refuse_names(path: Path, arrays: Mapping[str, Array], inputs: Sequence[TensorSpec]) -> None:
    wanted = [spec.name for spec in inputs]
    missing = [name for name in wanted if name not in arrays]
    unknown = [name for name in arrays if name not in wanted]
    if not missing and not unknown:
        return
    came = ", ".join(
        f"{name}: {array.dtype}[{'x'.join(map(str, array.shape))}]"
        for name, array in arrays.items()
    )
    what = (
        f"{path.name} does not hold the model's inputs: expected {', '.join(map(str, inputs))}; "
        f"got {came or 'nothing'}"
    )
    if len(inputs) == 1 and len(arrays) == 1:
        (got,) = arrays
        saved = (
            f"np.savez({path.name!r}, {wanted[0]}=np.load({path.name!r})[{got!r}])"
            if path.suffix == ".npz" and wanted[0].isidentifier()
            else f"save it again under the name {wanted[0]!r}"
        )
        raise DataError(what, do=f"the array {got!r} must be called {wanted[0]!r}: {saved}")
    hints = []
    for name in missing:
        near = difflib.get_close_matches(name, unknown, n=1, cutoff=0.5)
        hints.append(f"{name} is missing" + (f" (is it {near[0]}?)" if near else ""))
    for name in unknown:
        near = difflib.get_close_matches(name, missing or wanted, n=1, cutoff=0.5)
        hints.append(f"{name} is unknown" + (f" (the closest is {near[0]})" if near else ""))
    raise DataError(what, do="; ".join(hints), place=Place(tensor=(missing or unknown)[0]))


def _refuse_unlike_sizes(
    where: str, shapes: Mapping[str, tuple[int, ...]], inputs: Sequence[TensorSpec]
) -> None:
    """A dynamic dimension has one size in all inputs that share it."""
    seen: dict[str, tuple[str, int]] = {}
    for spec in inputs:
        for dim, size in zip(spec.shape, shapes[spec.name], strict=True):
            if not isinstance(dim, Dim):
                continue
            first, before = seen.setdefault(dim.name, (spec.name, size))
            if size != before:
                raise DataError(
                    f"{where}: the dimension {dim.name} has the size {before} in {first} and "
                    f"{size} in {spec.name}",
                    place=Place(tensor=spec.name),
                )


def _matches(shape: tuple[int, ...], spec: TensorSpec) -> bool:
    return len(shape) == len(spec.shape) and all(
        want.min <= size <= want.max if isinstance(want, Dim) else size == want
        for size, want in zip(shape, spec.shape, strict=True)
    )


def _layout(path: Path, shape: tuple[int, ...], spec: TensorSpec) -> _Layout:
    if _matches(shape, spec):
        return _Layout(count=1, kind="one")
    if shape and _matches(shape[1:], spec):
        return _Layout(count=shape[0], kind="stacked")
    first = spec.shape[0] if spec.shape else None
    if isinstance(first, int) and first > 0 and len(shape) == len(spec.shape):
        rest = TensorSpec(name=spec.name, shape=spec.shape[1:], dtype=spec.dtype)
        if _matches(shape[1:], rest):
            if shape[0] % first == 0:
                return _Layout(count=shape[0] // first, kind="rows", rows=first)
            raise DataError(
                f"{path.name}: {spec.name} has {shape[0]} rows, which is no multiple of the "
                f"model's batch of {first}",
                do=f"leave {shape[0] % first} rows out, or export the batch as dynamic: "
                f"--dynamic {spec.name}.0=1:{shape[0]}",
                place=Place(tensor=spec.name),
            )
    wanted = "x".join(map(str, spec.shape)) or "scalar"
    raise DataError(
        f"{path.name}: {spec.name} has the shape {'x'.join(map(str, shape)) or 'scalar'}; "
        f"expected {wanted}, or Nx{wanted} for N samples",
        do=_shape_hint(shape, spec),
        place=Place(tensor=spec.name),
    )


def _shape_hint(shape: tuple[int, ...], spec: TensorSpec) -> str:
    fixed = [size for size in spec.shape if isinstance(size, int)]
    if len(fixed) == len(spec.shape):
        for given in (shape, shape[1:]):
            if len(given) == 4 and (given[0], given[3], given[1], given[2]) == tuple(fixed):
                return f"the channels are last, the model wants them first: {spec.name}" + (
                    ".transpose(0, 3, 1, 2)" if given is shape else ".transpose(0, 1, 4, 2, 3)"
                )
            if len(given) == 4 and (given[0], given[2], given[3], given[1]) == tuple(fixed):
                return f"the channels are first, the file wants them last: {spec.name}" + (
                    ".transpose(0, 2, 3, 1)" if given is shape else ".transpose(0, 1, 3, 4, 2)"
                )
    bounds = [f"{d.name} {d.min}..{d.max}" for d in spec.shape if isinstance(d, Dim)]
    return f"the dynamic sizes are {', '.join(bounds)}" if bounds else ""


def _check_values(path: Path, array: Array, spec: TensorSpec, note: Any) -> None:
    given, wanted = array.dtype.name, spec.dtype
    if given != wanted:
        _refuse_dtype(path, given, spec)
        if (given, wanted) in _NARROWED:
            if wanted == "int32":
                _refuse_large(path, array, spec)
            elif not _fits_float32(array):
                raise DataError(
                    f"{path.name}: {spec.name} is float64 and holds values beyond float32 "
                    f"(largest {np.nanmax(np.abs(array[np.isfinite(array)])):.3g})",
                    place=Place(tensor=spec.name),
                )
            text = f"input {spec.name}: {given} samples are narrowed to the model's {wanted}"
            note("narrowed-input", spec.name, text)
        else:
            text = f"input {spec.name}: {given} samples are widened to the model's {wanted}"
            note("widened-input", spec.name, text)
    if _kind(given) == "float":
        values = array.astype(np.float32) if given == "bfloat16" else array
        nans, infs = int(np.isnan(values).sum()), int(np.isinf(values).sum())
        if nans or infs:
            note(
                "nonfinite-input",
                spec.name,
                f"input {spec.name}: {path.name} holds {nans} NaN and {infs} infinite values",
            )


def _refuse_dtype(path: Path, given: str, spec: TensorSpec) -> None:
    if (given, spec.dtype) in _NARROWED | _WIDENED:
        return
    kinds = (_kind(given), _kind(spec.dtype))
    if kinds == ("integer", "float"):
        do = (
            "integers as they come (pixels 0..255?) are rarely what a float input was trained on: "
            "apply the training's preprocessing and save float32"
        )
    elif kinds == ("float", "integer"):
        do = f"the model takes whole numbers (ids, lengths?): save them as {spec.dtype}"
    else:
        do = f"save the array as {spec.dtype}"
    raise DataError(
        f"{path.name}: {spec.name} is {given}; expected {spec.dtype}",
        do=do,
        place=Place(tensor=spec.name),
    )


def _kind(dtype: str) -> str:
    if "float" in dtype:
        return "float"
    return "integer" if "int" in dtype else dtype


def _refuse_large(path: Path, array: Array, spec: TensorSpec) -> None:
    info = np.iinfo(np.int32)
    for value in (int(array.min()), int(array.max())) if array.size else ():
        if not info.min <= value <= info.max:
            raise DataError(
                f"{path.name}: {spec.name} holds {value}, which does not fit the model's int32 "
                "input",
                do="LiteRT computes in int32: keep the values within it",
                place=Place(tensor=spec.name),
            )


def _fits_float32(array: Array) -> bool:
    finite = array[np.isfinite(array)]
    return not finite.size or bool(np.abs(finite).max() <= np.finfo(np.float32).max)


def _converted(array: Array, spec: TensorSpec) -> Array:
    return array.astype(_dtype(spec.dtype), copy=True)


# ---- synthetic samples --------------------------------------------------------------------------


def synthetic_samples(
    example: Tensors,
    inputs: Sequence[TensorSpec],
    *,
    count: int,
    seed: int,
    sizes: Mapping[str, int] | None = None,
) -> list[Sample]:
    """``count`` samples: the example itself, then seeded variations of it.

    Each has the inputs' names, dtypes and shapes; ids are ``example``, ``variation-1`` … Dynamic
    dimensions have the size that ``sizes`` gives for their name, else the example's; an example of
    another size is repeated or cut along that axis.

    Variations of a float input are its values in another order, spread about their mean by a gain
    of 0.5 to 1.5, plus skewed noise of a quarter of their standard deviation, kept within the
    example's range stretched by a half at each end; they stay non-negative if the example's are.
    A constant float input becomes standard normal around its value. Integers are uniform between
    the example's smallest and largest value (so ids and lengths stay valid), booleans are as often
    true; where those are constant they stay so. NaN and infinity of the example are left out of
    the variations.

    The draws depend on the seed, the input's name and the sample's number, not on the order or
    number of inputs. Raises DataError when the example lacks an input, or a size is out of bounds.
    """
    sizes = dict(sizes or {})
    _refuse_sizes(sizes, inputs)
    base: dict[str, Array] = {}
    for spec in inputs:
        if spec.name not in example:
            raise DataError(
                f"the example inputs lack {spec}; they have {', '.join(example) or 'none'}",
                place=Place(tensor=spec.name),
            )
        base[spec.name] = _sized(np.asarray(example[spec.name]), spec, sizes)
    _refuse_unlike_sizes(
        "the example inputs", {name: array.shape for name, array in base.items()}, inputs
    )
    samples = [Sample(id="example", inputs=base)] if count > 0 else []
    for number in range(1, count):
        varied = {
            spec.name: _varied(base[spec.name], _generator(seed, spec.name, number))
            for spec in inputs
        }
        samples.append(Sample(id=f"variation-{number}", inputs=varied))
    return samples


def _refuse_sizes(sizes: Mapping[str, int], inputs: Sequence[TensorSpec]) -> None:
    dims = {d.name: d for spec in inputs for d in spec.shape if isinstance(d, Dim)}
    for name, size in sizes.items():
        if name not in dims:
            known = ", ".join(f"{d.name} ({d})" for d in dims.values()) or "none"
            raise DataError(f"there is no dynamic dimension {name!r}; known: {known}")
        if not dims[name].min <= size <= dims[name].max:
            raise DataError(f"size {size} of {name} is outside of {dims[name]}")


def _sized(array: Array, spec: TensorSpec, sizes: Mapping[str, int]) -> Array:
    """The example with the wanted sizes and the input's dtype."""
    if array.ndim != len(spec.shape):
        raise DataError(
            f"the example of {spec} has the shape {'x'.join(map(str, array.shape)) or 'scalar'}",
            place=Place(tensor=spec.name),
        )
    if array.dtype.name != spec.dtype:
        where = Path("the example")
        _refuse_dtype(where, array.dtype.name, spec)
        if (array.dtype.name, spec.dtype) == ("int64", "int32"):
            _refuse_large(where, array, spec)
    for axis, dim in enumerate(spec.shape):
        if isinstance(dim, Dim) and dim.name in sizes and sizes[dim.name] != array.shape[axis]:
            if array.shape[axis] == 0:
                raise DataError(f"the example of {spec} is empty, so it cannot be repeated")
            places = np.arange(sizes[dim.name]) % array.shape[axis]
            array = np.take(array, places, axis=axis)
    if not _matches(array.shape, spec):
        raise DataError(
            f"the example of {spec} has the shape {'x'.join(map(str, array.shape)) or 'scalar'}",
            place=Place(tensor=spec.name),
        )
    return np.array(array, dtype=_dtype(spec.dtype), order="C")


def _generator(seed: int, name: str, number: int) -> np.random.Generator:
    digest = hashlib.sha256(f"{seed}\0{name}\0{number}".encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))


def _varied(array: Array, rng: np.random.Generator) -> Array:
    if not array.size:
        return array.copy()
    if array.dtype == np.bool_:
        density = np.count_nonzero(array) / array.size
        return (rng.random(array.shape) < density).astype(array.dtype)
    if array.dtype.kind in "iu":
        first, last = int(array.min()), int(array.max())
        whole = rng.integers(first, last, size=array.shape, endpoint=True, dtype=np.int64)
        return whole.astype(array.dtype)
    values = array.astype(np.float64)
    finite = values[np.isfinite(values)]
    if not finite.size:
        return rng.standard_normal(array.shape).astype(array.dtype)
    low, high = float(finite.min()), float(finite.max())
    if low == high:
        # Nothing is known about the range of a constant (torch.zeros, torch.ones).
        return (low + rng.standard_normal(array.shape)).astype(array.dtype)
    drawn = rng.permutation(finite)
    if drawn.size != values.size:
        drawn = rng.choice(finite, size=values.size)
    gain = rng.uniform(0.5, 1.5)
    # Exponential noise about zero: skewed, so that a sign error cannot hide in its symmetry.
    noise = (rng.standard_exponential(values.size) - 1.0) * (0.25 * float(finite.std()))
    reach = 0.5 * (high - low)
    bottom = max(0.0, low - reach) if low >= 0 else low - reach
    largest = _largest(array.dtype)
    bottom, top = max(bottom, -largest), min(high + reach, largest)
    centre = float(finite.mean())
    made = np.clip(centre + (drawn - centre) * gain + noise, bottom, top)
    return made.reshape(values.shape).astype(array.dtype)


def _largest(dtype: np.dtype[Any]) -> float:
    if dtype.kind == "f":
        return float(np.finfo(dtype).max)
    return 3.3895313892515355e38  # bfloat16: (2 - 2**-7) * 2**127
