"""The record of a small run, made by hand, for the tests of --compare."""

from __future__ import annotations

from typing import Any

Record = dict[str, Any]
LIMIT = 0.05


def estimate(value: float) -> Record:
    return {"value": value, "low": value * 0.99, "high": value * 1.01}


def _contender(name: str, ms: float) -> Record:
    return {
        "name": name,
        "status": "ok",
        "latency_ms": {"p50": estimate(ms)},
        "users_per_s": estimate(2000 / ms),
        "device_peak_bytes": None,
        "host_own_bytes": 5_000_000,
        "parity": {"marks": []},
    }


def _row(beam: int) -> Record:
    shape = {"model": "quick", "dtype": "float32", "catalog": "500 items", "items": 500, "context": 16, "users": 2}
    shape |= {"beam": beam, "top_k": beam, "score_over": "vocab", "shared_prefix": 0, "prompts": "synthetic"}
    return {**shape, "contenders": [_contender("xgr", 10.0), _contender("paged", 20.0)]}


def _options() -> Record:
    return {
        "geometries": ["quick"],
        "model": None,
        "vocab": None,
        "inputs": [],
        "items": 500,
        "codes": 16,
        "levels": 3,
        "contexts": [16],
        "users": [2],
        "beams": [8, 16],
        "top_k": None,
        "score_over": "vocab",
        "shared_prefix": 0,
        "baselines": ["paged"],
        "rows": True,
        "attention": True,
        "online": True,
        "constraint": True,
        "constraint_items": [100, 1000],
        "slo_ms": 200.0,
        "online_beams": [],
        "online_contenders": ["xgr"],
    }


def _size(items: int) -> Record:
    times = {"xgr_ms": 2.0, "head_ms": 1.0, "masked_ms": 9.0, "masked_head_ms": 3.0}
    times |= {"constraint_ms": 1.0, "masked_constraint_ms": 6.0}
    return {"items": items, "status": "ok", **times, "marks": [], "masked_marks": []}


def whole_record() -> Record:
    """Of a run on a CPU with every part that is compared."""
    shape = {"model": "quick", "context": 16, "beam": 16}
    attention = {**shape, "users": 2, "own_tokens": 2, "status": "ok", "xgr_ms": 1.0, "paged_ms": 4.0}
    table = {"geometry": "quick", "codes": "16x3", "users": 2, "beam": 16, "sizes": [_size(100), _size(1000)]}
    return {
        "schema_version": 1,
        "kind": "bench",
        "state": "done",
        "left_out": [],
        "options": _options(),
        "machine": {"device": "cpu", "device_name": "Some CPU"},
        "rows": [_row(8), _row(16)],
        "attention": [attention],
        "online": [{**shape, "contender": "xgr", "status": "ok", "rate": 100.0}],
        "constraint": table,
    }
