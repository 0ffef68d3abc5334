"""The stages strung together: from a model to a checked bundle, and a check alone.

This is the one place that knows all stages. ``export_model`` is the Python API, ``export_source``
the same from what the command line was given.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from tpu2edge import bundle as bundles
from tpu2edge import references
from tpu2edge.bundle import Bundle, load_bundle
from tpu2edge.errors import (
    BundleError,
    ConversionError,
    DataError,
    DeviceError,
    OptionError,
    Place,
    Tpu2EdgeError,
)
from tpu2edge.files import canonical_json, sha256_of, write_atomically
from tpu2edge.folders import refuse_existing, staged
from tpu2edge.types import (
    Dim,
    EdgeModel,
    Note,
    NoteSink,
    Progress,
    Sample,
    Signature,
    Tensors,
    TensorSpec,
    no_progress,
)

if TYPE_CHECKING:
    import torch

    from tpu2edge.export.program import TracedProgram
    from tpu2edge.runtime_check.budget import Budget
    from tpu2edge.runtime_check.metrics import OutputMetrics
    from tpu2edge.runtime_check.parity import CaseReport, ParityReport
    from tpu2edge.runtime_check.reference import Reference, ReferenceWriter

__all__ = [
    "CheckRequest",
    "ExportRequest",
    "check_parity",
    "check_target",
    "export_model",
    "export_source",
]

_PACKAGES = (
    "tpu2edge",
    "torch",
    "litert-torch",
    "litert-converter",
    "ai-edge-litert",
    "ai-edge-quantizer",
    "jax",
    "numpy",
)

DEVICES = ("host",)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportRequest:
    """What ``tpu2edge export`` was asked for; plain data, so that it can cross to another process."""

    source: str
    output: Path
    checkpoint: Path | None = None
    inputs: tuple[Path, ...] = ()
    num_samples: int = 8
    dynamic: tuple[str, ...] = ()
    signature_name: str = "serving_default"
    recipes: tuple[str, ...] = ("float32",)
    budgets: tuple[str, ...] = ()
    devices: tuple[str, ...] = ("host",)
    threads: int | None = None
    seed: int = 0
    force: bool = False
    reference: str | None = None  # a word or a path, see references.py; None: the usual one

    def to_json(self) -> dict[str, Any]:
        """Plain data; paths as text."""
        return _request_json(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ExportRequest:
        """The inverse of :meth:`to_json`."""
        return cls(
            **{
                **data,
                "output": Path(data["output"]),
                "checkpoint": Path(data["checkpoint"]) if data["checkpoint"] else None,
                "inputs": tuple(Path(p) for p in data["inputs"]),
                **{
                    name: tuple(data[name]) for name in ("dynamic", "recipes", "budgets", "devices")
                },
            }
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckRequest:
    """What ``tpu2edge check`` was asked for."""

    target: Path
    reference: Path | None = None
    inputs: tuple[Path, ...] = ()
    budgets: tuple[str, ...] = ()
    devices: tuple[str, ...] = ("host",)
    threads: int | None = None
    signature: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain data; paths as text."""
        return _request_json(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CheckRequest:
        """The inverse of :meth:`to_json`."""
        return cls(
            target=Path(data["target"]),
            reference=Path(data["reference"]) if data["reference"] else None,
            inputs=tuple(Path(p) for p in data["inputs"]),
            budgets=tuple(data["budgets"]),
            devices=tuple(data["devices"]),
            threads=data["threads"],
            signature=data["signature"],
        )


def _request_json(request: ExportRequest | CheckRequest) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        if isinstance(value, Path):
            return str(value)
        return [plain(item) for item in value] if isinstance(value, tuple) else value

    return {name: plain(value) for name, value in asdict(request).items()}


# ----------------------------------------------------------------------------------- public API


def export_model(
    module: torch.nn.Module | torch.export.ExportedProgram,
    args: tuple[Any, ...] | torch.Tensor | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    output: Path | str,
    recipes: Sequence[str] = ("float32",),
    budget: Budget | str | Sequence[str] | None = None,
    reference: Reference | Path | str = "eager",
    samples: Sequence[Sample | Mapping[str, Any]] | None = None,
    num_samples: int = 8,
    dynamic: Mapping[str, Mapping[int, Dim]] | None = None,
    signature_name: str = "serving_default",
    devices: Sequence[str] = ("host",),
    threads: int | None = None,
    seed: int = 0,
    force: bool = False,
    progress: Progress = no_progress,
    on_note: NoteSink | None = None,
    log_path: Path | None = None,
) -> Bundle:
    """Export ``module`` to a folder of checked LiteRT files and give the verified bundle.

    Safe to call inside a training loop: the module, its mode, its weights, its devices, the random
    generators and the grad mode are as before afterwards; the converter, the quantizer and all that
    runs a ``.tflite`` have processes of their own, so what kills them does not kill the training.

    Args:
        module: a torch module on any device and in any mode, or an ExportedProgram.
        args: example positional inputs (a lone tensor counts as one); an ExportedProgram has its own.
        kwargs: example keyword inputs.
        output: the folder to make; it appears in one rename when all is done.
        recipes: names of recipes, "float32" or those of ai-edge-quantizer.
        budget: bounds for all recipes, as a Budget or as text ("sqnr>=30dB"); defaults by recipe.
        reference: what the numbers are held to: "eager" (the module in float32), "f64",
            "tpu-emulated[:v5e][@high]", "tpu-emulated-naive", "auto" (predicted for v5e if the extra
            "tpu" is installed), or a captured Reference or its folder, which brings its own samples.
        samples: inputs to check with, by input name (arrays or tensors); else the example and seeded
            variations of it, and the report says that the data is synthetic.
        num_samples: how many synthetic samples.
        dynamic: for each input name, which axes may change, e.g. ``{"x": {0: Dim(...)}}``.
        signature_name: name of the entry in the file.
        devices: where to check; "host" is this machine.
        threads: LiteRT threads.
        seed: of the synthetic samples.
        force: replace a bundle that is there.
        progress: told which stage is under way.
        on_note: told each thing that was done to the copy of the module.
        log_path: a log that is being written already and is moved into the bundle; else third-party
            output is caught while the converter runs.

    Returns:
        The bundle; look at ``bundle.verdict``: a FAIL is a result, not an exception.

    Raises:
        ConversionError: the model cannot be exported or converted (exit status 3).
        InputError: the inputs, options or the output folder do not fit (exit status 2).
    """
    from tpu2edge.export.program import trace_module, trace_program

    job = _Job(
        output=Path(output),
        recipes=_recipes(recipes),
        budgets=_budget_texts(budget),
        budget=budget if not isinstance(budget, (str, Sequence)) else None,
        devices=_devices(devices),
        threads=_threads(threads),
        seed=seed,
        force=force,
        progress=_Stages(progress),
        on_note=on_note,
        log_path=log_path,
        choice=_choice(reference),
        isolate=True,
    )
    refuse_existing(job.output, force=force)

    def traced() -> TracedProgram:
        if hasattr(module, "graph_signature"):
            return trace_program(module, signature_name=signature_name)  # type: ignore[arg-type]
        if args is None and not kwargs:
            raise DataError("no example inputs were given", do="pass args=(tensor, …) or kwargs")
        given = tuple(args) if isinstance(args, (tuple, list)) else (args,)
        return trace_module(
            module,  # type: ignore[arg-type]
            given if args is not None else (),
            kwargs,
            dynamic=dynamic,
            signature_name=signature_name,
        )

    def data(program: TracedProgram) -> _Data:
        if job.choice.kind == "given":
            if samples is not None:
                raise OptionError(
                    "samples and a captured reference were both given",
                    do="leave samples away: a reference brings its own",
                )
            return _replayed(program, job.choice.path or reference, str(weights))
        if samples is None:
            return _synthetic(program, num_samples, seed)
        return _given(program, samples)

    from tpu2edge.export.prepare import weights_digest

    owner = module.module() if hasattr(module, "graph_signature") else module  # type: ignore[operator]
    weights = weights_digest(owner)  # type: ignore[arg-type]
    provenance = {
        "source": {"origin": f"{type(owner).__module__}.{type(owner).__qualname__}"},
        "weights_sha256": weights,
        "options": {"signature_name": signature_name, "num_samples": num_samples},
    }
    return job.run(traced, data, provenance)


def export_source(
    request: ExportRequest,
    *,
    progress: Progress = no_progress,
    on_note: NoteSink | None = None,
    log_path: Path | None = None,
) -> Bundle:
    """The same for a model named on the command line; see :func:`export_model`."""
    recipes = _recipes(request.recipes)
    job = _Job(
        output=request.output,
        recipes=recipes,
        budgets=request.budgets,
        budget=None,
        devices=_devices(request.devices),
        threads=_threads(request.threads),
        seed=request.seed,
        force=request.force,
        progress=_Stages(progress),
        on_note=on_note,
        log_path=log_path,
        choice=references.ReferenceChoice.parse(request.reference),
        isolate=False,
    )
    refuse_existing(request.output, force=request.force)
    dynamic = parse_dynamic(request.dynamic)
    job.check_budgets()
    job.progress("import torch")
    from tpu2edge.export.checkpoints import checkpoint_digest, load_checkpoint
    from tpu2edge.export.prepare import weights_digest
    from tpu2edge.export.program import trace_module, trace_program
    from tpu2edge.export.sources import load_source

    job.progress("load model")
    loaded = load_source(request.source)
    notes = list(loaded.notes)
    provenance: dict[str, Any] = {
        "source": {"origin": loaded.origin, "sha256": loaded.sha256},
        "options": {
            name: value
            for name, value in request.to_json().items()
            if name not in ("source", "output", "force", "checkpoint", "inputs")
        },
    }
    if request.checkpoint is not None:
        if loaded.module is None:
            raise OptionError(
                "--checkpoint goes with a module, not with a saved program",
                do="leave --checkpoint away: the .pt2 file holds its weights",
            )
        job.progress("load checkpoint")
        notes.extend(load_checkpoint(loaded.module, request.checkpoint))
        provenance["checkpoint"] = {
            "name": request.checkpoint.name,
            "sha256": checkpoint_digest(request.checkpoint),
        }
    owner = loaded.module if loaded.module is not None else loaded.program.module()  # type: ignore[union-attr]
    provenance["weights_sha256"] = weights_digest(owner)

    def traced() -> TracedProgram:
        if loaded.program is not None:
            if dynamic:
                raise OptionError(
                    "--dynamic goes with a module, not with a saved program",
                    do="give dynamic_shapes to torch.export.export before saving",
                )
            return trace_program(loaded.program, signature_name=request.signature_name)
        if loaded.args is None and not loaded.kwargs:
            raise DataError(
                f"'{request.source}' gives no example inputs",
                do="let its function return (module, args), or define get_args() beside it",
            )
        assert loaded.module is not None
        return trace_module(
            loaded.module,
            loaded.args or (),
            loaded.kwargs,
            dynamic=dynamic,
            signature_name=request.signature_name,
        )

    def data(program: TracedProgram) -> _Data:
        if job.choice.kind == "given":
            if request.inputs:
                raise OptionError(
                    "--inputs and a captured --reference were both given",
                    do="leave --inputs away: a reference brings its own samples",
                )
            return _replayed(program, job.choice.path, provenance["weights_sha256"])
        if not request.inputs:
            return _synthetic(program, request.num_samples, request.seed)
        from tpu2edge.runtime_check.samples import load_samples

        noted: list[Note] = []
        found = load_samples(request.inputs, program.signature.inputs, noted.append)
        files = [{"name": path.name, "sha256": _digest(path)} for path in request.inputs]
        extra = _dynamic_ends(program, request.seed)
        return _Data([*found, *extra], {"kind": "files", "files": files}, noted)

    return job.run(traced, data, provenance, notes)


def check_parity(
    model: EdgeModel | Path | str,
    reference: Reference | Path | str,
    *,
    budget: Budget | str | Sequence[str] | None = None,
    oracle: Reference | None = None,
    device: str = "host",
    threads: int | None = None,
    signature: str | None = None,
    progress: Progress = no_progress,
) -> ParityReport:
    """Run a ``.tflite`` on every sample of a reference and hold it to a budget.

    Args:
        model: an EdgeModel, or the path of a ``.tflite`` file.
        reference: a Reference, or the path of its folder.
        budget: bounds as a Budget or as text; the recipe's default otherwise (float32 for a path).
        oracle: the float64 outputs of the same samples, for the error split.
        device: where to run it; "host" is this machine.
        threads: LiteRT threads.
        signature: the file's signature to check, when it has several.
        progress: told about each sample.

    Returns:
        The report; a device that breaks gives ERROR cases in it.

    Raises:
        InputError: the file, the samples or the budget do not fit one another.
    """
    from tpu2edge.runtime_check.budget import default_budget
    from tpu2edge.runtime_check.parity import check_model
    from tpu2edge.runtime_check.reference import Reference

    (device,) = _devices([device])
    if not isinstance(model, EdgeModel):
        model = _edge_model(Path(model))
    if not isinstance(reference, Reference):
        reference = Reference.load(reference)
    if not isinstance(budget, (str, Sequence)) and budget is not None:
        full = budget
    else:
        full = _parse_budget(_budget_texts(budget), default_budget(model.recipe))
    return check_model(
        model,
        reference,
        full,
        oracle=oracle,
        device=device,
        threads=_threads(threads),
        signature=signature,
        progress=progress,
    )


def check_target(
    request: CheckRequest,
    *,
    progress: Progress = no_progress,
    on_note: NoteSink | None = None,
    log_path: Path | None = None,
) -> ParityReport:
    """The comparison alone, for a bundle (all its models) or one ``.tflite``.

    A bundle brings its own reference and budgets; a ``.tflite`` needs ``reference``.
    """
    from tpu2edge.runtime_check.budget import Budget, default_budget
    from tpu2edge.runtime_check.parity import check_model, noise_floor
    from tpu2edge.runtime_check.reference import Reference

    devices = _devices(request.devices)
    progress("load")
    reports: list[ParityReport] = []
    if request.target.is_dir():
        bundle = load_bundle(request.target)
        stored = {entry["recipe"]: entry["budget"] for entry in bundle.manifest["models"]}
        reference = Reference.load(request.reference) if request.reference else bundle.reference()
        oracle = None if request.reference else bundle.reference("oracle")
        has_eager = (bundle.path / "reference" / "eager").is_dir() and not request.reference
        eager = bundle.reference("eager") if has_eager else None
        constant = frozenset(bundle.manifest.get("constant_outputs", ()))
        models: Sequence[EdgeModel] = bundle.models
        budgets = {
            m.recipe: _parse_budget(request.budgets, Budget.from_json(stored[m.recipe]))
            for m in models
        }
    else:
        if request.reference is None:
            raise OptionError(
                "a .tflite alone has nothing to be compared with",
                do="give --reference: a reference folder or a bundle",
            )
        reference = _reference_of(request.reference)
        oracle, eager, constant = None, None, frozenset()
        models = (_edge_model(request.target),)
        budgets = {
            "float32": _parse_budget(request.budgets, default_budget("float32")),
        }
    floor = noise_floor(reference, oracle) if eager is not None and oracle is not None else {}
    with _log_stream(log_path) as log:
        for device in devices:
            for model in models:
                reports.append(
                    check_model(
                        model,
                        reference,
                        budgets[model.recipe],
                        oracle=oracle,
                        eager=eager,
                        conversion=default_budget("float32"),
                        floor=floor,
                        device=device,
                        threads=_threads(request.threads),
                        signature=request.signature,
                        constant_outputs=constant,
                        log=log,
                        progress=progress,
                    )
                )
    return _merged(reports)


def _reference_of(path: Path) -> Reference:
    from tpu2edge.runtime_check.reference import Reference

    inner = path / "reference"
    if inner.is_dir() and (path / "manifest.json").is_file():
        return load_bundle(path).reference()
    return Reference.load(path)


def _edge_model(path: Path) -> EdgeModel:
    if not path.is_file():
        raise BundleError(f"there is no file '{path}'", do="give a .tflite file or a bundle folder")
    return EdgeModel(
        path=path,
        signatures=(),
        recipe="float32",
        sha256=sha256_of(path),
        size_bytes=path.stat().st_size,
    )


# --------------------------------------------------------------------------------------- the job


@dataclass(frozen=True, slots=True)
class _Data:
    samples: Sequence[Sample]
    source: Mapping[str, Any]  # for the reference's manifest
    notes: Sequence[Note] = ()
    eager: Mapping[str, Tensors] = field(default_factory=dict)  # outputs known by sample id
    given: Reference | None = None  # a captured reference that brought these samples


class _Stages:
    """Passes progress on and keeps the seconds of each stage for the manifest."""

    def __init__(self, sink: Progress) -> None:
        self._sink = sink
        self._stage: str | None = None
        self._since = 0.0
        self.seconds: dict[str, float] = {}

    def __call__(self, stage: str, done: float | None = None, total: float | None = None) -> None:
        now = time.perf_counter()
        if stage != self._stage:
            self._close(now)
            self._stage, self._since = stage, now
        self._sink(stage, done, total)

    def _close(self, now: float) -> None:
        if self._stage is not None:
            spent = self.seconds.get(self._stage, 0.0)
            self.seconds[self._stage] = round(spent + now - self._since, 3)

    def end(self) -> None:
        self._close(time.perf_counter())
        self._stage = None


@dataclass(kw_only=True, slots=True)
class _Job:
    output: Path
    recipes: tuple[str, ...]
    budgets: tuple[str, ...]
    budget: Any
    devices: tuple[str, ...]
    threads: int | None
    seed: int
    force: bool
    progress: _Stages
    on_note: NoteSink | None
    log_path: Path | None
    choice: references.ReferenceChoice
    isolate: bool  # convert in a process of its own; the command line's job is one already
    notes: list[Note] = field(default_factory=list)

    def check_budgets(self) -> None:
        """Refuse a budget that cannot be read before any work is done."""
        for recipe in self.recipes:
            self._budget(recipe)

    def _budget(self, recipe: str, truth: _Truth | None = None) -> Budget:
        from tpu2edge.runtime_check.budget import (
            UNPROVED_LEAST_DB,
            budget_against_tpu,
            default_budget,
        )

        if self.budget is not None:
            return self.budget  # type: ignore[no-any-return]
        base = default_budget(recipe)
        if truth is not None and references.is_rounded(truth.reference):
            # The floor of captured outputs holds their faults, too: what they should be is better.
            least = UNPROVED_LEAST_DB if truth.is_given and not truth.expected else -math.inf
            base = budget_against_tpu(recipe, truth.expected or truth.floor, least_db=least)
        return _parse_budget(self.budgets, base)

    def _say(self, notes: Sequence[Note]) -> None:
        for note in notes:
            if note not in self.notes:
                self.notes.append(note)
                if self.on_note is not None:
                    self.on_note(note)

    def run(
        self,
        traced: Any,
        data: Any,
        provenance: Mapping[str, Any],
        notes: Sequence[Note] = (),
    ) -> Bundle:
        from tpu2edge.export.program import keep_global_state

        started = time.time()
        self.check_budgets()
        self._say(notes)
        with (
            keep_global_state(),  # importing litert_torch alone seeds torch and NumPy anew
            staged(self.output, force=self.force) as folder,
            _log_stream(self.log_path or folder / "log.txt") as log,
            _warnings_to(log),
        ):
            self.progress("trace")
            program: TracedProgram = traced()
            self._say(program.notes)
            samples: _Data = data(program)
            self._say(samples.notes)
            truth = self._references(folder, program, samples, provenance, log)
            base, nodes = self._lower(folder, program, log)
            report, models = self._family(folder, program, base, nodes, truth, log)
            self._write(folder, program, report, models, nodes, provenance, started)
            if self.log_path is not None:
                log.flush()
                shutil.copyfile(self.log_path, folder / "log.txt")
        self.progress("verify bundle")
        bundle = load_bundle(self.output)
        self.progress.end()
        return bundle

    def _references(
        self,
        folder: Path,
        program: TracedProgram,
        data: _Data,
        provenance: Mapping[str, Any],
        log: IO[bytes],
    ) -> _Truth:
        """All references of the bundle: the one asked for, the eager module, the oracle."""
        from tpu2edge.runtime_check.parity import noise_floor

        if not data.samples:
            raise DataError("there is no sample to check with", do="give --inputs with samples")
        main = self._main_outputs(program, data, log)
        where = folder / "reference"
        common: dict[str, Any] = {
            "data": data.source,
            "weights_sha256": provenance.get("weights_sha256"),
        }
        writers = {
            "oracle": _writer(where / "oracle", program, "oracle-f64", "f64", common, borrow=True)
        }
        if main is None:
            writers["eager"] = _writer(where, program, "eager", "f32", common)
        else:
            writers["main"] = _writer(
                where, program, main.provider, main.precision, common, extra=main.extra
            )
            writers["eager"] = _writer(
                where / "eager", program, "eager", "f32", common, borrow=True
            )
        oracles = program.oracles(sample.inputs for sample in data.samples)
        for index, sample in enumerate(data.samples):
            self.progress("reference: eager and float64", index, len(data.samples))
            known = data.eager.get(sample.id)
            oracle = next(oracles)
            if main is not None:
                outputs = main.outputs[index] if main.provider != "oracle-f64" else oracle
                writers["main"].add(sample, outputs)
            eager = program.eager(sample.inputs) if known is None else known
            writers["eager"].add(sample, eager)
            writers["oracle"].add(sample, oracle)
        if program.oracle_exceptions:
            names = ", ".join(program.oracle_exceptions)
            text = f"the float64 oracle computes {names} in the program's own precision"
            self._say([Note(code="oracle-exception", text=text)])
        closed = {
            name: writers[name].close() for name in ("main", "eager", "oracle") if name in writers
        }
        truth = _Truth(closed.get("main", closed["eager"]), closed["oracle"])
        if main is not None:
            truth.eager = closed["eager"]
            truth.floor = noise_floor(truth.reference, truth.oracle)
            if data.given is not None:
                truth.is_given = True
                truth.proof = self._prove(program, data, truth, log)
        return truth

    def _main_outputs(
        self, program: TracedProgram, data: _Data, log: IO[bytes]
    ) -> references.Predicted | None:
        """The outputs that the file is held to; None for the eager module's."""
        choice = self.choice
        if data.given is not None:
            given = data.given
            return references.Predicted(
                outputs=_LazyOutputs(given),
                provider=given.provider,
                precision=given.precision,
                extra=dict(given.extra),
                notes=(),
            )
        if choice.kind == "eager":
            return None
        if choice.kind == "f64":
            return references.Predicted(
                outputs=(), provider="oracle-f64", precision="f64", extra={}, notes=()
            )
        try:
            predicted = self._predict(program, data.samples, choice, log)
        except (ConversionError, DeviceError, OptionError) as error:
            if choice.kind != "auto":
                raise
            text = f"compared with the torch module in float32: no TPU prediction: {error.what}"
            self._say([Note(code="no-prediction", text=text)])
            return None
        self._say(predicted.notes)
        return predicted

    def _predict(
        self,
        program: TracedProgram,
        samples: Sequence[Sample],
        choice: references.ReferenceChoice,
        log: IO[bytes],
        twin: bool = False,
    ) -> references.Predicted:
        wanted = (program.program, program.signature, samples, choice)
        if self.isolate:
            return references.predict_isolated(*wanted, twin=twin, log=log, progress=self.progress)
        return references.predict_outputs(*wanted, twin=twin, progress=self.progress)

    def _prove(
        self, program: TracedProgram, data: _Data, truth: _Truth, log: IO[bytes]
    ) -> list[CaseReport]:
        """The first comparison: were the captured outputs made from these weights and inputs?"""
        from tpu2edge.runtime_check.parity import noise_floor

        reference, eager = truth.reference, truth.eager
        assert eager is not None
        precision = references.precision_of_label(reference.precision)
        if reference.provider.startswith("tpu-emulated"):
            return []
        if precision is None:
            if reference.precision != "f32":
                text = (
                    "whether the reference belongs to these weights is not proved: nothing here "
                    f"computes in the precision '{reference.precision}'"
                )
                self._say([Note(code="not-proved", text=text)])
                return []
            return references.prove_reference(
                reference, _LazyOutputs(eager), "the module on this CPU"
            )
        generation = references.generation_of(reference)
        choice = references.ReferenceChoice(
            kind="tpu-emulated", generation=generation, precision=precision
        )
        try:
            predicted = self._predict(program, data.samples, choice, log, twin=True)
        except (ConversionError, DeviceError, OptionError) as error:
            text = f"whether the reference belongs to these weights is not proved: {error.what}"
            self._say([Note(code="not-proved", text=f"{text} ({error.do})")])
            return []
        label = f"this CPU with TPU {generation} numerics"
        truth.expected = noise_floor(reference, truth.oracle, outputs=predicted.outputs)
        return references.prove_reference(reference, predicted.outputs, label, twin=predicted.twin)

    def _lower(
        self, folder: Path, program: TracedProgram, log: IO[bytes]
    ) -> tuple[Path, dict[str, Any]]:
        from tpu2edge.export.lower import Loweree, lower_isolated, lower_programs

        base = folder / "model.float32.tflite"
        loweree = Loweree(program.program, program.signature)
        if self.isolate:
            lowered = lower_isolated([loweree], base, log=log, progress=self.progress)
        else:
            lowered = lower_programs([loweree], base, progress=self.progress)
        self._say(lowered.notes)
        return base, dict(lowered.nodes)

    def _family(
        self,
        folder: Path,
        program: TracedProgram,
        base: Path,
        nodes: Mapping[str, Any],
        truth: _Truth,
        log: IO[bytes],
    ) -> tuple[ParityReport, list[tuple[EdgeModel, Budget]]]:
        from tpu2edge.quantize.apply import quantize_file
        from tpu2edge.runtime_check.budget import default_budget
        from tpu2edge.runtime_check.parity import check_model
        from tpu2edge.runtime_check.reference import Reference

        reports: list[ParityReport] = []
        models: list[tuple[EdgeModel, Budget]] = []
        quantized = [name for name in self.recipes if name != "float32"]
        # The float file's own outputs tell conversion from quantization.
        keep = folder / "reference" / ".float" if quantized else None
        float_outputs: Reference | None = None
        for recipe in dict.fromkeys(("float32", *quantized)):
            file = base
            if recipe != "float32":
                file = folder / f"model.{recipe}.tflite"
                self.progress(f"quantize {recipe}")
                quantize_file(base, file, recipe, log=log)
                _refuse_unchanged(base, file, recipe)
            model = _tested_model(file, program.signature, recipe)
            budget = self._budget(recipe, truth)
            for device in self.devices:
                report = check_model(
                    model,
                    truth.reference,
                    budget,
                    oracle=truth.oracle,
                    eager=truth.eager,
                    conversion=default_budget("float32"),
                    floor=truth.floor,
                    float_outputs=float_outputs,
                    device=device,
                    threads=self.threads,
                    constant_outputs=program.constant_outputs,
                    keep=keep if recipe == "float32" else None,
                    log=log,
                    progress=self.progress,
                )
                if recipe == "float32" and device == "host":
                    _refuse_unrunnable(report, file, nodes)
                if recipe in self.recipes:
                    reports.append(report)
            if keep is not None and float_outputs is None and (keep / "manifest.json").is_file():
                float_outputs = Reference.load(keep, verify=False)
            if recipe in self.recipes:
                models.append((model, budget))
        if keep is not None:
            shutil.rmtree(keep, ignore_errors=True)
        if "float32" not in self.recipes:
            base.unlink()
        merged = _merged(reports)
        return replace(merged, cases=(*truth.proof, *merged.cases)), models

    def _write(
        self,
        folder: Path,
        program: TracedProgram,
        report: ParityReport,
        models: Sequence[tuple[EdgeModel, Budget]],
        nodes: Mapping[str, Any],
        provenance: Mapping[str, Any],
        started: float,
    ) -> None:
        from tpu2edge.flatbuffer import read_tflite

        self.progress("write bundle")
        write_atomically(folder / "parity.json", canonical_json(report.to_json(times=False)))
        layers: dict[str, Any] = {}
        for model, _ in models:
            tensors = [t.name for graph in read_tflite(model.path).subgraphs for t in graph.tensors]
            layers.update(bundles.layers_of_tensors(tensors, nodes))
        write_atomically(folder / "layers.json", canonical_json(layers))
        self.progress.end()
        bundles.write_manifest(
            folder,
            {
                **provenance,
                "verdict": str(report.verdict),
                "signature": program.signature.to_json(),
                "constant_outputs": sorted(program.constant_outputs),
                "models": [
                    {
                        "recipe": model.recipe,
                        "file": model.path.name,
                        "sha256": model.sha256,
                        "size_bytes": model.size_bytes,
                        "signatures": [s.to_json() for s in model.signatures],
                        "budget": budget.to_json(),
                    }
                    for model, budget in models
                ],
                "notes": [{"code": note.code, "text": note.text} for note in self.notes],
                "seed": self.seed,
                "threads": self.threads,
                "devices": list(self.devices),
                "versions": _versions(),
                "times": {
                    "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
                    "stages_s": dict(self.progress.seconds),
                    "devices": dict(report.times),
                },
            },
        )


@dataclass(slots=True)
class _Truth:
    """What the files are compared with; ``eager`` is None when it is the reference itself."""

    reference: Reference
    oracle: Reference
    eager: Reference | None = None
    floor: dict[str, OutputMetrics] = field(default_factory=dict)
    is_given: bool = False  # captured elsewhere, not predicted here
    expected: dict[str, OutputMetrics] = field(default_factory=dict)  # the floor it should have
    proof: list[CaseReport] = field(default_factory=list)


class _LazyOutputs(Sequence[Any]):
    """A reference's outputs as a sequence, read one by one."""

    def __init__(self, reference: Reference) -> None:
        self._reference = reference

    def __len__(self) -> int:
        return len(self._reference)

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)  # what ends an iteration
        return self._reference.outputs(index)


def _writer(
    path: Path,
    program: TracedProgram,
    provider: str,
    precision: str,
    common: Mapping[str, Any],
    *,
    borrow: bool = False,
    extra: Mapping[str, Any] | None = None,
) -> ReferenceWriter:
    from tpu2edge.runtime_check.reference import ReferenceWriter

    return ReferenceWriter(
        path,
        program.signature,
        provider=provider,
        precision=precision,
        borrow_inputs=".." if borrow else None,
        extra=extra,
        **common,
    )


def _tested_model(file: Path, signature: Signature, recipe: str) -> EdgeModel:
    return EdgeModel(
        path=file,
        signatures=(signature,),
        recipe=recipe,
        sha256=sha256_of(file),
        size_bytes=file.stat().st_size,
    )


_NO_KERNEL = re.compile(r"[Dd]idn't find op for builtin opcode '(?P<op>\w+)'")
_NODE_FAILED = re.compile(r"Node number (?P<node>\d+) \((?P<op>\w+)\) failed to (?P<what>\w+)")
_CUSTOM = re.compile(r"Encountered unresolved custom op: (?P<op>[\w.]+)")


def _refuse_unrunnable(report: ParityReport, file: Path, nodes: Mapping[str, Any]) -> None:
    """Turn LiteRT's refusal of a file that was just converted into words about the model.

    Raises:
        LoweringError: an operator of the float file has no kernel, or its kernel refuses it.
    """
    from tpu2edge.errors import LoweringError

    reason = next(
        (r for case in report.cases for r in case.reasons if r.code.startswith("device-")), None
    )
    if reason is None:
        return
    missing = _NO_KERNEL.search(reason.text) or _CUSTOM.search(reason.text)
    failed = _NODE_FAILED.search(reason.text)
    if missing:
        raise LoweringError(
            f"LiteRT has no kernel for {missing['op']}, which the model was converted to",
            do="replace this part of the model by operators that LiteRT has, or leave it out",
            place=_place_in_file(file, nodes, missing["op"], None),
            step="check",
        )
    if failed:
        raise LoweringError(
            f"LiteRT cannot {failed['what']} the operator {failed['op']} of the converted file: "
            f"{reason.text.splitlines()[0]}",
            do="replace this part of the model by an equal form, or leave it out",
            place=_place_in_file(file, nodes, failed["op"], int(failed["node"])),
            step="check",
        )


def _place_in_file(
    file: Path, nodes: Mapping[str, Any], op: str, index: int | None
) -> Place | None:
    from tpu2edge.flatbuffer import read_tflite

    for graph in read_tflite(file).subgraphs:
        for operator in graph.operators:
            if operator.name != op or index not in (None, operator.index):
                continue
            # An output of the signature has no layer's name of its own: then the inputs tell.
            tensors = [
                graph.tensors[i].name for i in (*operator.outputs, *operator.inputs) if i >= 0
            ]
            for sources in bundles.layers_of_tensors(tensors, nodes).values():
                source = sources[0]
                return Place(
                    module=source["module"],
                    op=source["op"],
                    file=source.get("file"),
                    line=source.get("line"),
                )
    return None


def _refuse_unchanged(base: Path, file: Path, recipe: str) -> None:
    from tpu2edge.errors import QuantizationError
    from tpu2edge.flatbuffer import read_tflite, summarize

    before, after = (summarize(read_tflite(path)).weight_bytes_by_kind for path in (base, file))
    if before == after:
        raise QuantizationError(
            f"recipe '{recipe}' changed nothing: all weights are stored as before",
            do="use another recipe; layers that feed other operators than FULLY_CONNECTED, CONV_2D "
            "and the like are left float by ai-edge-quantizer",
            step="quantize",
        )


# ---------------------------------------------------------------------------------------- samples


def _synthetic(program: TracedProgram, count: int, seed: int) -> _Data:
    from tpu2edge.runtime_check.samples import synthetic_samples

    if count < 1:
        raise OptionError(f"--num-samples {count} makes no sense", do="give at least 1")
    made = synthetic_samples(program.example, program.signature.inputs, count=count, seed=seed)
    usable: list[Sample] = []
    notes: list[Note] = []
    eager: dict[str, Tensors] = {}
    for sample in made:
        try:
            eager[sample.id] = program.eager(sample.inputs)
        except Tpu2EdgeError:
            if sample.id == "example":
                raise
            text = f"synthetic sample '{sample.id}' is one that the module cannot take: left out"
            notes.append(Note(code="sample-left-out", text=text))
        else:
            usable.append(sample)
    usable.extend(_dynamic_ends(program, seed))
    notes.append(
        Note(
            code="synthetic-data",
            text=f"no --inputs: checked on the example and {len(usable) - 1} seeded variations of "
            "it (synthetic data)",
        )
    )
    source = {"kind": "synthetic", "seed": seed, "count": len(usable)}
    return _Data(usable, source, notes, eager)


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
        samples.append(Sample(id=f"{label}-size", inputs=made[-1].inputs))
    return samples


def _replayed(
    program: TracedProgram, source: Reference | Path | str | None, weights_sha256: str
) -> _Data:
    """The samples of a captured reference, which has to fit the program and its weights."""
    from tpu2edge.runtime_check.reference import Reference

    assert source is not None
    reference = source if isinstance(source, Reference) else _reference_of(Path(source))
    samples, notes = references.replay(reference, program.signature, weights_sha256)
    return _Data(samples, reference.data, notes, given=reference)


def _choice(reference: Reference | Path | str) -> references.ReferenceChoice:
    if not isinstance(reference, (Path, str)):
        return references.ReferenceChoice(kind="given")
    return references.ReferenceChoice.parse(reference)


def _given(program: TracedProgram, samples: Sequence[Any]) -> _Data:
    import numpy as np

    made: list[Sample] = []
    for index, item in enumerate(samples):
        identity = item.id if isinstance(item, Sample) else f"sample-{index}"
        tensors = item.inputs if isinstance(item, Sample) else item
        unknown = set(tensors) - {spec.name for spec in program.signature.inputs}
        missing = [s.name for s in program.signature.inputs if s.name not in tensors]
        if unknown or missing:
            raise DataError(
                f"sample '{identity}' has the inputs {sorted(tensors)}",
                do=f"give {[s.name for s in program.signature.inputs]}",
            )
        made.append(
            Sample(
                id=identity,
                inputs={
                    spec.name: _edge_array(np.asarray(_host(tensors[spec.name])), spec, identity)
                    for spec in program.signature.inputs
                },
            )
        )
    return _Data(made, {"kind": "given", "count": len(made)})


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


# ---------------------------------------------------------------------------------------- options


def _recipes(names: Sequence[str]) -> tuple[str, ...]:
    from tpu2edge.quantize.recipes import known_recipe

    if isinstance(names, str):
        names = (names,)
    if not names:
        raise OptionError("no recipe was given", do="give at least one, e.g. float32")
    return tuple(dict.fromkeys(known_recipe(name).name for name in names))


def _devices(names: Sequence[str]) -> tuple[str, ...]:
    for name in names:
        if name not in DEVICES:
            raise OptionError(f"unknown device '{name}'", do=f"known: {', '.join(DEVICES)}")
    return tuple(dict.fromkeys(names)) or ("host",)


def _threads(count: int | None) -> int | None:
    if count is not None and not 1 <= count <= 1024:
        raise OptionError(f"--threads {count} makes no sense", do="give 1 to 1024")
    return count


def _budget_texts(budget: Any) -> tuple[str, ...]:
    if budget is None or not isinstance(budget, (str, Sequence)):
        return ()
    return (budget,) if isinstance(budget, str) else tuple(budget)


def _parse_budget(texts: Sequence[str], base: Budget) -> Budget:
    from tpu2edge.runtime_check.budget import Budget

    return Budget.parse(*texts, base=base) if texts else base


_DYNAMIC = re.compile(r"^(?P<name>.+)\.(?P<axis>\d+)=(?P<min>\d+):(?P<max>\d+)$")


def parse_dynamic(texts: Sequence[str]) -> dict[str, dict[int, Dim]]:
    """``x.0=1:8`` as ``{"x": {0: Dim(1, 8)}}``.

    Raises:
        OptionError: a text of another form, or an empty range.
    """
    result: dict[str, dict[int, Dim]] = {}
    for text in texts:
        match = _DYNAMIC.match(text.strip())
        if match is None:
            raise OptionError(
                f"--dynamic '{text}' has another form", do="write NAME.AXIS=MIN:MAX, e.g. x.0=1:8"
            )
        low, high = int(match["min"]), int(match["max"])
        if not 1 <= low <= high:
            raise OptionError(f"--dynamic '{text}': no size is in {low}:{high}", do="give MIN:MAX")
        name, axis = match["name"], int(match["axis"])
        result.setdefault(name, {})[axis] = Dim(name=f"{name}_{axis}", min=low, max=high)
    return result


# ------------------------------------------------------------------------------------------ small


def _merged(reports: Sequence[ParityReport]) -> ParityReport:
    merged = reports[0]
    for report in reports[1:]:
        merged = merged.merged(report)
    return merged


def _digest(path: Path) -> str | None:
    if path.is_dir():
        import hashlib

        digest = hashlib.sha256()
        for file in sorted(p for p in path.rglob("*") if p.is_file()):
            digest.update(f"{file.relative_to(path)}|{sha256_of(file)}|".encode())
        return digest.hexdigest()
    return sha256_of(path)


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


@contextlib.contextmanager
def _log_stream(path: Path | None) -> Iterator[IO[bytes]]:
    with Path(path or os.devnull).open("ab") as stream:
        yield stream


@contextlib.contextmanager
def _warnings_to(log: IO[bytes]) -> Iterator[None]:
    """Python warnings that torch raises while it traces go to the log, not to the user's stderr."""

    def show(
        message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None
    ) -> None:
        log.write(warnings.formatwarning(message, category, filename, lineno).encode())

    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.showwarning = show
        yield
