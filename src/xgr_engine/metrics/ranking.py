"""Ranking metrics of many lists at once, from integer keys. numpy only; what a key stands for is the caller's matter.

For a row with the set of targets T and the list of distinct predictions p_1, p_2, ... (best first)::

    recall@k   = |T and {p_1..p_k}| / |T|
    hit_rate@k = 1 if any of p_1..p_k is in T, else 0            (equal to recall@k when |T| = 1)
    ndcg@k     = sum over hits at rank r <= k of 1 / log2(r + 1), over the same sum for min(|T|, k) hits at the top
    mrr        = 1 / rank of the first hit, over the whole list; 0 without one

NDCG with binary gains as in Järvelin and Kekäläinen, "Cumulated gain-based evaluation of IR techniques", 2002.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

UNKNOWN = -1


@dataclass(frozen=True)
class Lists:
    """Rows of keys, flattened.

    Attributes:
        row: [M] ascending, the row each key belongs to.
        key: [M] >= 0, or UNKNOWN for something that equals nothing else, another UNKNOWN included.
    """

    row: IntArray
    key: IntArray

    def repeats(self) -> NDArray[np.bool_]:
        """[M] whether the row has the key further up already; UNKNOWN never repeats."""
        repeated = np.zeros(len(self.key), bool)
        known = np.flatnonzero(self.key >= 0)
        if len(known) == 0:
            return repeated
        # Sorting values is ten times as fast as sorting with positions, and mostly there is nothing to remove.
        pairs = np.sort(self.row[known] * (int(self.key.max()) + 1) + self.key[known])
        if not (pairs[1:] == pairs[:-1]).any():
            return repeated
        # A stable sort by (row, key): in a run of equal pairs the first is the one that came first in the list.
        order = known[np.lexsort((self.key[known], self.row[known]))]
        same = (self.row[order[1:]] == self.row[order[:-1]]) & (self.key[order[1:]] == self.key[order[:-1]])
        repeated[order[1:][same]] = True
        return repeated

    def distinct(self) -> tuple[Lists, int]:
        """The lists without repeated keys (the first of each stays), and how many entries went."""
        kept = ~self.repeats()
        return Lists(self.row[kept], self.key[kept]), int(len(kept) - kept.sum())

    def counts(self, rows: int) -> IntArray:
        """[rows] entries of each row."""
        return np.bincount(self.row, minlength=rows).astype(np.int64)


def metric_names(ks: Sequence[int]) -> tuple[str, ...]:
    """Names of the columns that ``row_metrics`` returns."""
    return (*(f"{name}@{k}" for name in ("recall", "ndcg", "hit_rate") for k in ks), "mrr")


def row_metrics(rows: int, predicted: Lists, truth: Lists, ks: Sequence[int]) -> FloatArray:
    """[rows, 3 * len(ks) + 1] in the order of ``metric_names``; rows without a target are 0.

    Args:
        rows: number of rows; a row without predictions scores 0.
        predicted: best first within a row, without repeats (``Lists.distinct``).
        truth: the targets of each row, without repeats. An UNKNOWN target counts in |T| and is never found.
    """
    hit_row, hit_rank = _hits(rows, predicted, truth)
    targets = truth.counts(rows)
    deepest = max(max(ks), 1)
    discount = 1.0 / np.log2(np.arange(deepest) + 2)
    ideal = np.concatenate(([0.0], np.cumsum(discount)))
    values = np.zeros((rows, 3 * len(ks) + 1))
    has_target = np.maximum(targets, 1)
    for at, k in enumerate(ks):
        inside = hit_rank < k
        row, rank = hit_row[inside], hit_rank[inside]
        found = np.bincount(row, minlength=rows)
        gain = np.bincount(row, weights=discount[rank], minlength=rows)
        values[:, at] = found / has_target
        values[:, len(ks) + at] = gain / np.maximum(ideal[np.minimum(targets, k)], discount[-1])
        values[:, 2 * len(ks) + at] = found > 0
    # Hits are in list order, so the first of a row is its best.
    first_rows, first_at = np.unique(hit_row, return_index=True)
    values[first_rows, -1] = 1.0 / (hit_rank[first_at] + 1)
    return values


def _hits(rows: int, predicted: Lists, truth: Lists) -> tuple[IntArray, IntArray]:
    """Row and 0-based rank of each prediction that is a target, in list order."""
    hit = np.flatnonzero(is_member(predicted, truth))
    starts = np.concatenate(([0], np.cumsum(predicted.counts(rows))))
    return predicted.row[hit], hit - starts[predicted.row[hit]]


def is_member(entries: Lists, sets: Lists) -> NDArray[np.bool_]:
    """For each entry, whether its row's set holds its key. Fast where the sets are small beside the entries."""
    known = sets.key >= 0
    if len(entries.key) == 0 or not known.any():
        return np.zeros(len(entries.key), bool)
    span = max(int(entries.key.max()), int(sets.key.max())) + 1
    wanted = np.sort(sets.row[known] * span + sets.key[known])
    asked = entries.row * span + entries.key
    at = np.searchsorted(wanted, asked).clip(max=len(wanted) - 1)
    found: NDArray[np.bool_] = (wanted[at] == asked) & (entries.key >= 0)
    return found
