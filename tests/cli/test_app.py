from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import tpu2edge
from tpu2edge.cli import app, main, supervise
from tpu2edge.cli.supervise import JobBug, JobInterrupted, Outcome
from tpu2edge.errors import LoweringError, Place
from tpu2edge.runtime_check.metrics import OutputMetrics
from tpu2edge.runtime_check.parity import CaseReport, ErrorSplit, ParityReport, Reason
from tpu2edge.types import Note, Verdict

DATA = Path(__file__).parents[1] / "data"


def raising(error: BaseException) -> Any:
    def invoke(args: list[str]) -> int:
        raise error

    return invoke


@pytest.mark.parametrize("args", [["--help"], ["export", "--help"], ["--version"], ["exprot"]])
def test_help_and_usage_load_no_torch_jax_litert_or_numpy(args: list[str]) -> None:
    script = (
        "import sys\n"
        "from tpu2edge.cli import main\n"
        f"code = main({args!r})\n"
        "heavy = {'torch', 'jax', 'jaxlib', 'litert_torch', 'ai_edge_litert', 'numpy', 'rich',\n"
        "         'ai_edge_quantizer', 'safetensors'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == "[]"


def test_the_module_runs_as_the_command_does() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tpu2edge", "--version"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, f"tpu2edge {tpu2edge.__version__}\n")


def test_help_shows_examples_and_exit_statuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    assert "\n    tpu2edge export model.py -o out\n" in said
    assert "Exit status: 0 all right, 1 the numbers" in said
    for command in ("export", "check", "inspect", "doctor"):
        assert main([command, "--help"]) == 0
        assert "Usage: tpu2edge" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["exprot", "m.py"], "No such command 'exprot'. Did you mean 'export'?"),
        (["export", "m.py", "-o", "out", "--recpie", "x"], "--recipe"),
        (["export", "m.py"], "Missing option '--output'"),
        (["export", "m.py", "-o", "out", "--num-samples", "0"], "greater than or equal to 1"),
        (["inspect"], "FILE"),
    ],
)
def test_wrong_usage_ends_with_2_and_names_the_nearest_word(
    args: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(args) == 2
    out, err = capsys.readouterr()
    assert said in err
    assert out == ""


def test_wrong_usage_is_one_json_document_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", "--nonsense"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["kind"], error["exit_code"]) == ("UsageError", 2)
    assert "--nonsense" in error["what"]


def test_an_error_is_words_on_stderr_and_its_own_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = LoweringError(
        "aten.sort has no lowering",
        do="use topk",
        place=Place(op="aten.sort", file="m.py", line=7),
    )
    monkeypatch.setattr(app, "_invoke", raising(error))
    assert main([]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        "error: aten.sort has no lowering\n  at op aten.sort, m.py:7\n  Next: use topk\n"
    )
    assert main(["--json"]) == 3
    out, err = capsys.readouterr()
    assert err == ""
    document = json.loads(out)["error"]
    assert document["kind"] == "LoweringError"
    assert document["place"] == {"op": "aten.sort", "file": "m.py", "line": 7}


@pytest.mark.parametrize("error", [ZeroDivisionError("ours"), JobBug("its traceback", Path("l"))])
def test_any_other_exception_is_called_a_bug_of_ours_with_its_traceback(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(app, "_invoke", raising(error))
    assert main([]) == 70
    err = capsys.readouterr().err
    assert "its traceback\n" in err or "ZeroDivisionError: ours\n" in err
    assert f"error: this is a bug of tpu2edge {tpu2edge.__version__}" in err
    assert main(["--json"]) == 70
    assert json.loads(capsys.readouterr().out)["error"]["kind"] == "Bug"


@pytest.mark.parametrize(
    ("error", "status"), [(KeyboardInterrupt(), 130), (JobInterrupted(15), 143)]
)
def test_an_interruption_ends_with_the_status_of_its_signal(
    error: BaseException,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(app, "_invoke", raising(error))
    assert main([]) == status
    assert capsys.readouterr().err == "interrupted: nothing was written\n"


def test_a_closed_pipe_is_no_error_and_no_traceback() -> None:
    done = subprocess.run(
        # The reader is gone before the first line, whatever the machine's speed.
        f"{{ sleep 0.3; {sys.executable} -m tpu2edge inspect {DATA} --tensors; echo $? >&2; }} "
        "| true",
        shell=True,
        capture_output=True,
        text=True,
    )
    assert done.stderr == "141\n"


def test_inspect_shows_names_operators_and_what_stayed_float(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["inspect", str(DATA / "small.dynamic_wi8_afp32.tflite")]) == 0
    out = capsys.readouterr().out
    assert "signature 'serving_default'" in out
    assert "input  image: float32[1x2x6x6]" in out
    assert "FULLY_CONNECTED       2" in out
    assert "1.2 kB, of which 92 B (7.4%) stayed float" in out
    assert "int8 per-channel axis 0" in out
    assert "role" not in out
    assert main(["inspect", str(DATA / "small.dynamic_wi8_afp32.tflite"), "--tensors"]) == 0
    assert "role" in capsys.readouterr().out


def test_inspect_takes_a_folder_and_prints_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in DATA.glob("small.*.tflite"):
        shutil.copy(file, tmp_path)
    assert main(["inspect", str(tmp_path), "--json", "--tensors"]) == 0
    models = json.loads(capsys.readouterr().out)["models"]
    assert [Path(m["path"]).name for m in models] == [
        "small.dynamic_wi8_afp32.tflite",
        "small.float32.tflite",
        "small.static_wi8_ai8.tflite",
    ]
    assert models[2]["weights"]["float_bytes"] == 0
    assert models[2]["signatures"][0]["inputs"][0]["zero_point"] == 13
    assert {t["name"] for t in models[0]["subgraphs"][0]["tensors"]} >= {
        w["name"] for w in models[0]["weights"]["tensors"]
    }


def test_inspect_refuses_what_is_no_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(tmp_path)]) == 2
    assert "holds no .tflite file" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path / "none.tflite"), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["kind"] == "BundleError"


def test_doctor_says_that_this_machine_can_export(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "tpu2edge export can run here"
    assert main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["litert"]["ok"] is True


def case(recipe: str, output: str, verdict: Verdict, **fields: Any) -> CaseReport:
    return CaseReport(
        model=f"model.{recipe}.tflite",
        recipe=recipe,
        device=fields.pop("device", "host"),
        signature="serving_default",
        output=output,
        verdict=verdict,
        budget="sqnr>=25dB",
        **fields,
    )


def metrics(sqnr_db: float) -> OutputMetrics:
    return OutputMetrics(
        samples=8,
        sqnr_db_worst=sqnr_db,
        sqnr_db_median=math.inf,
        max_abs=1.2e-6,
        range_error=3.6e-7,
        cosine_worst=1.0,
        top1=1.0,
        mismatch=0.0,
        worst_sample="x#7",
        reference_min=-1.0,
        reference_max=1.0,
    )


BROKEN = Reason(code="device", text="the worker was killed by SIGILL")
REPORT = ParityReport(
    cases=(
        case("float32", "logits", Verdict.PASS, metrics=metrics(121.34)),
        case(
            "dynamic_wi8_afp32",
            "logits",
            Verdict.FAIL,
            metrics=metrics(18.2),
            reasons=(Reason(code="budget", text="sqnr 18.2 dB, wanted at least 25 dB"),),
            split=ErrorSplit(float32_db=130.0, conversion_db=120.04, quantization_db=18.2),
        ),
        case("float32", "logits", Verdict.ERROR, device="qemu", reasons=(BROKEN,)),
        case("float32", "[mask]", Verdict.ERROR, device="qemu", reasons=(BROKEN,)),
        case(
            "float32",
            "[mask]",
            Verdict.PASS,
            reasons=(Reason(code="flag-constant", text="the same value in all samples"),),
        ),
    ),
    reference="eager float32 (f32-highest), 8 synthetic samples",
    data_kind="synthetic",
    samples=8,
).to_json()


@pytest.fixture
def exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """`export` without the work: the request that it made, and a bundle with REPORT."""
    seen: dict[str, Any] = {"exit_code": 1}
    bundle = tmp_path / "my out"
    bundle.mkdir()
    (bundle / "parity.json").write_text(json.dumps(REPORT))
    (bundle / "model.float32.tflite").write_bytes(bytes(6_200_000))

    class Request:
        def __init__(self, **fields: Any) -> None:
            seen["request"] = fields

        def to_json(self) -> dict[str, Any]:
            return {}

    def run_job(job: str, request: Any, *, display: Any, output: Path | None = None) -> Outcome:
        seen["job"], seen["output"] = job, output
        return Outcome(
            result={"bundle": str(bundle), "report": REPORT, "exit_code": seen["exit_code"]},
            notes=(Note(code="eval-mode", text="eval() was called"),),
            stages=(("convert", 1.23456),),
            seconds=12.34,
        )

    requests = types.ModuleType("tpu2edge.requests")
    requests.ExportRequest = requests.CheckRequest = Request  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tpu2edge.requests", requests)
    monkeypatch.setattr(supervise, "run_job", run_job)
    return seen


def test_export_hands_every_option_on(exported: dict[str, Any], tmp_path: Path) -> None:
    arguments = "m.py:f -o out --checkpoint w.pt --inputs a.npz --inputs b.npz --num-samples 3"
    arguments += " --dynamic x.0=1:4 --signature-name run --recipe a --recipe b --budget sqnr>=30dB"
    arguments += " --shapes x=1,2 --channels-last x --channels-last-output y"
    arguments += " --device host --device qemu --threads 2 --seed 7 --force"
    arguments += " --reference tpu-emulated:v6e@high --recipe-file r.json --keep-float head"
    arguments += " --calibration-data c.npz --calibration-method mse --metric m.py:top1"
    arguments += " --level int8-static --level float32"
    arguments += " --optimize latency --max-size 40% --max-latency 1.1 --time-limit 60"
    arguments += " --device-file d.toml"
    assert main(["export", *arguments.split()]) == 1
    assert (exported["job"], exported["output"]) == ("export", Path("out"))
    assert exported["request"] == {
        "source": "m.py:f",
        "output": Path("out"),
        "checkpoint": Path("w.pt"),
        "inputs": (Path("a.npz"), Path("b.npz")),
        "num_samples": 3,
        "dynamic": ("x.0=1:4",),
        "shapes": ("x=1,2",),
        "channels_last": ("x",),
        "channels_last_output": ("y",),
        "signature_name": "run",
        "recipes": ("a", "b"),
        "budgets": ("sqnr>=30dB",),
        "recipe_files": (Path("r.json"),),
        "keep_float": ("head",),
        "calibration": ("c.npz",),
        "estimator": "mse",
        "metric": "m.py:top1",
        "optimize": "latency",
        "levels": ("int8-static", "float32"),
        "max_size": "40%",
        "max_latency": "1.1",
        "time_limit_s": 60.0,
        "devices": ("host", "qemu"),
        "device_files": (Path("d.toml"),),
        "threads": 2,
        "seed": 7,
        "force": True,
        "reference": "tpu-emulated:v6e@high",
    }


def test_export_has_the_documented_defaults(exported: dict[str, Any]) -> None:
    main(["export", "m.py", "-o", "out"])
    assert exported["request"] == {
        "source": "m.py",
        "output": Path("out"),
        "checkpoint": None,
        "inputs": (),
        "num_samples": None,
        "dynamic": (),
        "shapes": (),
        "channels_last": (),
        "channels_last_output": (),
        "signature_name": "serving_default",
        "recipes": ("float32",),
        "budgets": (),
        "recipe_files": (),
        "keep_float": (),
        "calibration": (),
        "estimator": "minmax",
        "metric": None,
        "optimize": "size",
        "levels": (),
        "max_size": None,
        "max_latency": None,
        "time_limit_s": None,
        "devices": (),
        "device_files": (),
        "threads": None,
        "seed": 0,
        "force": False,
        "reference": None,
    }


def test_export_prints_the_table_the_reasons_and_what_to_type_next(
    exported: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = str(tmp_path / "my out")
    assert main(["export", "m.py", "-o", output]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "compared with eager float32 (f32-highest), 8 synthetic samples"
    (row,) = (line for line in lines if "121.3" in line)
    assert " ".join(row.split()) == (
        "float32 6.2 MB host logits 121.3 / equal 3.6e-07 1.2e-06 100.00% PASS"
    )
    tail = [line for line in lines if line.strip()][-7:]
    assert tail == [
        "FAIL dynamic_wi8_afp32 on host, output 'logits': sqnr 18.2 dB, wanted at least 25 dB",
        "    dynamic_wi8_afp32 on host, output 'logits': the largest step of the error is "
        "the quantization: 18.2 dB (float32 130.0 dB, conversion 120.0 dB)",
        "ERROR float32 on qemu, outputs 'logits', '[mask]': the worker was killed by SIGILL",
        "note float32 on host, output '[mask]': the same value in all samples",
        f"export done 12.3s, saved as '{output}' (6.2 MB), but parity FAIL",
        f"next: tpu2edge inspect '{output}'",
        f"      tpu2edge check '{output}'",
    ]
    exported["exit_code"] = 0
    assert main(["export", "m.py", "-o", output, "--quiet"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"export success 12.3s, saved as '{output}' (6.2 MB)"
    )


def test_export_and_check_print_one_json_document(
    exported: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", "m.py", "-o", "out", "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert (data["verdict"], data["exit_code"], data["seconds"]) == ("FAIL", 1, 12.34)
    assert data["notes"] == [{"code": "eval-mode", "text": "eval() was called"}]
    assert data["parity"] == REPORT
    assert main(["check", "out", "--signature", "decode", "--json"]) == 1
    assert exported["job"] == "check"
    assert exported["request"]["signature"] == "decode"
    assert json.loads(capsys.readouterr().out)["target"] == "out"


def test_check_ends_with_one_line(
    exported: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "my out"
    main(["check", str(output), "--quiet"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("FAIL dynamic_wi8_afp32 on host")
    assert lines[-1] == f"check FAIL 12.3s, 5 outputs of '{output}'"
