"""Outputs of a device by what they depend on: a second run of an unchanged case costs nothing.

The key is the sha256 over the file, the profile as far as it changes numbers, the versions behind
the device (LiteRT, emulator, worker, CPU features), the signature and one sample's inputs. Each
sample is a file of its own, so that a few new samples cost a few runs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, Self

import numpy as np

from tpu2edge.files import canonical_json, sha256_of, sha256_of_arrays, write_atomically
from tpu2edge.runtime_check.devices.checks import DeviceChecks, check_session
from tpu2edge.runtime_check.devices.client import DEFAULT_TIMEOUT_S, Session
from tpu2edge.runtime_check.devices.profiles import Profile
from tpu2edge.runtime_check.devices.runners import launch_of
from tpu2edge.types import Array, Signature, Tensors

__all__ = ["CachedSession", "clear_cache", "outputs_folder"]

#: 1: 2026-12-01, first one. In the key, so that older files are never read as newer ones.
FORMAT = 1

# Samples are looked up in runs of at most this many (or this many bytes), the missing ones of a run
# going to the device together.
_BLOCK_SAMPLES = 64
_BLOCK_BYTES = 32 << 20

# When the folder holds more than this, the outputs that were not used for longest go.
_MOST_BYTES = 2 << 30


def outputs_folder() -> Path:
    """Where outputs are kept: ``$XDG_CACHE_HOME/tpu2edge/outputs``."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "tpu2edge" / "outputs"


class CachedSession:
    """A :class:`Session` that starts the device only for samples it has no outputs of.

    ``signatures``, ``times``, ``peak_rss_kb`` and ``run`` as of a Session; what was not measured now
    is what was measured when the outputs were made. A failure is never kept.

    Args:
        folder: where outputs are kept; :func:`outputs_folder` if None.
        threads: in place of the profile's.

    Raises:
        DeviceError: the device is not ready (even for what is kept: the key needs its versions).
    """

    def __init__(
        self,
        model: Path,
        profile: Profile,
        *,
        threads: int | None = None,
        folder: Path | None = None,
        log: IO[bytes] | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        self.model = model
        self.device = profile.name
        self.launch = launch_of(profile)
        self.hits = self.misses = 0
        self.times: dict[str, float] = {}
        self.peak_rss_kb = 0
        self._threads = threads
        self._log = log
        self._timeout_s = timeout_s
        self._session: Session | None = None
        self._root = folder or outputs_folder()
        self._folder = self._root / _key(model, profile, self.launch.versions, threads)
        known = self._read_record()
        self.signatures: tuple[Signature, ...] = (
            known if known is not None else self._started().signatures
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the device's process, if one was started, and keep the folder small."""
        if self._session is None:
            return
        self._write_record()
        self._session.close()
        self._session = None
        _shrink(self._root)

    def run(self, signature: str, samples: Iterable[Tensors]) -> Iterator[dict[str, Array]]:
        """The outputs of each sample, by name, in order.

        Raises:
            DataError, DeviceError: as of :meth:`Session.run`.
        """
        for block in _blocks(samples):
            paths = [self._folder / f"{_sample_key(signature, one)}.safetensors" for one in block]
            found = [_read(path) for path in paths]
            wanted = [one for one, outputs in zip(block, found, strict=True) if outputs is None]
            self.hits += len(block) - len(wanted)
            self.misses += len(wanted)
            fresh = iter(self._run(signature, wanted)) if wanted else iter(())
            for path, outputs in zip(paths, found, strict=True):
                if outputs is None:
                    outputs = next(fresh)
                    self._keep(path, outputs)
                yield outputs

    def checks(
        self, signature: str, sample: Tensors, outputs: Tensors, *, threads: tuple[int, int]
    ) -> DeviceChecks:
        """What :func:`check_session` finds, or what it found when the outputs were made.

        Raises:
            DeviceError: as of :func:`check_session`.
        """
        key = f"{_sample_key(signature, sample)}.checks.json"
        try:
            kept = DeviceChecks.from_json(json.loads((self._folder / key).read_text()))
            return replace(kept, device=self.device)  # a name is not in the folder's key
        except (OSError, ValueError, KeyError, TypeError):
            pass  # not made yet, or damaged
        # Copies: the session's own are of the last run, and get the check's runs besides.
        times, peak = dict(self.times), self.peak_rss_kb
        session = self._started()
        if not times.get("samples"):  # outputs are kept, what was measured then is lost
            (_,) = session.run(signature, [sample])
            times, peak = dict(session.times), session.peak_rss_kb
        found = check_session(
            session,
            signature,
            sample,
            outputs,
            threads=threads,
            times=times,
            peak_rss_kb=peak,
            log=self._log,
            timeout_s=self._timeout_s,
        )
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self._folder / key, canonical_json(found.to_json()))
        return found

    def _run(self, signature: str, samples: list[Tensors]) -> Iterator[dict[str, Array]]:
        session = self._started()
        for outputs in session.run(signature, samples):
            self.times = dict(session.times)
            self.peak_rss_kb = session.peak_rss_kb
            yield outputs

    def _started(self) -> Session:
        if self._session is None:
            self._session = Session(
                self.model,
                launch=self.launch,
                threads=self._threads,
                log=self._log,
                timeout_s=self._timeout_s,
            )
        return self._session

    def _keep(self, path: Path, outputs: dict[str, Array]) -> None:
        from safetensors.numpy import save

        whole = {name: np.ascontiguousarray(array) for name, array in outputs.items()}
        shapes = {name: list(array.shape) for name, array in outputs.items()}
        with contextlib.suppress(OSError):  # a full or read-only disk costs the next run, no more
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, save(whole, metadata={"shapes": json.dumps(shapes)}))

    def _read_record(self) -> tuple[Signature, ...] | None:
        try:
            record = json.loads((self._folder / "session.json").read_text())
            self.times = record["times"]
            self.peak_rss_kb = record["peak_rss_kb"]
            return tuple(Signature.from_json(item) for item in record["signatures"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _write_record(self) -> None:
        record = {
            "signatures": [signature.to_json() for signature in self.signatures],
            "times": self.times,
            "peak_rss_kb": self.peak_rss_kb,
        }
        if not self.times.get("samples"):
            return
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self._folder / "session.json", canonical_json(record))


def clear_cache(folder: Path | None = None) -> int:
    """Remove all kept outputs; gives how many bytes that freed."""
    return _shrink(folder or outputs_folder(), most=0)


def _key(model: Path, profile: Profile, versions: Any, threads: int | None) -> str:
    data = profile.to_json()
    for words in ("name", "description", "tolerance"):  # change no number
        del data[words]
    everything = {
        "format": FORMAT,
        "model": sha256_of(model),
        "profile": data,
        "threads": threads or profile.threads,
        "versions": dict(versions),
    }
    return hashlib.sha256(canonical_json(everything).encode()).hexdigest()


def _sample_key(signature: str, sample: Tensors) -> str:
    arrays = {name: np.asarray(array) for name, array in sample.items()}
    text = f"{signature}\0{sha256_of_arrays(arrays)}"
    return hashlib.sha256(text.encode()).hexdigest()


def _read(path: Path) -> dict[str, Array] | None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            shapes = json.loads(file.metadata()["shapes"])
            outputs = {name: file.get_tensor(name).reshape(shapes[name]) for name in shapes}
        os.utime(path)
    except FileNotFoundError:
        return None
    except (OSError, SafetensorError, ValueError, KeyError, TypeError):
        with contextlib.suppress(OSError):
            path.unlink()  # damaged: made anew
        return None
    return outputs


def _blocks(samples: Iterable[Tensors]) -> Iterator[list[Tensors]]:
    block: list[Tensors] = []
    size = 0
    for sample in samples:
        block.append(sample)
        size += sum(np.asarray(array).nbytes for array in sample.values())
        if len(block) >= _BLOCK_SAMPLES or size >= _BLOCK_BYTES:
            yield block
            block, size = [], 0
    if block:
        yield block


def _shrink(root: Path, most: int = _MOST_BYTES) -> int:
    files = []
    for path in root.glob("*/*"):
        with contextlib.suppress(OSError):
            stat = path.stat()
            files.append((stat.st_mtime, stat.st_size, path))
    total = sum(size for _, size, _ in files)
    freed = 0
    for _, size, path in sorted(files):
        if total - freed <= most:
            break
        with contextlib.suppress(OSError):
            path.unlink()
            freed += size
    if most == 0:
        for folder in root.glob("*"):
            with contextlib.suppress(OSError):
                folder.rmdir()
    return freed
