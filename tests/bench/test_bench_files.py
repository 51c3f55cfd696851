"""The files of a run: what they may replace, what they say while it goes on, and what happens when they fail."""

from __future__ import annotations

import errno
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from job_support import make_model, make_vocabulary

from xgr_cli import bench_run
from xgr_cli.main import run
from xgr_engine.bench import constraint
from xgr_engine.bench import run as run_module
from xgr_engine.bench import subject as subject_module
from xgr_engine.bench.record import read_record
from xgr_engine.bench.report import page as page_module
from xgr_engine.bench.row import Row
from xgr_engine.errors import UsageError

_NO_ROWS = ("--preset", "static", "--items", "100", "--codes", "16x2", "--users", "1", "--beam", "4")
_ROW = ("--geometry", "quick", "--items", "200", "--codes", "16x2", "--context", "4", "--users", "1", "--beam", "3")
_COSTS = run_module.constraint_costs
_WRITE = bench_run.write_record


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


@pytest.fixture
def given(tmp_path: Path) -> dict[str, Any]:
    """Options of a run that would measure, each with its value."""
    users = tmp_path / "u.parquet"
    pq.write_table(pa.table({"user_id": ["a"], "history": [[100, 101]]}), users)
    model, vocab = make_model(tmp_path / "model"), make_vocabulary(tmp_path / "vocab")
    return {"--model": model, "--vocab": vocab, "--in": users, "--beam": 4, "--users": 1, "--baselines": "none"}


_SLIPS: list[tuple[str, Any, str]] = [
    ("--model", "modle", "modle: no such directory"),
    ("--model", "vocab", "vocab"),
    ("--vocab", "vocba", "vocba: no such directory"),
    ("--vocab", "model", "model"),
    ("--in", "nobody.parquet", "nobody.parquet"),
    ("--in", "torn.parquet", "torn.parquet"),
    ("--history-col", "clicks", "clicks"),
    ("--context", "1", "at most 1 tokens"),
    ("--budget", "-1", "--budget -1"),
    ("--geometry", "qwen", "--geometry"),
]


@pytest.mark.parametrize(("option", "value", "said"), _SLIPS)
def test_bad_input_costs_no_older_result(
    option: str, value: str, said: str, given: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 and no more")
    out, html = tmp_path / "r.json", tmp_path / "r.html"
    out.write_text("old")
    html.write_text("old page")
    path = option in ("--model", "--vocab", "--in")
    options = given | {option: tmp_path / value if path else value, "--out": out, "--html": html}
    assert bench(*(part for pair in options.items() for part in pair), sizes=()) == 2
    assert said in capsys.readouterr().err
    assert out.read_text() == "old" and html.read_text() == "old page"


def test_a_geometry_that_cannot_hold_the_context_costs_no_older_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "r.json"
    sizes = (*_ROW, "--context", "9999", "--baselines", "none", "--out", str(out))
    assert bench(sizes=sizes) == 2
    assert read_record(out)["state"] == "failed"  # there was none
    assert "stays as it was" not in capsys.readouterr().err
    out.write_text("old")
    assert bench(sizes=sizes) == 2
    assert out.read_text() == "old"
    assert capsys.readouterr().err.count(f"--out {out} stays as it was before: nothing was measured") == 1


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


def test_a_record_stands_from_the_beginning_where_there_is_no_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "r.json"
    seen: list[str] = []
    monkeypatch.setattr(
        run_module, "measure_ceilings", lambda *arguments: seen.append(read_record(out)["state"]) or 1 / 0
    )
    assert bench("--out", out) == 1 and seen == ["running"]
    left = read_record(out)
    assert left["state"] == "failed" and "ZeroDivisionError" in left["left_out"][0]["reason"]
    out.write_text("old")
    monkeypatch.setattr(run_module, "measure_ceilings", lambda *arguments: seen.append(out.read_text()) or 1 / 0)
    assert bench("--out", out) == 1 and seen[1:] == ["old"] and out.read_text() == "old"


_DIES_IN_ITS_SECOND_ROW = """
import os, signal
from xgr_cli.main import main
from xgr_engine.bench.row import Row

def measure(row, first=Row.measure):
    return first(row) if row.workload.users == 1 else os.kill(os.getpid(), signal.SIGKILL)

Row.measure = measure
main()
"""


@pytest.mark.parametrize(("users", "states"), [("2", []), ("1,2", ["running"])])
def test_an_older_result_makes_way_for_the_first_row(users: str, states: list[str], tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    out.write_text("old")
    more = ("--users", users, "--baselines", "none", "--no-ablations", "--budget", "0.01", "--device", "cpu")
    command = [sys.executable, "-c", _DIES_IN_ITS_SECOND_ROW, "bench", *_ROW, *more, "--out", str(out)]
    assert subprocess.run(command, check=False, timeout=120).returncode == -signal.SIGKILL
    if not states:
        assert out.read_text() == "old"
    else:
        assert read_record(out)["state"] == "running" and len(read_record(out)["rows"]) == 1


def test_a_stopped_run_says_no_more_of_its_file_than_is_true(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*arguments: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(run_module, "measure_ceilings", stop)
    out = tmp_path / "r.json"
    assert bench("--out", out, "-q") == 143
    assert f"state interrupted: {out}" in capsys.readouterr().err and read_record(out)["state"] == "interrupted"
    out.write_text("old")
    assert bench("--out", out, "-q") == 143
    said = capsys.readouterr().err
    assert "state interrupted" not in said and f"{out} stays as it was" in said and out.read_text() == "old"


def test_a_stopped_run_without_rows_keeps_the_sizes_that_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They used to be lost with the size at hand, which may take minutes."""
    sizes = constraint._one_size

    def one_size(*arguments: Any) -> dict[str, Any]:
        if arguments[2] > 10_000:
            os.kill(os.getpid(), signal.SIGTERM)
        return sizes(*arguments)

    monkeypatch.setattr(constraint, "_one_size", one_size)
    out, given = tmp_path / "r.json", ("--preset", "static", "--codes", "64x3", "--users", "1", "--beam", "2")
    assert bench("--out", out, "-q", sizes=given) == 143
    record = read_record(out)
    assert record["state"] == "interrupted" and [one["items"] for one in record["constraint"]["sizes"]] == [10_000]
    assert "10,000" in capsys.readouterr().out
    assert "load_average" in record["noise"]


def test_a_run_that_measured_nothing_has_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, html = tmp_path / "r.json", tmp_path / "r.html"
    given = ("--items", "20", "--codes", "2x1", "--out", out, "--html", html, "--json")
    assert bench(*given) == 1
    shown = capsys.readouterr()
    assert json.loads(shown.out)["state"] == read_record(out)["state"] == "failed" and html.exists()
    assert "nothing that was asked for could be measured" in shown.err and "code space is too small" in shown.err
    for path in (out, html):
        path.write_text("old")
    assert bench(*given) == 1
    shown = capsys.readouterr()
    assert json.loads(shown.out)["state"] == "failed" and out.read_text() == html.read_text() == "old"
    assert f"--html {html} stays as it was before" in shown.err and "report: " not in shown.err


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
    def weights(geometry: Any, *arguments: Any, make: Any = subject_module.random_weights) -> Any:
        if geometry.name == "qwen3-4b":
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
        return make(geometry, *arguments)

    monkeypatch.setattr(subject_module, "random_weights", weights)
    sizes = (*_ROW, "--geometry", "qwen3-4b,quick", "--no-ablations", "--baselines", "none", "--json")
    assert bench(sizes=sizes) == 0
    record = json.loads(capsys.readouterr().out)
    assert {"part": "model qwen3-4b", "reason": "out of memory"} in record["left_out"]
    assert [row["model"] for row in record["rows"]] == ["quick"]


def test_rows_are_shown_though_a_later_model_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def weights(geometry: Any, *arguments: Any, make: Any = subject_module.random_weights) -> Any:
        if geometry.name == "qwen3-4b":
            raise UsageError("--context 9: too long for it")
        return make(geometry, *arguments)

    monkeypatch.setattr(subject_module, "random_weights", weights)
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
    during(monkeypatch, lambda: monkeypatch.setattr(bench_run, "write_record", _full))
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

    monkeypatch.setattr(bench_run, "write_record", full_until_done)
    assert bench("--out", out, "-q") == 0 and read_record(out)["state"] == "done"


def test_a_record_that_cannot_be_begun_ends_the_run_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_run, "write_record", _full)
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
