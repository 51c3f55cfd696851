"""xgr bench as a command: what it writes, and what a signal or a place that cannot be written leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from run_support import xgr

from xgr_engine.bench.record import read_record


def test_command_writes_json_and_report(tmp_path: Path) -> None:
    sizes = ["--items", "300", "--codes", "20x2", "--context", "6", "--users", "1", "--beam", "3", "--budget", "0.02"]
    html, out = tmp_path / "r.html", tmp_path / "r.json"
    choice = ["--geometry", "quick", "--baselines", "none", "--no-ablations"]
    done = xgr("bench", *sizes, *choice, "--html", str(html), "--out", str(out), "--json", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["schema_version"] == 1
    assert result["rows"] == read_record(out)["rows"]
    assert result["rows"][0]["top_k"] == 3
    assert html.read_text("utf-8").startswith("<!doctype html>")


def _begun(tmp_path: Path, out: Path, *arguments: str, program: str = "") -> subprocess.Popen[str]:
    """A run with hours to go, whose first row stands in its file."""
    sizes = ["--items", "300", "--codes", "20x2", "--context", "6", "--users", "1,2", "--beam", "3", "--budget", "0.02"]
    choice = ["--geometry", "quick", "--baselines", "none", "--no-ablations", "--device", "cpu", "--time-limit", "9999"]
    (tmp_path / "temp").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", program or _SECOND_ROW_HANGS, "bench", *sizes, *choice, "--out", str(out), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path / "temp")},
    )
    deadline = time.monotonic() + 120
    while not out.exists() or not read_record(out)["rows"]:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.1)
    return process


# the second row hangs in an engine of another process, which has a checkpoint
_SECOND_ROW_HANGS = """
import sys
from xgr_engine.bench.row import Row
from xgr_engine.bench.foreign import process

def measure(row, first=Row.measure):
    if row.workload.users == 1:
        return first(row)
    process.new_folder().joinpath("model.safetensors").write_text("weights")
    process.Process(sys.executable, "sleeper", {})

process.subprocess.Popen = lambda command, popen=process.subprocess.Popen, **more: popen(
    [sys.executable, "-c", "import time, os; print(os.getpid(), file=open(os.environ['TMPDIR'] + '.pid', 'w')); "
     "time.sleep(600)"], **more)
Row.measure = measure
from xgr_cli.main import main
main()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 143)])
def test_a_stopped_run_keeps_what_it_measured_and_says_so(tmp_path: Path, number: signal.Signals, code: int) -> None:
    out = tmp_path / "r.json"
    process = _begun(tmp_path, out, "--json", "-q", "--html", str(tmp_path / "r.html"))
    assert read_record(out)["state"] == "running"
    child = tmp_path / "temp.pid"
    while not (child.exists() and child.read_text()):
        time.sleep(0.1)
    begin = time.monotonic()
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == code, stderr
    assert time.monotonic() - begin < 15.0
    said = [line for line in stderr.splitlines() if "other programs kept" not in line]  # of a busy machine
    assert len(said) == 1 and f"stopped by {number.name} after" in said[0]
    assert "1 of 2 rows measured" in stderr and str(out) in stderr and "6 tokens x 2 users x W 3" in stderr
    record = read_record(out)
    assert record["state"] == json.loads(stdout)["state"] == "interrupted"
    assert len(record["rows"]) == 1 and record["stopped"]["by"] == number.name
    assert "stopped by" in (tmp_path / "r.html").read_text("utf-8")
    assert not list((tmp_path / "temp").iterdir()), "no checkpoint is left"
    status = Path("/proc") / child.read_text().strip() / "stat"
    assert not status.exists() or ") Z" in status.read_text(), "no engine is left"


def test_a_run_that_does_not_listen_is_ended_by_a_second_signal(tmp_path: Path) -> None:
    """A library's call of minutes, in which no handler of Python runs: the record and the checkpoint are seen to."""
    deaf = (
        "import ctypes, signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]); "
        "open(process.os.environ['TMPDIR'] + '.pid', 'w').write('0'); ctypes.CDLL(None).sleep(600)"
    )
    out = tmp_path / "r.json"
    program = _SECOND_ROW_HANGS.replace('process.Process(sys.executable, "sleeper", {})', deaf)
    process = _begun(tmp_path, out, "-q", program=program)
    while not (tmp_path / "temp.pid").exists():
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.stderr is not None and "again to stop at once" in process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 143
    process.communicate()
    assert read_record(out)["state"] == "interrupted" and not list((tmp_path / "temp").iterdir())


def test_a_run_that_is_stopped_at_once_says_so(tmp_path: Path) -> None:
    program = "import os, signal, sys\nfrom xgr_engine.bench import choices\n"
    program += "choices.open_device = lambda *a: os.kill(os.getpid(), signal.SIGTERM)\n"
    program += "from xgr_cli.main import main\nmain()"
    done = subprocess.run([sys.executable, "-c", program, "bench"], capture_output=True, text=True, check=False)
    assert done.returncode == 143 and "stopped by SIGTERM: nothing was measured yet" in done.stderr


def test_a_report_that_cannot_be_written_stops_the_command_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for option, place in (("--html", tmp_path), ("--out", tmp_path / "file" / "a.json"), ("--html", "/proc/a/b.html")):
        done = xgr("bench", option, str(place))
        assert done.returncode == 2 and f"error: {option} {place}" in done.stderr, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]
