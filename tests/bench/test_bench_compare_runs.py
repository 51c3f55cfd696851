"""The record of a run that was measured, compared with slower and other ones."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
from run_support import Record, xgr

from xgr_engine.bench.compare import compare_files, compare_records, parse_share
from xgr_engine.bench.record import read_record, write_record
from xgr_engine.errors import InputError, UsageError


def _slower(record: Record, factor: float) -> Record:
    record["rows"][0]["contenders"][0]["latency_ms"]["samples"] = 3  # else no figure is a regression
    changed = copy.deepcopy(record)
    for figure in ("latency_ms",):
        p50 = changed["rows"][0]["contenders"][0][figure]["p50"]
        for name in ("value", "low", "high"):
            p50[name] *= factor
    return changed


def test_compare_flags_only_what_got_worse_beyond_the_limit(record: Record) -> None:
    p50 = record["rows"][0]["contenders"][0]["latency_ms"]["p50"]
    p50["low"], p50["high"] = p50["value"] * 0.99, p50["value"] * 1.01
    assert compare_records(record, record, 0.05)["regressions"] == []
    worse = compare_records(record, _slower(record, 1.2), 0.05)["regressions"]
    assert [(row["contender"], row["figure"]) for row in worse] == [("xgr", "latency p50, ms")]
    assert worse[0]["ratio"] == pytest.approx(1.2)
    assert compare_records(record, _slower(record, 0.5), 0.05)["regressions"] == []
    assert compare_records(record, _slower(record, 1.2), 0.5)["regressions"] == []
    assert compare_records(record, _slower(record, 1.2), None)["regressions"] == []


def test_compare_takes_noise_for_noise(record: Record) -> None:
    p50 = record["rows"][0]["contenders"][0]["latency_ms"]["p50"]
    p50["low"], p50["high"] = p50["value"] * 0.5, p50["value"] * 2
    assert compare_records(record, _slower(record, 1.2), 0.05)["regressions"] == []


def test_compare_flags_lost_contenders_and_wrong_answers(record: Record) -> None:
    gone, wrong = copy.deepcopy(record), copy.deepcopy(record)
    gone["rows"][0]["contenders"][0] = {"name": "xgr", "what": "", "status": "out of memory", "reason": ""}
    wrong["rows"][0]["contenders"][0]["parity"]["marks"] = ["1 invalid"]
    assert [row["figure"] for row in compare_records(record, gone, 0.05)["regressions"]] == ["status"]
    assert [row["figure"] for row in compare_records(record, wrong, 0.05)["regressions"]] == ["answers"]


def test_compare_looks_at_online_rates_under_the_same_limit(record: Record) -> None:
    record["online"] = record["online"][:1]
    record["online"][0] |= {"rate": 100.0, "status": "ok", "reason": ""}  # whatever this machine reached
    slower, gone, other = (copy.deepcopy(record) for _ in range(3))
    slower["online"][0]["rate"] = 80.0
    gone["online"][0]["rate"] = None
    other["online"][0]["rate"], other["options"]["slo_ms"] = 10.0, 50.0
    for changed in (slower, gone):
        worse = compare_records(record, changed, 0.05)["regressions"]
        assert [row["figure"] for row in worse] == ["online users/s"]
        assert compare_records(changed, record, 0.05)["regressions"] == []
    assert compare_records(record, slower, 0.3)["regressions"] == []
    assert compare_records(record, other, 0.05)["regressions"] == []


def test_compare_needs_rows_in_common(record: Record) -> None:
    other = {**copy.deepcopy(record), "attention": [], "online": [], "constraint": None}
    other["options"] |= {"beams": [5, 10], "constraint": False}
    for row in other["rows"]:
        row["beam"] += 1
    with pytest.raises(InputError, match="no row in common"):
        compare_records(record, other, 0.05)
    assert parse_share("5%") == parse_share("0.05") == 0.05
    with pytest.raises(UsageError):
        parse_share("fast")


def test_records_survive_the_disk_and_foreign_files_are_refused(record: Record, tmp_path: Path) -> None:
    write_record(tmp_path / "deep" / "a.json", record)
    assert read_record(tmp_path / "deep" / "a.json")["rows"] == record["rows"]
    (tmp_path / "b.json").write_text('{"kind": "manifest"}')
    (tmp_path / "c.json").write_text("{")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    for name in ("b.json", "c.json", "deep.json", "absent.json"):
        with pytest.raises(InputError):
            read_record(tmp_path / name)
    whole = tmp_path / "deep" / "a.json"
    row = {**record["rows"][0], "contenders": [{"name": "xgr"}]}
    for broken in ({}, {"rows": None}, {"rows": [{"model": "x"}]}, {**record, "rows": [row]}, {**record, "online": 1}):
        write_record(tmp_path / "broken.json", {"kind": "bench", **broken})
        for pair in ((tmp_path / "broken.json", whole), (whole, tmp_path / "broken.json")):
            with pytest.raises(InputError, match=r"broken\.json: fields of"):
                compare_files(*pair, None)


def test_compare_command_exits_1_on_a_regression(
    record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    p50 = record["rows"][0]["contenders"][0]["latency_ms"]["p50"]
    p50["low"], p50["high"] = p50["value"] * 0.99, p50["value"] * 1.01
    for name, factor in (("a", 1.0), ("b", 1.5)):
        write_record(tmp_path / f"{name}.json", _slower(record, factor))
    a, b = str(tmp_path / "a.json"), str(tmp_path / "b.json")
    assert xgr("bench", "compare", a, b, "--fail-over", "5%").returncode == 1
    assert xgr("bench", "compare", a, b).returncode == 0
    assert xgr("bench", "compare", a, a, "--fail-over", "5%").returncode == 0
    assert xgr("bench", "compare", a).returncode == 2
    for option, value in (("--html", tmp_path / "c.html"), ("--out", tmp_path / "c.json"), ("--beam", "4")):
        done = xgr("bench", "compare", a, b, option, str(value))
        assert done.returncode == 2 and f"{option} does not belong to xgr bench compare" in done.stderr
    monkeypatch.setenv("XGR_BENCH_OUT", str(tmp_path / "c.json"))  # for runs; nobody asked for it here
    assert xgr("bench", "compare", a, a, "--json", "-q").returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "b.json"]
    assert xgr("bench", "frobnicate").returncode == 2
