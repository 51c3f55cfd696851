"""A catalog with attributes, users with attributes, and the same lists by brute force."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from job_support import SIDS, make_model

from xgr_engine.catalog.build import BuildOptions, build_vocabulary
from xgr_engine.catalog.readers import ReadOptions
from xgr_engine.job.filter_options import FilterOptions
from xgr_engine.job.options import HistoryOptions, RecommendOptions
from xgr_engine.options import SearchOptions

ITEMS = list(range(100, 140))
CATEGORY = ["books", "toys", "garden", None]
COUNTRY = ["AT", "DE", "CH", "AT", None]
ATTRIBUTES: dict[str, pa.Array] = {
    "category": pa.array([CATEGORY[i % 4] for i in range(40)]),
    "in_stock": pa.array([None if i % 7 == 0 else i % 3 != 0 for i in range(40)]),
    "price": pa.array([None if i % 11 == 0 else i * 0.5 for i in range(40)]),
    "country": pa.array([COUNTRY[i % 5] for i in range(40)]),
    "brand": pa.array([None if i % 6 == 5 else i % 4 for i in range(40)], pa.int16()),
    "tags": pa.array([[f"t{i % 3}"] for i in range(40)]),
}


def make_filter_vocabulary(out: Path, **more: Any) -> Path:
    """40 items 100..139 on 36 SIDs with ``ATTRIBUTES``."""
    catalog = out.with_name(f"{out.name}.catalog.parquet")
    columns = {
        "item_id": pa.array(ITEMS, pa.int64()),
        "sid": pa.array(SIDS, pa.list_(pa.int32())),
        **ATTRIBUTES,
        **more,
    }
    pq.write_table(pa.table(columns), catalog)
    build_vocabulary([catalog], out, ReadOptions(), BuildOptions())
    return out


def make_assets(root: Path) -> tuple[Path, Path]:
    return make_filter_vocabulary(root / "vocab"), make_model(root / "model")


def of_items(name: str) -> dict[int, Any]:
    """Item -> its value of an attribute."""
    return dict(zip(ITEMS, ATTRIBUTES[name].to_pylist(), strict=True))


def write_users(path: Path, rows: int, **columns: Any) -> Path:
    rng = np.random.default_rng(rows)
    table = {
        "user_id": [f"u{i}" for i in range(rows)],
        "history": pa.array([rng.integers(100, 140, rng.integers(1, 6)).tolist() for _ in range(rows)]),
        **columns,
    }
    pq.write_table(pa.table(table), path)
    return path


def options_for(
    root: Path, vocab: Path, model: Path, users: Path | str, search: SearchOptions | None = None, **given: Any
) -> RecommendOptions:
    """Options with keywords sorted into their dataclasses."""
    groups: dict[str, Any] = {}
    for group in (HistoryOptions, FilterOptions):
        names = set(group.__dataclass_fields__) & set(given)
        groups[group.__name__] = {name: given.pop(name) for name in names}
    defaults = {"model": str(model), "vocab": str(vocab), "out": str(root / "recs"), "device": "cpu"}
    return RecommendOptions(
        HistoryOptions((str(users),), **groups["HistoryOptions"]),
        search or SearchOptions(beam=40, top_k=5),
        filters=FilterOptions(**groups["FilterOptions"]),
        **{**defaults, **given},
    )


def lists_of(out: Path) -> list[list[tuple[int, float]] | None]:
    """Per row (item, score), best first; None for a rejected row."""
    parts = sorted(out.glob("part-*.parquet"))
    rows = [cell for part in parts for cell in pq.ParquetFile(part).read()["items"].to_pylist()]
    return [None if row is None else [(item["item_id"], item["score"]) for item in row] for row in rows]
