"""The scripts under benchmarks/ that run on a GPU: their arithmetic, and all of them at tiny sizes on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "benchmarks"))
from intervals import Interval, gap_report, gaps_between
from linears import flops, growth
from memory import pool_bytes
from rows import Shape

from xgr_engine.bench.cost import decode_work, prefill_work, rows_a_level
from xgr_engine.bench.geometries import find_geometry
from xgr_engine.bench.phases import busy_time
from xgr_engine.bench.workloads import Workload, random_weights, synthetic_catalog
from xgr_engine.options import SearchOptions

BENCHMARKS = Path(__file__).resolve().parent.parent.parent / "benchmarks"


def test_union_counts_time_once_and_gaps_are_what_is_left() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        starts = np.sort(rng.integers(0, 60, 12))
        ends = starts + rng.integers(1, 9, 12)
        found = [Interval(str(n), float(s), float(e)) for n, (s, e) in enumerate(zip(starts, ends, strict=True))]
        covered = np.zeros(80, bool)
        for start, end in zip(starts, ends, strict=True):
            covered[start:end] = True
        assert busy_time(found) == covered.sum()
        gaps = gaps_between(found)
        assert sum(gap.us for gap in gaps) == (~covered[starts[0] : ends.max()]).sum()
        for gap in gaps:
            assert not covered[int(gap.start) : int(gap.end)].any()
            assert ends[int(gap.before)] == gap.start
            assert starts[int(gap.after)] == gap.end


def test_a_copy_between_kernels_is_part_of_their_gap() -> None:
    found = [Interval("a", 0, 10), Interval("Memcpy HtoD", 12, 17), Interval("b", 30, 31)]
    report = gap_report(found)
    assert report["largest"] == [{"us": 20, "at_ms": 0.01, "copies_us": 5, "before": "a", "after": "b"}]
    assert busy_time(found) == 16


def test_pools_of_graphs_are_told_from_ordinary_memory() -> None:
    segments = [
        {"segment_pool_id": (0, 0), "total_size": 100, "allocated_size": 60},
        {"segment_pool_id": (0, 3), "total_size": 50, "allocated_size": 10},
        {"segment_pool_id": (7, 0), "total_size": 5, "allocated_size": 5},
    ]
    assert pool_bytes(segments) == (55, 40)


@pytest.mark.parametrize("name", ["quick", "onerec-0.1b", "qwen3-1.7b"])
def test_linear_operations_are_those_of_the_cost_model_without_attention(name: str) -> None:
    geometry, catalog = find_geometry(name), synthetic_catalog(5000, 64, 3)
    spec, shape = geometry.spec(64, 3, "bfloat16"), Shape(1, 3, 16)
    tiny = random_weights(find_geometry("quick"), 64, 3, torch.device("cpu"))
    rows = rows_a_level(Workload(tiny, catalog, SearchOptions(16, 16), 1, 3))
    found = flops(spec, shape, rows)
    if name == "quick":
        workload = Workload(tiny, catalog, SearchOptions(16, 16), 1, 3)
        heads = 4 * spec.num_heads * spec.head_dim
        in_prompts = heads * 3 * (spec.num_layers - 1)
        in_decode = sum(heads * spec.num_layers * count * (3 + 3 * depth) for depth, count in enumerate(rows) if depth)
        assert found.prefill == prefill_work(workload, 3).flops - in_prompts
        assert found.tail == decode_work(workload, 3).flops - in_decode
    # one more prompt token costs the layers' parameters but for what only the last token of a prompt needs
    longer = flops(spec, Shape(2, 3, 16), rows)
    layer = sum(np.prod(shape) for shape in _layer_shapes(spec))
    last = spec.hidden_size * (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    assert longer.prefill - found.prefill == 2 * 3 * ((spec.num_layers - 1) * layer + last)


def _layer_shapes(spec: Any) -> list[tuple[int, int]]:
    heads = spec.num_heads * spec.head_dim
    return [
        (heads + 2 * spec.num_kv_heads * spec.head_dim, spec.hidden_size),
        (spec.hidden_size, heads),
        (2 * spec.intermediate_size, spec.hidden_size),
        (spec.hidden_size, spec.intermediate_size),
    ]


def test_growth_is_judged_from_the_narrowest_to_the_widest() -> None:
    def line(beam: int, ms: float, tflop: float) -> dict[str, Any]:
        return {
            "geometry": "g", "context": 9, "users": 2, "beam": beam,
            "ms": ms, "linears_tflop": tflop, "linears_alone_ms": tflop * 2,
        }  # fmt: skip

    slow = growth([line(512, 30.0, 2.0), line(128, 10.0, 1.0), line(256, 14.0, 1.5)])
    assert slow[0]["beam"] == [128, 256, 512]
    assert slow[0]["ms_growth"] == [1.0, 1.4, 3.0]
    assert slow[0]["no_faster_than_linears"] is False
    assert growth([line(512, 19.0, 2.0), line(128, 10.0, 1.0)])[0]["no_faster_than_linears"] is True
    assert growth([line(512, 19.0, 2.0)]) == []


def test_every_script_runs_on_a_cpu(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "h200.py"), "--try-on-cpu", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    records = {
        part: json.loads((tmp_path / f"{part}.json").read_text("utf-8"))
        for part in ("sustained", "smaller", "memory", "busy")
    }
    assert [row["beam"] for row in records["sustained"]["growth"]] == [[8, 16]]
    for record in records.values():
        assert all(row["matches"] for row in record["rows"])
    busy = records["busy"]["rows"][0]
    assert busy["same_lists_profiled"]
    assert 0 < busy["busy"] <= busy["busy_with_copies"] <= 1
    row = records["memory"]["rows"][0]
    kv = 2 * 4 * 2 * 32 * 4  # quick: layers, key heads, head dimension, float32
    assert row["bytes"]["shared_kv"] == kv * 2 * 40
    assert row["bytes"]["generated_kv"] == kv * 2 * (16 + 16)
