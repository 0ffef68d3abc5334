"""ARM cores as QEMU's user mode knows them, and the files by which a process learns its core.

XNNPACK picks kernels by the features that the kernel tells (AT_HWCAP, which QEMU sets by ``-cpu``)
and by the core's part number in /proc/cpuinfo. QEMU before 10 passes this machine's /proc/cpuinfo
and /sys through, on which LiteRT's cpuinfo library crashes; there, files made here stand in the
folder that QEMU searches first (``-L``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CORES", "Core", "write_system_files"]

_V80 = "fp asimd evtstrm aes pmull sha1 sha2 crc32 cpuid"
_V82 = (
    "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop "
    "asimddp"
)
_V90 = (
    f"{_V82} sha3 sm3 sm4 asimdfhm dit uscat ilrcpc flagm ssbs sb paca pacg dcpodp flagm2 frint "
    "i8mm bf16 bti"
)

# Cores of one phone cluster; LiteRT's threads are no more than that.
_COUNT = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Core:
    """One core: its part number and features, and QEMU's names for it, the best one first."""

    part: str  # "CPU part" of /proc/cpuinfo, ARM's own number
    features: str
    qemu: tuple[str, ...]
    khz: int


# "max" has SME, by which float runs 2,700 times slower than natively instead of 400 times, and SVE,
# which phones with these cores do not offer to programs.
_MAX = "max,sme=off,sve=off"

CORES: Mapping[str, Core] = {
    "cortex-a53": Core(part="0xd03", features=_V80, qemu=("cortex-a53",), khz=1400000),
    "cortex-a55": Core(part="0xd05", features=_V82, qemu=("cortex-a55", "cortex-a76"), khz=1800000),
    "cortex-a57": Core(part="0xd07", features=_V80, qemu=("cortex-a57",), khz=1900000),
    "cortex-a72": Core(part="0xd08", features=_V80, qemu=("cortex-a72",), khz=1500000),
    "cortex-a76": Core(part="0xd0b", features=_V82, qemu=("cortex-a76", _MAX), khz=2400000),
    "cortex-a710": Core(part="0xd47", features=_V90, qemu=("cortex-a710", _MAX), khz=2400000),
    "neoverse-n1": Core(part="0xd0c", features=_V82, qemu=("neoverse-n1",), khz=2600000),
}


def write_system_files(core: Core, folder: Path) -> None:
    """Write ``proc/cpuinfo`` and ``sys/devices/system/cpu`` of a phone with such cores."""
    everyone = f"0-{_COUNT - 1}"
    mask = format((1 << _COUNT) - 1, "x")
    files = {
        f"sys/devices/system/cpu/{name}": everyone for name in ("possible", "present", "online")
    }
    files["sys/devices/system/cpu/kernel_max"] = "31"
    info = ""
    for number in range(_COUNT):
        info += (
            f"processor\t: {number}\nBogoMIPS\t: 38.40\nFeatures\t: {core.features}\n"
            "CPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x1\n"
            f"CPU part\t: {core.part}\nCPU revision\t: 0\n\n"
        )
        base = f"sys/devices/system/cpu/cpu{number}"
        files[f"{base}/cpufreq/cpuinfo_max_freq"] = str(core.khz)
        files[f"{base}/cpufreq/cpuinfo_min_freq"] = "300000"
        files[f"{base}/topology/physical_package_id"] = "0"
        files[f"{base}/topology/core_id"] = str(number)
        files[f"{base}/topology/thread_siblings_list"] = str(number)
        for name in ("cluster_cpus_list", "core_siblings_list", "package_cpus_list"):
            files[f"{base}/topology/{name}"] = everyone
        for name in ("cluster_cpus", "core_siblings"):
            files[f"{base}/topology/{name}"] = mask
    files["proc/cpuinfo"] = f"{info}Hardware\t: Generic"
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
