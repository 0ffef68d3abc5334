"""Everything that the commands print as their result, as tables for people or as JSON.

Results go to stdout. The parity table is made from the plain data of ``parity.json``;
:func:`rows_of` is the one place that knows its schema.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tpu2edge.types import Note

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from tpu2edge.doctor import Diagnosis
    from tpu2edge.flatbuffer import Subgraph, TfliteFile

__all__ = [
    "ParityRow",
    "model_json",
    "print_capture",
    "print_check",
    "print_devices",
    "print_diagnosis",
    "print_export",
    "print_installed",
    "print_json",
    "print_model",
    "print_parity",
    "print_reference",
    "print_search",
    "print_survey",
    "rows_of",
    "size_text",
]

_TOP_WEIGHTS = 20
_COLORS = {"PASS": "green", "FAIL": "red", "ERROR": "magenta"}
_WIDE = 200  # columns where there is no terminal: a table in a log file must not be folded


class Outcome(Protocol):
    """What a supervised job came to (:class:`tpu2edge.cli.supervise.Outcome`)."""

    @property
    def result(self) -> Mapping[str, Any]: ...
    @property
    def notes(self) -> tuple[Note, ...]: ...
    @property
    def stages(self) -> tuple[tuple[str, float], ...]: ...
    @property
    def seconds(self) -> float: ...
    @property
    def exit_code(self) -> int: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ParityRow:
    """One line of the parity table: one output of one model on one device."""

    model: str  # file name
    recipe: str
    device: str
    signature: str
    output: str
    verdict: str
    budget: str = ""
    sqnr_db_worst: float | None = None
    sqnr_db_median: float | None = None
    range_error: float | None = None
    max_abs: float | None = None
    top1: float | None = None
    reasons: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()  # what to know about it, whatever the verdict
    split: str = ""  # which step spends the error, in words
    largest: str = ""  # that step: "tpu", "device" …
    host_error: float | None = None  # largest difference to this machine, over the range
    is_tpu: bool = False  # whether it is held to a TPU's outputs


def rows_of(report: Mapping[str, Any]) -> tuple[ParityRow, ...]:
    """The rows of ``parity.json`` (format_version 1)."""
    return tuple(_row(case) for case in report["cases"])


def _row(case: Mapping[str, Any]) -> ParityRow:
    metrics = case["metrics"] or {}
    numbers = {
        name: None if (value := metrics.get(name)) is None else float(value)
        for name in ("sqnr_db_worst", "sqnr_db_median", "range_error", "max_abs", "top1")
    }
    return ParityRow(
        model=case["model"],
        recipe=case["recipe"],
        device=case["device"],
        signature=case["signature"],
        output=case["output"],
        verdict=case["verdict"],
        budget=case["budget"],
        reasons=tuple(r["text"] for r in case["reasons"] if not r["code"].startswith("flag-")),
        flags=tuple(r["text"] for r in case["reasons"] if r["code"].startswith("flag-")),
        split=case.get("in_words") or "",
        largest=(case["error_split"] or {}).get("largest", ""),
        is_tpu=bool((case["error_split"] or {}).get("tpu_db")),
        host_error=None
        if (against := case.get("against_host")) is None or against["range_error"] is None
        else float(against["range_error"]),
        **numbers,
    )


def print_json(data: Mapping[str, Any]) -> None:
    """One JSON document; NaN and infinities, which JSON does not have, become strings."""
    print(json.dumps(_finite(data), indent=2, ensure_ascii=False, allow_nan=False))


def print_export(
    outcome: Outcome, output: Path, *, as_json: bool, quiet: bool, word: str = "export"
) -> None:
    """The parity table, the reasons of what failed, where the bundle is and what to do next.

    ``word`` is the command's.
    """
    bundle = Path(outcome.result["bundle"])
    report = json.loads((bundle / "parity.json").read_text(encoding="utf-8"))
    search_file = bundle / "search.json"
    search = json.loads(search_file.read_text(encoding="utf-8")) if search_file.is_file() else None
    if as_json:
        found = {"search": search} if search else {}
        print_json(_outcome_json(outcome, report) | {"bundle": str(bundle)} | found)
        return
    if search and not quiet:
        print_search(search)
    sizes = {path.name: path.stat().st_size for path in bundle.glob("*.tflite")}
    print_parity(report, sizes=sizes, table=not quiet)
    size = sum(sizes.values())
    saved = f"{outcome.seconds:.1f}s, saved as '{output}' ({size_text(size)})"
    if outcome.exit_code == 0:
        print(f"{word} success {saved}")
    else:
        print(f"{word} done {saved}, but parity {_word(outcome.exit_code)}")
    if not quiet:
        print(f"next: tpu2edge inspect {_quoted(output)}")
        print(f"      tpu2edge check {_quoted(output)}")


def print_check(outcome: Outcome, target: Path, *, as_json: bool, quiet: bool) -> None:
    """The parity table, the reasons of what failed, and one last line."""
    report = outcome.result["report"]
    if as_json:
        print_json(_outcome_json(outcome, report) | {"target": str(target)})
        return
    files = target.glob("*.tflite") if target.is_dir() else [target]
    sizes = {path.name: path.stat().st_size for path in files}
    print_parity(report, sizes=sizes, table=not quiet)
    word = "success" if outcome.exit_code == 0 else _word(outcome.exit_code)
    print(f"check {word} {outcome.seconds:.1f}s, {len(rows_of(report))} outputs of '{target}'")


_STATES = {"ready": "green", "missing": "yellow", "impossible": "dim"}


def print_devices(found: Sequence[Mapping[str, Any]], *, as_json: bool) -> None:
    """Every device with its state, and in words how to get it or why it is not for here."""
    if as_json:
        print_json({"devices": list(found)})
        return
    from rich.text import Text

    drawn = _table("device", "state", "what it stands for", "")
    for one in found:
        drawn.add_row(
            Text(one["name"]),
            Text(one["state"], style=_STATES[one["state"]]),
            Text(one["description"]),
            Text("; ".join(part for part in (one["text"], one["slow"], one["how"]) if part)),
        )
    _console().print(drawn)
    missing = [one["name"] for one in found if one["state"] == "missing"]
    if missing:
        print(f"next: tpu2edge devices install {' '.join(missing)}")


def print_installed(outcome: Outcome, *, as_json: bool) -> None:
    """What became of each device that was to be installed."""
    found = outcome.result["devices"]
    if as_json:
        print_json({"exit_code": outcome.exit_code, "devices": found})
        return
    for one in found:
        told = "; ".join(part for part in (one["text"], one["slow"], one["how"]) if part)
        print(f"{one['name']}: {one['state']}: {told}")
    if not found:
        print("nothing to install: every device that can be used here is ready")
    ready = [one["name"] for one in found if one["state"] == "ready"]
    if ready:
        print(f"next: tpu2edge check BUNDLE --device {','.join(['host', *ready])}")


def print_search(search: Mapping[str, Any]) -> None:
    """The Pareto table of a search: what no other file beats in size, SQNR and latency at once."""
    base = search["float32"]
    drawn = _table(
        "mix",
        ">size",
        ">of float32",
        ">SQNR dB searched",
        ">held out",
        ">ms",
        ">of float32",
        "budget",
    )
    from rich.text import Text

    best = search["best"]
    for row in search["rows"]:
        if not row["pareto"] and row != best:
            continue
        levels = ", ".join(f"{count} {level}" for level, count in row["levels"].items())
        name = row["recipe"] + (f" ({row['ranges']})" if row["ranges"] else "")
        chosen = all(row[key] == best[key] for key in ("recipe", "levels", "ranges", "size_bytes"))
        took, whole = row["searched"]["latency_ms"], base["searched"]["latency_ms"]
        both = (row["searched"], row["held_out"] or row["searched"])
        margin = min(float(figures["margin_db"]) for figures in both)
        drawn.add_row(
            Text(("→ " if chosen else "  ") + (levels if row["levels"] else name)),
            size_text(row["size_bytes"]),
            f"{row['size_bytes'] / base['size_bytes']:.1%}",
            _decibels(row["searched"]["sqnr_db"]),
            _decibels(row["held_out"]["sqnr_db"]) if row["held_out"] else "–",
            "–" if took is None else f"{took:.3g}",
            "–" if took is None or not whole else f"{took / whole:.2f}",
            Text("met", style="green")
            if row["met"]
            else Text(f"missed by {_decibels(-margin)} dB", style="red"),
        )
    print(
        f"{search['evaluations']} files were run; those that no other beats in all of size, SQNR and time:"
    )
    _console().print(drawn)


def _decibels(value: Any) -> str:
    number = float(value)
    return "equal" if number == math.inf else f"{number:.1f}"


def print_capture(outcome: Outcome, output: Path, *, as_json: bool, quiet: bool) -> None:
    """What was captured, and what to do with it next."""
    found = outcome.result["reference"]
    if as_json:
        notes = [{"code": note.code, "text": note.text} for note in outcome.notes]
        print_json({"exit_code": 0, "seconds": round(outcome.seconds, 3), "notes": notes} | found)
        return
    if not quiet:
        print_reference(found, as_json=False)
    print(f"capture success {outcome.seconds:.1f}s, saved as '{output}'")
    if not quiet:
        print(f"next: tpu2edge export MODEL --reference {_quoted(output)} -o out")


def print_reference(found: Mapping[str, Any], *, as_json: bool) -> None:
    """Who computed a reference, in which precision, from which weights, on what samples."""
    if as_json:
        print_json(found)
        return
    extra = found["extra"]
    print(f"{found['path']}: {found['words']}")
    for word in ("inputs", "outputs"):
        for text in found[word]:
            print(f"    {word[:-1]:6} {text}")
    rows = {
        "device": extra.get("device_kind") or extra.get("topology"),
        "mode": extra.get("mode"),
        "excess precision": extra.get("excess_precision"),
        "versions": ", ".join(f"{n} {v}" for n, v in (extra.get("versions") or {}).items()),
        "not modelled": "; ".join(extra.get("not_modelled") or ()),
        "weights": found["weights_sha256"] or "not known: proved by the numbers alone",
    }
    for name, value in rows.items():
        if value is not None and value != "":
            print(f"    {name}: {value}")


def print_survey(outcome: Outcome, *, as_json: bool) -> None:
    """What each TPU generation makes of a model, and which ones compute alike."""
    from rich.text import Text

    found = outcome.result["survey"]
    if as_json:
        print_json({"exit_code": outcome.exit_code} | found)
        return
    print(
        f"{found['model']} at precision '{found['precision']}', lowered by {found['route']}, "
        f"compiled by libtpu {found['libtpu'] or '–'}"
    )
    drawn = _table("TPU", "compiles", "matmuls", ">flops", ">HBM", ">compile")
    for one in found["topologies"]:
        counts = ", ".join(f"{n} {mode}" for mode, n in (one.get("matmuls") or {}).items())
        memory = one.get("memory")
        drawn.add_row(
            one["generation"],
            Text("yes", style="green") if one["compiles"] else Text("no", style="red"),
            counts or ("none" if one["compiles"] and not one["reason"] else "–"),
            f"{one['flops']:.3g}" if one["compiles"] else "–",
            size_text(sum(memory.values())) if memory else "–",
            f"{one['compile_s']:.1f} s" if one["compiles"] else "–",
        )
    console = _console()
    console.print(drawn)
    said: dict[tuple[str, str], list[str]] = {}
    for one in found["topologies"]:
        if one["reason"]:
            print(f"{one['generation']}: {one['reason']}")
        for mode, modules in (one.get("modules") or {}).items():
            said.setdefault((mode, ", ".join(modules)), []).append(one["generation"])
    for (mode, modules), names in said.items():
        print(f"{mode} on {', '.join(names)}: {modules}")
    groups = found["same_precision"]
    if len(groups) == 1 and len(groups[0]) > 1:
        print(f"the same precision everywhere on {', '.join(groups[0])}")
    elif len(groups) > 1:
        print("not the same precision: " + " | ".join(", ".join(names) for names in groups))


def print_parity(
    report: Mapping[str, Any], *, sizes: Mapping[str, int] | None = None, table: bool = True
) -> None:
    """The table, and below it in words why a row is not PASS.

    ``sizes`` are the bytes of the files by name. What is wrong is printed without the table too.
    """
    from rich.text import Text

    rows = rows_of(report)
    console = _console()
    if table:
        print(f"compared with {report['reference']}")
        console.print(_parity_table(rows, sizes or {}))
    if table and report.get("devices"):
        _print_device_figures(report["devices"])
    for text in report.get("device_words", ()):
        print(f"    {text}")
    said: dict[tuple[str, str, str, str], list[str]] = {}
    for row in rows:
        lines = [(row.verdict, text) for text in row.reasons]
        if row.verdict != "PASS":
            lines = lines or [(row.verdict, f"outside of {row.budget}")]
        # Of a device that adds little the table says all: the other steps are those of the host.
        is_told = row.is_tpu and table and (row.device == "host" or row.largest == "device")
        if row.split and (row.verdict != "PASS" or is_told):
            lines.append(("", row.split))
        lines += [("note", text) for text in row.flags] if table else []
        for word, text in lines:
            said.setdefault((word, row.recipe, row.device, text), []).append(row.output)
    for (word, recipe, device, text), outputs in said.items():
        names = ", ".join(f"'{name}'" for name in outputs)
        head = f"{word} " if word else "    "
        line = Text(head, style=_COLORS.get(word, ""))
        line.append(
            f"{recipe} on {device}, output{'s' * (len(outputs) > 1)} {names}: {text}",
            style="default",
        )
        console.print(line, soft_wrap=True)


def _parity_table(rows: Sequence[ParityRow], sizes: Mapping[str, int]) -> Table:
    from rich.text import Text

    has_devices = any(row.host_error is not None for row in rows)
    columns = ["model", ">size", "device", "output", ">SQNR dB worst / median", ">error/range"]
    columns += [">max abs", ">top-1", *([">from host"] if has_devices else []), "verdict"]
    drawn = _table(*columns)
    has_signatures = len({row.signature for row in rows}) > 1
    for row in rows:
        size = sizes.get(row.model)
        name = f"{row.signature}: {row.output}" if has_signatures else row.output
        drawn.add_row(
            Text(row.recipe),
            "–" if size is None else size_text(size),
            Text(row.device),
            Text(name),
            f"{_db(row.sqnr_db_worst)} / {_db(row.sqnr_db_median)}",
            _small(row.range_error),
            _small(row.max_abs),
            "–" if row.top1 is None else f"{row.top1:.2%}",
            *([_small(row.host_error)] if has_devices else []),
            Text(row.verdict, style=_COLORS.get(row.verdict, "")),
        )
    return drawn


def _print_device_figures(figures: Mapping[str, Any]) -> None:
    """Times, memory and what differs between runs, for each file on each device."""
    has_signatures = len({one["signature"] for one in figures.values()}) > 1
    drawn = _table(
        "model",
        "device",
        *(["signature"] if has_signatures else []),
        ">load ms",
        ">first ms",
        ">then ms",
        ">memory",
        "repeated",
        ">threads",
        "delegate",
    )
    for one in figures.values():
        moved = [float(error) for error in one["thread_range_error"].values()]
        drawn.add_row(
            one["recipe"],
            one["device"],
            *([one["signature"]] if has_signatures else []),
            f"{one['load_ms']:.3g}",
            f"{one['first_ms']:.3g}",
            "–" if one["steady_ms"] is None else f"{one['steady_ms']:.3g}",
            size_text(one["peak_rss_kb"] * 1024),
            "same bits" if one["repeatable"] else "differs",
            "–" if not moved else ("same" if not max(moved) else f"{max(moved):.2g}"),
            _delegate_text(one),
        )
    _console().print(drawn)
    emulated = dict.fromkeys(one["device"] for one in figures.values() if one["emulated"])
    if emulated:
        print(f"emulated: times of {', '.join(emulated)} are no device's times")


def _delegate_text(one: Mapping[str, Any]) -> str:
    """How much of the graph the delegate runs, as far as the device tells."""
    if one["left_ops"] is not None and one["left_ops"]:
        names = ", ".join(dict.fromkeys(op for op, _ in one["left"]))
        return f"{one['ops'] - one['left_ops']} of {one['ops']} ops, not {names}"
    if one["delegated"] is None:
        return "–"
    return "all" if one["delegated"] else "a part"


def print_diagnosis(found: Diagnosis) -> None:
    """The state of the machine, and one last line."""
    from rich.text import Text

    console = _console()
    print(f"tpu2edge {found.version}, Python {found.python}, {found.platform}")
    drawn = _table("package", "installed", "tested", "")
    words = {
        "ok": ("", "green"),
        "missing": ("missing", "red"),
        "absent": ("only on a TPU host", "dim"),
        "untested": ("not the tested version", "yellow"),
    }
    for package in found.packages:
        word, style = words[package.state]
        drawn.add_row(
            package.name, package.installed or "–", package.tested or "–", Text(word, style=style)
        )
    console.print(drawn)
    print(f"LiteRT: {'ok' if found.litert.ok else 'broken'}: {found.litert.text}")
    for facility in found.facilities:
        print(f"{facility.name}: {facility.state}: {facility.text}")
        if facility.how:
            print(f"    to get it: {facility.how}")
    if found.can_export:
        print("tpu2edge export can run here")
        return
    if found.can_check:
        print("tpu2edge check, tpu2edge devices and the pytest plugin can run here")
    missing = [p.name for p in found.packages if p.state == "missing"]
    if missing:
        print(f"tpu2edge export cannot run here: missing {', '.join(missing)}")
        pins = [f"{p.name}=={p.tested}" for p in found.packages if p.name in missing]
        print(f"next: pip install 'tpu2edge[export]' {' '.join(pins)}")
    else:
        print("tpu2edge export cannot run here: LiteRT does not run (see above)")
        print("next: pip install --force-reinstall --no-deps ai-edge-litert")


def print_model(file: TfliteFile, *, tensors: bool = False) -> None:
    """Signatures, operators and weights of a file; every tensor too if asked for."""
    from rich.text import Text

    from tpu2edge.flatbuffer import signatures_of, summarize

    console = _console()
    summary = summarize(file)
    graphs = len(file.subgraphs)
    ops = sum(file.op_histogram.values())
    print(
        f"{file.path or 'model'}: {size_text(file.size_bytes)}, "
        f"{graphs} graph{'s' * (graphs != 1)}, {ops} operator{'s' * (ops != 1)}"
        + (f", '{file.description}'" if file.description else "")
    )
    for signature in signatures_of(file):
        print(f"signature '{signature.name}'")
        for word, specs in (("input", signature.inputs), ("output", signature.outputs)):
            for spec in specs:
                scale = (
                    ""
                    if spec.scale is None
                    else f", real = {spec.scale:.6g} * (q - {spec.zero_point})"
                )
                print(f"    {word:6} {spec}{scale}")
    if not file.signatures:
        print("no signature: inputs and outputs by the names of their tensors")
        graph = file.subgraphs[0]
        for word, indexes in (("input", graph.inputs), ("output", graph.outputs)):
            for index in indexes:
                t = graph.tensors[index]
                print(f"    {word:6} {t.name}: {t.dtype}[{_shape(t.shape_signature)}]")

    left = _outside_xnnpack(file)
    drawn = _table("operator", ">count", "outside xnnpack")
    for name, count in file.op_histogram.items():
        kinds = {kind: number for kind, number in left.items() if kind.split()[0] == name}
        shown = ", ".join(f"{number}{kind.removeprefix(name)}" for kind, number in kinds.items())
        drawn.add_row(Text(name), str(count), Text(shown))
    console.print(drawn)
    print(f"xnnpack: takes {ops - sum(left.values())} of {ops} operators")

    print(
        f"weights: {size_text(summary.weight_bytes)}, of which {size_text(summary.float_bytes)} "
        f"({summary.float_share:.1%}) stayed float"
    )
    for kind, size in summary.weight_bytes_by_kind.items():
        print(f"    {kind}: {size_text(size)}")
    if summary.weights:
        drawn = _table("weight", "shape", "stored as", ">size", "used by")
        for weight in summary.weights[:_TOP_WEIGHTS]:
            drawn.add_row(
                Text(weight.name),
                _shape(weight.shape),
                weight.stored_as,
                size_text(weight.size_bytes),
                Text(", ".join(weight.used_by)),
            )
        console.print(drawn)
    more = len(summary.weights) - _TOP_WEIGHTS
    if more > 0:
        print(f"and {more} smaller weights: --tensors lists every tensor")
    if tensors:
        for graph in file.subgraphs:
            console.print(_tensor_table(graph))


def _outside_xnnpack(file: TfliteFile) -> dict[str, int]:
    """How many operators of each kind XNNPACK leaves to LiteRT's own kernels."""
    from collections import Counter

    from tpu2edge.delegates import left_by_xnnpack

    return dict(Counter(left.kind for left in left_by_xnnpack(file)))


def model_json(file: TfliteFile, *, tensors: bool = False) -> dict[str, Any]:
    """What :func:`print_model` shows, as plain data, with all weights."""
    from tpu2edge.flatbuffer import signatures_of, summarize

    summary = summarize(file)
    data: dict[str, Any] = {
        "path": None if file.path is None else str(file.path),
        "size_bytes": file.size_bytes,
        "description": file.description,
        "signatures": [signature.to_json() for signature in signatures_of(file)],
        "operators": dict(file.op_histogram),
        "outside_xnnpack": _outside_xnnpack(file),
        "metadata": sorted(file.metadata),
        "weights": {
            "bytes": summary.weight_bytes,
            "float_bytes": summary.float_bytes,
            "float_share": summary.float_share,
            "bytes_by_kind": dict(summary.weight_bytes_by_kind),
            "constant_bytes_by_dtype": dict(summary.constant_bytes_by_dtype),
            "tensors": [
                {
                    "name": w.name,
                    "subgraph": w.subgraph,
                    "index": w.index,
                    "shape": list(w.shape),
                    "dtype": w.dtype,
                    "size_bytes": w.size_bytes,
                    "stored_as": w.stored_as,
                    "used_by": list(w.used_by),
                }
                for w in summary.weights
            ],
        },
    }
    if tensors:
        data["subgraphs"] = [
            {
                "name": graph.name,
                "inputs": list(graph.inputs),
                "outputs": list(graph.outputs),
                "tensors": [
                    {
                        "index": t.index,
                        "name": t.name,
                        "shape": list(t.shape_signature),
                        "dtype": t.dtype,
                        "stored_as": t.stored_as,
                        "size_bytes": t.size_bytes,
                        "is_constant": t.is_constant,
                    }
                    for t in graph.tensors
                ],
                "operators": [
                    {
                        "index": op.index,
                        "name": op.composite or op.name,
                        "inputs": list(op.inputs),
                        "outputs": list(op.outputs),
                    }
                    for op in graph.operators
                ],
            }
            for graph in file.subgraphs
        ]
    return data


def size_text(size_bytes: int) -> str:
    """Bytes in decimal units, "6.2 MB"; whole bytes below a thousand."""
    if size_bytes < 1000:
        return f"{size_bytes} B"
    size = float(size_bytes)
    for unit in ("kB", "MB", "GB"):
        size /= 1000
        if size < 999.95 or unit == "GB":
            break
    return f"{size:.1f} {unit}"


def _tensor_table(graph: Subgraph) -> Table:
    from rich.text import Text

    roles = dict.fromkeys(graph.inputs, "input")
    roles |= dict.fromkeys(graph.outputs, "output")
    drawn = _table(">#", "tensor", "shape", "type", "role")
    for t in graph.tensors:
        role = "weight" if t.is_constant else roles.get(t.index, "")
        drawn.add_row(str(t.index), Text(t.name), _shape(t.shape_signature), t.stored_as, role)
    drawn.title = f"graph '{graph.name}'" if graph.name else f"graph {graph.index}"
    return drawn


def _console() -> Console:
    from rich.console import Console

    class PipeConsole(Console):
        """Lets a closed pipe be seen by our own handler; rich would end with status 1 (FAIL)."""

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return PipeConsole(width=None if sys.stdout.isatty() else _WIDE, highlight=False)


def _table(*columns: str) -> Table:
    """A table; a column's name that begins with ">" is aligned to the right."""
    from rich import box
    from rich.table import Table

    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left")
    for column in columns:
        drawn.add_column(
            column.removeprefix(">"),
            justify="right" if column.startswith(">") else "left",
            overflow="fold",  # never an ellipsis: names are for copying
        )
    return drawn


def _shape(shape: Sequence[int]) -> str:
    return "x".join("?" if size < 0 else str(size) for size in shape) or "scalar"


def _word(exit_code: int) -> str:
    return {0: "PASS", 1: "FAIL"}.get(exit_code, "ERROR")


def _quoted(path: Path) -> str:
    import shlex

    return shlex.quote(str(path))


def _outcome_json(outcome: Outcome, report: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "verdict": _word(outcome.exit_code),
        "exit_code": outcome.exit_code,
        "seconds": round(outcome.seconds, 3),
        "stages": [{"stage": name, "seconds": round(s, 3)} for name, s in outcome.stages],
        "notes": [{"code": note.code, "text": note.text} for note in outcome.notes],
        "parity": report,
    }


def _db(value: float | None) -> str:
    if value is None:
        return "–"
    return "equal" if value == math.inf else f"{value:.1f}"


def _small(value: float | None) -> str:
    return "–" if value is None else f"{value:.2g}"


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
