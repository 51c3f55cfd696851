"""What a part file and the rejects file hold, as Arrow tables. docs/recommend.md describes it for users.

``nested`` (default), one row per input row, in input order::

    <user column> <kept columns>  items: list<struct<item_id, score: float, sid: list<int32>, ...>>  short: bool

``long``, one row per recommendation, rejected users absent::

    row: int64  <user column> <kept columns>  rank: int32  item_id  score: float  sid: list<int32>  ...  short: bool

``row`` is the place of the user's row among the rows of all input files, from 0; ``rank`` counts from 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from xgr_engine.catalog.vocabulary import Vocabulary
from xgr_engine.errors import UsageError
from xgr_engine.job.lists import offsets_of
from xgr_engine.job.prompts import Prepared, Reject
from xgr_engine.xschedule.results import Ranked

NESTED_COLUMNS = ("items", "short")
LONG_COLUMNS = ("row", "rank", "item_id", "score", "sid", "short")


@dataclass(frozen=True)
class ItemColumns:
    """Catalog columns by item row: what is written for a recommended item."""

    item_ids: pa.Array
    sids: NDArray[np.int32]
    sid_lengths: NDArray[np.int64]
    leaf_of_row: NDArray[np.int32]
    extra: pa.Table

    @classmethod
    def of(cls, vocabulary: Vocabulary, extra: Sequence[str]) -> ItemColumns:
        """
        Raises:
            UsageError: the catalog has no such column, or one is named twice.
        """
        if isinstance(extra, str):
            raise UsageError(f"--item-cols is the text {extra!r}, not a list of columns", hint=f"give [{extra!r}]")
        if not isinstance(extra, Iterable):
            raise UsageError(f"--item-cols is {extra!r}, not a list of columns")
        for name in extra:
            if list(extra).count(name) > 1:
                raise UsageError(f"--item-cols names {name!r} twice", why="the fields of an item have one name each")
            if name not in vocabulary.attribute_names:
                known = ", ".join(vocabulary.attribute_names) or "none"
                raise UsageError(f"--item-cols {name}: the vocabulary has no such column", why=f"it has: {known}")
        codes, lengths = vocabulary.sids()
        table = vocabulary.columns(list(extra)) if extra else pa.table({})
        return cls(vocabulary.item_ids, codes, lengths.astype(np.int64), vocabulary.leaf_of_row, table)

    def arrays(self, item_rows: NDArray[np.int32], scores: NDArray[np.float32]) -> Any:
        """Names and arrays for recommended items, in the order of the output's struct.

        Leaves are looked up by row: the search of a filtered catalog numbers its leaves differently.
        """
        taken = pa.array(item_rows)
        leaves = self.leaf_of_row[item_rows]
        lengths = self.sid_lengths[leaves]
        codes = self.sids[leaves]
        there = np.arange(codes.shape[1]) < lengths[:, None]
        sid_offsets = pa.array(offsets_of(lengths).astype(np.int32))
        arrays = [
            _one_chunk(self.item_ids).take(taken),
            pa.array(scores),
            pa.ListArray.from_arrays(sid_offsets, pa.array(codes[there])),
        ]
        arrays += [_one_chunk(self.extra.column(name)).take(taken) for name in self.extra.column_names]
        return ["item_id", "score", "sid", *self.extra.column_names], arrays


def _one_chunk(column: Any) -> Any:
    if not isinstance(column, pa.ChunkedArray):
        return column
    return column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)


def check_column_names(copied: Sequence[str], layout: str, item_cols: Sequence[str] = ()) -> None:
    """
    Raises:
        UsageError: a copied input column, or a catalog column, has a name that the output needs.
    """
    if layout == "long" and (clash := sorted({"row", "rank", "short"}.intersection(item_cols))):
        raise UsageError(f"--item-cols {clash[0]}: with --layout long the output itself uses this name")
    taken = NESTED_COLUMNS if layout == "nested" else (*LONG_COLUMNS, *item_cols)
    for name in copied:
        if name in taken:
            raise UsageError(
                f"the input column {name!r} cannot be copied: the output has a column of that name",
                hint="leave it out of --keep, or rename it in the input",
            )


def nested_table(copied: pa.Table, prepared: Prepared, ranked: Ranked, columns: ItemColumns) -> pa.Table:
    """One row per input row; ``items`` and ``short`` are null where the row was rejected."""
    counts = np.zeros(prepared.length, np.int64)
    has_items = np.zeros(prepared.length, np.bool_)
    short = np.zeros(prepared.length, np.bool_)
    live = np.asarray(prepared.live, np.int64)
    counts[live] = np.diff(ranked.offsets)
    has_items[live] = True
    has_items[live[list(ranked.failed)]] = False
    short[live] = ranked.short
    names, arrays = columns.arrays(ranked.item_rows, ranked.scores)
    offsets = offsets_of(counts).astype(np.int32)
    items = pa.ListArray.from_arrays(
        pa.array(offsets), pa.StructArray.from_arrays(arrays, names=names), mask=pa.array(~has_items)
    )
    return copied.append_column("items", items).append_column("short", pa.array(short, mask=~has_items))


def long_table(copied: pa.Table, prepared: Prepared, ranked: Ranked, columns: ItemColumns, first_row: int) -> pa.Table:
    """One row per recommendation."""
    counts = np.diff(ranked.offsets)
    live = np.asarray(prepared.live, np.int64)
    owner = np.repeat(live, counts)
    rank = np.arange(len(owner)) - np.repeat(ranked.offsets[:-1], counts) + 1
    names, arrays = columns.arrays(ranked.item_rows, ranked.scores)
    users = copied.take(pa.array(owner))
    return pa.table(
        {
            "row": pa.array(first_row + owner, pa.int64()),
            **dict(zip(users.column_names, users.columns, strict=True)),
            "rank": pa.array(rank, pa.int32()),
            **dict(zip(names, arrays, strict=True)),
            "short": pa.array(np.repeat(ranked.short, counts)),
        }
    )


def all_rejects(prepared: Prepared, ranked: Ranked) -> list[Reject]:
    """Rows rejected before and during the computation, ascending."""
    failed = [Reject(prepared.live[prompt], *fault) for prompt, fault in ranked.failed.items()]
    return sorted([*prepared.rejects, *failed], key=lambda reject: reject.row)


def rejects_table(rejects: Sequence[Reject], file: str, first: int, users: pa.ChunkedArray) -> pa.Table:
    """Columns file, row (from 0 within the file), user (in its own type), reason, detail.

    Args:
        first: row of the file that the shard begins with; users: the shard's user column.
    """
    rows = pa.array([reject.row for reject in rejects], pa.int64())
    return pa.table(
        {
            "file": pa.array([file] * len(rejects), pa.string()),
            "row": pa.array([first + reject.row for reject in rejects], pa.int64()),
            "user": users.take(rows),
            "reason": pa.array([reject.reason for reject in rejects], pa.string()),
            "detail": pa.array([reject.detail for reject in rejects], pa.string()),
        }
    )
