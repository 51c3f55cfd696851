"""From finished SIDs to the user's list of items, on the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xgr_engine.catalog.trie import ItemTrie, runs
from xgr_engine.errors import XgrError
from xgr_engine.options import SearchOptions
from xgr_engine.xbeam.exclusions import Exclusions


@dataclass(frozen=True)
class BatchResult:
    """Ranked items of U users, back to back.

    Attributes:
        counts: int32 [U] items of each user: ``min(K, reachable)``.
        item_rows: int32 [sum of counts] rows of ``items.parquet``.
        leaves: int32 [sum of counts] the leaf of each item.
        scores: float32 [sum of counts] log-probabilities.
        short: bool [U] fewer than K were reachable.
    """

    counts: NDArray[np.int32]
    item_rows: NDArray[np.int32]
    leaves: NDArray[np.int32]
    scores: NDArray[np.float32]
    short: NDArray[np.bool_]


def rank_items(
    trie: ItemTrie,
    exclusions: Exclusions,
    leaves: NDArray[np.int64],
    scores: NDArray[np.float32],
    options: SearchOptions,
) -> BatchResult:
    """Order leaves by score, then SID; expand each into its allowed items; keep K.

    Args:
        leaves: [U, P] complete SIDs in any order.
        scores: [U, P], -inf = empty place.

    Raises:
        XgrError: some user's number of items is not ``min(K, reachable)``, which is a fault of the search.
    """
    top_k = options.top_k
    reachable = exclusions.reachable_items if options.collisions == "all" else exclusions.reachable_leaves
    rows, of_leaf, score, counts = [], [], [], []
    for user in range(len(leaves)):
        present = scores[user] != -np.inf
        leaf, value = leaves[user][present], scores[user][present]
        # leaf number ascending is SID order, the rule for ties
        order = np.lexsort((leaf, -value))[:top_k]
        places, owner = _allowed_items(
            trie, leaf[order], exclusions.item_positions[user], options.collisions == "first"
        )
        places, owner = places[:top_k], owner[:top_k]
        rows.append(trie.items[places])
        of_leaf.append(leaf[order][owner])
        score.append(value[order][owner])
        counts.append(len(places))
    if (np.array(counts, np.int64) != np.minimum(reachable, top_k)).any():
        raise XgrError(
            "internal error: the search did not find as many items as there are",
            why=f"K {top_k}; found for the first users {counts[:8]}, allowed {reachable[:8].tolist()}",
            hint="please report this with what `xgr inspect --json` prints for the catalog",
        )
    return BatchResult(
        counts=np.array(counts, np.int32),
        item_rows=np.concatenate(rows).astype(np.int32) if rows else np.empty(0, np.int32),
        leaves=np.concatenate(of_leaf).astype(np.int32) if rows else np.empty(0, np.int32),
        scores=np.concatenate(score).astype(np.float32) if rows else np.empty(0, np.float32),
        short=reachable < top_k,
    )


def _allowed_items(
    trie: ItemTrie, leaf: NDArray[np.int64], excluded: NDArray[np.int64], only_first: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Places in ``trie.items`` of the leaves' allowed items, leaf by leaf, and for each the index of its leaf."""
    start = trie.item_start[leaf].astype(np.int64)
    size = trie.item_start[leaf + 1] - start
    owner = np.repeat(np.arange(len(leaf)), size)
    places = runs(start, size)
    if len(excluded):
        allowed = ~np.isin(places, excluded, assume_unique=True)
        places, owner = places[allowed], owner[allowed]
    if only_first and len(owner):
        first = np.concatenate([[True], owner[1:] != owner[:-1]])
        places, owner = places[first], owner[first]
    return places, owner
