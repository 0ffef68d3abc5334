"""Static calibration: samples a second of ours, of ai-edge-quantizer's, and of the bare runs.

    python benchmarks/calibration.py [--samples 64] [--repeat 3] [--keep DIR] [NET …]

The networks: MiniLM and CREPE (tiny) of examples/pretrained, MTCNN's O-net (package
facenet-pytorch), all with trained weights, and MobileNetV2 at 224 x 224 with random ones. Each way
of each network runs in a process of its own, one thread, the ways in turn ``--repeat`` times; the
fastest counts. Times are CPU times. The first sample is left out: it pays for the preparation of
memory.

- bare: the plain interpreter, inputs set, run, outputs read.
- ours: ``calibrate``, min/max, from the first sample sent to the last counted.
- upstream: ``Quantizer.calibrate`` of ai-edge-quantizer with the recipe static_wi8_ai8.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
EXAMPLES = HERE.parent / "examples" / "pretrained"
NETS = ("minilm", "onet", "crepe_tiny", "mobilenet_v2")
WAYS = ("bare", "ours", "upstream")


def mobilenet_v2() -> Any:
    """Sandler et al., 2018: 3.5 M weights."""
    import torch
    from torch import nn

    def block(channels: int, width: int, stride: int, factor: int) -> nn.Module:
        hidden = channels * factor
        layers: list[nn.Module] = []
        if factor != 1:
            layers += [nn.Conv2d(channels, hidden, 1), nn.ReLU6()]
        layers += [nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden), nn.ReLU6()]
        return nn.Sequential(*layers, nn.Conv2d(hidden, width, 1))

    class Residual(nn.Module):
        def __init__(self, inside: nn.Module) -> None:
            super().__init__()
            self.inside = inside

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inside(x)

    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU6()]
    channels = 32
    for factor, width, count, stride in (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    ):
        for position in range(count):
            made = block(channels, width, stride if position == 0 else 1, factor)
            layers.append(Residual(made) if position else made)
            channels = width
    layers += [nn.Conv2d(320, 1280, 1), nn.ReLU6(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(1280, 1000)).eval()


def onet() -> Any:
    """The third network of MTCNN, with facenet-pytorch's weights."""
    import importlib.util

    import torch
    from torch import nn

    spec = importlib.util.find_spec("facenet_pytorch")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("pip install --no-deps facenet-pytorch==2.6.0")
    folder = Path(spec.submodule_search_locations[0])
    # The module itself imports torchvision, which the network does not need.
    code = (folder / "models" / "mtcnn.py").read_text()
    space: dict[str, Any] = {"nn": nn, "torch": torch}
    exec(code[code.index("class ONet") : code.index("class MTCNN(")], space)
    model = space["ONet"](pretrained=False)
    model.load_state_dict(torch.load(folder / "data" / "onet.pt", weights_only=True))
    return model.eval()


def make(name: str, folder: Path, count: int) -> None:
    """Write ``name``.tflite and ``name``.npz with ``count`` samples."""
    import litert_torch
    import torch

    sys.path.insert(0, str(EXAMPLES))
    generator = np.random.default_rng(0)
    if name == "minilm":
        import make_inputs
        import minilm

        model: Any = minilm.get_model()
        samples = [
            tuple(part.to(torch.int32) for part in minilm.encode(text))
            for text in make_inputs.sentences(count)
        ]
    elif name == "crepe_tiny":
        import crepe

        model = crepe.get_model()
        pitches = np.geomspace(60.0, 1000.0, count)
        samples = [(torch.from_numpy(crepe.tone(hz, seed=i)),) for i, hz in enumerate(pitches)]
    else:
        model, size = (onet(), 48) if name == "onet" else (mobilenet_v2(), 224)
        images = generator.uniform(-1, 1, (count, 1, 3, size, size)).astype(np.float32)
        samples = [(torch.from_numpy(image),) for image in images]
    litert_torch.convert(model, samples[0]).export(str(folder / f"{name}.tflite"))
    columns = {
        f"args_{i}": np.stack([s[i].numpy() for s in samples]) for i in range(len(samples[0]))
    }
    np.savez(folder / f"{name}.npz", **columns)


def read(name: str, folder: Path) -> tuple[Path, list[dict[str, Any]]]:
    with np.load(folder / f"{name}.npz") as data:
        columns = {key: data[key] for key in data.files}
    count = len(next(iter(columns.values())))
    return folder / f"{name}.tflite", [
        {key: column[i] for key, column in columns.items()} for i in range(count)
    ]


def measure(way: str, name: str, folder: Path) -> dict[str, float]:
    """CPU milliseconds a sample, and seconds of the whole call, process and all."""
    path, samples = read(name, folder)
    begun = time.perf_counter()
    if way == "ours":
        from tpu2edge.quantize.calibrate import calibrate

        done = calibrate(path, {"serving_default": samples})
        return {"ms": done.cpu_ms, "whole_s": time.perf_counter() - begun}
    if way == "upstream":
        from ai_edge_quantizer import quantizer, recipe

        worker = quantizer.Quantizer(str(path), recipe.static_wi8_ai8())
        worker.calibrate({"serving_default": samples[:1]}, num_threads=1)
        first = time.process_time()
        worker.calibrate({"serving_default": samples[1:]}, num_threads=1)
        taken = time.process_time() - first
        return {"ms": taken * 1e3 / (len(samples) - 1), "whole_s": time.perf_counter() - begun}
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(model_path=str(path), num_threads=1)
    interpreter.allocate_tensors()
    runner = interpreter.get_signature_runner()
    indexes = {key: d["index"] for key, d in runner.get_input_details().items()}
    del runner
    outputs = [d["index"] for d in interpreter.get_output_details()]
    first = 0.0
    for position, sample in enumerate(samples):
        if position == 1:
            first = time.process_time()
        for key, value in sample.items():
            interpreter.set_tensor(indexes[key], value)
        interpreter.invoke()
        for index in outputs:
            interpreter.get_tensor(index)
    taken = time.process_time() - first
    return {"ms": taken * 1e3 / (len(samples) - 1), "whole_s": time.perf_counter() - begun}


def in_child(*arguments: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, str(Path(__file__)), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)}: exit {done.returncode}\n{done.stderr[-3000:]}")
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    found: dict[str, float] = json.loads(lines[-1]) if lines else {}
    return found


def line(name: str, found: Mapping[str, Mapping[str, float]]) -> tuple[float, float]:
    bare, ours, upstream = (found[way]["ms"] for way in WAYS)
    print(
        f"{name:14s} {bare:8.2f} {ours:8.2f} {upstream:9.2f} {ours / bare:10.2f} "
        f"{upstream / ours:14.2f} {found['upstream']['whole_s'] / found['ours']['whole_s']:12.2f}",
        flush=True,
    )
    return ours / bare, upstream / ours


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("nets", nargs="*", default=NETS, metavar="NET", help=", ".join(NETS))
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="where the networks are and stay")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        way, name = args.child
        if way == "make":
            make(name, args.keep, args.samples)
        else:
            print(json.dumps(measure(way, name, args.keep)))
        return
    with tempfile.TemporaryDirectory() as made:
        folder = (args.keep or Path(made)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        print("CPU ms a sample     bare     ours  upstream  ours/bare  upstream/ours  whole calls")
        ratios = []
        for name in args.nets:
            if not (folder / f"{name}.npz").exists():
                in_child(
                    "--child", "make", name, "--keep", str(folder), "--samples", str(args.samples)
                )
            best: dict[str, dict[str, float]] = {}
            for _ in range(args.repeat):
                for way in WAYS:
                    found = in_child("--child", way, name, "--keep", str(folder))
                    if way not in best or found["ms"] < best[way]["ms"]:
                        best[way] = found
            ratios.append(line(name, best))
        to_bare, to_upstream = (statistics.median(column) for column in zip(*ratios, strict=True))
        print(f"median{'':33s} {to_bare:18.2f} {to_upstream:14.2f}")


if __name__ == "__main__":
    main()
