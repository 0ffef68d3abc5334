"""Stands in for adb and a phone: a folder is the phone's storage, QEMU its processor.

``FAKE_ADB`` names a JSON file: ``phones`` (serial -> status), ``root``, ``properties``, ``features``,
``free_kb``, ``qemu`` (the command before an arm64 program) and ``damage`` (a pushed file's last byte
is changed). Only what tpu2edge asks of adb is there; a command it does not know ends with status 1.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path


def main() -> int:
    config = json.loads(Path(os.environ["FAKE_ADB"]).read_text())
    root, words = Path(config["root"]), sys.argv[1:]
    if words == ["devices"]:
        print("List of devices attached")
        for serial, status in config["phones"].items():
            print(f"{serial}\t{status}")
        return 0
    if words[0] != "-s" or config["phones"].get(words[1]) != "device":
        print(f"error: device '{words[1]}' not found", file=sys.stderr)
        return 1
    command, rest = words[2], words[3:]
    if command == "features":
        print("\n".join(config["features"]))
        return 0
    if command == "push":
        return push(root, rest, config.get("damage", False))
    if command == "shell":
        return shell(root, rest, config)
    print(f"adb: unknown command {command}", file=sys.stderr)
    return 1


def push(root: Path, words: list[str], damage: bool) -> int:
    *sources, target = words
    place = root / target.lstrip("/")
    for source in sources:
        to = place / Path(source).name if target.endswith("/") else place
        if not to.parent.is_dir():
            print(f"adb: error: failed to copy '{source}' to '{target}'", file=sys.stderr)
            return 1
        shutil.copyfile(source, to)
        if damage:
            data = bytearray(to.read_bytes())
            data[-1] ^= 1
            to.write_bytes(data)
    print(f"{len(sources)} files pushed", file=sys.stderr)
    return 0


def shell(root: Path, words: list[str], config: dict[str, object]) -> int:
    options, (text,) = words[:-1], words[-1:]
    properties = config["properties"]
    assert isinstance(properties, dict)
    cases = "".join(f"{name}) echo '{value}';; " for name, value in properties.items())
    prelude = (
        f'getprop() {{ case "$1" in {cases}*) echo;; esac; }}\n'
        "df() { echo 'Filesystem 1K-blocks Used Available Use% Mounted on'; "
        f"echo '/dev/block/dm-0 100000000 1 {config['free_kb']} 1% /data'; }}\n"
    )
    text = text.replace("/data/local/tmp", str(root / "data/local/tmp"))
    qemu = config["qemu"]
    assert isinstance(qemu, list)
    text = re.sub(r"exec (\S+/ld-linux-aarch64)", f"exec {' '.join(qemu)} \\1", text)
    done = ["sh", "-c", prelude + text]
    if "exec" not in text or ("-T" in options and "none" in options):
        status = subprocess.run(done, check=False).returncode
        return status if status >= 0 else 128 - status  # as adb tells a signal
    # A terminal in between changes line ends.
    changed = subprocess.run(done, check=False, capture_output=True)
    sys.stdout.buffer.write(changed.stdout.replace(b"\n", b"\r\n"))
    return changed.returncode


if __name__ == "__main__":
    sys.exit(main())
