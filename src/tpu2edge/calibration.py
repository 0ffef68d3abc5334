"""Where the samples come from that ranges of activations are measured on.

``--calibration-data`` names files or folders as ``--inputs`` does, or a function of the user's that gives
samples. Without it the samples of the parity check are used, which is said in a note.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tpu2edge.errors import DataError
from tpu2edge.types import NoteSink, Sample, Signature, Tensors
from tpu2edge.usercode import load_function, shown_path, user_code

if TYPE_CHECKING:
    from tpu2edge.runtime_check.reference import Reference

__all__ = ["calibration_samples", "samples_of_reference"]

Samples = Mapping[str, Sequence[Tensors]]


def samples_of_reference(reference: Reference, picks: Sequence[int]) -> list[Tensors]:
    """The inputs of some of a reference's samples."""
    return [reference.inputs(index) for index in picks]


def calibration_samples(
    data: Sequence[Any],
    signatures: Sequence[Signature],
    *,
    initial: Mapping[str, Tensors],
    on_note: NoteSink,
) -> dict[str, list[Tensors]]:
    """Samples for each signature, by its name.

    Args:
        data: paths; ``file.py:function`` or ``package.module:function``; or samples themselves, as
            Sample or as arrays by input name. A function takes nothing and gives (or yields) samples,
            or a dict of such by signature.
        signatures: the file's; each sample goes to those that its inputs fit.
        initial: for each signature the values of its state, for samples that leave it out.
        on_note: told what was converted on the way.

    Raises:
        DataError: samples that fit no signature, or a signature without samples.
        ModelSourceError: the user's function cannot be found, or raises.
    """
    found: dict[str, list[Tensors]] = {signature.name: [] for signature in signatures}
    paths: list[Path] = []
    for item in data:
        text = str(item)
        if isinstance(item, (Sample, Mapping)):
            _put(found, _as_arrays(item), signatures, initial, "a calibration sample")
        elif _is_function(text):
            for name, sample in _called(text, signatures):
                wanted = [s for s in signatures if name in (None, s.name)]
                _put(found, sample, wanted, initial, f"a sample of {_shown(text)}")
        else:
            paths.append(Path(text))
    if paths:
        _from_files(found, paths, signatures, on_note)
    for name, samples in found.items():
        if not samples:
            raise DataError(
                f"--calibration-data has no sample for the signature '{name}'",
                do="give samples with its inputs",
            )
    return found


def _shown(spec: str) -> str:
    head, _, name = spec.rpartition(":")
    return f"{shown_path(head)}:{name}"


def _is_function(text: str) -> bool:
    head, _, name = text.rpartition(":")
    if not head or not name.replace(".", "").isidentifier():
        return False
    return head.endswith(".py") or (not Path(text).exists() and "/" not in head)


def _called(spec: str, signatures: Sequence[Signature]) -> Iterable[tuple[str | None, Tensors]]:
    function, _ = load_function(spec, what="--calibration-data")
    with user_code(f"calling {_shown(spec)}", None):
        given = function()
        names = {signature.name for signature in signatures}
        # Samples by signature, not one sample: its values are sequences of samples.
        if isinstance(given, Mapping) and set(given) <= names:
            pairs = [(name, sample) for name, samples in given.items() for sample in samples]
        else:
            pairs = [(None, sample) for sample in given]
    for name, sample in pairs:
        if not isinstance(sample, (Mapping, Sample)):
            inputs = [spec.name for spec in signatures[0].inputs]
            raise DataError(
                f"{_shown(spec)} gives {type(sample).__name__}, not arrays by input name",
                do=f"give dicts with {inputs}",
            )
        yield name, _as_arrays(sample)


def _as_arrays(sample: Any) -> dict[str, Any]:
    items = sample.inputs if isinstance(sample, Sample) else sample
    return {name: _host(value) for name, value in items.items()}


def _host(value: Any) -> Any:
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.float() if str(value.dtype) == "torch.bfloat16" else value
    return np.asarray(value)


def _put(
    found: dict[str, list[Tensors]],
    sample: Mapping[str, Any],
    signatures: Sequence[Signature],
    initial: Mapping[str, Tensors],
    what: str,
) -> None:
    refused: DataError | None = None
    fits = False
    for signature in signatures:
        try:
            found[signature.name].append(_fitted(sample, signature, initial, what))
        except DataError as error:
            refused = refused or error
        else:
            fits = True
    if refused is not None and not fits:
        raise refused


def _fitted(
    sample: Mapping[str, Any],
    signature: Signature,
    initial: Mapping[str, Tensors],
    what: str,
) -> dict[str, Any]:
    from tpu2edge.runtime_check.parity import fit_sample

    state = initial.get(signature.name, {})
    return fit_sample({**state, **sample}, signature, what)


def _from_files(
    found: dict[str, list[Tensors]],
    paths: Sequence[Path],
    signatures: Sequence[Signature],
    on_note: NoteSink,
) -> None:
    from tpu2edge.runtime_check.samples import load_samples

    if len(signatures) == 1:
        loaded = load_samples(paths, signatures[0].inputs, on_note)
        found[signatures[0].name] += [sample.inputs for sample in loaded]
        return
    for path in paths:
        refused: DataError | None = None
        fits = False
        for signature in signatures:
            try:
                loaded = load_samples([path], signature.inputs, on_note)
            except DataError as error:
                refused = refused or error
            else:
                found[signature.name] += [sample.inputs for sample in loaded]
                fits = True
        if refused is not None and not fits:
            raise refused
