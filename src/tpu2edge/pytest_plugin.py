"""A bundle as tests: ``pytest --tpu2edge-bundle DIR [--tpu2edge-device NAME,…]``.

One test for each file, device, signature and output; the outputs of a signature share one run. Without
the option this plugin does nothing and imports nothing. For tests of your own there are the fixtures
``edge_model``, ``reference`` and ``device`` (docs/devices.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tpu2edge.runtime_check.devices.profiles import Profile
    from tpu2edge.runtime_check.reference import Reference
    from tpu2edge.suite import DeviceModel, Suite
    from tpu2edge.types import EdgeModel

__all__: list[str] = []

_SUITE = pytest.StashKey["Suite"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options; each has a line in ``pytest --help``."""
    group = parser.getgroup("tpu2edge", "tpu2edge: LiteRT files on devices")
    group.addoption(
        "--tpu2edge-bundle",
        metavar="DIR",
        help="collect a test for each file, device, signature and output of this bundle",
    )
    group.addoption(
        "--tpu2edge-device",
        metavar="NAME,…",
        action="append",
        default=[],
        help="devices to run its files on, as for `tpu2edge check --device`; host by default",
    )
    group.addoption(
        "--tpu2edge-device-file",
        metavar="TOML",
        action="append",
        default=[],
        help="a device profile of your own, to run the files on, too",
    )
    group.addoption(
        "--tpu2edge-threads",
        metavar="N",
        type=int,
        help="LiteRT threads; the device's own by default",
    )
    group.addoption(
        "--tpu2edge-strict",
        action="store_true",
        help="a device that is not ready is an error, not a skip",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Reads the bundle and the profiles, when there is one."""
    option = config.option
    if option.tpu2edge_bundle is None:
        if option.tpu2edge_device or option.tpu2edge_device_file or option.tpu2edge_strict:
            raise pytest.UsageError("--tpu2edge-… options need --tpu2edge-bundle DIR")
        return
    from tpu2edge.suite import Suite, add_bundle

    suite = Suite.from_options(
        Path(option.tpu2edge_bundle),
        devices=option.tpu2edge_device,
        device_files=[Path(file) for file in option.tpu2edge_device_file],
        threads=option.tpu2edge_threads,
        strict=option.tpu2edge_strict,
        folder=config.invocation_params.dir,
    )
    config.stash[_SUITE] = suite
    add_bundle(config, suite)


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """The manifest of the bundle that was asked for stands for its tests."""
    suite = parent.config.stash.get(_SUITE, None)
    if suite is None or file_path != suite.manifest:
        return None
    from tpu2edge.suite import BundleFile

    # Outside of pytest's root directory the file would have no name at all.
    inside = file_path.is_relative_to(parent.config.rootpath)
    nodeid = None if inside else f"{suite.folder.name}/{file_path.name}"
    return BundleFile.from_parent(parent, path=file_path, nodeid=nodeid, suite=suite)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests that use the fixtures run for each model and device."""
    suite = metafunc.config.stash.get(_SUITE, None)
    if suite is None:
        return
    for name, (values, ids) in suite.parameters().items():
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, values, ids=ids, indirect=True, scope="session")


@pytest.fixture(scope="session")
def _tpu2edge_suite(pytestconfig: pytest.Config) -> Suite:
    suite = pytestconfig.stash.get(_SUITE, None)
    if suite is None:
        pytest.skip("needs a bundle: pytest --tpu2edge-bundle DIR")
    return suite


@pytest.fixture(scope="session")
def _tpu2edge_device(request: pytest.FixtureRequest, _tpu2edge_suite: Suite) -> Profile:
    return _tpu2edge_suite.ready(request.param)


@pytest.fixture(scope="session")
def _tpu2edge_model(request: pytest.FixtureRequest, _tpu2edge_suite: Suite) -> EdgeModel:
    return _tpu2edge_suite.model(request.param)


@pytest.fixture(scope="session")
def device(_tpu2edge_device: Profile) -> Profile:
    """Each device's profile: ``device.name``, ``device.tolerance``."""
    return _tpu2edge_device


@pytest.fixture(scope="session")
def reference(_tpu2edge_suite: Suite) -> Reference:
    """The bundle's samples and what they should give: ``reference.inputs(0)``, ``.outputs(0)``."""
    return _tpu2edge_suite.reference()


@pytest.fixture(scope="session")
def edge_model(
    _tpu2edge_suite: Suite, _tpu2edge_model: EdgeModel, _tpu2edge_device: Profile
) -> Iterator[DeviceModel]:
    """Each file on each device: ``edge_model.run(inputs)`` gives the outputs by name."""
    runner = _tpu2edge_suite.runner(_tpu2edge_model, _tpu2edge_device)
    yield runner
    runner.close()
