"""The files of a run: what they may replace, what they say while it goes on, and what happens when they fail."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from job_support import make_model, make_vocabulary

from xgr_cli.main import run
from xgr_engine.bench import record as record_module
from xgr_engine.bench import run as run_module
from xgr_engine.bench.point import Row
from xgr_engine.bench.record import read_record
from xgr_engine.bench.report import page as page_module
from xgr_engine.errors import UsageError

_NO_ROWS = ("--preset", "static", "--items", "100", "--codes", "16x2", "--users", "1", "--beam", "4")
_ROW = ("--geometry", "quick", "--items", "200", "--codes", "16x2", "--context", "4", "--users", "1", "--beam", "3")
_COSTS = run_module.constraint_costs
_WRITE = record_module.write_record


def bench(*arguments: object, sizes: tuple[str, ...] = _NO_ROWS) -> int:
    """A run of a second or two."""
    return run(["bench", *sizes, "--budget", "0.01", "--device", "cpu", *map(str, arguments)])


def during(monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> None:
    """Do something in the middle of a run without rows."""

    def costs(*arguments: Any) -> Any:
        action()
        return _COSTS(*arguments)

    monkeypatch.setattr(run_module, "constraint_costs", costs)


# ---- what they may replace ------------------------------------------------------------------------------------------


def test_inputs_are_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, vocab = make_model(tmp_path / "model"), make_vocabulary(tmp_path / "vocab")
    users = tmp_path / "users" / "u.parquet"
    users.parent.mkdir()
    pq.write_table(pa.table({"user_id": ["a"], "history": [[100, 101]]}), users)
    (tmp_path / "link").symlink_to(users)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    given = ("--model", model, "--vocab", vocab, "--in")
    for name, place in (
        (users, users),
        (users, tmp_path / "link"),
        (users.parent, users.parent / "r.json"),
        (users.parent / "*", users.parent / "r.json"),  # there when the pattern is read
        (users, vocab / "vocab.json"),
        (users, model / "model.safetensors"),
    ):
        for option in ("--out", "--html"):
            assert bench(*given, name, option, place, sizes=()) == 2, place
            assert f"error: {option} {place}" in capsys.readouterr().err
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before


def test_a_slip_in_the_model_s_name_costs_no_older_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "r.json").write_text("old")
    given = ("--model", tmp_path / "modle", "--vocab", make_vocabulary(tmp_path / "vocab"))
    assert bench(*given, "--out", tmp_path / "r.json", sizes=()) == 2
    assert "modle: no such directory" in capsys.readouterr().err and (tmp_path / "r.json").read_text() == "old"


def test_pipes_and_one_file_twice_are_refused_and_links_stay_links(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    for option in ("--out", "--html"):
        assert bench(option, tmp_path / "pipe") == 2
        assert f"{option} {tmp_path / 'pipe'}" in capsys.readouterr().err
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    assert bench("--out", "/dev/null") == 2
    (tmp_path / "sub").mkdir()
    (tmp_path / "link").symlink_to("same.x")
    for other in (tmp_path / "same.x", tmp_path / "sub" / ".." / "same.x", tmp_path / "link"):
        assert bench("--out", other, "--html", tmp_path / "same.x") == 2
    assert not (tmp_path / "same.x").exists()
    assert bench("--out", tmp_path / "link") == 0
    assert (tmp_path / "link").is_symlink() and read_record(tmp_path / "same.x")["state"] == "done"


def test_names_as_long_as_the_file_system_allows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--html", tmp_path / ("a" * 300)) == 2
    assert "File name too long" in capsys.readouterr().err
    assert bench("--html", tmp_path / ("a" * 245), "--out", tmp_path / ("b" * 245)) == 0
    assert (tmp_path / ("a" * 245)).exists() and (tmp_path / ("b" * 245)).exists()


# ---- what they say --------------------------------------------------------------------------------------------------


def test_an_older_result_makes_way_when_the_run_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "r.json"
    out.write_text('{"kind": "bench", "schema_version": 1, "state": "done", "command": ["older"]}')
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(run_module, "measure_ceilings", lambda *arguments: seen.append(read_record(out)) or 1 / 0)
    assert bench("--out", out) == 1
    assert seen[0]["state"] == "running" and seen[0]["command"] != ["older"]
    left = read_record(out)
    assert left["state"] == "failed" and "ZeroDivisionError" in left["left_out"][0]["reason"]


def test_a_run_that_measured_nothing_has_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "r.json"
    assert bench("--items", "20", "--codes", "2x1", "--out", out, "--json") == 1
    shown = capsys.readouterr()
    assert json.loads(shown.out)["state"] == read_record(out)["state"] == "failed"
    assert "nothing that was asked for could be measured" in shown.err and "code space is too small" in shown.err


def test_a_row_that_does_not_fit_is_no_measured_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(row: Row) -> dict[str, Any]:
        raise MemoryError

    monkeypatch.setattr(Row, "measure", measure)
    assert bench("--no-ablations", "--baselines", "none", "--json", sizes=_ROW) == 1
    shown = capsys.readouterr()
    record = json.loads(shown.out)
    assert record["state"] == "failed" and record["timeline"] is not None
    assert "4 tokens x 1 user x W 3: out of memory" in shown.err and "0 rows in" in shown.err


def test_a_model_that_does_not_fit_is_left_out_and_the_next_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def weights(geometry: Any, *arguments: Any, make: Any = run_module.random_weights) -> Any:
        if geometry.name == "qwen3-4b":
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
        return make(geometry, *arguments)

    monkeypatch.setattr(run_module, "random_weights", weights)
    sizes = (*_ROW, "--geometry", "qwen3-4b,quick", "--no-ablations", "--baselines", "none", "--json")
    assert bench(sizes=sizes) == 0
    record = json.loads(capsys.readouterr().out)
    assert {"part": "model qwen3-4b", "reason": "out of memory"} in record["left_out"]
    assert [row["model"] for row in record["rows"]] == ["quick"]


def test_rows_are_shown_though_a_later_model_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def weights(geometry: Any, *arguments: Any, make: Any = run_module.random_weights) -> Any:
        if geometry.name == "qwen3-4b":
            raise UsageError("--context 9: too long for it")
        return make(geometry, *arguments)

    monkeypatch.setattr(run_module, "random_weights", weights)
    sizes = (*_ROW, "--geometry", "quick,qwen3-4b", "--no-ablations", "--baselines", "none", "--json")
    assert bench(sizes=sizes) == 2
    shown = capsys.readouterr()
    record = json.loads(shown.out)
    assert record["state"] == "failed" and len(record["rows"]) == 1
    assert record["left_out"][-1] == {"part": "model qwen3-4b", "reason": "--context 9: too long for it"}
    assert "error: --context 9: too long for it" in shown.err


# ---- what happens when they fail ------------------------------------------------------------------------------------


def _full(*arguments: object) -> None:
    raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))


def test_a_report_that_cannot_be_written_costs_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(page_module, "write_page", _full)
    assert bench("--html", tmp_path / "r.html", "-q") == 1
    shown = capsys.readouterr()
    assert "The constraint alone" in shown.out
    assert f"--html {tmp_path / 'r.html'} cannot be written: File too large" in shown.err


def test_a_record_that_cannot_be_written_on_the_way_costs_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "r.json"
    during(monkeypatch, lambda: monkeypatch.setattr(record_module, "write_record", _full))
    assert bench("--out", out, "-q") == 1
    shown = capsys.readouterr()
    assert "The constraint alone" in shown.out and shown.err.count(f"--out {out} cannot be written") == 1
    assert read_record(out)["state"] == "running"


def test_a_record_that_is_written_in_the_end_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "r.json"

    def full_until_done(path: Path, record: Any) -> None:
        if record["constraint"] and record["state"] == "running":
            _full()
        _WRITE(path, record)

    monkeypatch.setattr(record_module, "write_record", full_until_done)
    assert bench("--out", out, "-q") == 0 and read_record(out)["state"] == "done"


def test_a_record_that_cannot_be_begun_ends_the_run_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(record_module, "write_record", _full)
    during(monkeypatch, lambda: pytest.fail("must not be measured"))
    assert bench("--out", tmp_path / "r.json") == 1
    shown = capsys.readouterr()
    assert shown.out == "" and f"error: --out {tmp_path / 'r.json'}: cannot be written" in shown.err


def test_two_runs_do_not_take_turns_in_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "r.json"
    during(monkeypatch, lambda: _WRITE(out, {"kind": "bench", "state": "of another run"}))
    assert bench("--out", out, "-q") == 1
    assert "another run writes it too" in capsys.readouterr().err
    assert read_record(out)["state"] == "of another run"
    during(monkeypatch, out.unlink)  # nobody's any more
    assert bench("--out", out, "-q") == 0 and read_record(out)["state"] == "done"


# ---- settings that nobody typed -------------------------------------------------------------------------------------


def test_settings_of_other_runs_do_not_stop_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "xgr.toml").write_text('in = "users"\nhistory-col = "clicks"\n[bench]\nfail-over = "5%"\n')
    for name, value in (("TOP_K", "50"), ("SLO_MS", "50"), ("BENCH_MODEL", "model"), ("BENCH_VOCAB", "vocab")):
        monkeypatch.setenv(f"XGR_{name}", value)
    assert bench("-q") == 0
    assert bench("-q", "--fail-over", "5%") == 2
    assert bench("-q", "--in", "users") == 2
    assert bench("-q", "--top-k", "50") == 2
