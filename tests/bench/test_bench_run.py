"""A whole small run and its record: what was asked for is measured, and what disturbed it is said."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from run_support import TINY, Record

from xgr_cli.bench_views import show_bench
from xgr_cli.output import Output
from xgr_engine.bench.machine import Ceilings
from xgr_engine.bench.options import BenchOptions
from xgr_engine.bench.record import exceeded
from xgr_engine.bench.report.page import page
from xgr_engine.bench.report.tables import (
    online_table,
    row_table,
)
from xgr_engine.bench.run import Bench, BenchCaller, run_bench
from xgr_engine.bench.workloads import BenchModel


def test_run_measures_all_that_was_asked_for(record: Record) -> None:
    assert [(row["context"], row["beam"]) for row in record["rows"]] == [(8, 4), (8, 9), (17, 4), (17, 9)]
    assert record["left_out"] == []
    for row in record["rows"]:
        status = {one["name"]: one["status"] for one in row["contenders"]}
        assert status == {"xgr": "ok", "paged": "ok", "vllm": "not run"}
        for one in row["contenders"][:2]:
            assert one["parity"]["marks"] == []
            assert one["latency_ms"]["p50"]["value"] > 0
            assert one["latency_ms"]["p99"] is None  # three samples have no 99th percentile
    assert record["ceilings"]["tflops"] > 0
    assert record["ceilings"]["tbs"] > 0
    assert set(record["phases"]["ms"]) == {"prefill", "levels", "ranking"}
    assert sum(record["timeline"]["shares"].values()) == pytest.approx(1.0)
    assert {"linear", "selection"} <= set(record["timeline"]["shares"])
    assert [entry["status"] for entry in record["attention"]] == ["ok", "ok"]
    assert record["attention"][0]["relative_difference"] < 1e-4


def test_ablations_name_every_part_and_simulate_none(record: Record) -> None:
    parts = {part["part"]: part for part in record["ablations"]["parts"]}
    assert len(parts) == 9
    assert parts["xAttention"]["status"] == "ok"
    assert parts["shared prefix"]["status"] == "ok"
    for name in ("xBeam: ragged rows", "xSchedule: graph", "xSchedule: streams"):
        assert parts[name]["status"] == "not available"
        assert parts[name]["reason"]
        assert "slower" not in parts[name]
    assert all(part["off"] for part in parts.values())


def test_constraint_agrees_with_the_masked_search(record: Record) -> None:
    sizes = {entry["items"]: entry for entry in record["constraint"]["sizes"]}
    for items in (500, 5000):
        assert sizes[items]["marks"] == []
        assert sizes[items]["overlap"] == 1.0
    assert sizes[10**7]["status"] == "not run"


def test_online_reports_what_it_tried(record: Record) -> None:
    for entry in record["online"]:
        assert entry["status"] == "ok"
        assert entry["trials"] or entry["reason"]
        assert entry["latency_model"]["observed_batches"] > 3
        assert entry["latency_model"]["relative_error"]["p50_abs"] >= 0


def test_a_time_limit_leaves_out_and_says_so() -> None:
    options = BenchOptions(geometries=("quick",), items=500, codes=40, levels=3, budget_s=0.01, time_limit_s=1e-6)
    record = run_bench(options, torch.device("cpu"), BenchCaller())
    assert record["rows"] == []
    assert record["state"] == "failed"  # no row was measured
    assert "time limit" in record["left_out"][0]["reason"]
    assert "Not run" in page(record)


def test_the_timeline_is_of_the_last_model_that_was_measured() -> None:
    """The limit may leave out the models after it; and the profiler, which slows a GPU's launches, comes last."""
    options = replace(TINY, geometries=("quick", "qwen3-4b"), attention=True, timeline=True, time_limit_s=3600.0)
    order: list[str] = []

    def note(text: str) -> None:
        order.append(text)
        if text == "attention":  # the last part of the first model
            bench._started -= 3600.0

    bench = Bench(options, torch.device("cpu"), BenchCaller(note=note))
    record = bench.run()
    assert [part["part"] for part in record["left_out"]] == ["model qwen3-4b"]
    assert record["phases"]["model"] == record["timeline"]["model"] == "quick"
    assert order[-1] == "timeline"


def test_rows_above_a_ceiling_are_warned_of(record: Record, capsys: pytest.CaptureFixture[str]) -> None:
    record["ceilings"] |= {"tflops": 1e6, "tbs": 1e6}
    assert exceeded(record["ceilings"], record["rows"]) == []
    row_table(record["rows"][0], record["ceilings"])
    assert "percentages of it mean nothing" not in page(record) and "exceeded: too low" not in page(record)
    record["rows"][0]["contenders"][0]["tflops"] = 2e6
    (text,) = exceeded(record["ceilings"], record["rows"])
    assert text.startswith("the measured ceiling of 1e+06 TFLOP/s is too low, xgr reached up to 2e+06: ")
    assert "was disturbed; percentages of it mean nothing" in text
    assert text in row_table(record["rows"][0], record["ceilings"]).notes
    assert text not in row_table(record["rows"][1], record["ceilings"]).notes
    assert text in page(record) and "measured, and exceeded: too low" in page(record)
    record["warnings"] = []
    show_bench(Output(), record)
    assert "percentages of it mean nothing" in " ".join(capsys.readouterr().out.split())


def test_a_run_with_disturbed_ceilings_records_it(monkeypatch: pytest.MonkeyPatch) -> None:
    low = Ceilings(tflops=1e-9, tbs=1e-9, matmul="product", copy="copy")
    monkeypatch.setattr("xgr_engine.bench.run.measure_ceilings", lambda *_: low)
    record = run_bench(TINY, torch.device("cpu"), BenchCaller())
    flops, data = (text for text in record["warnings"] if "mean nothing" in text)
    assert "1e-09 TFLOP/s is too low, xgr reached" in flops and "1e-09 TB/s is too low, xgr reached" in data


def test_a_record_says_in_which_dtype_it_ran(record: Record) -> None:
    assert BenchOptions().dtype == "bfloat16"
    assert record["options"]["dtype"] == record["rows"][0]["dtype"] == "float32"


def test_the_dtype_is_that_of_the_model_once_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(replace(TINY, rows=False, attention=True), torch.device("cpu"), BenchCaller())
    assert bench.record["options"]["dtype"] == "float32"  # of a run that loads none
    monkeypatch.setattr(BenchModel, "dtype", property(lambda model: "float16"))
    assert bench.run()["options"]["dtype"] == "float16"


def test_contenders_that_were_not_measured_online_are_named(record: Record) -> None:
    options = record["options"] | {"preset": "quick"}
    assert "not measured online in preset quick: paged, vllm" in online_table(record["online"], options).notes
    assert "not measured online: paged, vllm" in page(record)
    options["online_contenders"] = ["xgr", "paged", "vllm"]
    assert not [note for note in online_table(record["online"], options).notes if "not measured online" in note]
