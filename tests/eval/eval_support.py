"""Small vocabularies, outputs and truths for the evaluation tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from xgr_engine.catalog.build import BuildOptions, build_vocabulary
from xgr_engine.catalog.readers import ReadOptions
from xgr_engine.catalog.vocabulary import load_vocabulary
from xgr_engine.job.manifest import fingerprint
from xgr_engine.metrics.evaluate import EvalOptions, EvalReport, evaluate

# Items 10 and 11 share a SID; 30 has a SID of another length.
CATALOG = {10: [1, 1, 0], 11: [1, 1, 0], 12: [1, 1, 2], 20: [2, 0, 0], 21: [2, 0, 1], 30: [3, 1]}


def make_vocabulary(folder: Path, catalog: dict[Any, list[int]] = CATALOG, name: str = "vocab") -> Path:
    table = pa.table({"item_id": list(catalog), "sid": pa.array(list(catalog.values()), pa.list_(pa.int32()))})
    pq.write_table(table, folder / f"{name}.parquet")
    build_vocabulary([folder / f"{name}.parquet"], folder / name, ReadOptions(), BuildOptions())
    return folder / name


def nested(users: Sequence[Any], lists: Sequence[list[Any] | None], id_type: pa.DataType | None = None) -> pa.Table:
    ids = pa.array([item for items in lists for item in items or []], id_type)
    items = pa.ListArray.from_arrays(
        pa.array([sum(len(items or []) for items in lists[:at]) for at in range(len(lists) + 1)], pa.int32()),
        pa.StructArray.from_arrays([ids, pa.array([0.0] * len(ids), pa.float32())], names=["item_id", "score"]),
        mask=pa.array([items is None for items in lists]),
    )
    return pa.table({"user_id": pa.array(users), "items": items})


def long(users: Sequence[Any], lists: Sequence[list[Any] | None]) -> pa.Table:
    flat = [
        (row, users[row], rank, item) for row, items in enumerate(lists) for rank, item in enumerate(items or [], 1)
    ]
    names = ("row", "user_id", "rank", "item_id")
    return pa.table({name: [entry[at] for entry in flat] for at, name in enumerate(names)})


def write_output(
    folder: Path,
    table: pa.Table,
    *,
    inputs: Sequence[Path] = (),
    vocab: Path | None = None,
    rows: int | None = None,
    parts: int = 1,
    options: dict[str, Any] | None = None,
    rejected: Sequence[Any] = (),
) -> Path:
    """An output directory with part files, manifest and ``_SUCCESS`` as ``recommend`` leaves them."""
    import hashlib

    recs = folder / "recs"
    (recs / "_xgr").mkdir(parents=True)
    step = -(-table.num_rows // parts)
    for part in range(parts):
        pq.write_table(table.slice(part * step, step), recs / f"part-{part:05d}-of-{parts:05d}.parquet")
    histories = {
        "user_col": "user_id",
        "history_col": "history",
        "history_format": "items",
        "list_text": None,
        **(options or {}),
    }
    manifest = {
        "kind": "recommendations",
        "schema_version": 1,
        "state": "done",
        "run_id": "0",
        "started": "2026-11-30T02:00:00+00:00",
        "fingerprint": fingerprint({}),
        "fingerprint_fields": {},
        "environment": {"versions": {}},
        "durations": {},
        "model": {"path": "gone", "fingerprint": "0"},
        "rows": table.num_rows if rows is None else rows,
        "shards": parts,
        "shards_finished": parts,
        "options": {
            **{f"search.{name}": {"value": None} for name in ("beam", "top_k", "score_over", "collisions")},
            "histories.exclude_seen": {"value": False},
            **{f"histories.{name}": {"value": value, "origin": "caller"} for name, value in histories.items()},
        },
        "vocab": {
            "path": str(vocab) if vocab else "gone",
            "content_hash": load_vocabulary(vocab).content_hash if vocab else "sha256:0",
        },
        "inputs": [
            {"path": str(path), "bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
            for path in inputs
        ],
    }
    (recs / "_xgr" / "manifest.json").write_text(json.dumps(manifest))
    pq.write_table(
        pa.table({"user": pa.array(list(rejected)), "reason": pa.array(["empty-history"] * len(rejected))}),
        recs / "_xgr" / "rejects.parquet",
    )
    (recs / "_SUCCESS").touch()
    return recs


def write_users(folder: Path, name: str = "users.parquet", **columns: Any) -> Path:
    pq.write_table(pa.table(columns), folder / name)
    return folder / name


def run(recs: Path, truth: Path, **more: Any) -> EvalReport:
    return evaluate(EvalOptions(str(recs), (str(truth),), **{"ks": (1, 3), "resamples": 20, **more}))


def mean(report: EvalReport, metric: str, level: str = "item", subset: str = "all") -> float:
    value: float = report.record["metrics"][level][subset][metric]["mean"]
    return value
