"""Catalogs that the tests of readers and of build-vocab share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from xgr_engine.catalog.build import BuildOptions, BuildResult, build_vocabulary
from xgr_engine.catalog.readers import Catalog, ReadOptions

IDS = ["B00X", "007", "9007199254740993", "é"]
SIDS = [[1, 2, 3], [1, 2, 4], [0, 0, 0], [1, 2, 3]]

EXPECTED = {item: tuple(sid) for item, sid in zip(IDS, SIDS, strict=True)}
BASIC = {"item_id": [4, 3, 2, 1], "sid": [[1, 2], [0, 9], [1, 2], [1]], "title": ["d", "c", None, "a"]}

Columns = dict[str, Any]


def parquet(path: Path, columns: Columns) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def items(catalog: Catalog) -> dict[Any, tuple[int, ...]]:
    codes = [tuple(code for code in row if code >= 0) for row in catalog.codes.tolist()]
    return dict(zip(catalog.item_id.to_pylist(), codes, strict=True))


def build(
    folder: Path, table: pa.Table | dict[str, Any], out: str = "vocab", *, rank: str | None = None, **options: Any
) -> BuildResult:
    source = folder / f"{out}.source.parquet"
    pq.write_table(table if isinstance(table, pa.Table) else pa.table(table), source)
    return build_vocabulary([source], folder / out, ReadOptions(rank_column=rank), BuildOptions(**options))


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def rows_in_order(directory: Path) -> list[tuple[Any, list[int]]]:
    table = pq.read_table(directory / "items.parquet")
    return list(zip(table["item_id"].to_pylist(), table["sid"].to_pylist(), strict=True))
