"""From item ids of any type to integer keys, and which row of the truth belongs to which row of the output."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from xgr_engine.catalog.ids import IdIndex, canonical, plain
from xgr_engine.catalog.sid_text import parse_sid_texts
from xgr_engine.catalog.trie import runs
from xgr_engine.catalog.vocabulary import Vocabulary
from xgr_engine.errors import InputError
from xgr_engine.job.lists import Lists as IdLists
from xgr_engine.job.lists import offsets_of
from xgr_engine.metrics.ranking import UNKNOWN, Lists, is_member
from xgr_engine.metrics.recs import RecChunk
from xgr_engine.metrics.truth import Truth

IntArray = NDArray[np.int64]
Align = Literal["position", "user"]

# Integers below this are their own keys: row * span + key still fits an int64 for millions of rows.
_OWN_KEY_LIMIT = 1 << 36
_BLOCK_ROWS = 50_000  # at a time, to bound the memory that the texts of ids take


def shared_keys(one: pa.Array, other: pa.Array) -> tuple[IntArray, IntArray]:
    """Keys of both arrays: equal exactly where the ids are equal by canonical text; UNKNOWN where an id is null."""
    one, other = plain(one), plain(other)
    numbers = [_own_keys(ids) for ids in (one, other)]
    if numbers[0] is not None and numbers[1] is not None:
        return numbers[0], numbers[1]
    texts = pa.chunked_array([canonical(one), canonical(other)]).combine_chunks().dictionary_encode()
    keys = pc.fill_null(texts.indices, UNKNOWN).to_numpy(zero_copy_only=False).astype(np.int64)
    return keys[: len(one)], keys[len(one) :]


def _own_keys(ids: pa.Array) -> IntArray | None:
    if not pa.types.is_integer(ids.type) or ids.null_count:
        return None
    numbers: IntArray = ids.to_numpy(zero_copy_only=False)
    if len(numbers) and (numbers.min() < 0 or numbers.max() >= _OWN_KEY_LIMIT):
        return None
    return numbers.astype(np.int64, copy=False)


def gather(lists: IdLists, rows: IntArray) -> tuple[IntArray, IntArray]:
    """Elements of the lists of some rows: position of its row in ``rows``, and index in ``lists.values``, for each."""
    lengths = lists.lengths[rows]
    owner = np.repeat(np.arange(len(rows)), lengths)
    return owner, runs(lists.offsets[rows], lengths)


def without_repeated_targets(truth: Truth) -> Truth:
    """The targets of a row are a set: a repeated one counts once, be it an item of the catalog or not."""
    targets = truth.targets
    if targets.lengths.max(initial=0) < 2:
        return truth
    owner = np.repeat(np.arange(truth.rows), targets.lengths)
    kept = ~Lists(owner, shared_keys(targets.values, targets.values[:0])[0]).repeats()
    offsets = offsets_of(np.bincount(owner[kept], minlength=truth.rows))
    return replace(truth, targets=IdLists(targets.values.filter(pa.array(kept)), offsets, targets.faults))


def target_in_history(truth: Truth) -> NDArray[np.bool_]:
    """[rows] whether any target of the row is an item of its history (both as item ids).

    Args:
        truth: with a history.
    """
    assert truth.history is not None
    seen = np.zeros(truth.rows, bool)
    for start in range(0, truth.rows, _BLOCK_ROWS):
        rows = np.arange(start, min(start + _BLOCK_ROWS, truth.rows))
        target_row, target_at = gather(truth.targets, rows)
        past_row, past_at = gather(truth.history, rows)
        target_key, past_key = shared_keys(
            truth.targets.values.take(pa.array(target_at)), truth.history.values.take(pa.array(past_at))
        )
        seen[rows] = _rows_with_target_seen(len(rows), Lists(target_row, target_key), Lists(past_row, past_key))
    return seen


def _rows_with_target_seen(rows: int, targets: Lists, history: Lists) -> NDArray[np.bool_]:
    found = np.zeros(rows, bool)
    found[history.row[is_member(history, targets)]] = True
    return found


def target_sid_in_history(truth: Truth, target_leaf: IntArray, vocabulary: Vocabulary) -> NDArray[np.bool_]:
    """[rows] whether any target's SID is in the row's history, which holds SIDs as text.

    Args:
        target_leaf: leaf of each of the truth's targets, UNKNOWN where it has none.
    """
    assert truth.history is not None
    codes, _ = parse_sid_texts(truth.history.values, vocabulary.sid_templates)
    past_leaf = vocabulary.leaves_of_codes(codes).astype(np.int64)
    rows = np.arange(truth.rows)
    return _rows_with_target_seen(
        truth.rows,
        Lists(np.repeat(rows, truth.targets.lengths), target_leaf),
        Lists(np.repeat(rows, truth.history.lengths), past_leaf),
    )


def _take(taken: NDArray[np.bool_], rows: IntArray) -> IntArray:
    """Mark ``rows`` as taken. Returns those taken before, or given twice; ascending."""
    each, count = np.unique(rows, return_counts=True)
    twice: IntArray = each[taken[each] | (count > 1)]
    taken[each] = True
    return twice


class ByPosition:
    """Row i of the output belongs to row i of the truth; user columns, where both have one, must agree."""

    align: Align = "position"

    def __init__(self, truth: Truth) -> None:
        self._truth = truth
        self._taken = np.zeros(truth.rows, bool)

    def rows_of(self, chunk: RecChunk) -> IntArray:
        """[n] truth row of each row of the chunk.

        Raises:
            InputError: more rows than the truth has, a row in two places, or another user.
        """
        if chunk.position.max(initial=-1) >= self._truth.rows:
            raise InputError(f"the output has more rows than the truth has ({self._truth.rows:,})", hint=_POSITION_HINT)
        if len(twice := _take(self._taken, chunk.position)):
            raise InputError(
                f"the output has recommendations for row {twice[0]} in two places",
                why="those of one row must be together, best first",
                hint="sort the file by row and rank",
            )
        if chunk.users is not None and self._truth.users is not None:
            theirs = self._truth.users.take(pa.array(chunk.position))
            mine_key, their_key = shared_keys(chunk.users, theirs)
            differs = np.flatnonzero(mine_key != their_key)
            if len(differs):
                at = int(differs[0])
                raise InputError(
                    f"row {chunk.position[at]}: output for user {chunk.users[at]}, truth for user {theirs[at]}",
                    why="rows are matched by position, and the user columns disagree",
                    hint=_POSITION_HINT,
                )
        return chunk.position

    def finish(self, run_rows: int) -> None:
        """Raises InputError unless the run had ``run_rows`` rows, as many as the truth has."""
        if run_rows != self._truth.rows:
            raise InputError(
                f"the output is for {run_rows:,} rows, the truth has {self._truth.rows:,}", hint=_POSITION_HINT
            )


_POSITION_HINT = (
    "give the users file of this run with --truth, or --align user with a truth file that has one row per user"
)


class ByUser:
    """A row of the output belongs to the truth's row of the same user; every user has one row in the truth."""

    align: Align = "user"

    def __init__(self, truth: Truth, user_col: str) -> None:
        """
        Raises:
            InputError: no user column, or a user with two rows.
        """
        if truth.users is None:
            raise InputError(
                f"the truth has no column {user_col!r}",
                why="its rows are not those of the run, so they can only be matched by user",
                hint="name the column with --user-col, or give the users file of the run with --truth",
            )
        users = plain(truth.users)
        if canonical(users).null_count:
            raise InputError(f"the truth has rows without a user in column {user_col!r}")
        self._index = IdIndex(users)
        if len(pairs := self._index.duplicates):
            raise InputError(
                f"the truth has two rows for user {users[pairs[0, 0]]}",
                why="matched by user, each user needs exactly one row",
                hint="give the users file of the run (matched by position), or one row per user",
            )
        self._taken = np.zeros(truth.rows, bool)
        self._col = user_col

    def rows_of(self, chunk: RecChunk) -> IntArray:
        """[n] truth row of each row of the chunk, -1 where the truth has no such user.

        Raises:
            InputError: the output has no user column, or a user twice.
        """
        if chunk.users is None:
            raise InputError(f"the output has no column {self._col!r}", hint="name the user column with --user-col")
        rows = self._index.rows_of(chunk.users).astype(np.int64)
        if len(twice := _take(self._taken, rows[rows >= 0])):
            at = int(np.flatnonzero(rows == twice[0])[0])
            raise InputError(
                f"the output has two rows for user {chunk.users[at]}",
                why="matched by user, each user needs exactly one row",
                hint="give the users file of the run with --truth: it is matched by position",
            )
        return rows

    def rows_of_rejected(self, users: pa.Array) -> IntArray:
        """Truth rows of users that the output has no row for."""
        rows = self._index.rows_of(users).astype(np.int64)
        return rows[rows >= 0]

    def finish(self, run_rows: int) -> None:
        """Nothing to check: users of the truth that the run did not have are counted, not an error."""


Aligner = ByPosition | ByUser
