"""What the written files really hold, counted by reading them back. No number in here comes from the engine.

Each part file is read again and compared with the catalog (is this an item, and is this its SID?) and with the
histories (has this user had it?). A file somebody damaged after it was written is counted like a fault of xgr's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from xgr_engine.catalog.vocabulary import Vocabulary
from xgr_engine.job.filters import open_filters, user_texts
from xgr_engine.job.histories import HistoryResolver, Ragged
from xgr_engine.job.input_formats import Rows
from xgr_engine.job.options import RecommendOptions
from xgr_engine.job.read_back import Written, read_part, reading_back, written_of
from xgr_engine.job.shards import Piece, Shard, cut


@dataclass(frozen=True)
class Audit:
    """Counts over written rows.

    Attributes:
        users: users with a list, an empty one included; rejected: users without.
        items: recommendations.
        invalid: no item of the catalog, another SID than the item's, or a score that is no log-probability.
        duplicate: an item twice for one user (with ``--collisions first`` also two items of one SID).
        seen: items of the user's history; None when seen items are allowed.
        excluded: items of the user's exclusion column; None without one.
        filtered: items that a filter forbids (--where, --allow-items, --deny-items, --match); None without one.
        over_cap: items of a value beyond --diversify's maximum; None without it.
        short: users with fewer than K items.
        misordered: neighbours in the wrong order (score descending, ties by SID, items of a SID by their rank).
        misplaced: rows that stand in the wrong place, belong to another user, or are marked wrongly.
    """

    users: int = 0
    rejected: int = 0
    items: int = 0
    invalid: int = 0
    duplicate: int = 0
    seen: int | None = None
    excluded: int | None = None
    filtered: int | None = None
    over_cap: int | None = None
    short: int = 0
    misordered: int = 0
    misplaced: int = 0

    @property
    def faults(self) -> int:
        """What must be 0 before ``_SUCCESS`` is written."""
        faults = (
            *(self.invalid, self.duplicate, self.seen, self.excluded, self.filtered, self.over_cap),
            *(self.misordered, self.misplaced),
        )
        return sum(count or 0 for count in faults)

    def line(self) -> str:
        """``users=3, items=30, invalid=0, duplicate=0, seen=off, short=0``; more only where there is more to say."""
        seen = "off" if self.seen is None else str(self.seen)
        text = (
            f"users={self.users}, items={self.items}, invalid={self.invalid}, duplicate={self.duplicate}, seen={seen}, "
        )
        in_force = {"filtered": self.filtered, "over_cap": self.over_cap}
        text += "".join(f"{name}={count}, " for name, count in in_force.items() if count is not None)
        text += f"short={self.short}"
        more = {"excluded": self.excluded, "misordered": self.misordered, "misplaced": self.misplaced}
        return text + "".join(f", {name}={count}" for name, count in more.items() if count)

    def to_json(self) -> dict[str, Any]:
        record = asdict(self)
        record["seen"] = "off" if self.seen is None else self.seen
        return record

    def __add__(self, other: Audit) -> Audit:
        mine, theirs = asdict(self), asdict(other)
        summed: dict[str, Any] = {
            name: None if mine[name] is None and theirs[name] is None else (mine[name] or 0) + (theirs[name] or 0)
            for name in mine
        }
        return Audit(**summed)


class Auditor:
    """Counts part files.

    Args:
        vocabulary: the catalog the output must agree with.
        resolver: reads the histories as the run did.
        options: K, the rules in force and the layout.
    """

    def __init__(self, vocabulary: Vocabulary, resolver: HistoryResolver, options: RecommendOptions) -> None:
        self._vocabulary = vocabulary
        self._resolver = resolver
        self._options = options
        self._leaf_of_row = vocabulary.leaf_of_row
        self._sids = vocabulary.sids()[0]
        # read anew: what the search was told is not taken from it
        self._filters = open_filters(options.filters, options.histories.match, vocabulary)

    def part(self, path: Path, shard: Shard, read: Callable[[Piece], Rows], rejected: NDArray[np.int64]) -> Audit:
        """Counts one part file.

        Args:
            path: the file; shard: what it should hold.
            read: reads input rows again. Piece by piece, as the run did: a shard of long histories takes gigabytes.
            rejected: rows of the shard's input file that the rejects file names.

        Raises:
            AuditError: the file cannot be read, or has not the columns of the layout.
        """
        table, total = read_part(path), Audit()
        for piece in cut(shard):
            rows = read(piece)
            with reading_back(path):
                live = ~np.isin(np.arange(piece.start, piece.stop), rejected)
                written = written_of(table, piece, rows.table, live, self._options)
            total += self._count(written, rows)
        return total

    def _count(self, written: Written, rows: Rows) -> Audit:
        owner, most = written.owner, self._options.search.top_k
        item_rows = self._vocabulary.rows_of(written.item_ids)
        seen, excluded = self._forbidden(rows, owner, item_rows)
        return Audit(
            users=int(written.with_list.sum()),
            rejected=int((~written.with_list).sum()),
            items=len(item_rows),
            invalid=self._invalid(written, item_rows),
            duplicate=self._duplicates(owner, item_rows),
            seen=seen,
            excluded=excluded,
            filtered=self._filtered(rows, owner, item_rows),
            over_cap=self._over_cap(owner, item_rows),
            short=int((written.with_list & (written.counts < most)).sum()),
            misordered=_misordered(owner, written.scores, item_rows),
            misplaced=written.misplaced + int((written.counts > most).sum()),
        )

    def _invalid(self, written: Written, item_rows: NDArray[np.int32]) -> int:
        valid = item_rows >= 0
        valid[valid] &= self._sid_agrees(written.sids.filter(pa.array(valid)), item_rows[valid])
        valid &= np.isfinite(written.scores) & (written.scores <= 0)
        return int((~valid).sum())

    def _sid_agrees(self, sids: pa.Array, item_rows: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Whether each written SID is the catalog's for that item."""
        expected = self._sids[self._leaf_of_row[item_rows]]
        lengths = pc.fill_null(pc.list_value_length(sids), 0).to_numpy(zero_copy_only=False).astype(np.int64)
        codes = pc.fill_null(sids.flatten(), -2).to_numpy(zero_copy_only=False)
        width = max(int(lengths.max(initial=0)), expected.shape[1])
        written = np.full((len(sids), width), -1, np.int64)
        written[np.arange(width) < lengths[:, None]] = codes
        padded = np.pad(expected, ((0, 0), (0, width - expected.shape[1])), constant_values=-1)
        agrees: NDArray[np.bool_] = (written == padded).all(axis=1)
        return agrees

    def _duplicates(self, owner: NDArray[np.int64], item_rows: NDArray[np.int32]) -> int:
        known = item_rows >= 0
        owner, item_rows = owner[known], item_rows[known]
        what = self._leaf_of_row[item_rows] if self._options.search.collisions == "first" else item_rows
        keys = np.sort(_keys(owner, what, self._vocabulary.num_items))
        return int((keys[1:] == keys[:-1]).sum())

    def _forbidden(
        self, rows: Rows, owner: NDArray[np.int64], item_rows: NDArray[np.int32]
    ) -> tuple[int | None, int | None]:
        """Recommended items of the history and of the exclusion column, where these rules are in force."""
        options = self._options.histories
        keys = np.sort(_keys(owner, item_rows, self._vocabulary.num_items)[item_rows >= 0])
        excluded = None
        if options.exclude_col is not None:
            excluded = self._count_in(keys, self._resolver.denied(rows)[0])
        if not options.exclude_seen:
            return None, excluded
        if options.history_format == "prompt":
            return excluded, excluded  # the exclusion column is the only word on what was seen
        return self._count_in(keys, self._resolver.seen(self._resolver.resolve(rows))), excluded

    def _filtered(self, rows: Rows, owner: NDArray[np.int64], item_rows: NDArray[np.int32]) -> int | None:
        """Recommended items that a filter forbids, each counted once."""
        filters, known = self._filters, item_rows >= 0
        if not filters.of_catalog and filters.matcher is None:
            return None
        owner, item_rows = owner[known], item_rows[known]
        wrong = ~filters.allowed[item_rows]
        matcher = filters.matcher
        for match, attribute in zip(matcher.matches, matcher.attributes, strict=True) if matcher else ():
            wanted = user_texts(rows.lists[match.user_col], match.user_col).take(pa.array(owner))
            values = attribute.values.take(
                pa.array(attribute.of_item[item_rows], mask=attribute.of_item[item_rows] < 0)
            )
            equal = pc.fill_null(pc.equal(values, wanted), False)
            wrong |= ~equal.to_numpy(zero_copy_only=False)
        return int(wrong.sum())

    def _over_cap(self, owner: NDArray[np.int64], item_rows: NDArray[np.int32]) -> int | None:
        cap, capped = self._filters.cap, self._filters.capped
        if cap is None or capped is None:
            return None
        value = np.where(item_rows >= 0, capped.of_item[item_rows], -1)
        keys = _keys(owner[value >= 0], value[value >= 0], len(capped.values))
        _, counts = np.unique(keys, return_counts=True)
        return int((counts - cap.most).clip(min=0).sum())

    def _count_in(self, keys: NDArray[np.int64], items: Ragged) -> int:
        """How many of ``keys`` (ascending) are among the items. Sorted keys on both sides keep the search in cache."""
        forbidden = np.sort(_keys(items.owners, items.values, self._vocabulary.num_items))
        if not len(forbidden):
            return 0
        at = np.searchsorted(forbidden, keys).clip(max=len(forbidden) - 1)
        return int((forbidden[at] == keys).sum())


def _keys(owner: NDArray[np.int64], items: NDArray[np.int32], num_items: int) -> NDArray[np.int64]:
    """One number for each (user, item)."""
    keys: NDArray[np.int64] = owner.astype(np.int64) * (num_items + 1) + items
    return keys


def _misordered(owner: NDArray[np.int64], scores: NDArray[np.float32], item_rows: NDArray[np.int32]) -> int:
    same_user = owner[1:] == owner[:-1]
    rising = scores[1:] > scores[:-1]
    # items.parquet is in SID order, and within a SID best first: its row number settles a tie
    tie_wrong = (scores[1:] == scores[:-1]) & (item_rows[1:] <= item_rows[:-1])
    return int((same_user & (rising | tie_wrong)).sum())
