"""Writes samples for the trained networks: English sentences for MiniLM, tones for CREPE.

    python examples/pretrained/make_inputs.py DIR      DIR/minilm.npz and DIR/crepe.npz

The sentences are those of Python's own language reference, which is a module of the standard
library. There is no recorded speech to be had here, so CREPE gets synthesized tones: it was trained
on such sounds, but they are easier than a voice.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from pydoc_data.topics import topics

import crepe
import minilm
import numpy as np

COUNT = 64


def sentences(count: int = COUNT) -> list[str]:
    """Sentences of 50 to 250 characters, evenly from the whole reference."""
    text = " ".join(" ".join(topics[name].split()) for name in sorted(topics))
    found = re.findall(r"(?<=\. )[A-Z][a-z][^.:|=*_`\"<>{}\[\]()]{50,250}\.(?= [A-Z])", text)
    distinct = list(dict.fromkeys(found))
    return [distinct[i] for i in np.linspace(0, len(distinct) - 1, count).astype(int)]


def pitches_hz(count: int = COUNT) -> np.ndarray:
    """Evenly spaced in cents from 60 to 1000 Hz."""
    return np.geomspace(60.0, 1000.0, count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--only", choices=("minilm", "crepe"))
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.only != "crepe":
        encoded = [minilm.encode(sentence) for sentence in sentences()]
        np.savez(
            args.folder / "minilm.npz",
            input_ids=np.stack([ids.numpy() for ids, _ in encoded]),
            attention_mask=np.stack([mask.numpy() for _, mask in encoded]),
        )
    if args.only != "minilm":
        frames = [crepe.tone(hz, seed=i) for i, hz in enumerate(pitches_hz())]
        np.savez(args.folder / "crepe.npz", x=np.stack(frames))


if __name__ == "__main__":
    main()
