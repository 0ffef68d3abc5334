"""Fetches what emulated devices need into a cache, without root, from where the user gets packages.

Python packages come through the user's own pip, the rest through the user's own apt sources; no
host is named here. Everything lies in ``$XDG_CACHE_HOME/tpu2edge/devices/<LiteRT's version>``, in
parts that appear in one rename each: what was fetched before an interruption is not fetched again.
Each part records where it is from and the digests of its files (``part.json``).
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpu2edge.errors import DeviceError
from tpu2edge.files import canonical_json, sha256_of
from tpu2edge.runtime_check.devices.host import litert_version

__all__ = [
    "Part",
    "apt_closure",
    "apt_lists",
    "apt_newer",
    "apt_offers",
    "apt_packages",
    "backports_suite",
    "cache_folder",
    "new_part",
    "part_named",
    "pip_wheel",
    "size_bytes",
    "unpack",
]

_RECORD = "part.json"
_DOWNLOAD_TIMEOUT_S = 900.0


def cache_folder() -> Path:
    """Where the parts for the installed LiteRT lie; it need not exist."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "tpu2edge" / "devices" / litert_version()


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One thing that was fetched: a folder, and what is recorded of it."""

    folder: Path
    source: str  # "ai_edge_litert-2.3.0-...whl by pip", "qemu-user 1:7.2 by apt"
    files: Mapping[str, str]  # path in the folder -> sha256
    facts: Mapping[str, Any]  # the runner's own: version, CPUs, ...

    def damaged(self) -> str:
        """Why it cannot be used (a file is gone or changed); empty when it can."""
        for name, digest in self.files.items():
            path = self.folder / name
            if not path.is_file():
                return f"{path} is gone"
            if sha256_of(path) != digest:
                return f"{path} is not what was fetched"
        return ""


def part_named(name: str) -> Part | None:
    """The part of that name, if all of its files are there."""
    folder = cache_folder() / name
    try:
        record = json.loads((folder / _RECORD).read_text())
        part = Part(
            folder=folder,
            source=record["source"],
            files=record["files"],
            facts=record["facts"],
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return part if all((folder / file).is_file() for file in part.files) else None


def forget_part(name: str) -> None:
    """Remove a part, so that it is fetched anew."""
    shutil.rmtree(cache_folder() / name, ignore_errors=True)


@contextlib.contextmanager
def new_part(name: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    """A folder to fill and a record to write to; both take their place in one rename at the end.

    The record's "source" and "facts" are the caller's; digests are taken here.
    """
    root = cache_folder()
    try:
        root.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=root))
    except OSError as err:
        raise DeviceError(
            f"the cache '{root}' cannot be written: {err.strerror}",
            do="set XDG_CACHE_HOME to a folder of yours",
            step="install",
        ) from err
    try:
        record: dict[str, Any] = {"source": "", "facts": {}}
        yield temporary, record
        files = sorted(p for p in temporary.rglob("*") if p.is_file() and not p.is_symlink())
        record["files"] = {p.relative_to(temporary).as_posix(): sha256_of(p) for p in files}
        (temporary / _RECORD).write_text(canonical_json(record))
        temporary.chmod(0o755)
        target = root / name
        shutil.rmtree(target, ignore_errors=True)
        try:
            temporary.rename(target)
        except OSError:
            if part_named(name) is None:  # else another process was faster
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def size_bytes(*names: str) -> int:
    """Bytes of the named parts on disk."""
    folders = [cache_folder() / name for name in names]
    files = [p for folder in folders for p in folder.rglob("*") if not p.is_symlink()]
    return sum(p.stat().st_size for p in files if p.is_file())


def pip_wheel(
    package: str,
    folder: Path,
    *,
    version: str = "",
    platforms: Sequence[str] = (),
    python: str = f"{sys.version_info.major}.{sys.version_info.minor}",
) -> Path:
    """The wheel of a package, fetched by the user's own pip into ``folder``.

    ``python`` is the version that it is for where ``platforms`` are not this machine's.

    Raises:
        DeviceError: there is no pip, or it cannot get the wheel; pip's own last words.
    """
    if _has_pip():
        pip = [sys.executable, "-m", "pip"]
    elif found := shutil.which("pip3") or shutil.which("pip"):
        pip = [found]
    else:
        raise DeviceError(
            "this Python has no pip to fetch packages with",
            do=f"run `{sys.executable} -m ensurepip`",
            step="install",
        )
    command = [*pip, "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder)]
    for name in platforms:
        command += ["--platform", name]
    if platforms:
        command += ["--python-version", python]
    wanted = f"{package}=={version}" if version else package
    before = set(folder.glob("*.whl"))
    _run([*command, wanted], f"pip cannot get {wanted} for {', '.join(platforms) or 'here'}")
    new = set(folder.glob("*.whl")) - before
    if len(new) != 1:
        raise DeviceError(f"pip brought no wheel of {wanted}", step="install")
    return new.pop()


def _has_pip() -> bool:
    """Asked of the metadata: setuptools' import hook warns when an import system looks for pip."""
    try:
        importlib.metadata.version("pip")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def unpack(wheel: Path, member: str, target: Path) -> None:
    """One file out of a wheel (a zip archive), whose checksum is verified on the way."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as sink:
                shutil.copyfileobj(source, sink)
    except (OSError, KeyError, zipfile.BadZipFile) as err:
        raise DeviceError(
            f"{wheel.name} holds no usable '{member}': {err}", step="install"
        ) from err


def apt_packages(
    packages: Sequence[str], folder: Path, *, options: Sequence[str] = ()
) -> dict[str, str]:
    """Fetch packages through the user's apt sources and unpack them into ``folder``; no root.

    apt checks the signatures and digests. Where the system's package lists are empty or old, lists
    of our own are made, in the cache. Gives the version of each package. ``options`` are apt's own
    (:func:`apt_newer`, :func:`apt_lists`), whose lists are there already.

    Raises:
        DeviceError: there is no apt here, or it cannot get a package; apt's own last words.
    """
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise DeviceError(
            f"{', '.join(packages)}: there is no apt here to fetch them with",
            do="use a Debian or Ubuntu machine or container",
            step="install",
        )
    versions: dict[str, str] = {}
    with tempfile.TemporaryDirectory(dir=folder.parent) as place:
        why = f"apt cannot get {', '.join(packages)}"
        try:
            _run(["apt-get", "download", "-q", *options, *packages], why, cwd=place)
        except DeviceError:
            if options:
                raise
            _run(["apt-get", "download", "-q", *apt_lists(), *packages], why, cwd=place)
        for file in sorted(Path(place).glob("*.deb")):
            _run(["dpkg-deb", "-x", str(file), str(folder)], f"{file.name} cannot be unpacked")
            fields = _run(["dpkg-deb", "-f", str(file), "Package", "Version"], "dpkg-deb failed")
            found = dict(line.split(": ", 1) for line in fields.splitlines() if ": " in line)
            versions[found["Package"]] = found["Version"]
    missing = set(packages) - set(versions)
    if missing:
        raise DeviceError(f"apt brought no {', '.join(sorted(missing))}", step="install")
    return versions


def apt_newer(package: str, least: int) -> list[str]:
    """apt's options by which ``package`` has at least the major version ``least``.

    Looks in the user's sources first; on Debian then in the backports of the user's own release and
    mirror, which are listed in the cache only, so that the system stays as it is.

    Raises:
        DeviceError: neither has it; the message says what they have.
    """
    options: list[str] = []
    offered = _offered(package, options)
    if not offered:  # the system's lists are empty
        options = apt_lists()
        offered = _offered(package, options)
    for version, suite in offered:
        if _major(version) >= least:
            return [*options, "-o", f"APT::Default-Release={suite}"]
    best = offered[0][0] if offered else "none"
    suite = backports_suite()
    mirror = _mirror(options) if suite else ""
    if not suite or not mirror:
        raise DeviceError(
            f"{package} {least} or newer is needed, your apt sources have {best}",
            do=f"use a system with {package} {least}, or add a source that has it",
            step="install",
        )
    options = _backports(mirror, suite)
    _run(
        ["apt-get", "update", "-q", *options],
        f"your apt sources have {package} {best}, and {suite} cannot be read from the same mirror",
    )
    if not any(_major(version) >= least for version, _ in _offered(package, options)):
        raise DeviceError(f"{suite} has no {package} {least} or newer", step="install")
    return options


def backports_suite() -> str:
    """Debian's suite of newer packages for this release, "bookworm-backports"; empty elsewhere."""
    release = platform.freedesktop_os_release() if Path("/etc/os-release").exists() else {}
    codename = release.get("VERSION_CODENAME", "")
    return f"{codename}-backports" if release.get("ID") == "debian" and codename else ""


def apt_offers(package: str) -> str:
    """The newest version of a package in the system's lists; empty when they have none."""
    if shutil.which("apt-cache") is None:
        return ""
    offered = _offered(package, ())
    return offered[0][0] if offered else ""


def apt_closure(packages: Sequence[str], options: Sequence[str]) -> list[str]:
    """What ``packages`` depend on, in the end, that is not installed here."""
    skip = [f"--no-{kind}" for kind in ("recommends", "suggests", "conflicts", "breaks")]
    skip += ["--no-replaces", "--no-enhances"]
    command = ["apt-cache", "depends", "--recurse", *skip, *options, *packages]
    text = _run(command, "apt does not tell what packages depend on")
    names = {line.strip() for line in text.splitlines() if line[:1].isalnum()}
    installed = _run(
        ["dpkg-query", "-W", "-f", "${db:Status-Status} ${Package}\n"], "dpkg-query failed"
    )
    have = {line.split()[1] for line in installed.splitlines() if line.startswith("installed ")}
    return sorted(name for name in names - have if ":" not in name)


def _offered(package: str, options: Sequence[str]) -> list[tuple[str, str]]:
    """Version and suite of all candidates, the newest first."""
    text = _run(["apt-cache", *options, "madison", package], f"apt knows no {package}")
    rows = [[word.strip() for word in line.split("|")] for line in text.splitlines()]
    return [(row[1], row[2].split()[1].split("/")[0]) for row in rows if len(row) == 3]


def _major(version: str) -> int:
    number = version.split(":")[-1].split(".")[0]
    return int(number) if number.isdigit() else 0


def _mirror(options: Sequence[str]) -> str:
    """Where the user's sources have the release's own main part from."""
    codename = platform.freedesktop_os_release().get("VERSION_CODENAME", "")
    text = _run(
        [
            "apt-get",
            *options,
            "indextargets",
            "--format",
            "$(REPO_URI) $(RELEASE) $(COMPONENT)",
            "Created-By: Packages",
        ],
        "apt does not tell its sources",
    )
    rows = [line.split() for line in text.splitlines()]
    return next((row[0] for row in rows if row[1:] == [codename, "main"]), "")


def _backports(mirror: str, suite: str) -> list[str]:
    """Options by which apt sees the release and its backports, and nothing else."""
    folder = cache_folder().parent / "apt-backports"
    for name in ("lists/partial", "archives/partial"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    keyring = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
    signed = f"[signed-by={keyring}] " if keyring.exists() else ""
    lines = [f"deb {signed}{mirror} {name} main\n" for name in (suite.split("-")[0], suite)]
    (folder / "sources.list").write_text("".join(lines))
    options = {
        "Dir::State::lists": folder / "lists",
        "Dir::Cache": folder,
        "Dir::Cache::archives": folder / "archives",
        "Dir::Etc::sourcelist": folder / "sources.list",
        "Dir::Etc::sourceparts": "-",
        "Debug::NoLocking": "1",
        "Acquire::Languages": "none",
        "APT::Default-Release": suite,
    }
    return [word for name, value in options.items() for word in ("-o", f"{name}={value}")]


def apt_dependencies(*packages: str, options: Sequence[str] = ()) -> list[str]:
    """Names of the packages that ``packages`` depend on directly, as apt would choose them."""
    command = ["apt-cache", "depends", "--important", *options, *packages]
    text = _run(command, f"apt knows no {' or no '.join(packages)}")
    names = [line.split(":", 1)[1].strip() for line in text.splitlines() if "Depends:" in line]
    return sorted({name for name in names if not name.startswith("<")} - set(packages))


def is_installed(package: str) -> bool:
    """Whether the system has a package."""
    done = subprocess.run(
        ["dpkg-query", "-W", "-f", "${db:Status-Status}", package],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip().startswith("installed")


def apt_lists(architecture: str = "") -> list[str]:
    """Options by which apt keeps its lists and archives in our cache, and needs no root; up to date.

    ``architecture`` is Debian's name of one that is not this machine's own.
    """
    folder = cache_folder().parent / (f"apt-{architecture}" if architecture else "apt")
    for name in ("lists/partial", "archives/partial"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    settings = {
        "Dir::State::lists": folder / "lists",
        "Dir::Cache": folder,
        "Dir::Cache::archives": folder / "archives",
        "Debug::NoLocking": "1",
        "Acquire::Languages": "none",
    }
    if architecture:
        settings |= {"APT::Architecture": architecture, "APT::Architectures": architecture}
    options = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
    _run(["apt-get", "update", "-q", *options], "apt cannot update its lists")
    return options


def needs_linux_x86() -> str:
    """Why emulation by QEMU's user mode or CPUID faulting is impossible here; empty when not."""
    system, machine = platform.system(), platform.machine()
    if system != "Linux":
        return f"it needs Linux, this is {system}: run tpu2edge in a Linux container or machine"
    if machine not in ("x86_64", "AMD64"):
        return f"it is made for x86-64 machines, this is {machine}"
    return ""


def _run(command: Sequence[str], why: str, cwd: str | None = None) -> str:
    """Stdout of a command; ``why`` begins the message when it fails."""
    env = {**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(
            list(command),
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            timeout=_DOWNLOAD_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as err:
        raise DeviceError(
            f"{why}: no end in {_DOWNLOAD_TIMEOUT_S:.0f} s", do="try again", step="install"
        ) from err
    except OSError as err:
        raise DeviceError(f"{why}: {err}", step="install") from err
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        words = [line for line in lines if not line.startswith(("WARNING:", "W:"))] or lines
        tail = "".join(f"\n    {line}" for line in words[-4:])
        raise DeviceError(
            f"{why}{tail}",
            do="check the network and your package sources, then try again",
            step="install",
        )
    return done.stdout
