"""References from elsewhere: captured on the device a model is on, or made of golden outputs.

``capture`` is the Python API, ``capture_source`` the same from what the command line was given.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpu2edge.errors import DataError, DeviceError, ExportError, OptionError, Place
from tpu2edge.extras import need_modules
from tpu2edge.files import named_digest
from tpu2edge.folders import refuse_existing, staged
from tpu2edge.requests import CaptureRequest, ImportRequest
from tpu2edge.types import (
    Array,
    Note,
    NoteSink,
    Progress,
    Sample,
    Signature,
    TensorSpec,
    no_progress,
)

if TYPE_CHECKING:
    import torch

    from tpu2edge.export.names import CallLayout
    from tpu2edge.runtime_check.reference import Reference

__all__ = [
    "capture",
    "capture_source",
    "describe_reference",
    "import_reference",
    "move_to_device",
]

_KIND = "tpu2edge-reference"

#: Devices that need a package, and what is said when it is missing.
_DEVICE_PACKAGES = {
    "tpu": ("torch_tpu", "pip install torch_tpu on a TPU host"),
    "xla": ("torch_xla", "pip install torch_xla beside the torch version that it was built for"),
    "jax": ("torchax", "pip install 'tpu2edge[tpu]'"),
}


# ----------------------------------------------------------------------------------- public API


def capture(
    model: torch.nn.Module,
    samples: Any,
    *,
    output: Path | str,
    kwargs: Mapping[str, Any] | None = None,
    example: tuple[Any, ...] | torch.Tensor | None = None,
    precision: str | None = None,
    compiled: bool = False,
    num_samples: int = 8,
    signature_name: str = "serving_default",
    seed: int = 0,
    force: bool = False,
    progress: Progress = no_progress,
    on_note: NoteSink | None = None,
) -> Reference:
    """Run ``model`` where it is (TPU, other accelerator, CPU) and keep its outputs as a reference.

    The model is not moved or copied. Its mode, buffers, the precision setting and the random
    generators are as before afterwards. Inputs and outputs are named as ``export_model`` names
    them. Samples are drawn and written one at a time.

    Args:
        model: a module, all of it on one device.
        samples: real samples, as an iterable of Samples or of mappings by input name (arrays or
            tensors; nested inputs by dotted name). Or the example inputs of one call, as a tuple or
            a lone tensor: then that example and seeded variations of it are the samples.
        output: the folder to make; it appears in one rename when all is done.
        kwargs: keyword inputs of the example.
        example: with real samples, how forward is called; needed when it takes nested inputs or
            arguments that are no tensors. Without it the first sample's inputs are keywords.
        precision: "default", "high" or "highest" for matmuls; None leaves the setting as it is.
        compiled: under torch.compile (jax.jit on a JAX device) instead of eager.
        num_samples: how many samples are made of an example.
        signature_name: name of the entry.
        seed: of the variations, and of random operations in forward.
        force: replace a reference that is there.
        progress: told about each sample.
        on_note: told what is worth knowing.

    Raises:
        DataError: there is no sample, or one that does not fit the others.
        ExportError: forward raises, or returns something that holds no tensors.
        DeviceError: the model is on a device that is not there, or on several.
        BundleError: something is there already.
    """
    need_modules("capturing outputs", ("torch",))
    import torch

    kind: dict[str, Any]
    if isinstance(samples, (tuple, torch.Tensor)):
        if example is not None:
            raise OptionError(
                "example inputs were given twice", do="give samples as a list, or no example"
            )
        args = _as_args(samples)

        def made(specs: Sequence[TensorSpec], arrays: Mapping[str, Array]) -> Iterable[Any]:
            return _variations(specs, arrays, num_samples, seed)

        kind = {"kind": "synthetic", "seed": seed, "count": num_samples}
    else:
        stream = iter([samples] if isinstance(samples, (Mapping, Sample)) else samples)
        first = next(stream, None)
        if first is None:
            raise DataError("there is no sample to capture", do="give at least one")
        if example is None and not kwargs:
            args, kwargs = (), _as_keywords(model, first)
        else:
            args = _as_args(example) if example is not None else ()

        def made(specs: Sequence[TensorSpec], arrays: Mapping[str, Array]) -> Iterable[Any]:
            return itertools.chain([first], stream)

        kind = {"kind": "given"}
    return _capture(
        model,
        args,
        kwargs or {},
        made,
        output=Path(output),
        data=kind,
        precision=precision,
        compiled=compiled,
        signature_name=signature_name,
        seed=seed,
        force=force,
        progress=progress,
        on_note=on_note,
    )


def capture_source(
    request: CaptureRequest, *, progress: Progress = no_progress, on_note: NoteSink | None = None
) -> Reference:
    """The same for a model named on the command line; see :func:`capture`."""
    refuse_existing(request.output, force=request.force, kind=_KIND)
    progress("import torch")
    need_modules("tpu2edge capture", ("torch",))
    from tpu2edge.export.checkpoints import checkpoint_digest, load_checkpoint
    from tpu2edge.export.methods import module_of
    from tpu2edge.export.sources import load_source
    from tpu2edge.tracing import checkpoint_owner, entry_of, weights_of

    def say(notes: Iterable[Note]) -> None:
        for note in notes:
            if on_note is not None:
                on_note(note)

    progress("load model")
    loaded = load_source(request.source)
    say(loaded.notes)
    if loaded.program is not None:
        raise OptionError(
            "a saved program cannot be captured on another device",
            do="give the module that it was exported from",
        )
    name, module = request.signature_name or "serving_default", loaded.module
    args, kwargs = loaded.args or (), loaded.kwargs
    several = loaded.signatures
    if several is not None:
        name = entry_of(loaded, request.signature_name, option="--signature-name")
        target, args, kwargs = several[name]
        module = module_of(target, name)
        if not args and not kwargs:
            raise DataError(f"signature '{name}' has no example inputs", do="give (module, args)")
    else:
        loaded.refuse_without_inputs(request.source)
    assert module is not None
    about: dict[str, Any] = {"source": {"origin": loaded.origin, "sha256": loaded.sha256}}
    if request.checkpoint is not None:
        progress("load checkpoint")
        say(load_checkpoint(checkpoint_owner(loaded), request.checkpoint))
        about["checkpoint"] = {
            "name": request.checkpoint.name,
            "sha256": checkpoint_digest(request.checkpoint),
        }
    if request.device is not None:
        progress(f"move to {request.device}")
        move_to_device(module, request.device)

    def made(specs: Sequence[TensorSpec], arrays: Mapping[str, Array]) -> Iterable[Any]:
        if not request.inputs:
            return _variations(specs, arrays, request.num_samples, request.seed)
        from tpu2edge.runtime_check.samples import load_samples

        return load_samples(request.inputs, specs, on_note or (lambda note: None))

    data: dict[str, Any] = {"kind": "synthetic", "seed": request.seed, "count": request.num_samples}
    if request.inputs:
        data = {"kind": "files", "files": [named_digest(path) for path in request.inputs]}
    return _capture(
        module,
        args,
        kwargs,
        made,
        output=request.output,
        data=data,
        precision=request.precision,
        compiled=request.compiled,
        signature_name=name,
        seed=request.seed,
        force=request.force,
        progress=progress,
        on_note=on_note,
        extra=about,
        # Of all signatures, as an export of them has it.
        fingerprint=None if several is None else lambda _: weights_of(several),
    )


def move_to_device(model: torch.nn.Module, name: str) -> None:
    """Move ``model`` to the device ``name``: cpu, tpu, xla, jax, cuda, or what else torch knows.

    Raises:
        DeviceError: the device is not there, or the package that it needs.
        OptionError: torch knows no such device.
    """
    import torch

    kind = name.partition(":")[0]
    package, how = _DEVICE_PACKAGES.get(kind, ("", ""))
    if package and importlib.util.find_spec(package) is None:
        raise DeviceError(
            f"the device '{name}' needs the package {package}, which is not installed",
            do=how,
            step="capture",
        )
    if kind == "jax":
        from tpu2edge.export.stablehlo import import_torchax, keep_jax_off_absent_tpus

        keep_jax_off_absent_tpus()
        with import_torchax().default_env():
            model.to("jax")
        return
    if kind == "xla":
        importlib.import_module("torch_xla")
        model.to(name)
        return
    if kind == "tpu":
        importlib.import_module("torch_tpu")
    current = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    try:
        device = torch.device(name)
    except RuntimeError as err:
        if kind == "tpu":
            raise _absent(name, current) from err
        raise OptionError(
            f"--device '{name}': torch knows no such device",
            do="give cpu, tpu, xla, jax (torchax), cuda, or another one that torch knows",
        ) from err
    if device.type != "cpu" and (current is None or current.type != device.type):
        raise _absent(name, current)
    model.to(device)


def _absent(name: str, current: torch.device | None) -> DeviceError:
    here = "cpu" if current is None else f"cpu, {current.type}"
    return DeviceError(
        f"torch sees no device '{name}' on this machine (here: {here})",
        do="run this on the machine that has it; without a TPU take --reference tpu-emulated",
        step="capture",
    )


def import_reference(request: ImportRequest, *, on_note: NoteSink | None = None) -> Reference:
    """A reference of golden outputs in ``.npz`` or ``.safetensors`` files, by name.

    Raises:
        DataError: a file is missing, damaged or holds other numbers of samples.
        OptionError: an unknown precision label or provider.
    """
    from tpu2edge.runtime_check.reference import Reference
    from tpu2edge.runtime_check.samples import read_arrays

    files = [request.inputs, request.outputs]
    inputs, outputs = (read_arrays(path) for path in files)
    extra: dict[str, Any] = {}
    if request.device_kind is not None:
        extra["device_kind"] = request.device_kind
    return Reference.from_arrays(
        request.output,
        inputs=inputs,
        outputs=outputs,
        precision=request.precision,
        provider=request.provider,
        batch=request.batch,
        signature_name=request.signature_name,
        data={
            "kind": "files",
            "files": [named_digest(path) for path in files],
        },
        extra=extra,
        force=request.force,
    )


def describe_reference(path: Path) -> dict[str, Any]:
    """What a reference (or a bundle's) says of itself, as plain data, after a look at its hashes.

    Raises:
        BundleError: there is none, or it is damaged.
    """
    from tpu2edge.runtime_check.reference import Reference

    inner = path / "reference"
    reference = Reference.load(inner if (inner / "manifest.json").is_file() else path)
    return {
        "path": str(reference.path),
        "words": reference.describe(),
        "provider": reference.provider,
        "precision": reference.precision,
        "weights_sha256": reference.weights_sha256,
        "samples": list(reference.sample_ids),
        "data": dict(reference.data),
        "signature": reference.signature.to_json(),
        "inputs": [str(spec) for spec in reference.signature.inputs],
        "outputs": [str(spec) for spec in reference.signature.outputs],
        "extra": dict(reference.extra),
    }


# ------------------------------------------------------------------------------------- the work


def _capture(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    samples: Callable[[Sequence[TensorSpec], Mapping[str, Array]], Iterable[Any]],
    *,
    output: Path,
    data: Mapping[str, Any],
    precision: str | None,
    compiled: bool,
    signature_name: str,
    seed: int,
    force: bool,
    progress: Progress,
    on_note: NoteSink | None,
    extra: Mapping[str, Any] | None = None,
    fingerprint: Callable[[torch.nn.Module], str] | None = None,
) -> Reference:
    from tpu2edge.export import blame, names
    from tpu2edge.export.prepare import unwrap, weights_digest
    from tpu2edge.export.program import numpy_from_tensor
    from tpu2edge.runtime_check.reference import Reference, ReferenceWriter
    from tpu2edge.runtime_check.reference.capture import capture_outputs
    from tpu2edge.runtime_check.reference.store import SignatureGatherer, edge_array

    refuse_existing(output, force=force, kind=_KIND)
    # What a user has compiled already would be captured compiled and labelled eager.
    own: torch.nn.Module = getattr(model, "_orig_mod", model)
    layout = names.call_layout(unwrap(own)[0].forward, args, kwargs)
    dtypes = [tensor.dtype for tensor in layout.tensors]
    left_out: list[Note] = []

    def call(forward: Callable[..., Any], tensors: Mapping[str, torch.Tensor]) -> Any:
        given = tuple(
            tensors[name].to(dtype) for name, dtype in zip(layout.names, dtypes, strict=True)
        )
        try:
            return layout.call(forward, given)
        except Exception as err:
            raise ExportError(
                f"the module fails on a sample: {type(err).__name__}: {err}",
                do="check the sample's values, or give real samples",
                place=blame.place_of_exception(err, own),
            ) from err

    def flatten(result: Any) -> dict[str, torch.Tensor]:
        found = names.output_layout(result)
        left_out[:] = found.left_out
        return dict(zip(found.names, found.tensors, strict=True))

    captured = capture_outputs(
        own,
        (),
        precision=precision,
        compiled=compiled,
        call=call,
        flatten=flatten,
        fingerprint=fingerprint or weights_digest,
        seed=seed,
    )
    with captured.device.context():
        arrays = {
            name: edge_array(name, numpy_from_tensor(tensor))
            for name, tensor in zip(layout.names, layout.tensors, strict=True)
        }
    specs = [
        TensorSpec(name=name, shape=array.shape, dtype=array.dtype.name)
        for name, array in arrays.items()
    ]
    captured.samples = _by_name(samples(specs, arrays), layout)
    gatherer = SignatureGatherer(signature_name)
    with staged(output, force=force, kind=_KIND) as folder:
        writer = ReferenceWriter(
            folder,
            Signature(name=signature_name, inputs=(), outputs=()),
            provider=captured.device.provider,
            precision="",
            data=data,
        )
        count = 0
        progress("capture", 0, data.get("count"))
        for sample, outputs in captured:
            gatherer.add(sample.inputs, outputs)
            writer.add(sample, outputs)
            count += 1
            progress("capture", count, data.get("count"))
        if not count:
            raise DataError("there is no sample to capture", do="give at least one")
        found = captured.provenance
        writer.amend(
            signature=gatherer.signature().to_json(),
            precision=_label(found.precision, own),
            weights_sha256=found.weights_sha256,
            data={**data, "count": count},
            extra={**found.to_json(), **(extra or {})},
        )
        writer.close()
    for note in left_out:
        if on_note is not None:
            on_note(note)
    return Reference.load(output, verify=False)


def _label(label: str, model: torch.nn.Module) -> str:
    """The precision label; a model of other weights than float32 is neither "f32" nor a TPU's."""
    import torch

    from tpu2edge.export.prepare import half_types

    if half := half_types(model):
        return "bf16-model" if half[0] is torch.bfloat16 else "f16-model"
    if label == "f32" and any(p.dtype is torch.float64 for p in model.parameters()):
        return "f64"
    return label


def _by_name(samples: Iterable[Any], layout: CallLayout) -> Iterator[Sample]:
    """Samples with NumPy arrays in the types of the edge model, in the model's order."""
    from tpu2edge.runtime_check.reference.store import edge_array

    for number, item in enumerate(samples):
        name = item.id if isinstance(item, Sample) else f"sample-{number}"
        tensors = item.inputs if isinstance(item, Sample) else item
        if not isinstance(tensors, Mapping):
            raise DataError(
                f"sample '{name}' is a {type(tensors).__name__}, not inputs by name",
                do=f"give mappings with {list(layout.names)}",
            )
        if set(tensors) != set(layout.names):
            raise DataError(
                f"sample '{name}' has the inputs {sorted(tensors)}",
                do=f"give {list(layout.names)}",
            )
        arrays: dict[str, Array] = {}
        for key, example in zip(layout.names, layout.tensors, strict=True):
            arrays[key] = edge_array(key, _numpy(tensors[key]))
            if arrays[key].ndim != example.dim():
                raise DataError(
                    f"sample '{name}': input '{key}' has the shape {list(arrays[key].shape)}, the "
                    f"example {list(example.shape)}",
                    place=Place(tensor=key),
                )
        yield Sample(id=name, inputs=arrays)


def _numpy(value: Any) -> Any:
    from tpu2edge.export.program import numpy_from_tensor

    return numpy_from_tensor(value) if hasattr(value, "detach") else value


def _as_args(example: Any) -> tuple[Any, ...]:
    return tuple(example) if isinstance(example, (tuple, list)) else (example,)


def _as_keywords(model: torch.nn.Module, sample: Any) -> dict[str, torch.Tensor]:
    """The first sample's inputs as forward's keywords, floats in the model's own type."""
    import numpy as np
    import torch

    from tpu2edge.export.prepare import half_types
    from tpu2edge.runtime_check.reference.store import edge_array

    tensors = sample.inputs if isinstance(sample, Sample) else sample
    if not isinstance(tensors, Mapping):
        raise DataError(
            f"a sample is a {type(tensors).__name__}, not inputs by name",
            do="give mappings by forward's argument names, or the example inputs as a tuple",
        )
    half = half_types(model)
    keywords: dict[str, torch.Tensor] = {}
    for name, value in tensors.items():
        if isinstance(value, torch.Tensor):
            keywords[name] = value
            continue
        tensor = torch.from_numpy(np.array(edge_array(name, value), order="C"))
        keywords[name] = tensor.to(half[0]) if half and tensor.is_floating_point() else tensor
    return keywords


def _variations(
    specs: Sequence[TensorSpec], arrays: Mapping[str, Array], count: int, seed: int
) -> Sequence[Sample]:
    from tpu2edge.runtime_check.samples import synthetic_samples

    if count < 1:
        raise OptionError(f"num_samples {count} makes no sense", do="give at least 1")
    return synthetic_samples(arrays, specs, count=count, seed=seed)
