"""A part file read again for the audit: what it holds for one piece of the input, the same for either layout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from xgr_engine.catalog.arrow_types import flat_values
from xgr_engine.errors import XgrError
from xgr_engine.job.options import RecommendOptions
from xgr_engine.job.shards import Piece

BoolArray = NDArray[np.bool_]


class AuditError(XgrError):
    """The written files break a promise: exit code 1, no ``_SUCCESS``."""


@contextmanager
def reading_back(path: Path) -> Iterator[None]:
    """A part file that is damaged, or lacks a column, is a fault of the output.

    Raises:
        AuditError: instead of what the reader raises.
    """
    try:
        yield
    except (OSError, KeyError, pa.ArrowException) as error:
        raise AuditError(
            f"{path}: cannot be read back: {error}",
            hint="check the disk, remove this file and run the same command: only its shard is computed again",
        ) from error


def read_part(path: Path) -> pa.Table:
    """A whole part file, its pages compared with their checksums.

    Raises:
        AuditError: it cannot be read.
    """
    with reading_back(path), pq.ParquetFile(path, page_checksum_verification=True) as file:
        return file.read()


@dataclass(frozen=True)
class Written:
    """What a part file holds for one piece: U rows of the input, and recommendations in file order.

    Attributes:
        owner: [items] row of the piece that each recommendation is for.
        item_ids, scores, sids: [items] as they are written.
        with_list: [U] rows with a list, an empty one included; counts: [U] its length.
        misplaced: rows that stand in the wrong place, belong to another user, or are marked wrongly.
    """

    owner: NDArray[np.int64]
    item_ids: pa.Array
    scores: NDArray[np.float32]
    sids: pa.Array
    with_list: BoolArray
    counts: NDArray[np.int64]
    misplaced: int


def written_of(part: pa.Table, piece: Piece, given: pa.Table, live: BoolArray, options: RecommendOptions) -> Written:
    """The rows of a part that stand where those of the piece should, compared with its rows of the input.

    Each row of the part is in one piece, so that one in the wrong place counts there.

    Args:
        given: the rows of the input; live: [U] those that the rejects file does not name.
    """
    if options.layout == "long":
        row = part.column("row").to_numpy()
        begin, end = (int((row < limit).sum()) for limit in (piece.first_row, piece.first_row + piece.rows))
    else:
        begin, end = piece.start - piece.shard.start, piece.stop - piece.shard.start
    begin = begin if piece.start > piece.shard.start else 0
    table = part.slice(begin, None if piece.last else end - begin)
    read = _read_long if options.layout == "long" else _read_nested
    return read(table, piece, given, live, options)


def _read_nested(table: pa.Table, piece: Piece, given: pa.Table, live: BoolArray, options: RecommendOptions) -> Written:
    """One row a user, in the order of the input."""
    rows = min(table.num_rows, piece.rows)
    too_many_or_few = abs(table.num_rows - piece.rows)
    table = table.slice(0, rows)
    items = table.column("items").combine_chunks()
    with_list = items.is_valid().to_numpy(zero_copy_only=False)
    counts = pc.fill_null(pc.list_value_length(items), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    flat = flat_values(items)
    misplaced = with_list != live[:rows]
    misplaced |= with_list & _differs(table.column("short"), counts < options.search.top_k)
    misplaced |= _other_user(table, given.slice(0, rows), options)
    return Written(
        owner=np.repeat(np.arange(rows), counts),
        item_ids=flat.field("item_id"),
        scores=flat.field("score").to_numpy(zero_copy_only=False),
        sids=flat.field("sid"),
        with_list=with_list,
        counts=counts,
        misplaced=int(misplaced.sum()) + too_many_or_few,
    )


def _read_long(table: pa.Table, piece: Piece, given: pa.Table, live: BoolArray, options: RecommendOptions) -> Written:
    """One row a recommendation, in the order of the input and of the ranks. A user without any has no row."""
    owner = table.column("row").to_numpy() - piece.first_row
    inside = (owner >= 0) & (owner < piece.rows)
    table, owner = table.filter(pa.array(inside)), owner[inside]
    counts = np.bincount(owner, minlength=piece.rows)
    starts = np.flatnonzero(np.diff(owner, prepend=-1) != 0)
    rank = np.arange(len(owner)) - np.repeat(starts, np.diff([*starts, len(owner)])) + 1
    misplaced = (table.column("rank").to_numpy() != rank) | ~live[owner]
    misplaced |= _differs(table.column("short"), (counts < options.search.top_k)[owner])
    misplaced |= np.diff(owner, prepend=0) < 0
    misplaced |= _other_user(table, given.take(pa.array(owner)), options)
    return Written(
        owner=owner,
        item_ids=table.column("item_id").combine_chunks(),
        scores=table.column("score").to_numpy(),
        sids=table.column("sid").combine_chunks(),
        with_list=live,
        counts=counts,
        misplaced=int(misplaced.sum()) + int((~inside).sum()),
    )


def _differs(flags: pa.ChunkedArray, wanted: BoolArray) -> BoolArray:
    """Where a flag is null or not as wanted."""
    differs: BoolArray = pc.fill_null(pc.not_equal(flags, pa.array(wanted)), True).to_numpy()
    return differs


def _other_user(written: pa.Table, given: pa.Table, options: RecommendOptions) -> BoolArray:
    """Where the user's id is not that of the input."""
    name = options.histories.user_col
    mine, theirs = written.column(name), given.column(name)
    if mine.equals(theirs):
        return np.zeros(len(mine), np.bool_)
    # NaN differs from itself, and text may have been widened: compare value by value
    pairs = zip(mine.to_pylist(), theirs.to_pylist(), strict=True)
    return np.array([a != b and not (a != a and b != b) for a, b in pairs], np.bool_)
