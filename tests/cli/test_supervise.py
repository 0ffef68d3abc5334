from __future__ import annotations

import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tpu2edge.cli import supervise
from tpu2edge.cli.display import Display
from tpu2edge.cli.supervise import JobBug, JobInterrupted, run_job
from tpu2edge.errors import DataError, DeviceError, LoweringError

HERE = Path(__file__).parent

# The parent of the tests on Ctrl-C: a process of its own, for the signal is its.
PARENT = """
import sys
from pathlib import Path
from tpu2edge.cli import app, supervise
from tpu2edge.cli.display import Display
supervise.GRACE_S = float(sys.argv[4])
app._invoke = lambda args: supervise.run_job(
    sys.argv[1],
    {"temporary": sys.argv[2], "pids": sys.argv[3]},
    display=Display(),
    output=Path("out"),
).exit_code
sys.exit(app.run([]))
"""


@pytest.fixture(autouse=True)
def _jobs_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    # No empty entry: Python reads that as the current folder.
    paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    logs = tmp_path / "logs"
    logs.mkdir()
    monkeypatch.setenv("TMPDIR", str(logs))
    monkeypatch.setattr(supervise.tempfile, "tempdir", None)
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    yield
    supervise.tempfile.tempdir = None


def run(job: str, **request: Any) -> supervise.Outcome:
    return run_job(f"fake_jobs:{job}", request, display=Display(), output=Path("out"))


def logs(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "logs").iterdir())


def is_alive(pid: int) -> bool:
    """Zombies, which wait for a parent that may be slow, are not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_until(condition: Any, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never became true"
        time.sleep(0.02)


def test_chatter_goes_to_the_log_and_the_user_sees_stages_and_notes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    outcome = run("chatter", exit_code=1)
    out, err = capfd.readouterr()
    assert outcome.exit_code == 1
    assert outcome.result["pid"] != os.getpid()
    assert [name for name, _ in outcome.stages] == ["start", "load", "run"]
    assert outcome.seconds >= sum(seconds for _, seconds in outcome.stages) - 0.01
    assert [note.code for note in outcome.notes] == ["eval-mode"]
    assert out == ""
    lines = err.splitlines()
    assert lines[0] == "note: the model was in training mode: eval() was called"
    assert [line.split(":")[0] for line in lines[1:]] == ["load", "run"]
    assert lines[1].endswith(" s")
    assert logs(tmp_path) == []


def test_verbose_shows_the_log_and_quiet_shows_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    run_job("fake_jobs:chatter", {"exit_code": 0}, display=Display(verbose=True))
    shown = capfd.readouterr().err
    assert "the converter's chatter on 1" in shown
    assert "a grandchild on 2" in shown
    assert "\n''\n" in shown  # what the job read from stdin
    run_job("fake_jobs:chatter", {"exit_code": 0}, display=Display(quiet=True))
    assert capfd.readouterr() == ("", "")


def test_a_crash_names_the_stage_and_the_signal_and_quotes_and_keeps_the_log(
    tmp_path: Path,
) -> None:
    with pytest.raises(DeviceError) as caught:
        run("segfault", temporary=str(tmp_path / "work" / ".out.tmp-1"))
    error = caught.value
    assert error.exit_code == 4
    assert error.step == "convert"
    assert "segfault process was killed by SIGSEGV (segmentation fault)" in error.what
    assert "while at 'convert'" in error.what
    assert "MLIR: about to die" in error.what
    assert "in segfault" in error.what  # faulthandler's stack
    (log,) = logs(tmp_path)
    assert str(log) in error.do
    assert list((tmp_path / "work").iterdir()) == []  # the temporary folder went


def test_a_kill_from_outside_is_suspected_to_be_the_memory() -> None:
    with pytest.raises(DeviceError, match=r"SIGKILL \(killed\)") as caught:
        run("killed")
    assert "was the memory full?" in caught.value.do


def test_an_end_without_a_word_is_an_error_not_a_success() -> None:
    with pytest.raises(DeviceError, match="ended with exit status 3 and without a result"):
        run("silent_end")


def test_a_crash_after_the_result_was_told_changes_nothing() -> None:
    assert run("crash_after_the_work").exit_code == 0


def test_an_error_in_words_comes_through_as_the_same_class(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="expected 1x4") as refused:
        run("refuse")
    assert (refused.value.exit_code, refused.value.do) == (2, "give 1x4")
    assert logs(tmp_path) == []  # nothing to look up there
    with pytest.raises(LoweringError) as impossible:
        run("cannot_lower")
    assert impossible.value.exit_code == 3
    assert impossible.value.place is not None
    assert impossible.value.place.line == 7
    (log,) = logs(tmp_path)
    assert impossible.value.__notes__ == [f"log: {log}"]


def test_a_fault_of_ours_keeps_its_traceback_even_if_it_is_no_exception() -> None:
    with pytest.raises(JobBug) as caught:
        run("bug")
    assert "in bug" in caught.value.traceback
    assert "NotAnException: we divided by a banana" in caught.value.traceback


def test_a_file_of_the_users_that_is_called_like_a_module_of_python_is_not_run(
    tmp_path: Path,
) -> None:
    (tmp_path / "work" / "json.py").write_text("raise SystemExit('the wrong json')")
    assert run("chatter", exit_code=0).exit_code == 0


def start(tmp_path: Path, job: str, grace: float = 10.0) -> tuple[Any, list[int]]:
    pids = tmp_path / "pids"
    parent = subprocess.Popen(
        [
            *(sys.executable, "-c", PARENT, f"fake_jobs:{job}"),
            *(str(tmp_path / "work" / ".out.tmp-9"), str(pids), str(grace)),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until(lambda: pids.exists() and pids.read_text())
    return parent, [int(pid) for pid in pids.read_text().split()]


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_lets_the_child_clean_up_and_says_that_nothing_was_written(
    tmp_path: Path, signum: signal.Signals, status: int
) -> None:
    parent, pids = start(tmp_path, "slow")
    parent.send_signal(signum)
    out, err = parent.communicate(timeout=20)
    assert parent.returncode == status
    assert err.splitlines()[-1] == "interrupted: nothing was written"
    assert "Traceback" not in err
    assert out == ""
    assert list((tmp_path / "work").iterdir()) == []
    wait_until(lambda: not any(is_alive(pid) for pid in pids))
    assert logs(tmp_path) == []


def test_a_child_that_does_not_hear_ctrl_c_is_killed_and_its_leavings_removed(
    tmp_path: Path,
) -> None:
    other = tmp_path / "work" / ".out.tmp-other"
    other.mkdir()  # of another run: there before this one began
    parent, pids = start(tmp_path, "deaf", grace=0.5)
    parent.send_signal(signal.SIGINT)
    parent.communicate(timeout=20)
    assert parent.returncode == 130
    assert list((tmp_path / "work").iterdir()) == [other]
    assert not any(is_alive(pid) for pid in pids)


def test_a_second_ctrl_c_does_not_wait(tmp_path: Path) -> None:
    parent, pids = start(tmp_path, "deaf", grace=60)
    parent.send_signal(signal.SIGINT)
    assert parent.stderr is not None
    assert parent.stderr.readline() == "stopping …\n"
    time.sleep(0.2)
    parent.send_signal(signal.SIGINT)
    parent.communicate(timeout=20)
    assert parent.returncode == 130
    assert not any(is_alive(pid) for pid in pids)


def test_a_child_whose_parent_was_killed_ends_and_cleans_up(tmp_path: Path) -> None:
    parent, pids = start(tmp_path, "slow")
    parent.kill()
    parent.communicate(timeout=20)
    wait_until(lambda: not is_alive(pids[0]))
    assert list((tmp_path / "work").iterdir()) == []


def test_on_a_terminal_the_stages_are_live_lines_and_errors_red(tmp_path: Path) -> None:
    def shown(job: str) -> str:
        master, slave = pty.openpty()
        parent = subprocess.Popen(
            [sys.executable, "-c", PARENT, f"fake_jobs:{job}", "", str(tmp_path / "pids"), "10"],
            stderr=slave,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
        )
        os.close(slave)
        text = b""
        with contextlib.suppress(OSError):  # the end of a terminal
            while part := os.read(master, 1 << 16):
                text += part
        os.close(master)
        parent.wait(20)
        return text.decode()

    ends = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown("stages")).splitlines()
    assert [line.split()[:2] for line in ends if line.startswith("✓")][-2:] == [
        ["✓", "load"],
        ["✓", "run"],
    ]
    assert shown("refuse").count("\x1b[1;31merror:\x1b[0m input 'x' has the shape") == 1


def test_an_interrupted_job_knows_the_exit_status_of_its_signal() -> None:
    assert JobInterrupted(signal.SIGINT).exit_code == 130
    assert JobInterrupted(signal.SIGHUP).exit_code == 129
