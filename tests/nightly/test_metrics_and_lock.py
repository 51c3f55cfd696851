"""The metrics file and the lock on their own."""

from __future__ import annotations

import multiprocessing
import os
import re
import time
from pathlib import Path

import pytest

from xgr_engine.errors import HistoryError, OutputLockedError, TooManyRejectsError
from xgr_engine.job.audit import Audit
from xgr_engine.job.caches import use_caches
from xgr_engine.job.lock import hold, is_held
from xgr_engine.job.metrics_file import exit_code_of, metrics_text, reported, write_metrics
from xgr_engine.job.options import parse_duration
from xgr_engine.job.record import batch_summary
from xgr_engine.job.resume import now
from xgr_engine.job.stop import Stop, Stopped

SERIES = re.compile(r'([a-z_]+)\{name="[^"\\]*(?:\\.[^"\\]*)*"(?:,[a-z_]+="[^"]*")*\} (-?[0-9.e+]+|NaN)')

RECORD = {
    "rows": 10,
    "shards": 2,
    "shards_finished": 1,
    "counts": {"rejects": 3, "rejects_by_reason": {"empty-history": 2, "engine-error": 1}},
    "audit": {"users": 7, "items": 70, "short": 1, "invalid": 0, "seen": "off", "excluded": None},
    "durations": {"total": 1.5, "compute": 1},
    "batches": batch_summary([0.25, 0.5, 0.75]),
    "memory": {"host_peak_bytes": 123456789012, "device_peak_bytes": None},
    "events": [{"kind": "out-of-memory"}, {"kind": "out-of-memory"}],
    "attempts": [{}, {}],
}


def values(text: str) -> dict[str, float]:
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line[0] != "#"}


def test_the_text_form_is_what_prometheus_reads() -> None:
    text = metrics_text('a"b\\c\nd', RECORD, 3, 1e9, last_success=5e8)
    names = []
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            names.append(line.split()[2])
            assert line.endswith(" gauge")
        elif not line.startswith("# HELP "):
            match = SERIES.fullmatch(line)
            assert match and match[1] == names[-1], line
    assert len(names) == len(set(names)), "the samples of a metric stand together"
    assert text.endswith("\n")
    found = values(metrics_text("n", RECORD, 3, 1e9, last_success=5e8))
    assert found['xgr_rejects{name="n",reason="empty-history"}'] == 2
    assert found['xgr_shards{name="n",state="finished"}'] == 1
    assert found['xgr_batch_seconds{name="n",quantile="0.5"}'] == 0.5
    assert found['xgr_memory_peak_bytes{name="n",where="host"}'] == 123456789012
    assert found['xgr_events{name="n",kind="out-of-memory"}'] == 2
    assert found['xgr_last_success_timestamp_seconds{name="n"}'] == 5e8
    assert not [name for name in found if 'fault="seen"' in name or 'where="device"' in name]


def test_every_fault_that_the_audit_counts_is_a_series() -> None:
    audit = Audit(excluded=2, filtered=3, over_cap=4, invalid=5)
    found = values(metrics_text("n", {"audit": audit.to_json()}, 1, 1e9))
    faults = [value for name, value in found.items() if name.startswith("xgr_audit_faults")]
    assert sum(faults) == audit.faults == 14


def test_no_unknown_item_is_zero_and_not_a_series_that_is_absent() -> None:
    key = 'xgr_unknown_items{name="n"}'
    assert values(metrics_text("n", RECORD, 0, 1e9))[key] == 0
    assert key not in values(metrics_text("n", {}, 2, 1e9)), "a run that failed before it began counted nothing"


def test_a_failure_keeps_the_time_of_the_last_success(tmp_path: Path) -> None:
    path = tmp_path / "xgr-nightly.prom"
    key = 'xgr_last_success_timestamp_seconds{name="xgr-nightly"}'
    before = int(time.time())
    write_metrics(path, {**RECORD, "finished": now()}, 0)
    success = values(path.read_text())[key]
    assert before <= success <= time.time()
    for error in (HistoryError("x"), Stopped("SIGTERM", 143), KeyboardInterrupt(), OSError(28, "full")):
        with pytest.raises(type(error)), reported(str(path), dict):
            raise error
        found = values(path.read_text())
        assert found[key] == success
        assert found['xgr_last_run_exit_code{name="xgr-nightly"}'] == exit_code_of(error)
    assert [entry.name for entry in tmp_path.iterdir()] == ["xgr-nightly.prom"]


def test_a_metrics_file_that_cannot_be_written_hides_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(HistoryError, match="the real error"), reported(str(tmp_path / "file" / "x.prom"), dict):
        raise HistoryError("the real error")


def test_exit_codes() -> None:
    assert [exit_code_of(error) for error in (None, TooManyRejectsError("x"), ValueError(), KeyboardInterrupt())] == [
        0, 3, 1, 130,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "seconds"), [("20", 20), ("20s", 20), ("10m", 600), ("1.5h", 5400), ("2d", 172800), (" 0S ", 0)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration("--wait", text) == seconds


@pytest.mark.parametrize("text", ["", "m", "-1s", "10 minutes", "1e3", "nan"])
def test_durations_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(Exception, match="--wait"):
        parse_duration("--wait", text)


def test_batch_percentiles() -> None:
    summary = batch_summary([float(number) for number in range(1, 101)])
    assert summary["count"] == 100 and summary["seconds"]["max"] == 100
    assert summary["seconds"]["p50"] == 50.5 and summary["seconds"]["p99"] == pytest.approx(99.01)
    assert batch_summary([]) == {"count": 0}


# ---- lock -----------------------------------------------------------------------------------------------------------


def _count_alone(path: Path, counter: Path, times: int) -> None:
    for _ in range(times):
        with hold(path, wait=200):
            value = int(counter.read_text())
            time.sleep(0.001)
            counter.write_text(str(value + 1))


def test_only_one_holds_it_although_the_file_is_removed_each_time(tmp_path: Path) -> None:
    folder = tmp_path / "_xgr"
    folder.mkdir()
    counter = tmp_path / "counter"
    counter.write_text("0")
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_count_alone, args=(folder / "lock", counter, 5)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(250)
        assert worker.exitcode == 0
    assert counter.read_text() == "20" and not (folder / "lock").exists()


def test_a_lock_file_left_behind_blocks_nobody(tmp_path: Path) -> None:
    path = tmp_path / "_xgr" / "lock"
    path.parent.mkdir()
    path.write_text('{"pid": 1, "machine": "other", "since": "long ago"}')
    assert not is_held(path)
    with hold(path):
        assert is_held(path)
        with pytest.raises(OutputLockedError, match=f"process {os.getpid()} on") as held, hold(path):
            pass
        assert held.value.exit_code == 75
    assert not is_held(path) and not path.exists()


def test_waiting_ends_when_asked_to_stop(tmp_path: Path) -> None:
    path, stop, notes = tmp_path / "_xgr" / "lock", Stop(), []
    path.parent.mkdir()

    def note(text: str) -> None:
        notes.append(text)
        stop.request("SIGTERM", 143, 20)

    with hold(path), pytest.raises(Stopped), hold(path, wait=60, note=note, check=stop.check):
        pass
    assert len(notes) == 1 and "waiting" in notes[0]


# ---- caches ---------------------------------------------------------------------------------------------------------


def test_caches_follow_the_option_and_leave_a_missing_home_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")
    for name in variables:
        monkeypatch.setenv(name, "before")
        monkeypatch.delenv(name)
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "7")
    monkeypatch.setenv("HOME", str(tmp_path))
    use_caches(None)
    assert not [name for name in variables if name in os.environ]
    monkeypatch.setenv("HOME", str(tmp_path / "nowhere"))
    use_caches(None)
    places = [Path(os.environ[name]) for name in variables]
    assert len({place.parent for place in places}) == 1 and places[0].parent.stat().st_mode & 0o777 == 0o700
    places[0].parent.rmdir()
    use_caches(tmp_path / "caches")
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "caches" / "triton")
    assert (tmp_path / "caches" / "triton").is_dir()
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "7", "what the user set stays"
