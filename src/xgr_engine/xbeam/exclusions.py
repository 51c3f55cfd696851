"""What a user may not get, as dead trie nodes: a prefix with no allowed item under it must not cost a beam.

Leaves are numbered in SID order, so the nodes above an excluded item are found by binary search, and a node is dead
when all its leaves are. The tables hold only dead nodes: a few per user, however large the catalog.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xgr_engine.catalog.trie import ItemTrie
from xgr_engine.options import UserRules

NO_NODE = np.iinfo(np.int32).max


@dataclass(frozen=True)
class Exclusions:
    """Dead nodes of a batch. Tables are ascending in each row, padded with ``NO_NODE`` to a common width.

    Attributes:
        leaves: int32 [U, M] dead leaves.
        inner: per depth 1..L int32 [U, M_d] nodes without a live leaf below them; whether the node itself is one
            does not count.
        item_positions: per user the places in ``trie.items`` that are excluded, ascending, without repeats.
        reachable_items, reachable_leaves: int64 [U] how many are left for each user.
        root: int64 [U] node of depth 0 where each user's search starts.
    """

    leaves: NDArray[np.int32]
    inner: tuple[NDArray[np.int32], ...]
    item_positions: list[NDArray[np.int64]]
    reachable_items: NDArray[np.int64]
    reachable_leaves: NDArray[np.int64]
    root: NDArray[np.int64]


def find_dead_nodes(trie: ItemTrie, rules: Sequence[NDArray[np.int32] | UserRules]) -> Exclusions:
    """Dead nodes of a batch, in time that depends on what is excluded and not on the size of the catalog.

    Args:
        rules: per user the excluded rows of ``items.parquet``, in any order; repeats and rows outside the trie, or
            outside the user's tree, do no harm.
    """
    users = len(rules)
    tree = np.array([rule.tree if isinstance(rule, UserRules) else 0 for rule in rules], np.int64)
    first_leaf = trie.tree_leaves().astype(np.int64)
    first_item = trie.item_start[first_leaf].astype(np.int64)
    positions = []
    for rule, first, stop in zip(rules, first_item[tree], first_item[tree + 1], strict=True):
        found = trie.places_of(rule.excluded if isinstance(rule, UserRules) else rule)
        positions.append(found[(found >= first) & (found < stop)])
    counts = np.array([len(found) for found in positions], np.int64)
    user = np.repeat(np.arange(users), counts)
    item = np.concatenate(positions) if users else np.empty(0, np.int64)
    leaf = _last_at_or_before(trie.item_start, item)
    dead_user, dead_leaf, occurrences = _counted(user, leaf, trie.num_leaves)
    full = occurrences == trie.item_start[dead_leaf + 1] - trie.item_start[dead_leaf]
    dead_user, dead_leaf = dead_user[full], dead_leaf[full]
    inner = []
    for depth in range(1, trie.levels + 1):
        # a leaf of this very depth is the node itself, not something below it
        below = trie.leaf_depth[dead_leaf] > depth
        owner, under = dead_user[below], dead_leaf[below]
        owner, node, occurrences = _counted(
            owner, _last_at_or_before(trie.leaf_start[depth - 1], under), trie.num_nodes(depth)
        )
        first = trie.leaf_start[depth - 1][node]
        full = occurrences == trie.leaf_end[depth - 1][node] - first - (trie.leaf_depth[first] == depth)
        inner.append(_table(users, owner[full], node[full]))
    return Exclusions(
        leaves=_table(users, dead_user, dead_leaf),
        inner=tuple(inner),
        item_positions=positions,
        reachable_items=np.diff(first_item)[tree] - counts,
        reachable_leaves=np.diff(first_leaf)[tree] - np.bincount(dead_user, minlength=users).astype(np.int64),
        root=tree,
    )


def _last_at_or_before(starts: NDArray[np.int32], values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Index of the last start that is at most each value. Searching for another dtype would copy the whole array."""
    return np.searchsorted(starts, values.astype(starts.dtype), side="right") - 1


def _counted(
    user: NDArray[np.int64], node: NDArray[np.int64], nodes: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Distinct (user, node) pairs, ordered by user, then node, and how often each occurs."""
    key, occurrences = np.unique(user * nodes + node, return_counts=True)
    owner, found = np.divmod(key, max(nodes, 1))
    return owner, found, occurrences


def _table(users: int, user: NDArray[np.int64], node: NDArray[np.int64]) -> NDArray[np.int32]:
    counts = np.bincount(user, minlength=users)
    table = np.full((users, int(counts.max(initial=0))), NO_NODE, np.int32)
    first = np.cumsum(counts) - counts
    table[user, np.arange(len(user)) - first[user]] = node
    return table


def contains(table: Tensor, values: Tensor) -> Tensor:
    """Whether ``values[u, c]`` is in row u of ``table`` [U, M], whose rows ascend: bool [U, C]."""
    if table.shape[1] == 0:
        return torch.zeros_like(values, dtype=torch.bool)
    at = torch.searchsorted(table, values.to(table.dtype).contiguous()).clamp_max_(table.shape[1] - 1)
    return table.gather(1, at) == values
