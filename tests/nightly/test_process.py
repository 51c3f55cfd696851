"""The job as a real process that is really killed, stopped, starved of disk, and run without comforts."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from faults import PATIENCE, Job, end_of, expected_code, leftovers, manifest, stop, wait_for_line, wait_for_parts
from gated import Gate
from nightly_support import rows_of, same_output, write_users

# Runs that are stopped in the middle wait at a gate, and each wait of a test is for something that will happen. Only a
# machine on which a run makes no progress at all should fail one.
pytestmark = pytest.mark.timeout(3 * PATIENCE)

USERS, SHARD_ROWS = 6000, 100
SHARDS = USERS // SHARD_ROWS


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, assets: tuple[Path, Path]) -> Job:
    root = tmp_path_factory.mktemp("job")
    write_users(root / "users.parquet", USERS, 500)
    return Job(root, *assets, SHARD_ROWS)


@pytest.fixture(scope="module")
def whole(job: Job) -> Path:
    """The output of an uninterrupted run."""
    out = job.root / "whole"
    code, err = job.finish(out)
    assert code == 0, err
    assert len(rows_of(out)) == SHARDS and not leftovers(out)
    return out


def test_killed_five_times_and_then_equal(job: Job, whole: Path, tmp_path: Path) -> None:
    """cases.md: kill -9 at any moment, run again: same rows as an uninterrupted run, none twice."""
    out, rng, gate = tmp_path / "recs", random.Random(4), Gate(tmp_path / "gate", 0)
    for kill in range(5):
        there = len(list(out.glob("part-*")))
        gate.open(there + SHARDS // 6)  # so it cannot end before it is killed
        process = job.start(out, gate=gate)
        if kill:
            wait_for_parts(process, out, there + 1)
        time.sleep(rng.uniform(0.0, 0.4))  # the moment is random; nothing depends on how long this is
        assert stop(process, signal.SIGKILL)[1] == 137
    code, err = job.finish(out)
    assert code == 0, err
    assert same_output(out, whole) and not leftovers(out)
    states = [attempt["state"] for attempt in manifest(out)["attempts"]]
    assert states[-1] == "done" and set(states[:-1]) == {"killed"}


def stopped_run(job: Job, out: Path, number: signal.Signals, parts: int, metrics: Path) -> dict[str, Any]:
    """Starts a run, stops it after so many further parts, checks how it ended; its manifest."""
    there = len(list(out.glob("part-*")))
    gate = Gate(out.with_name("gate"), there + parts)
    process = job.start(out, "--grace", f"{PATIENCE:g}s", "--metrics-file", str(metrics), gate=gate)
    wait_for_parts(process, out, there + parts)
    process.send_signal(number)
    wait_for_line(process, f"{number.name}: stopping within")
    gate.open()
    assert end_of(process) == expected_code(number)
    record = manifest(out)
    assert record["state"] == "interrupted" and record["attempts"][-1]["signal"] == number.name
    assert there + parts <= record["shards_finished"] == len(list(out.glob("part-*"))) < SHARDS
    assert "same command" in (process.stderr.read() if process.stderr else "")
    assert not leftovers(out)[1:], "the shards' states alone"
    assert f'xgr_last_run_exit_code{{name="xgr"}} {expected_code(number)}\n' in metrics.read_text()
    assert "last_success" not in metrics.read_text()
    return record


def test_stopped_twice_by_sigterm_and_then_equal(job: Job, whole: Path, tmp_path: Path) -> None:
    """cases.md: SIGTERM: stops within the grace period, exit 143, resumes."""
    out, metrics = tmp_path / "recs", tmp_path / "xgr.prom"
    first = stopped_run(job, out, signal.SIGTERM, 2, metrics)
    again = stopped_run(job, out, signal.SIGTERM, 5, metrics)
    assert again["run_id"] == first["run_id"] and len(again["attempts"]) == 2
    assert job.finish(out, "--metrics-file", str(metrics))[0] == 0
    assert same_output(out, whole) and not leftovers(out)
    assert 'xgr_last_run_exit_code{name="xgr"} 0\n' in metrics.read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name)
def test_the_other_signals_stop_it_too(job: Job, tmp_path: Path, number: signal.Signals) -> None:
    stopped_run(job, tmp_path / "recs", number, 2, tmp_path / "xgr.prom")


def test_a_signal_that_was_ignored_stays_ignored(job: Job, tmp_path: Path) -> None:
    """``nohup``."""
    out, gate = tmp_path / "recs", Gate(tmp_path / "gate", 1)
    process = job.start(out, gate=gate, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    wait_for_parts(process, out)
    process.send_signal(signal.SIGHUP)
    gate.open()
    assert end_of(process) == 0 and (out / "_SUCCESS").exists()


def test_a_second_signal_ends_it_at_once(job: Job, tmp_path: Path) -> None:
    """At once: the gate stays closed and the grace is an hour, so nothing else would end it."""
    out, gate = tmp_path / "recs", Gate(tmp_path / "gate", 1)
    process = job.start(out, "--grace", "1h", gate=gate)
    wait_for_parts(process, out)
    process.send_signal(signal.SIGTERM)
    wait_for_line(process, "again to stop at once")
    assert process.poll() is None
    assert stop(process, signal.SIGTERM)[1] == 143
    assert manifest(out)["state"] in ("interrupted", "running") and not (out / "_SUCCESS").exists()


def test_a_run_that_cannot_finish_in_its_grace_is_ended_then(job: Job, tmp_path: Path) -> None:
    out, metrics = tmp_path / "recs", tmp_path / "xgr.prom"
    process = job.start(out, "--grace", "1s", "--metrics-file", str(metrics), gate=Gate(tmp_path / "gate", 1))
    wait_for_parts(process, out)
    assert stop(process, signal.SIGTERM)[1] == 143
    assert manifest(out)["state"] in ("interrupted", "running") and len(list(out.glob("part-*"))) == 1


def test_a_main_thread_that_does_not_listen_is_ended_when_the_grace_is_over(tmp_path: Path) -> None:
    """A library call that returns after minutes: no Python signal handler would run until then."""
    program = f"""
import ctypes, pathlib, signal, threading, time
from xgr_cli.output import Output
from xgr_cli.signals import stop_on_signals

sent = []

def to_this_thread():
    # not to the main thread: its call is not even interrupted
    time.sleep(0.2)
    sent.append(time.monotonic())
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
    time.sleep(10_000)

def last_words(stopped):
    text = f"{{stopped.reason}} {{time.monotonic() - sent[0]}}"
    pathlib.Path({str(tmp_path / "words")!r}).write_text(text)

with stop_on_signals(Output(), 1.0) as stop:
    stop.on_forced = last_words
    threading.Thread(target=to_this_thread, daemon=True).start()
    ctypes.CDLL(None).sleep(10_000)
"""
    process = subprocess.Popen([sys.executable, "-c", program])
    assert process.wait(PATIENCE) == 143
    reason, seconds = (tmp_path / "words").read_text().split()
    assert reason == "SIGTERM" and float(seconds) > 0.5


# ---- two jobs on one output -----------------------------------------------------------------------------------------


def test_two_jobs_on_one_output(job: Job, whole: Path, tmp_path: Path) -> None:
    out, gate = tmp_path / "recs", Gate(tmp_path / "gate", 2)
    first = job.start(out, gate=gate)
    wait_for_parts(first, out, 2)
    code, err = job.finish(out)
    assert code == 75 and f"process {first.pid}" in err and "--wait" in err
    code, err = job.finish(out, "--wait", "0.3s", "--fresh", "--limit", "100")
    assert code == 75, err
    second = job.start(out, "--wait", "1h")
    wait_for_line(second, "waiting for the run")
    gate.open()
    assert end_of(second) == end_of(first) == 0
    assert same_output(out, whole) and len(manifest(out)["attempts"]) == 1
    assert not leftovers(out)


def test_a_stopped_wait_is_a_stop(job: Job, tmp_path: Path) -> None:
    out = tmp_path / "recs"
    first = job.start(out, gate=Gate(tmp_path / "gate", 1))
    wait_for_parts(first, out)
    try:
        second = job.start(out, "--wait", "1h")
        wait_for_line(second, "waiting")
        assert stop(second, signal.SIGTERM)[1] == 143
    finally:
        first.kill()
        first.wait(PATIENCE)


# ---- full disks -----------------------------------------------------------------------------------------------------


def _mounted(place: Path, size: str) -> bool:
    if os.geteuid() != 0:
        return False
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "xgr-test", str(place)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_a_full_disk_fails_cleanly_and_the_run_resumes(job: Job, whole: Path, tmp_path: Path) -> None:
    """A small tmpfs where mounting is allowed, else a limit on the size of files."""
    out = tmp_path / "recs"
    out.mkdir()
    if _mounted(out, "160k"):
        try:
            code, err = job.finish(out)
            assert code == 1 and "No space left on device" in err and "same command" in err
            assert 0 < len(list(out.glob("part-*"))) < SHARDS and not list(out.rglob(".xgr-tmp*"))
            subprocess.run(["mount", "-o", "remount,size=64m", str(out)], check=True)
            code, err = job.finish(out)
            assert code == 0, err
            assert same_output(out, whole)
        finally:
            subprocess.run(["umount", str(out)], check=True)
        return
    part = max(path.stat().st_size for path in whole.glob("part-*"))
    code, err = job.finish(out, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (part - 1, part - 1)))
    assert code == 1 and "File too large" in err
    assert job.finish(out)[0] == 0 and same_output(out, whole)


def test_a_limit_on_the_size_of_files_is_a_clean_failure(job: Job, tmp_path: Path) -> None:
    out = tmp_path / "recs"
    code, err = job.finish(out, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)))
    assert code == 1 and "File too large" in err and "Traceback" not in err
    assert not list(out.rglob(".xgr-tmp*")) and not (out / "_SUCCESS").exists()


# ---- where comforts are missing -------------------------------------------------------------------------------------


def _python_path() -> dict[str, str]:
    return {"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}


def test_without_home_locale_terminal_and_with_read_only_input(job: Job, whole: Path, tmp_path: Path) -> None:
    out, caches = tmp_path / "recs", tmp_path / "caches"
    before = {path: path.stat().st_mtime_ns for path in job.root.rglob("*") if path.is_file()}
    code, err = job.finish(
        out, "--cache-dir", str(caches), "--log-format", "json", "--log-every", "0.1",
        env=_python_path(), cwd="/", stdin=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    assert code == 0, err
    assert same_output(out, whole) and (caches / "triton").is_dir()
    assert {path: path.stat().st_mtime_ns for path in job.root.rglob("*") if path.is_file()} == before
    lines = [json.loads(line) for line in err.splitlines()]
    run_id = manifest(out)["run_id"]
    assert lines and all(line["time"].endswith("Z") and line["level"] for line in lines)
    assert {line.get("run_id") for line in lines[1:]} <= {run_id} and lines[-1]["run_id"] == run_id


def test_text_logs_carry_time_and_run(job: Job, tmp_path: Path) -> None:
    code, err = job.finish(tmp_path / "recs", "--log-every", "0.1", "--limit", "500")
    run_id = manifest(tmp_path / "recs")["run_id"]
    assert code == 0 and f"Z {run_id[:8]} " in err.splitlines()[-1]


def test_readers_that_go_away_do_not_matter(job: Job, whole: Path, tmp_path: Path) -> None:
    """SIGPIPE and closed streams: the job goes on without a word."""
    out = tmp_path / "recs"
    reader, writer = os.pipe()
    os.close(reader)
    process = job.start(out, "--log-every", "0.1", stdout=writer, stderr=writer)
    os.close(writer)
    assert end_of(process) == 0 and same_output(out, whole)


# ---- what the morning finds -----------------------------------------------------------------------------------------


def test_the_manifest_is_complete(whole: Path) -> None:
    record = manifest(whole)
    assert record["state"] == "done" and record["argv"][0] == "recommend"
    assert record["options"]["search.beam"] == {"value": 16, "origin": "command line"}
    assert record["options"]["operation.grace"] == {"value": 20.0, "origin": "default"}
    assert record["environment"]["versions"]["xgr"] and record["engine"]["device_name"]
    assert record["batches"]["count"] == record["counts"]["batches"]
    seconds = record["batches"]["seconds"]
    assert 0 < seconds["p50"] <= seconds["p90"] <= seconds["p99"] <= seconds["max"]
    assert record["memory"]["host_peak_bytes"] > 10**7 and record["memory"]["device_peak_bytes"] is None
    assert record["audit"]["users"] == USERS and record["events"] == []
    assert {"fingerprint", "fingerprint_fields", "model", "vocab", "inputs", "durations", "run_id"} <= record.keys()
    [attempt] = record["attempts"]
    assert attempt["shards_finished"] == SHARDS and attempt["durations"]["total"] > 0 and attempt["pid"]
    assert pq.read_metadata(whole / f"part-00000-of-{SHARDS:05d}.parquet").num_rows == SHARD_ROWS


@pytest.mark.parametrize(
    ("options", "expected"),
    [(("--in", "nothing.parquet"), 2), (("--beam", "2"), 2), (("--max-rejects", "0", "--on-unknown", "reject"), 0)],
)
def test_metrics_are_written_on_failure_too(job: Job, tmp_path: Path, options: Any, expected: int) -> None:
    metrics = tmp_path / "deep" / "xgr.prom"
    more = (*options, "--limit", "200", "--metrics-file", str(metrics))
    assert job.finish(tmp_path / "recs", *more)[0] == expected
    assert f'xgr_last_run_exit_code{{name="xgr"}} {expected}\n' in metrics.read_text()
    assert [path.name for path in metrics.parent.iterdir()] == ["xgr.prom"]
