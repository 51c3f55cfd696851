"""The timeline's arithmetic, and the paper's claims beside a run's figures."""

from __future__ import annotations

import copy
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from bench_support import tiny_workload

from xgr_engine.bench import phases
from xgr_engine.bench.baselines.engine import Xgr
from xgr_engine.bench.claims import paper_claims
from xgr_engine.bench.phases import Span, busy_time, kind_of, merge_spans, trace_batch
from xgr_engine.bench.report.tables import phases_table


def test_busy_time_counts_overlapping_work_once() -> None:
    spans = [Span("a", 0, 10), Span("b", 5, 8), Span("a", 9, 12), Span("b", 20, 21)]
    assert busy_time(spans) == 13


def test_merged_spans_keep_extent_and_kinds_and_are_few() -> None:
    spans = [Span("ab"[at % 2], at * 2.0, at * 2.0 + 1) for at in range(5000)]
    merged = merge_spans(spans, 10_000.0, limit=100)
    assert len(merged) <= 100
    assert {span.kind for span in merged} == {"a", "b"}
    assert min(span.start for span in merged) == 0
    assert max(span.end for span in merged) == spans[-1].end
    few = [Span("a", 0, 1), Span("a", 500, 501)]
    assert merge_spans(few, 1000.0) == few


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", "linear"),
        ("aten::mm", "linear"),
        ("mkldnn::_linear_pointwise", "linear"),
        ("hopper_attention_kernel", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma", "attention"),
        ("aten::log_softmax", "head"),
        ("_tile_logsumexp_kernel", "head"),
        ("shortlist_kernel", "selection"),
        ("Memcpy HtoD (Pinned -> Device)", "copy"),
        ("add_rms_norm_kernel", "elementwise"),
        ("something_new", "other"),
    ],
)
def test_kernels_are_sorted_by_name(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def _contender(name: str, ms: float, gigabytes: float) -> dict[str, Any]:
    peak = int(gigabytes * 1e9)
    return {"name": name, "status": "ok", "latency_ms": {"p50": {"value": ms}}, "device_peak_bytes": peak}


def _row(beam: int, *contenders: dict[str, Any]) -> dict[str, Any]:
    return {"model": "m", "context": 3072, "users": 4, "beam": beam, "contenders": list(contenders)}


def test_claims_stand_beside_figures_that_were_measured_and_nothing_else() -> None:
    record: dict[str, Any] = {"rows": [], "attention": [], "online": [], "options": {"slo_ms": 200.0}}
    assert paper_claims(record) == []
    record["rows"] = [
        _row(128, _contender("xgr", 10.0, 5.0), _contender("paged", 20.0, 8.0)),
        _row(512, _contender("xgr", 15.0, 6.0), {"name": "paged", "status": "out of memory", "reason": ""}),
    ]
    record["attention"] = [
        {"status": "ok", "kernels": "triton", "context": 1, "users": 2, "beam": 3, "model": "m"}
        | {"xgr_ms": 1.0, "paged_ms": 7.0, "paged_over_xgr": 7.0},
        {"status": "ok", "kernels": "reference"},
    ]
    record["online"] = [
        {"model": "m", "context": 1, "beam": 128, "contender": name, "rate": rate}
        for name, rate in (("xgr", 90.0), ("paged", 30.0))
    ]
    memory, growth, attention, throughput = paper_claims(record)
    assert memory["values"] == {"xgr": 6.0, "paged": "out of memory"}
    assert memory["better"] == {}
    assert growth["values"] == {"xgr": 1.5, "paged": "out of memory"}
    assert growth["better"] == {}
    assert attention["better"] == {"paged": 7.0}
    assert throughput["better"]["paged"] == pytest.approx(3.0)
    for place in range(2):  # a search that the time limit ended says what holds at least: no ratio comes of it
        cut = copy.deepcopy(record)
        cut["online"][place]["reason"] = "the time limit ended the search"
        *_, throughput = paper_claims(cut)
        assert throughput["values"] == {"xgr": 90.0, "paged": 30.0} and throughput["better"] == {}


def test_share_of_a_batch_in_which_the_device_computed_is_of_all_its_time() -> None:
    """Not of that between the first kernel and the last: what the host does before and after counts as well."""
    phases = {"model": "m", "context": 1, "users": 2, "beam": 3, "ms": {"prefill": 6.0, "levels": 3.0, "ranking": 1.0}}
    timeline = {"busy": 0.5, "span_us": 8000.0, "wall_us": 10_000.0, "unit": "kernels", "shares": {"linear": 1.0}}
    table = phases_table(phases, timeline)
    assert any(" 40% of the time of a " in note for note in table.notes)
    assert [row[2] for row in table.rows] == ["60.0%", "30.0%", "10.0%"]


@pytest.mark.parametrize(("step_s", "most"), [(0.0, 9), (2.0, 4)])
def test_a_slow_batch_is_looked_into_with_few_runs(monkeypatch: pytest.MonkeyPatch, step_s: float, most: int) -> None:
    """The timeline is run past the time limit too: with a batch of seconds it took longer than the limit."""
    runs = []
    run = Xgr.run

    def counted(*arguments: Any) -> Any:
        runs.append(arguments)
        return run(*arguments)

    monkeypatch.setattr(Xgr, "run", counted)
    clock = itertools.count()
    monkeypatch.setattr(phases, "time", SimpleNamespace(perf_counter=lambda: next(clock) * step_s))
    record: dict[str, Any] = {}
    trace_batch(tiny_workload(), record)
    assert len(runs) <= most
    assert record["phases"]["ms"].keys() == {"prefill", "levels", "ranking"}
