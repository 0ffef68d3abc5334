"""Capture a model's outputs on the device it is on: a TPU, any other accelerator, or the CPU.

One code path for all; what differs (how the precision is set and read, which context operations
need, how results come home) is in one small class for each kind of device. Neither torch_tpu nor
torch_xla is needed here; those classes are only used when the model's own tensors are theirs.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tpu2edge.errors import DeviceError, OptionError
from tpu2edge.files import sha256_of_arrays
from tpu2edge.types import Array, Sample

if TYPE_CHECKING:
    import torch

__all__ = ["Capture", "Provenance", "capture_outputs"]

#: Precision settings, as everywhere in tpu2edge, and what torch calls them.
_TORCH_WORDS = {"default": "medium", "high": "high", "highest": "highest"}
#: What such a setting means on a TPU.
_TPU_LABELS = {"default": "bf16-default", "high": "bf16_3x-high", "highest": "f32-highest"}

_PACKAGES = ("torch", "torch_tpu", "torch_xla", "torchax", "jax", "jaxlib", "libtpu", "numpy")
_VARIABLES = ("XLA_", "LIBTPU_", "TPU_", "TORCH_TPU_", "PJRT_", "JAX_")


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """How outputs were captured; everything that decides them, and digests of what went through."""

    provider: str  # "torch_tpu", "torch_xla", "torchax", "eager" or "torch-<device type>"
    precision: str  # "bf16-default", "bf16_3x-high", "f32-highest", "f32", "<device>-<setting>"
    excess_precision: bool | None  # None: the device does not tell
    mode: str  # "eager" or "compiled"
    device_kind: str
    device: Mapping[str, str]  # what else the device tells
    versions: Mapping[str, str]
    environment: Mapping[str, str]  # variables that reach XLA
    python: str
    machine: str
    weights_sha256: str | None
    inputs_sha256: str
    outputs_sha256: str
    samples: int

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            name: dict(value) if isinstance(value := getattr(self, name), Mapping) else value
            for name in self.__slots__
        }


Call = Callable[["Callable[..., Any]", "Mapping[str, torch.Tensor]"], Any]
Flatten = Callable[[Any], "Mapping[str, torch.Tensor]"]


def capture_outputs(
    model: torch.nn.Module,
    samples: Iterable[Sample],
    *,
    precision: str | None = None,
    compiled: bool = False,
    call: Call | None = None,
    flatten: Flatten | None = None,
    fingerprint: Callable[[torch.nn.Module], str] | None = None,
    seed: int = 0,
) -> Capture:
    """The outputs of ``model`` on its own device, sample by sample, as an iterator.

    Iterating yields (sample, outputs by name, NumPy on the host); one sample is held at a time.
    When it is through, ``provenance`` says how the outputs came about. Train mode, buffers, random
    generators and the precision setting are as before whenever the caller's code runs, also
    between two samples.

    Args:
        model: as it stands on its device; it is not moved or copied.
        samples: inputs by forward's argument names.
        precision: "default", "high" or "highest"; None leaves the setting as it is.
        compiled: under torch.compile (``torch.jit`` of JAX for torchax) instead of eager.
        call: how a model is called with the tensors; by keyword if not given.
        flatten: what forward returned as named tensors; dotted keys if not given.
        fingerprint: digest of the model's weights, for the provenance.
        seed: for random operations in forward, set before every sample.
    """
    if precision is not None and precision not in _TORCH_WORDS:
        raise OptionError(
            f"no precision {precision!r}", do=f"take one of {', '.join(_TORCH_WORDS)}"
        )
    return Capture(
        model=model,
        samples=samples,
        device=_device_of(model),
        precision=precision,
        compiled=compiled,
        call=call or (lambda forward, tensors: forward(**tensors)),
        flatten=flatten or _named_tensors,
        fingerprint=fingerprint,
        seed=seed,
    )


@dataclass(kw_only=True)
class Capture:
    """An iterator over (sample, outputs); see :func:`capture_outputs`."""

    model: torch.nn.Module
    samples: Iterable[Sample]
    device: _Device
    precision: str | None
    compiled: bool
    call: Call
    flatten: Flatten
    fingerprint: Callable[[torch.nn.Module], str] | None
    seed: int
    _provenance: Provenance | None = field(default=None, init=False)

    @property
    def provenance(self) -> Provenance:
        """How the outputs came about; only once all samples are through."""
        if self._provenance is None:
            raise RuntimeError("the provenance is known when all samples have been captured")
        return self._provenance

    def __iter__(self) -> Iterator[tuple[Sample, dict[str, Array]]]:
        inputs, outputs, count = hashlib.sha256(), hashlib.sha256(), 0
        with self._as_captured():
            # Digests and facts are taken under the settings that the samples will see.
            weights = self.fingerprint(self.model) if self.fingerprint is not None else None
            forward = self.device.compiled(self.model) if self.compiled else self.model
            label, excess = self.device.label(), self.device.excess_precision()
            kind, about = self.device.kind(), self.device.about()
        for sample in self.samples:
            with self._as_captured():
                arrays = self._run(forward, sample)
            inputs.update(sha256_of_arrays(sample.inputs).encode())
            outputs.update(sha256_of_arrays(arrays).encode())
            count += 1
            yield sample, arrays
        self._provenance = Provenance(
            provider=self.device.provider,
            precision=label,
            excess_precision=excess,
            mode="compiled" if self.compiled else "eager",
            device_kind=kind,
            device=about,
            versions=_versions(),
            environment={k: v for k, v in sorted(os.environ.items()) if k.startswith(_VARIABLES)},
            python=platform.python_version(),
            machine=platform.machine(),
            weights_sha256=weights,
            inputs_sha256=inputs.hexdigest(),
            outputs_sha256=outputs.hexdigest(),
            samples=count,
        )

    def _run(self, forward: Callable[..., Any], sample: Sample) -> dict[str, Array]:
        import torch

        self.device.seed(self.seed)
        tensors = {
            name: self.device.put(torch.from_numpy(np.array(value, order="C")))
            for name, value in sample.inputs.items()
        }
        results = self.flatten(self.call(forward, tensors))
        return {name: _numpy(self.device.fetch(t)) for name, t in results.items()}

    @contextlib.contextmanager
    def _as_captured(self) -> Iterator[None]:
        """Evaluation mode, no gradients, the wished precision; all put back afterwards."""
        import torch

        modes = [(module, module.training) for module in self.model.modules()]
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.device.context())
            stack.enter_context(torch.no_grad())
            stack.enter_context(self.device.random_state_kept())
            stack.enter_context(_buffers_kept(self.model))
            if self.precision is not None:
                stack.enter_context(self.device.precision(self.precision))
            self.model.eval()
            try:
                yield
            finally:
                for module, training in modes:
                    module.training = training


@contextlib.contextmanager
def _buffers_kept(model: torch.nn.Module) -> Iterator[None]:
    """Undo what forward does to buffers (counters, caches): a capture must not change a model."""
    buffers = dict(model.named_buffers())
    before = {name: buffer.clone() for name, buffer in buffers.items()}
    try:
        yield
    finally:
        for name, buffer in buffers.items():
            owner = model.get_submodule(name.rpartition(".")[0])
            key = name.rpartition(".")[2]
            owner._buffers[key] = buffer  # forward may have put another tensor in its place
            buffer.copy_(before[name])


def _numpy(tensor: torch.Tensor) -> Array:
    """A host tensor as NumPy; bfloat16, which NumPy lacks, as the float32 of the same value."""
    import torch

    tensor = tensor.detach()
    array: Array = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return np.array(array, order="C")


def _named_tensors(result: Any) -> dict[str, torch.Tensor]:
    """Tensors by dotted key; ``output_<i>`` where the outermost container has no keys."""
    import torch
    from torch.utils import _pytree as pytree

    if isinstance(result, torch.Tensor):
        return {"output_0": result}
    named = {}
    for path, leaf in pytree.tree_flatten_with_path(result)[0]:
        if isinstance(leaf, torch.Tensor):
            parts = [
                str(next(getattr(k, a) for a in ("key", "idx", "name") if hasattr(k, a)))
                for k in path
            ]
            name = ".".join(parts)
            named[f"output_{name}" if name[:1].isdigit() else name] = leaf
    return named


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


# --- kinds of devices ----------------------------------------------------------------------------


class _Device:
    """A device that torch itself knows: the CPU, or any torch.accelerator."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.provider = "eager" if device.type == "cpu" else f"torch-{device.type}"

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """What operations on the device's tensors need around them."""
        return contextlib.nullcontext()

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` on the device."""
        return tensor.to(self.device)

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` on the host; waits until it is computed."""
        return tensor.detach().cpu()

    def compiled(self, model: torch.nn.Module) -> Callable[..., Any]:
        """``model`` as torch.compile makes it, in one graph."""
        import torch

        compiled: Callable[..., Any] = torch.compile(model, fullgraph=True, dynamic=False)
        return compiled

    @contextlib.contextmanager
    def precision(self, setting: str) -> Iterator[None]:
        """The matmul precision set to one of ours, and put back."""
        import torch

        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(_TORCH_WORDS[setting])
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)

    def setting(self) -> str:
        """The matmul precision that holds now, in our words."""
        import torch

        word = torch.get_float32_matmul_precision()
        return next(ours for ours, theirs in _TORCH_WORDS.items() if theirs == word)

    def label(self) -> str:
        """What that means on this device."""
        setting = self.setting()
        if self.device.type == "cpu" and setting == "highest":
            return "f32"
        return f"{self.device.type}-{setting}"

    def excess_precision(self) -> bool | None:
        """Whether the compiler may skip roundings; None when the device does not tell."""
        return None

    def kind(self) -> str:
        """The device's model name."""
        module = self._module()
        name = getattr(module, "get_device_name", None)
        if name is None or self.device.type == "cpu":
            return platform.processor() or platform.machine()
        return str(name())

    def about(self) -> dict[str, str]:
        """What else the device tells."""
        import torch

        if self.device.type == "cpu":
            return {"threads": str(torch.get_num_threads())}
        return {"device_count": str(torch.accelerator.device_count())}

    @contextlib.contextmanager
    def random_state_kept(self) -> Iterator[None]:
        """Put the host's and the device's random state back afterwards."""
        import torch

        host = torch.get_rng_state()
        module: Any = None if self.device.type == "cpu" else self._module()
        has_own = hasattr(module, "get_rng_state")
        own = module.get_rng_state() if has_own else None
        try:
            yield
        finally:
            torch.set_rng_state(host)
            if has_own:
                module.set_rng_state(own)

    def seed(self, number: int) -> None:
        """Start the random generators that forward may use."""
        import torch

        torch.manual_seed(number)

    def _module(self) -> Any:
        import torch

        return getattr(torch, self.device.type, None)


class _TorchTpu(_Device):
    """A TPU through TorchTPU: device type ``tpu``."""

    def __init__(self, device: torch.device) -> None:
        import torch

        super().__init__(device)
        self.provider = "torch_tpu"
        # ``torch.tpu`` exists without a TPU too: only the accelerator tells.
        current = torch.accelerator.current_accelerator()
        if not torch.accelerator.is_available() or current is None or current.type != "tpu":
            raise DeviceError("the model is on 'tpu', but torch sees no TPU", step="capture")

    def compiled(self, model: torch.nn.Module) -> Callable[..., Any]:
        import torch

        compiled: Callable[..., Any] = torch.compile(
            model, backend="tpu", fullgraph=True, dynamic=False
        )
        return compiled

    def label(self) -> str:
        return _TPU_LABELS[self.setting()]

    def excess_precision(self) -> bool | None:
        value = getattr(self._module(), "allow_excess_precision", None)
        return None if value is None else bool(value)

    def about(self) -> dict[str, str]:
        module = self._module()
        eager = getattr(module, "eager_mode", None)
        return {**super().about(), "eager_mode": str(eager), **_libtpu_build()}


class _TorchXla(_Device):
    """A device of PyTorch/XLA: device type ``xla``, lazily traced."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.provider = "torch_xla"

    @functools.cached_property
    def _backends(self) -> Any:
        import importlib

        return importlib.import_module("torch_xla.backends")

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        import importlib

        importlib.import_module("torch_xla").sync(wait=True)
        return super().fetch(tensor)

    def compiled(self, model: torch.nn.Module) -> Callable[..., Any]:
        import torch

        compiled: Callable[..., Any] = torch.compile(model, backend="openxla")
        return compiled

    @contextlib.contextmanager
    def precision(self, setting: str) -> Iterator[None]:
        before = self._backends.get_mat_mul_precision()
        self._backends.set_mat_mul_precision(setting)
        try:
            yield
        finally:
            self._backends.set_mat_mul_precision(before)

    def setting(self) -> str:
        return str(self._backends.get_mat_mul_precision())

    def label(self) -> str:
        return _TPU_LABELS[self.setting()] if self.kind() == "TPU" else f"xla-{self.setting()}"

    def kind(self) -> str:
        import importlib

        return str(importlib.import_module("torch_xla.runtime").device_type())

    def about(self) -> dict[str, str]:
        import importlib

        runtime = importlib.import_module("torch_xla.runtime")
        attributes = runtime.global_runtime_device_attributes()
        return {"attributes": str(attributes[:1]), **_libtpu_build()}

    def _module(self) -> Any:
        import importlib

        return importlib.import_module("torch_xla")  # has get_rng_state and set_rng_state


class _Torchax(_Device):
    """A JAX device through torchax: device type ``jax``, operations only inside its environment."""

    def __init__(self, device: torch.device) -> None:
        import jax
        import torchax

        super().__init__(device)
        self.provider = "torchax"
        self._environment: Any = torchax.default_env()
        self._jax: Any = jax

    def context(self) -> contextlib.AbstractContextManager[Any]:
        if self._environment.enabled:  # the user has enabled it for the whole process
            return contextlib.nullcontext()
        manager: contextlib.AbstractContextManager[Any] = self._environment
        return manager

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to("jax")

    def compiled(self, model: torch.nn.Module) -> Callable[..., Any]:
        from torchax import interop

        compiled: Callable[..., Any] = interop.JittableModule(model)
        return compiled

    @contextlib.contextmanager
    def precision(self, setting: str) -> Iterator[None]:
        with self._jax.default_matmul_precision(setting):
            yield

    def setting(self) -> str:
        value = str(self._jax.config.jax_default_matmul_precision or "default")
        names = {"fastest": "default", "bfloat16": "default", "bfloat16_3x": "high"}
        names |= {"tensorfloat32": "high", "float32": "highest"}
        return names.get(value, value)

    def label(self) -> str:
        setting, kind = self.setting(), self._jax.devices()[0].platform
        if kind == "tpu":
            return _TPU_LABELS.get(setting, setting)
        return "f32" if kind == "cpu" else f"{kind}-{setting}"

    def excess_precision(self) -> bool | None:
        # XLA's own default, unless the flags say otherwise.
        flags = os.environ.get("XLA_FLAGS", "") + os.environ.get("LIBTPU_INIT_ARGS", "")
        return "xla_allow_excess_precision=false" not in flags

    def kind(self) -> str:
        return str(self._jax.devices()[0].device_kind)

    def about(self) -> dict[str, str]:
        device = self._jax.devices()[0]
        build = " ".join(str(device.client.platform_version).split())
        return {
            "platform": str(device.platform),
            "platform_version": build,  # on a TPU: libtpu's build
            "x64": str(bool(self._jax.config.jax_enable_x64)),
        }

    @contextlib.contextmanager
    def random_state_kept(self) -> Iterator[None]:
        import torch

        host = torch.get_rng_state()
        try:
            with self._environment.override_property():  # its key is back at the end
                yield
        finally:
            torch.set_rng_state(host)

    def seed(self, number: int) -> None:
        super().seed(number)
        self._environment.manual_seed(number)


def _libtpu_build() -> dict[str, str]:
    """What libtpu says of its build; asked in another process, for here a client may be running."""
    from tpu2edge.runtime_check.reference.tpu import libtpu_build

    try:
        return {"libtpu_build": libtpu_build()}
    except (DeviceError, OptionError):  # a label that is missing must not cost the capture
        return {}


def _device_of(model: torch.nn.Module) -> _Device:
    """The kind of the one device that all of the model's parameters and buffers are on."""
    import torch

    devices = {t.device for t in (*model.parameters(), *model.buffers())}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise DeviceError(
            f"the model's weights are on several devices: {names}",
            do="move the model to one device before capturing",
            step="capture",
        )
    device = devices.pop() if devices else torch.device("cpu")
    kinds: dict[str, type[_Device]] = {"tpu": _TorchTpu, "xla": _TorchXla, "jax": _Torchax}
    return kinds.get(device.type, _Device)(device)
