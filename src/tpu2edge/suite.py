"""A bundle's comparisons as pytest sees them; :mod:`tpu2edge.pytest_plugin` is what pytest loads.

The tree of tests is ``DIR/manifest.json::RECIPE:DEVICE::SIGNATURE:OUTPUT``. A FAIL is a failure, a
device that broke an error at the test's setup, one that is not ready a skip.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tpu2edge.bundle import Bundle, load_bundle
from tpu2edge.checking import BundleSuite
from tpu2edge.errors import BundleError, DeviceError, OptionError, Tpu2EdgeError
from tpu2edge.options import known_devices, thread_count
from tpu2edge.runtime_check.devices.profiles import Profile
from tpu2edge.runtime_check.devices.runners import state_of
from tpu2edge.runtime_check.report.cases import CaseReport, ParityReport
from tpu2edge.types import Array, EdgeModel, Tensors, Verdict

if TYPE_CHECKING:
    from tpu2edge.runtime_check.devices.cache import CachedSession
    from tpu2edge.runtime_check.devices.client import Session
    from tpu2edge.runtime_check.reference import Reference

__all__ = ["BundleFile", "DeviceModel", "Suite", "add_bundle"]


@dataclass(slots=True)
class Suite:
    """What the command line asked for. The bundle is read and verified when tests are collected."""

    folder: Path
    devices: tuple[Profile, ...]
    threads: int | None = None
    strict: bool = False
    _loaded: BundleSuite | None = None
    _reports: dict[tuple[str, str, str], ParityReport | Tpu2EdgeError] = field(default_factory=dict)

    @classmethod
    def from_options(
        cls,
        bundle: Path,
        *,
        devices: Sequence[str],
        device_files: Sequence[Path],
        threads: int | None,
        strict: bool,
        folder: Path,
    ) -> Suite:
        """The suite; an unknown device or a folder that is no bundle is a usage error of pytest's."""
        found = (folder / bundle).resolve()
        try:
            if not (found / "manifest.json").is_file():
                raise BundleError(
                    f"--tpu2edge-bundle '{bundle}' is no bundle: it has no manifest.json",
                    do="give a folder made by `tpu2edge export`",
                )
            return cls(
                folder=found,
                devices=known_devices(devices, [folder / file for file in device_files]),
                threads=thread_count(threads),
                strict=strict,
            )
        except (BundleError, OptionError) as error:
            raise pytest.UsageError(str(error)) from None

    @property
    def manifest(self) -> Path:
        """The file that stands for the bundle in the tree of tests."""
        return self.folder / "manifest.json"

    @property
    def loaded(self) -> BundleSuite:
        """The verified bundle.

        Raises:
            BundleError: it is damaged.
        """
        if self._loaded is None:
            self._loaded = BundleSuite(load_bundle(self.folder))
        return self._loaded

    @property
    def bundle(self) -> Bundle:
        """The same without what it is compared with."""
        return self.loaded.bundle

    def parameters(self) -> dict[str, tuple[list[str], list[str]]]:
        """Fixture -> its parameters and their ids."""
        try:
            recipes = [model.recipe for model in self.bundle.models]
        except BundleError as error:
            raise pytest.UsageError(str(error)) from None
        names = [device.name for device in self.devices]
        return {"_tpu2edge_model": (recipes, recipes), "_tpu2edge_device": (names, names)}

    def model(self, recipe: str) -> EdgeModel:
        """The file of one recipe."""
        return self.bundle.model(recipe)

    def reference(self) -> Reference:
        """What the main signature is held to."""
        return self.bundle.reference()

    def ready(self, name: str) -> Profile:
        """The profile of that name; ends the test when the device cannot be used now."""
        (profile,) = (one for one in self.devices if one.name == name)
        state = state_of(profile)
        if not state.ready:
            how = f": run `{state.how}`" if state.how else ""
            text = f"device '{name}' is not ready: {state.text}{how}"
            if self.strict:
                pytest.fail(text, pytrace=False)
            pytest.skip(text)
        return profile

    def report(self, model: EdgeModel, profile: Profile, signature: str) -> ParityReport:
        """All outputs of one signature of one file on one device; run once, whatever comes of it.

        Raises:
            InputError: the bundle's parts do not fit one another.
        """
        key = (model.recipe, profile.name, signature)
        if key not in self._reports:
            try:
                found = self.loaded.check(model, signature, profile, threads=self.threads)
                self._reports[key] = found
            except Tpu2EdgeError as error:
                self._reports[key] = error
        report = self._reports[key]
        if isinstance(report, Tpu2EdgeError):
            raise report
        return report

    def runner(self, model: EdgeModel, profile: Profile) -> DeviceModel:
        """One file on one device, for tests of the user's own."""
        return DeviceModel(model=model, device=profile, threads=self.threads)


def add_bundle(config: pytest.Config, suite: Suite) -> None:
    """Have pytest collect the bundle besides what it was told to."""
    manifest = str(suite.manifest)
    # A worker of pytest-xdist is given the arguments of its parent, this one among them.
    if not any(arg.split("::")[0] == manifest for arg in config.args):
        config.args = [*config.args, manifest]


class BundleFile(pytest.File):
    """The bundle: one collector for each file on each device."""

    def __init__(self, *, suite: Suite, **more: Any) -> None:
        super().__init__(**more)
        self.suite = suite

    def collect(self) -> Iterator[pytest.Collector]:
        """A damaged bundle is an error of the collection, with the files that were changed."""
        try:
            models = self.suite.bundle.models
        except BundleError as error:
            raise self.CollectError(str(error)) from None
        for device in self.suite.devices:
            for model in models:
                yield _OnDevice.from_parent(
                    self, name=f"{model.recipe}:{device.name}", model=model, profile=device
                )


class _OnDevice(pytest.Collector):
    """One file on one device: a test for each output of each signature."""

    def __init__(
        self, *, model: EdgeModel, profile: Profile, parent: BundleFile, **more: Any
    ) -> None:
        super().__init__(parent=parent, **more)
        self.suite = parent.suite
        self.model = model
        self.profile = profile

    def collect(self) -> Iterator[pytest.Item]:
        """The outputs are the reference's: one that the file lacks is a failure, not no test."""
        bundle = self.suite.bundle
        for name in bundle.signatures:
            for spec in bundle.reference(signature=name).signature.outputs:
                yield _OutputTest.from_parent(
                    self, name=f"{name}:{spec.name}", signature=name, output=spec.name
                )


class _OutputTest(pytest.Item):
    """One output: the run (the first of its signature's outputs makes it) and the verdict."""

    parent: _OnDevice

    def __init__(self, *, signature: str, output: str, **more: Any) -> None:
        super().__init__(**more)
        self.signature = signature
        self.output = output
        self._case: CaseReport | None = None
        if self.config.pluginmanager.hasplugin("xdist"):
            # With --dist loadgroup the outputs of a run stay together.
            self.add_marker(pytest.mark.xdist_group(f"{self.parent.name}::{signature}"))

    def setup(self) -> None:
        """Run it; what goes wrong here is pytest's error, not a failure."""
        on = self.parent
        on.suite.ready(on.profile.name)
        try:
            report = on.suite.report(on.model, on.profile, self.signature)
        except Tpu2EdgeError as error:
            pytest.fail(str(error), pytrace=False)
        self._case = report.case(
            self.output, recipe=on.model.recipe, device=on.profile.name, signature=self.signature
        )
        if self._case.verdict is Verdict.ERROR:
            pytest.fail(_told(self._case), pytrace=False)

    def runtest(self) -> None:
        """Wanted and got, where the verdict is not PASS."""
        assert self._case is not None
        for name in ("sqnr_db_worst", "range_error", "max_abs"):
            if self._case.metrics is not None:
                value = getattr(self._case.metrics, name)
                self.user_properties.append((name, value))
        if self._case.verdict is not Verdict.PASS:
            pytest.fail(_told(self._case), pytrace=False)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        """The words above a failure."""
        return self.path, None, f"{self.parent.name} {self.name}"


def _told(case: CaseReport) -> str:
    """A case in words: what is wrong, with wanted and got, then the numbers."""
    lines = [f"{case.recipe} on {case.device}, output '{case.output}': {case.verdict}"]
    lines += [f"  {reason.text}" for reason in case.reasons]
    lines.append(f"  budget: {case.budget}")
    found = case.metrics
    if found is not None:
        lines.append(
            f"  got: SQNR {found.sqnr_db_worst} dB at worst, {found.sqnr_db_median} dB median, "
            f"error/range {found.range_error}, max abs {found.max_abs}, {found.samples} samples"
        )
    if case.against_host is not None:
        lines.append(f"  from this machine: error/range {case.against_host.range_error}")
    if case.in_words is not None:
        lines.append(f"  {case.in_words}")
    return "\n".join(lines)


class DeviceModel:
    """A file on a device. The process starts at the first run, and anew after one that broke."""

    def __init__(self, *, model: EdgeModel, device: Profile, threads: int | None = None) -> None:
        self.model = model
        self.device = device
        self._threads = threads
        self._session: Session | CachedSession | None = None

    @property
    def recipe(self) -> str:
        """What the file was made by: "float32", "dynamic_wi8_afp32"."""
        return self.model.recipe

    def run(self, inputs: Tensors, *, signature: str | None = None) -> dict[str, Array]:
        """The outputs by name, as real numbers, for one sample's inputs by name.

        Raises:
            DataError: the inputs do not fit.
            OptionError: the file has several signatures and none was named, or not this one.
            DeviceError: the device broke.
        """
        from tpu2edge.runtime_check.parity import fit_sample, opened, real_values

        try:
            if self._session is None:
                self._session = opened(self.model.path, self.device, self._threads)
            found = self._session.signatures
            known = [one for one in found if one.name == signature]
            if signature is None and len(found) == 1:
                known = list(found)
            if not known:
                what = f"no signature '{signature}'" if signature else "several signatures"
                raise OptionError(f"the file has {what}", do=f"it has {[s.name for s in found]}")
            specs = {spec.name: spec for spec in known[0].outputs}
            (stored,) = self._session.run(known[0].name, [fit_sample(inputs, known[0], "given")])
        except DeviceError:
            self.close()
            raise
        return {name: real_values(array, specs[name]) for name, array in stored.items()}

    def close(self) -> None:
        """End the device's process."""
        if self._session is not None:
            self._session.close()
            self._session = None
