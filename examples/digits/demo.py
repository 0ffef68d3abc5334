"""The main job on real data, in half a minute: train, export, check, and count right answers.

Trains DigitsNet on scikit-learn's handwritten digits, exports it with ``tpu2edge export``, and
compares how many held-out digits PyTorch and each ``.tflite`` file get right.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import numpy as np
from train import accuracy, data, train

from tpu2edge import Bundle, EdgeModel, Tpu2EdgeError, load_bundle
from tpu2edge.runtime_check.devices.client import Session

HERE = Path(__file__).parent
RECIPES = ("float32", "dynamic_wi8_afp32")


def save(folder: Path) -> tuple[Path, Path, float]:
    """Trained weights and held-out images, as files for ``tpu2edge export``, and the accuracy."""
    from safetensors.torch import save_model

    folder.mkdir(parents=True, exist_ok=True)
    weights, samples = folder / "digits.safetensors", folder / "held_out.npz"
    model = train()
    save_model(model, str(weights))
    _, images, _, _ = data()
    np.savez(samples, image=images[:, None])  # (N, 1, 1, 8, 8): N samples of a batch of one
    return weights, samples, accuracy(model)


def is_ours(bundle: Path) -> bool:
    """Whether the folder is a bundle that this demo has made, so that it may be replaced."""
    try:
        manifest = load_bundle(bundle, verify=False).manifest
    except (Tpu2EdgeError, OSError, ValueError, KeyError):
        return False
    return (
        str(manifest["source"]["origin"]).endswith("model.py:get_model")
        and manifest.get("checkpoint", {}).get("name") == "digits.safetensors"
    )


def export(weights: Path, samples: Path, bundle: Path) -> None:
    beside = Path(sys.executable).with_name("tpu2edge")
    command = [str(beside) if beside.exists() else "tpu2edge", "export", str(HERE / "model.py")]
    command += ["--checkpoint", str(weights), "--inputs", str(samples), "--output", str(bundle)]
    for recipe in RECIPES:
        command += ["--recipe", recipe]
    if is_ours(bundle):
        command.append("--force")
    print("$", " ".join(["tpu2edge", *command[1:]]), flush=True)
    done = subprocess.run(command, check=False)
    if done.returncode:
        sys.exit(done.returncode)


def file_accuracy(bundle: Bundle, model: EdgeModel) -> float:
    """Share of the held-out digits that the file gets right, on LiteRT in a process of its own."""
    _, images, _, labels = data()
    signature = bundle.manifest["signature"]["name"]
    with Session(model.path) as session:
        answers = session.run(signature, ({"image": image[None]} for image in images))
        found = [int(answer["logits"].argmax()) for answer in answers]
    return float((np.array(found) == labels).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("demo-out"), metavar="DIR")
    folder = parser.parse_args().output
    weights, samples, torch_accuracy = save(folder)
    print(f"trained, weights in {weights}", flush=True)
    export(weights, samples, folder / "bundle")
    bundle = load_bundle(folder / "bundle")
    print(f"\nbundle: {bundle.path}\nright answers on the held-out digits:")
    print(f"  {'PyTorch':32}{torch_accuracy:.2%}")
    right = {}
    for model in bundle.models:
        right[model.recipe] = file_accuracy(bundle, model)
        print(f"  {model.path.name:32}{right[model.recipe]:.2%}   {model.size_bytes / 1e3:.0f} kB")
    assert right["float32"] == torch_accuracy, "the float file must answer as PyTorch does"


if __name__ == "__main__":
    main()
