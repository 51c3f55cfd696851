"""One user's row -> the SIDs of their history, and the items that must not be recommended to them.

No torch and no tokenizer in here: ``job.prompts`` renders what this module resolves, and ``job.audit`` resolves
the same rows again to check the written files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from xgr_engine.catalog.sid_text import parse_sid_texts
from xgr_engine.catalog.trie import runs
from xgr_engine.catalog.vocabulary import Vocabulary
from xgr_engine.job.input_formats import ListColumn, Rows
from xgr_engine.job.lists import Fault, Lists, as_token_ids, is_text_type, offsets_of, read_lists
from xgr_engine.job.options import HistoryOptions
from xgr_engine.tokens.table import SidTokenTable

IntArray = NDArray[np.int32]


@dataclass(frozen=True)
class Ragged:
    """n lists of item rows back to back: list i is ``values[offsets[i] : offsets[i + 1]]``, unordered."""

    values: IntArray
    offsets: NDArray[np.int64]

    def __getitem__(self, row: int) -> IntArray:
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    @property
    def owners(self) -> NDArray[np.int64]:
        """[values] which list each value belongs to."""
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))


def sorted_union(first: Ragged, second: Ragged) -> Ragged:
    """Per list the values of both, ascending and without repeats. One sort over all lists: they are many and short."""
    keys = np.sort(np.concatenate([_keys(first), _keys(second)]))
    keys = keys[np.diff(keys, prepend=-1) != 0]
    owners = keys >> 32
    offsets = np.searchsorted(owners, np.arange(len(first.offsets)))
    return Ragged((keys & 0xFFFFFFFF).astype(np.int32), offsets.astype(np.int64))


def _keys(lists: Ragged) -> NDArray[np.int64]:
    """One number a value, ordered by list and then by value."""
    return (lists.owners << 32) | lists.values.astype(np.int64)


def no_items(rows: int) -> Ragged:
    return Ragged(np.empty(0, np.int32), np.zeros(rows + 1, np.int64))


@dataclass(frozen=True)
class Resolved:
    """n histories looked up, e interactions in all, oldest first.

    Attributes:
        offsets: int64 [n + 1] into the arrays below.
        known: bool [e] the interaction can enter the prompt.
        codes: int32 [e, L], -1 behind the end of a SID; undefined for unknown interactions.
        sid_lengths: int64 [e].
        leaves: int32 [e] leaf of the catalog, -1 when today's catalog lacks it.
        item_rows: int32 [e], for item histories only.
        names: what the input called each interaction.
        faults: rows that cannot be read; their history is empty here.
    """

    offsets: NDArray[np.int64]
    known: NDArray[np.bool_]
    codes: IntArray
    sid_lengths: NDArray[np.int64]
    leaves: IntArray
    item_rows: IntArray | None
    names: pa.Array
    faults: dict[int, Fault] = field(default_factory=dict)

    def newest(self, limit: int | None) -> tuple[IntArray, NDArray[np.int64]]:
        """Codes [k, L] of each row's last ``limit`` known interactions, oldest first, and the rows' offsets [n + 1]."""
        known = offsets_of(self.known)
        kept = self.known
        if limit:
            to_the_end = np.repeat(known[self.offsets[1:]], np.diff(self.offsets)) - known[:-1]
            kept = kept & (to_the_end <= limit)
        places = offsets_of(kept)
        inside = np.arange(self.codes.shape[1]) < self.sid_lengths[kept][:, None]
        return np.where(inside, self.codes[kept], -1).astype(np.int32), places[self.offsets]

    def known_in_each_row(self) -> NDArray[np.int64]:
        """[n] interactions that can enter the prompt."""
        known = offsets_of(self.known)[self.offsets]
        return np.diff(known)


class HistoryResolver:
    """Looks histories and exclusions up in the catalog.

    Args:
        vocabulary: the catalog.
        table: the model's SID tokens: a SID that today's catalog lacks but the model can spell stays in the prompt.
        options: which columns, and what they hold.
    """

    def __init__(self, vocabulary: Vocabulary, table: SidTokenTable, options: HistoryOptions) -> None:
        self._vocabulary = vocabulary
        self._table = table
        self._options = options
        self._leaf_codes, lengths = vocabulary.sids()
        self._leaf_lengths = lengths.astype(np.int64)
        self._shortest = int(self._leaf_lengths.min()) if len(lengths) else 1

    def resolve(self, rows: Rows) -> Resolved:
        """The histories of ``rows``. Not for ready prompts, which hold no SIDs.

        Raises:
            HistoryError: a column of the wrong type.
        """
        name = self._options.history_col
        lists = read_lists(rows.lists[name], name, self._options.list_text)
        match self._options.history_format:
            case "items":
                return self._from_items(lists)
            case "sids":
                return self._from_sids(lists)
            case _:
                return self._from_tokens(lists)

    def _from_items(self, lists: Lists) -> Resolved:
        item_rows = self._vocabulary.rows_of(lists.values)
        known = item_rows >= 0
        leaves = np.where(known, self._vocabulary.leaf_of_row[np.where(known, item_rows, 0)], -1).astype(np.int32)
        at = np.where(known, leaves, 0)
        return Resolved(
            lists.offsets,
            known,
            self._leaf_codes[at],
            self._leaf_lengths[at],
            leaves,
            item_rows,
            lists.values,
            lists.faults,
        )

    def _from_sids(self, lists: Lists) -> Resolved:
        texts = lists.values if is_text_type(lists.values.type) else lists.values.cast(pa.large_string())
        # The model's spelling: the catalog's is the same, or none, and may have fewer levels than the model.
        codes, readable = parse_sid_texts(texts, self._table.templates or self._vocabulary.sid_templates)
        return self._from_codes(lists.offsets, codes, readable, lists.values, lists.faults)

    def _from_codes(
        self,
        offsets: NDArray[np.int64],
        codes: IntArray,
        readable: NDArray[np.bool_],
        names: pa.Array,
        faults: dict[int, Fault],
    ) -> Resolved:
        lengths = (codes >= 0).sum(axis=1)
        levels = self._table.levels
        known = readable & (lengths >= self._shortest) & (lengths <= levels)
        codes = np.pad(codes, ((0, 0), (0, max(0, levels - codes.shape[1]))), constant_values=-1)[:, :levels]
        for level in range(levels):
            there = codes[:, level] >= 0
            known &= ~there | (self._table.columns(level, codes[:, level]) >= 0)
        width = self._vocabulary.levels
        inside = known & (lengths <= width)
        padded = np.pad(codes, ((0, 0), (0, max(0, width - levels))), constant_values=-1)[:, :width]
        leaves = np.full(len(codes), -1, np.int32)
        leaves[inside] = self._vocabulary.leaves_of_codes(np.ascontiguousarray(padded[inside]))
        return Resolved(offsets, known, codes, lengths, leaves, None, names, faults)

    def _from_tokens(self, lists: Lists) -> Resolved:
        """Flat token ids: a SID begins at a token of level 1 and ends where no token of the next level follows."""
        tokens, faults = as_token_ids(lists, self._options.history_col)
        column_of = [dict(zip(ids.tolist(), codes.tolist(), strict=True)) for ids, codes in self._token_columns()]
        sids: list[tuple[int, ...]] = []
        counts = np.zeros(len(lists), np.int64)
        for row in range(len(lists)):
            if row not in faults:
                found = list(_split_tokens(tokens[lists.offsets[row] : lists.offsets[row + 1]].tolist(), column_of))
                counts[row] = len(found)
                sids.extend(found)
        codes = np.full((len(sids), self._table.levels), -1, np.int32)
        for place, sid in enumerate(sids):
            codes[place, : len(sid)] = sid
        readable = np.array([len(sid) > 0 for sid in sids], np.bool_)
        names = pa.array(["-".join(map(str, sid)) or "tokens that are not a SID" for sid in sids], pa.string())
        offsets = offsets_of(counts)
        return self._from_codes(offsets, codes, readable, names, faults)

    def _token_columns(self) -> Iterator[tuple[IntArray, IntArray]]:
        return zip(self._table.token_ids, self._table.codes, strict=True)

    def seen(self, resolved: Resolved) -> Ragged:
        """Items of the whole history: the items themselves where the input names items, else all items of the SIDs."""
        if resolved.item_rows is not None:
            return _compress(resolved.item_rows, resolved.offsets, resolved.item_rows >= 0)
        there = resolved.leaves >= 0
        leaves = resolved.leaves[there]
        start = self._vocabulary.trie.item_start[leaves].astype(np.int64)
        size = self._vocabulary.trie.item_start[leaves + 1].astype(np.int64) - start
        places = runs(start, size)
        # items of a row lie back to back: its share of `size` gives its new offsets
        per_interaction = np.zeros(len(there), np.int64)
        per_interaction[there] = size
        total = offsets_of(per_interaction)
        return Ragged(self._vocabulary.trie.items[places].astype(np.int32), total[resolved.offsets])

    def denied(self, rows: Rows) -> tuple[Ragged, dict[int, Fault], int]:
        """Items of the exclusion column; rows whose exclusions cannot be read; number of ids that no item has.

        An id outside the catalog cannot be recommended anyway, so it is counted and otherwise ignored. A row whose
        exclusions cannot be read is rejected: whatever it got might break the rule that they stand for.
        """
        name = self._options.exclude_col
        if name is None:
            return no_items(rows.length), {}, 0
        column: ListColumn = rows.lists[name]
        lists = read_lists(column, name, self._options.list_text)
        item_rows = self._vocabulary.rows_of(lists.values)
        known = item_rows >= 0
        return _compress(item_rows, lists.offsets, known), lists.faults, int((~known).sum())


def _compress(values: IntArray, offsets: NDArray[np.int64], keep: NDArray[np.bool_]) -> Ragged:
    before = offsets_of(keep)
    return Ragged(values[keep].astype(np.int32), before[offsets])


def _split_tokens(tokens: list[int], code_of: list[dict[int, int]]) -> Iterator[tuple[int, ...]]:
    """Codes of each SID in a flat run of tokens; an empty tuple for each run of tokens that begin no SID."""
    sid: list[int] = []
    stray = False
    for token in tokens:
        if sid and len(sid) < len(code_of) and token in code_of[len(sid)]:
            sid.append(code_of[len(sid)][token])
            continue
        if sid:
            yield tuple(sid)
            sid = []
        if token in code_of[0]:
            sid, stray = [code_of[0][token]], False
        elif not stray:
            stray = True
            yield ()
    if sid:
        yield tuple(sid)
