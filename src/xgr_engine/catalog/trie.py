"""The catalog as a trie of semantic IDs: level-wise CSR arrays, nodes numbered in SID order.

Depth 0 is the root. Depth ``d`` (1..L) holds one node for each distinct prefix of ``d`` codes, numbered 0.. in
lexicographic order of the prefix. So the children of a node are one contiguous run of the next depth, a subtree is
one contiguous run of leaves, and "ties by SID" is "ties by node number". A SID may be a prefix of another one: its
node is then a leaf and an inner node at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]


@dataclass(frozen=True)
class ItemTrie:
    """Level-wise CSR. All arrays are int32 unless said otherwise and may be memory-mapped.

    Attributes:
        codes: ``codes[d]`` [n_{d+1}]: the code of each node at depth d+1, for d in 0..L-1.
        child_start: ``child_start[d]`` [n_d + 1]: node i of depth d has the children
            ``child_start[d][i] : child_start[d][i+1]`` of depth d+1, for d in 0..L-1 (n_0 = 1).
        leaf_start: ``leaf_start[d]`` [n_{d+1}]: the first leaf under each node of depth d+1.
        leaf_depth: [leaves] uint8: the length of each SID. Leaves are numbered in lexicographic order of their SIDs,
            a prefix before its extensions.
        item_start: [leaves + 1]: the items of leaf l are ``items[item_start[l] : item_start[l+1]]``, best first.
        items: [items]: row of ``items.parquet`` for each item, ascending (that table is kept in leaf order).
    """

    codes: tuple[IntArray, ...]
    child_start: tuple[IntArray, ...]
    leaf_start: tuple[IntArray, ...]
    leaf_depth: NDArray[np.uint8]
    item_start: IntArray
    items: IntArray

    @property
    def levels(self) -> int:
        """Length L of the longest SID."""
        return len(self.codes)

    @property
    def num_leaves(self) -> int:
        return len(self.leaf_depth)

    @property
    def num_items(self) -> int:
        return len(self.items)

    def num_nodes(self, depth: int) -> int:
        """Nodes at ``depth`` (0..L)."""
        return 1 if depth == 0 else len(self.codes[depth - 1])

    @cached_property
    def leaf_end(self) -> tuple[IntArray, ...]:
        """``leaf_end[d]`` [n_{d+1}]: one past the last leaf under each node of depth d+1."""
        ends: list[IntArray] = []
        for depth in range(self.levels, 0, -1):
            end = self.leaf_start[depth - 1] + 1
            if depth < self.levels:
                start, stop = self.child_start[depth][:-1], self.child_start[depth][1:]
                inner = stop > start
                end = end.copy()
                end[inner] = ends[-1][stop[inner] - 1]
            ends.append(end.astype(np.int32, copy=False))
        return tuple(reversed(ends))

    def is_leaf(self, depth: int) -> NDArray[np.bool_]:
        """[n_depth] whether the node of depth ``depth`` (1..L) is itself a complete SID."""
        flags: NDArray[np.bool_] = self.leaf_depth[self.leaf_start[depth - 1]] == depth
        return flags
