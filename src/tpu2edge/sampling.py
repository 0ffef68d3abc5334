"""The samples that a program is checked with: made up, given, out of files, or a reference's own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpu2edge import references
from tpu2edge.errors import DataError, OptionError, Place, Tpu2EdgeError
from tpu2edge.files import named_digest
from tpu2edge.requests import ExportRequest
from tpu2edge.types import Dim, Note, NoteSink, Sample, Tensors, TensorSpec

if TYPE_CHECKING:
    from tpu2edge.export.program import TracedProgram
    from tpu2edge.runtime_check.reference import Reference

__all__ = ["SampleSet", "given_samples", "made_up_samples", "replayed_samples", "samples_in_files"]


@dataclass(frozen=True, slots=True)
class SampleSet:
    """Samples for one program, and what is known about them already."""

    samples: Sequence[Sample]
    source: Mapping[str, Any]  # for the reference's manifest
    notes: Sequence[Note] = ()
    eager: Mapping[str, Tensors] = field(default_factory=dict)  # outputs known by sample id
    given: Reference | None = None  # a captured reference that brought these samples


#: Synthetic samples when no number is asked for; fewer for large models, whose references in
#: float32 and float64 would take longer than the conversion.
SAMPLES, SAMPLES_LARGE, LARGE_BYTES = 8, 4, 200 << 20


def _usual_samples(program: TracedProgram) -> int:
    weights = program.program.state_dict.values()
    size = sum(value.numel() * value.element_size() for value in weights)
    return SAMPLES_LARGE if size > LARGE_BYTES else SAMPLES


def made_up_samples(program: TracedProgram, count: int | None, seed: int) -> SampleSet:
    """The example and seeded variations of it that the module can take; ``count`` None: the usual.

    Raises:
        OptionError: a count below 1.
    """
    from tpu2edge.runtime_check.samples import synthetic_samples

    count = _usual_samples(program) if count is None else count
    if count < 1:
        raise OptionError(f"--num-samples {count} makes no sense", do="give at least 1")
    made = synthetic_samples(program.example, program.signature.inputs, count=count, seed=seed)
    usable: list[Sample] = []
    notes: list[Note] = []
    eager: dict[str, Tensors] = {}
    chain = _Chain(program)
    for sample in made:
        try:
            called, eager[sample.id] = chain.call(sample)
        except Tpu2EdgeError:
            if sample.id == "example":
                raise
            text = f"synthetic sample '{sample.id}' is one that the module cannot take: left out"
            notes.append(Note(code="sample-left-out", text=text))
        else:
            usable.append(called)
    usable.extend(_dynamic_ends(program, seed))
    notes.append(
        Note(
            code="synthetic-data",
            text=f"no --inputs: checked on the example and {len(usable) - 1} seeded variations of "
            "it (synthetic data)",
        )
    )
    source = {"kind": "synthetic", "seed": seed, "count": len(usable)}
    return SampleSet(usable, source, notes, eager)


def _dynamic_ends(program: TracedProgram, seed: int) -> list[Sample]:
    """For dynamic dimensions: samples at the lowest, the highest and one size in between."""
    from tpu2edge.runtime_check.samples import synthetic_samples

    dims = {
        size.name: size
        for spec in program.signature.inputs
        for size in spec.shape
        if isinstance(size, Dim)
    }
    if not dims:
        return []
    samples: list[Sample] = []
    for label, sizes in (
        ("smallest", {name: dim.min for name, dim in dims.items()}),
        ("middle", {name: (dim.min + dim.max) // 2 for name, dim in dims.items()}),
        ("largest", {name: dim.max for name, dim in dims.items()}),
    ):
        made = synthetic_samples(
            program.example, program.signature.inputs, count=2, seed=seed, sizes=sizes
        )
        initial = {name: program.example[name] for name in program.state}
        samples.append(Sample(id=f"{label}-size", inputs={**made[-1].inputs, **initial}))
    return samples


class _Chain:
    """Calls of the eager module one after the other, each with the state that the last one left.

    So the samples of a stateful program have states that really occur. Without state it is eager.
    """

    def __init__(self, program: TracedProgram) -> None:
        self._program = program
        self._initial = {name: program.example[name] for name in program.state}
        self._state: Tensors = self._initial

    def call(self, sample: Sample, *, own: bool = False) -> tuple[Sample, Tensors]:
        """The sample with its state, unless it brings its ``own``, and the outputs."""
        program = self._program
        if not program.state:
            return sample, program.eager(sample.inputs)
        outputs: Tensors
        if own:
            outputs = program.eager(sample.inputs)
        else:
            sample, outputs = self._with_state(sample)
        self._state = {
            name: outputs[name].astype(value.dtype) for name, value in self._initial.items()
        }
        return sample, outputs

    def _with_state(self, sample: Sample) -> tuple[Sample, Tensors]:
        called = Sample(id=sample.id, inputs={**sample.inputs, **self._state})
        try:
            return called, self._program.eager(called.inputs)
        except Tpu2EdgeError:  # a cache that is full, say: from the beginning again
            called = Sample(id=sample.id, inputs={**sample.inputs, **self._initial})
            return called, self._program.eager(called.inputs)


def _chained(program: TracedProgram, data: SampleSet) -> SampleSet:
    """``data`` with a state in each sample of a stateful program: the one the sample before left."""
    if not program.state:
        return data
    chain = _Chain(program)
    samples: list[Sample] = []
    eager: dict[str, Tensors] = {}
    for sample in data.samples:
        own = all(name in sample.inputs for name in program.state)
        called, eager[sample.id] = chain.call(sample, own=own)
        samples.append(called)
    return SampleSet(samples, data.source, data.notes, eager)


def replayed_samples(
    programs: Sequence[TracedProgram], source: Reference | Path | str | None, weights_sha256: str
) -> list[SampleSet]:
    """The samples of captured references, which have to fit the programs and their weights."""
    from tpu2edge.runtime_check.reference import Reference

    assert source is not None
    found: Sequence[Reference] = (
        [source] if isinstance(source, Reference) else references.references_in(Path(source), None)
    )
    known = {reference.signature.name: reference for reference in found}
    data: list[SampleSet] = []
    for program in programs:
        reference = known.get(program.signature.name)
        if reference is None and len(programs) == len(found) == 1:
            reference = found[0]  # captured under another name
        if reference is None:
            raise DataError(
                f"the reference has no samples for the signature '{program.signature.name}'",
                do=f"it has {sorted(known)}",
            )
        samples, notes = references.replay(reference, program.signature, weights_sha256)
        data.append(SampleSet(samples, reference.data, notes, given=reference))
    return data


def given_samples(
    programs: Sequence[TracedProgram], samples: Sequence[Any], num_samples: int | None, seed: int
) -> list[SampleSet]:
    """The caller's samples; with several signatures each goes to those that it fits."""
    found: list[list[Sample]] = [[] for _ in programs]
    for index, item in enumerate(samples):
        identity = item.id if isinstance(item, Sample) else f"sample-{index}"
        tensors = item.inputs if isinstance(item, Sample) else item
        refused: DataError | None = None
        fits = False
        for program, mine in zip(programs, found, strict=True):
            try:
                mine.append(_given_sample(program, identity, tensors))
            except DataError as error:
                refused = refused or error
            else:
                fits = True
        if refused is not None and not fits:
            raise refused
    source = {"kind": "given"}
    return [
        _or_synthetic(
            program,
            _chained(program, SampleSet(mine, {**source, "count": len(mine)})),
            num_samples,
            seed,
        )
        for program, mine in zip(programs, found, strict=True)
    ]


def _or_synthetic(
    program: TracedProgram, data: SampleSet, num_samples: int | None, seed: int
) -> SampleSet:
    """``data``, or synthetic samples for a signature of several that none of the samples fits."""
    if data.samples:
        return data
    made = made_up_samples(program, num_samples, seed)
    text = f"signature '{program.signature.name}': none of the samples fits its inputs"
    return SampleSet(
        made.samples, made.source, [Note(code="no-samples", text=text), *made.notes], made.eager
    )


def samples_in_files(programs: Sequence[TracedProgram], request: ExportRequest) -> list[SampleSet]:
    """The samples in files; with several signatures each file goes to those that it fits."""
    digests = {path: named_digest(path) for path in request.inputs}
    if len(programs) == 1:
        fitting = [list(request.inputs)]
    else:
        fitting = [[] for _ in programs]
        for path in request.inputs:
            refused: DataError | None = None
            for program, mine in zip(programs, fitting, strict=True):
                try:
                    _loaded([path], program, lambda note: None)
                except DataError as error:
                    refused = refused or error
                else:
                    mine.append(path)
            if refused is not None and not any(path in mine for mine in fitting):
                raise refused
    result: list[SampleSet] = []
    for program, mine in zip(programs, fitting, strict=True):
        if not mine:
            empty = SampleSet([], {"kind": "files", "files": []})
            result.append(_or_synthetic(program, empty, request.num_samples, request.seed))
            continue
        noted: list[Note] = []
        loaded = _loaded(mine, program, noted.append)
        extra = _dynamic_ends(program, request.seed)
        source = {"kind": "files", "files": [digests[path] for path in mine]}
        result.append(_chained(program, SampleSet([*loaded, *extra], source, noted)))
    return result


def _loaded(paths: Sequence[Path], program: TracedProgram, on_note: NoteSink) -> Sequence[Sample]:
    """The samples in files; those of a stateful program may leave the state out."""
    from tpu2edge.runtime_check.samples import load_samples

    inputs = program.signature.inputs
    if program.state:
        own = [spec for spec in inputs if spec.name not in program.state]
        with contextlib.suppress(DataError):
            return load_samples(paths, own, on_note)
    return load_samples(paths, inputs, on_note)


def _given_sample(program: TracedProgram, identity: str, tensors: Mapping[str, Any]) -> Sample:
    unknown = set(tensors) - {spec.name for spec in program.signature.inputs}
    specs = _given_specs(program, tensors)
    missing = [spec.name for spec in specs if spec.name not in tensors]
    if unknown or missing:
        raise DataError(
            f"sample '{identity}' has the inputs {sorted(tensors)}",
            do=f"give {[spec.name for spec in specs]}",
        )
    return Sample(
        id=identity,
        inputs={
            spec.name: _edge_array(_array(_host(tensors[spec.name])), spec, identity)
            for spec in specs
        },
    )


def _given_specs(program: TracedProgram, names: Iterable[str]) -> list[TensorSpec]:
    """The inputs that samples with these names should have: the state may be left out as a whole."""
    stateful = any(name in program.state for name in names)
    return [s for s in program.signature.inputs if stateful or s.name not in program.state]


def _array(value: Any) -> Any:
    import numpy as np

    return np.asarray(value)


def _host(value: Any) -> Any:
    if not hasattr(value, "detach"):
        return value
    tensor = value.detach().cpu()
    return tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor


def _edge_array(array: Any, spec: TensorSpec, sample: str) -> Any:
    import numpy as np

    dtype = np.dtype(spec.dtype)
    fits = array.ndim == len(spec.shape) and all(
        isinstance(want, Dim) or want == have
        for want, have in zip(spec.shape, array.shape, strict=True)
    )
    if not fits:
        raise DataError(
            f"sample '{sample}': input '{spec.name}' has the shape {list(array.shape)}, expected "
            f"{[str(size) for size in spec.shape]}",
            place=Place(tensor=spec.name),
        )
    if array.dtype == dtype:
        return array
    same_kind = array.dtype.kind == dtype.kind
    if same_kind and dtype.kind == "i" and array.size:
        info = np.iinfo(dtype)
        same_kind = bool(array.min() >= info.min and array.max() <= info.max)
    if not same_kind:
        raise DataError(
            f"sample '{sample}': input '{spec.name}' is {array.dtype}, expected {spec.dtype}, and "
            "its values do not fit",
            place=Place(tensor=spec.name),
        )
    return array.astype(dtype)
