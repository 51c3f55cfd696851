"""The unit of work: a contiguous range of rows of one input file, written to one part file.

Shards know nothing of who computes them, so that any worker may claim any shard later.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Shard:
    """Rows ``start:stop`` of input file ``file``.

    Attributes:
        index, count: this shard's number and how many there are.
        first_row: place of its first row among the rows of all input files.
        folder: of its part file below the output, empty for the output itself.
    """

    index: int
    count: int
    file: int
    start: int
    stop: int
    first_row: int
    folder: str = ""

    @property
    def rows(self) -> int:
        return self.stop - self.start

    @property
    def name(self) -> str:
        """``part-00017-of-00128``."""
        return f"part-{self.index:05d}-of-{self.count:05d}"


def plan_shards(files: Sequence[Sequence[int]], shard_rows: int, limit: int | None = None) -> list[Shard]:
    """Splits large row groups, joins small ones, never across files.

    Args:
        files: rows of each row group of each file.
        shard_rows: most rows of a shard.
        limit: only the first rows of all.

    Returns:
        Shards in input order; one shard without rows for an input without rows, so that the output has its schema.
    """
    ranges: list[tuple[int, int, int, int]] = []
    first_row = 0
    left = sum(sum(groups) for groups in files) if limit is None else limit
    for file, groups in enumerate(files):
        start = 0
        for rows in _join_small(_split_large(groups, shard_rows), shard_rows):
            taken = min(rows, left)
            if taken:
                ranges.append((file, start, start + taken, first_row))
            start, first_row, left = start + taken, first_row + taken, left - taken
    if not ranges:
        ranges.append((0, 0, 0, 0))
    return [Shard(index, len(ranges), *span) for index, span in enumerate(ranges)]


def _split_large(groups: Iterable[int], most: int) -> Iterable[int]:
    for rows in groups:
        yield from [most] * (rows // most)
        if rows % most:
            yield rows % most


def _join_small(pieces: Iterable[int], most: int) -> Iterable[int]:
    held = 0
    for rows in pieces:
        if held and held + rows > most:
            yield held
            held = 0
        held += rows
    if held:
        yield held


# Rows that are read, planned and uploaded together: enough to sort by length, few enough that the first batch does not
# wait for a whole shard. A constant, so that a shard done again is computed in the same batches.
PIECE_ROWS = 2048


@dataclass(frozen=True)
class Piece:
    """Rows ``start:stop`` of the shard's input file: what is read, planned and handed on together."""

    shard: Shard
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start

    @property
    def first_row(self) -> int:
        """Place of the first row among the rows of all input files."""
        return self.shard.first_row + self.start - self.shard.start

    @property
    def last(self) -> bool:
        """Whether the shard ends with it."""
        return self.stop == self.shard.stop


def cut(shard: Shard, most: int = PIECE_ROWS) -> list[Piece]:
    """Pieces of a shard, of nearly equal size; one piece for a shard without rows."""
    count = max(1, -(-shard.rows // most))
    ends = [shard.start + shard.rows * number // count for number in range(count + 1)]
    return [Piece(shard, start, stop) for start, stop in pairwise(ends)]
