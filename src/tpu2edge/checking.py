"""A comparison alone: a ``.tflite`` or a bundle with a reference.

``check_parity`` is the Python API, ``check_target`` the same from what the command line was given, and
:class:`BundleSuite` a bundle's own comparisons one by one, for the pytest plugin.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, reduce
from pathlib import Path
from typing import IO, TYPE_CHECKING

from tpu2edge import references
from tpu2edge.bundle import Bundle, load_bundle
from tpu2edge.errors import BundleError, OptionError
from tpu2edge.files import sha256_of
from tpu2edge.flatbuffer import read_tflite, signatures_of
from tpu2edge.logs import log_stream
from tpu2edge.options import budget_texts, parse_budget, ready_devices, thread_count
from tpu2edge.requests import CheckRequest
from tpu2edge.truths import Truth, truth_of
from tpu2edge.types import EdgeModel, Note, NoteSink, Progress, no_progress

if TYPE_CHECKING:
    from tpu2edge.runtime_check.budget import Budget
    from tpu2edge.runtime_check.devices.profiles import Profile
    from tpu2edge.runtime_check.parity import ParityReport
    from tpu2edge.runtime_check.reference import Reference

__all__ = ["BundleSuite", "check_parity", "check_target"]


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
        DeviceError: the device is not ready.
    """
    from tpu2edge.runtime_check.budget import default_budget
    from tpu2edge.runtime_check.parity import check_model
    from tpu2edge.runtime_check.reference import Reference

    (profile,) = ready_devices([device])
    if not isinstance(model, EdgeModel):
        model = _edge_model(Path(model))
    if not isinstance(reference, Reference):
        reference = Reference.load(reference)
    if not isinstance(budget, (str, Sequence)) and budget is not None:
        full = budget
    else:
        full = parse_budget(budget_texts(budget), default_budget(model.recipe))
    return check_model(
        model,
        reference,
        full,
        oracle=oracle,
        profile=profile,
        threads=thread_count(threads),
        signature=signature,
        progress=progress,
    )


class BundleSuite:
    """The comparisons that a bundle was made with, one file, signature and device at a time."""

    def __init__(self, bundle: Bundle) -> None:
        self.bundle = bundle
        self._truths: dict[str, Truth] = {}

    def truth(self, signature: str) -> Truth:
        """What the files' signature is held to."""
        if signature not in self._truths:
            self._truths[signature] = truth_of(self.bundle, signature)
        return self._truths[signature]

    @cached_property
    def budgets(self) -> dict[str, Budget]:
        """The budget that each recipe was held to."""
        from tpu2edge.runtime_check.budget import Budget

        models = self.bundle.manifest["models"]
        return {entry["recipe"]: Budget.from_json(entry["budget"]) for entry in models}

    @cached_property
    def outputs(self) -> frozenset[str]:
        """The outputs that a budget may name: of every signature, and those with a bound."""
        models = self.bundle.models
        found = {spec.name for m in models for s in m.signatures for spec in s.outputs}
        for entry in self.bundle.manifest["models"]:
            found.update(entry["budget"]["outputs"])
        return frozenset(found)

    def check(
        self,
        model: EdgeModel,
        signature: str,
        profile: Profile,
        *,
        threads: int | None = None,
        log: IO[bytes] | None = None,
    ) -> ParityReport:
        """One signature of one file on one device, held to the recipe's budget.

        Raises:
            InputError: the bundle's parts do not fit one another.
        """
        from tpu2edge.runtime_check.budget import default_budget
        from tpu2edge.runtime_check.parity import check_model

        truth = self.truth(signature)
        return check_model(
            model,
            truth.reference,
            self.budgets[model.recipe],
            oracle=truth.oracle,
            eager=truth.eager,
            conversion=default_budget("float32"),
            floor=truth.floor,
            profile=profile,
            threads=threads,
            signature=signature,
            constant_outputs=self.bundle.constant_outputs(signature),
            other_outputs=self.outputs,
            device_checks=True,
            log=log,
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

    Raises:
        InputError: the file, the samples or the budget do not fit one another.
        DeviceError: a device is not ready; nothing was run then.
    """
    from tpu2edge.runtime_check.budget import default_budget
    from tpu2edge.runtime_check.parity import ParityReport, check_model
    from tpu2edge.runtime_check.task_metric import load_task_metric

    devices = ready_devices(request.devices, request.device_files)
    metric = load_task_metric(request.metric) if request.metric is not None else None
    progress("load")
    reports: list[ParityReport] = []
    # What each signature is held to, and its outputs that depend on no input.
    checks: list[tuple[Truth, frozenset[str]]] = []
    if request.target.is_dir():
        bundle = load_bundle(request.target)
        suite = BundleSuite(bundle)
        known = bundle.signatures
        if request.reference:
            given = references.references_in(request.reference, request.signature)
            checks = [
                (Truth(one, None), bundle.constant_outputs(name))
                for name, one in _by_signature(given, known, request.signature).items()
            ]
        else:
            names = known if request.signature is None else (request.signature,)
            checks = [(suite.truth(name), bundle.constant_outputs(name)) for name in names]
        models: Sequence[EdgeModel] = bundle.models
        budgets = {m.recipe: parse_budget(request.budgets, suite.budgets[m.recipe]) for m in models}
        others = suite.outputs
    else:
        if request.reference is None:
            raise OptionError(
                "a .tflite alone has nothing to be compared with",
                do="give --reference: a reference folder or a bundle",
            )
        models = (_edge_model(request.target),)
        given = references.references_in(request.reference, request.signature)
        known = tuple(one.name for one in signatures_of(read_tflite(request.target)))
        checks = [
            (Truth(one, None), frozenset[str]())
            for one in _by_signature(given, known, request.signature).values()
        ]
        budgets = {
            "float32": parse_budget(request.budgets, default_budget("float32")),
        }
        others = frozenset(
            spec.name for one, _ in checks for spec in one.reference.signature.outputs
        )
    if request.signature is None and on_note is not None and len(known) > len(checks):
        checked = {one.reference.signature.name for one, _ in checks}
        left = ", ".join(f"'{name}'" for name in known if name not in checked)
        text = f"the reference has no samples for the signatures {left}: they are not checked"
        on_note(Note(code="unchecked-signatures", text=text))
    with log_stream(log_path) as log:
        for device in devices:
            for model in models:
                for place, (truth, constant) in enumerate(checks):
                    report = check_model(
                        model,
                        truth.reference,
                        budgets[model.recipe],
                        oracle=truth.oracle,
                        eager=truth.eager,
                        conversion=default_budget("float32"),
                        floor=truth.floor,
                        profile=device,
                        threads=thread_count(request.threads),
                        signature=request.signature,
                        constant_outputs=constant,
                        other_outputs=others,
                        metric=metric if place == 0 else None,
                        device_checks=True,
                        log=log,
                        progress=progress,
                    )
                    reports.append(report)
    merged = reduce(ParityReport.merged, reports)
    if request.junit is not None:
        from tpu2edge.runtime_check.report.junit import write_junit

        write_junit(request.junit, merged, suite=request.target.name)
    return merged


def _by_signature(
    found: Sequence[Reference], known: Sequence[str], wanted: str | None
) -> dict[str, Reference]:
    """The files' signatures that references are for: by name, but a lone one for the only signature.

    Raises:
        OptionError: a reference is of a signature that the files do not have.
    """
    if len(found) == 1 and (wanted is not None or len(known) == 1):
        return {wanted or known[0]: found[0]}
    by_name = {one.signature.name: one for one in found}
    strange = [f"'{name}'" for name in by_name if name not in known]
    if known and strange:
        listed = ", ".join(f"'{name}'" for name in known)
        raise OptionError(
            f"the reference is of the signature {', '.join(strange)}, here there is {listed}",
            do="--signature NAME says which one it is for"
            if len(found) == 1
            else "leave it out, or capture it with --signature-name NAME",
        )
    return {name: by_name[name] for name in known or by_name if name in by_name}


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
