"""The catalog as a trie of semantic IDs: CSR arrays (compressed sparse rows) per level, nodes numbered in SID order.

Depth 0 is the root. Depth ``d`` (1..L) holds one node for each distinct prefix of ``d`` codes, numbered from 0 in
lexicographic order of the prefix. So the children of a node are one contiguous run of the next depth, a subtree is
one contiguous run of leaves, and "ties by SID" is "ties by node number". A SID may be a prefix of another one: its
node is then both a leaf and an inner node.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from xgr_engine.catalog.distinct import distinct
from xgr_engine.errors import CatalogError

IntArray = NDArray[np.int32]


@dataclass(frozen=True)
class ItemTrie:
    """One CSR array per level. All arrays are int32 unless noted otherwise, and may be memory-mapped.

    Attributes:
        codes: ``codes[d]`` [n_{d+1}]: the code of each node at depth d+1, for d in 0..L-1.
        child_start: ``child_start[d]`` [n_d + 1]: node i of depth d has the children
            ``child_start[d][i] : child_start[d][i+1]`` of depth d+1, for d in 0..L-1 (n_0 = 1).
        leaf_start: ``leaf_start[d]`` [n_{d+1}]: the first leaf under each node of depth d+1.
        leaf_depth: [leaves] uint8: the length of each SID. Leaves are numbered in lexicographic order of their SIDs,
            a prefix before its extensions.
        item_start: [leaves + 1]: the items of leaf l are ``items[item_start[l] : item_start[l+1]]``, best first.
        items: [items]: row of ``items.parquet`` for each item, ascending (the rows of that table are in leaf order).
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
        """[n_depth] whether each node of ``depth`` (1..L) is itself a complete SID."""
        flags: NDArray[np.bool_] = self.leaf_depth[self.leaf_start[depth - 1]] == depth
        return flags

    def tree_leaves(self) -> IntArray:
        """[roots + 1] the leaves under root t are ``tree_leaves()[t] : tree_leaves()[t + 1]``; a trie has one root."""
        return np.array([0, self.num_leaves], np.int32)

    def places_of(self, rows: IntArray) -> NDArray[np.int64]:
        """Places in ``items`` of those ``rows`` of ``items.parquet`` that the trie has: ascending, without repeats."""
        rows = distinct(rows)
        if len(rows) == 0 or self.num_items == 0:
            return np.empty(0, np.int64)
        rows = rows.astype(self.items.dtype, copy=False)  # searchsorted with another dtype would copy all items
        at = np.searchsorted(self.items, rows).clip(max=self.num_items - 1)
        found: NDArray[np.int64] = at[self.items[at] == rows].astype(np.int64)
        return found

    @cached_property
    def leaf_of_item(self) -> IntArray:
        """[items] the leaf each entry of ``items`` belongs to."""
        return np.repeat(np.arange(self.num_leaves, dtype=np.int32), np.diff(self.item_start))

    def child(self, depth: int, nodes: IntArray, codes: IntArray) -> IntArray:
        """The child of each of ``nodes`` [n] (numbers at ``depth``; -1 = no node) by its code in ``codes`` [n].

        Returns:
            [n] numbers at ``depth + 1``; -1 where there is no such child.
        """
        siblings = self.codes[depth]
        if len(siblings) == 0:
            return np.full(len(nodes), -1, np.int32)
        parents = np.maximum(nodes, 0)
        low = self.child_start[depth][parents]
        stop = np.where(nodes >= 0, self.child_start[depth][parents + 1], low)
        high = stop.copy()
        # one binary search for all rows at once, since siblings ascend by code
        for _ in range(int((high - low).max(initial=0)).bit_length()):
            middle = (low + high) >> 1
            before = (low < high) & (siblings[np.minimum(middle, len(siblings) - 1)] < codes)
            low, high = np.where(before, middle + 1, low), np.where(before, high, middle)
        found = (low < stop) & (siblings[np.minimum(low, len(siblings) - 1)] == codes)
        return np.where(found, low, -1).astype(np.int32)

    def leaves_of_codes(self, codes: IntArray) -> IntArray:
        """Leaf of each row of ``codes`` [n, any width] (padded with -1 at the end); -1 where it is not a SID."""
        leaves = np.full(len(codes), -1, np.int32)
        lengths = (codes >= 0).sum(axis=1)
        nodes = np.zeros(len(codes), np.int32)
        for depth in range(min(self.levels, codes.shape[1])):
            nodes = self.child(depth, nodes, codes[:, depth])
            ends = np.flatnonzero((lengths == depth + 1) & (nodes >= 0))
            ends = ends[self.is_leaf(depth + 1)[nodes[ends]]]
            leaves[ends] = self.leaf_start[depth][nodes[ends]]
        return leaves

    def leaf_codes(self) -> IntArray:
        """[leaves, L] the SID of each leaf, padded with -1."""
        codes = np.full((self.num_leaves, self.levels), -1, np.int32)
        for depth in range(self.levels):
            spans = self.leaf_end[depth] - self.leaf_start[depth]
            under = np.repeat(self.codes[depth], spans)
            if len(under) == self.num_leaves:
                codes[:, depth] = under
            else:
                codes[self.leaf_depth > depth, depth] = under
        return codes

    def restrict(self, allowed: NDArray[np.bool_]) -> ItemTrie:
        """The trie of those items whose row is set in ``allowed`` [rows of ``items.parquet``].

        Items keep their row numbers and their order; nodes and leaves are renumbered. The number of levels stays the
        same, so that the deepest may be empty. The cost is a few passes over the arrays.
        """
        keep_item = allowed[self.items]
        kept_before = _exclusive_cumsum(keep_item)
        item_start = kept_before[self.item_start]
        keep_leaf = np.diff(item_start) > 0
        leaves_before = _exclusive_cumsum(keep_leaf)
        keep_node = [
            leaves_before[end] > leaves_before[start] for start, end in zip(self.leaf_start, self.leaf_end, strict=True)
        ]
        child_start = []
        for depth in range(self.levels):
            nodes_before = _exclusive_cumsum(keep_node[depth])
            starts = nodes_before[self.child_start[depth]]
            kept = starts[:-1] if depth == 0 else starts[:-1][keep_node[depth - 1]]
            child_start.append(np.append(kept, nodes_before[-1]).astype(np.int32))
        return ItemTrie(
            codes=tuple(codes[keep] for codes, keep in zip(self.codes, keep_node, strict=True)),
            child_start=tuple(child_start),
            leaf_start=tuple(
                leaves_before[start[keep]] for start, keep in zip(self.leaf_start, keep_node, strict=True)
            ),
            leaf_depth=self.leaf_depth[keep_leaf],
            item_start=np.append(item_start[:-1][keep_leaf], kept_before[-1]).astype(np.int32),
            items=self.items[keep_item],
        )

    def validate(self) -> None:
        """Check sizes, bounds and order of every array, so that no later look-up can leave its array.

        Raises:
            CatalogError: names the array that is wrong.
        """
        levels, leaves = self.levels, self.num_leaves
        _require(len(self.child_start) == levels and len(self.leaf_start) == levels, "a level lacks an array")
        _require(levels == 0 or self.num_nodes(1) > 0 or leaves == 0, "leaves without a first level")
        for depth in range(levels):
            nodes, codes = self.num_nodes(depth + 1), self.codes[depth]
            starts, first_leaf = self.child_start[depth], self.leaf_start[depth]
            name = f"child_start.{depth}"
            _require(len(starts) == self.num_nodes(depth) + 1, f"{name} has the wrong length")
            _require(starts[0] == 0 and starts[-1] == nodes and _ascending(starts), f"{name} is not a row index")
            _require(len(first_leaf) == nodes, f"leaf_start.{depth} has the wrong length")
            inside = nodes == 0 or (first_leaf[0] >= 0 and first_leaf[-1] < leaves)
            _require(bool(inside) and _ascending(first_leaf, strictly=True), f"leaf_start.{depth} is out of order")
            if nodes == 0:
                continue
            _require(bool(codes.min() >= 0), f"codes.{depth} holds a negative code")
            rising = codes[1:] > codes[:-1]
            first_child = starts[:-1][starts[:-1] < starts[1:]]
            rising[first_child[first_child > 0] - 1] = True
            _require(bool(rising.all()), f"codes.{depth} is not ascending among siblings")
        depths_valid = leaves == 0 or bool(self.leaf_depth.min() >= 1 and self.leaf_depth.max() <= levels)
        _require(depths_valid, "leaf_depth is out of bounds")
        _require(len(self.item_start) == leaves + 1, "item_start has the wrong length")
        _require(self.item_start[0] == 0 and self.item_start[-1] == len(self.items), "item_start does not fit items")
        _require(_ascending(self.item_start, strictly=True), "item_start: a leaf without items")
        items_valid = len(self.items) == 0 or bool(self.items[0] >= 0)
        _require(items_valid and _ascending(self.items, strictly=True), "items are not ascending")
        _require(sum(int(self.is_leaf(depth + 1).sum()) for depth in range(levels)) == leaves, "leaf_depth is wrong")


@dataclass(frozen=True)
class ItemForest(ItemTrie):
    """Tries over disjoint sets of items in one set of arrays, so that one batch may search in several of them.

    Depth 0 holds one root per tree, and every deeper node belongs to one tree: a search that starts at a root stays in
    its tree. Nodes and leaves are numbered tree by tree, in SID order within a tree. ``items`` ascend only within a
    tree.

    Attributes:
        first_leaf: [trees + 1] the first leaf of each tree; the last entry is the number of leaves.
    """

    first_leaf: IntArray

    def num_nodes(self, depth: int) -> int:
        return len(self.child_start[0]) - 1 if depth == 0 else super().num_nodes(depth)

    def tree_leaves(self) -> IntArray:
        return self.first_leaf

    def places_of(self, rows: IntArray) -> NDArray[np.int64]:
        rows = distinct(rows)
        if len(rows) == 0 or self.num_items == 0:
            return np.empty(0, np.int64)
        by_row, sorted_rows = self._by_row
        at = np.searchsorted(sorted_rows, rows).clip(max=self.num_items - 1)
        found: NDArray[np.int64] = np.sort(by_row[at[sorted_rows[at] == rows]]).astype(np.int64)
        return found

    @cached_property
    def _by_row(self) -> tuple[NDArray[np.intp], IntArray]:
        order = np.argsort(self.items)
        return order, self.items[order]


def build_forest(codes: IntArray, rows: IntArray, tree: IntArray, trees: int) -> ItemForest:
    """The forest of chosen items.

    Args:
        codes: [n, L] the SID of each item (padded with -1), in SID order.
        rows: [n] its row of ``items.parquet``.
        tree: [n] its tree, 0..trees-1.
        trees: how many trees there are; those without items have no leaf.
    """
    order = np.argsort(tree, kind="stable")
    whole = trie_of_sorted(np.concatenate([tree[order, None].astype(np.int32), codes[order]], axis=1))
    # the trees' numbers were put in front of the codes: the first level of ``whole`` are the trees that have items
    present = whole.codes[0] if whole.levels else np.empty(0, np.int32)
    first_leaf = np.zeros(trees + 1, np.int32)
    first_leaf[1 + present] = whole.leaf_end[0] - whole.leaf_start[0]
    np.cumsum(first_leaf, out=first_leaf)
    children = np.zeros(trees + 1, np.int32)
    if whole.levels > 1:
        children[1 + present] = np.diff(whole.child_start[1])
        np.cumsum(children, out=children)
    return ItemForest(
        codes=whole.codes[1:],
        child_start=(children, *whole.child_start[2:]),
        leaf_start=whole.leaf_start[1:],
        leaf_depth=whole.leaf_depth - np.uint8(1),
        item_start=whole.item_start,
        items=rows[order].astype(np.int32),
        first_leaf=first_leaf,
    )


def sid_order(codes: IntArray) -> NDArray[np.intp]:
    """Permutation of the rows of ``codes`` [N, L] (padded with -1) into lexicographic order, a prefix before its
    extensions. Rows with the same SID keep their order."""
    rows = len(codes)
    row_bits = max(rows - 1, 0).bit_length()
    words, used = _packed_words(codes)
    if len(words) == 1 and used + row_bits <= 64:
        # SID and row number fit in one integer, and sorting values is much faster than sorting indices.
        words[0] <<= np.uint64(row_bits)
        words[0] |= np.arange(rows, dtype=np.uint64)
        words[0].sort()
        words[0] &= np.uint64((1 << row_bits) - 1)
        return words[0].astype(np.intp)
    if not words:
        return np.arange(rows, dtype=np.intp)
    return np.lexsort(words[::-1])


def trie_of_sorted(codes: IntArray) -> ItemTrie:
    """The trie of SIDs ``codes`` [N, L] (padded with -1) that are already in the order of ``sid_order``.

    Item i of the trie is row i; rows with the same SID share a leaf in their order.
    """
    rows, levels = codes.shape
    differs = np.zeros(rows, np.bool_)  # this row's prefix is not the previous row's
    differs[:1] = True
    columns, begins = [], []
    for depth in range(levels):
        column = np.ascontiguousarray(codes[:, depth])
        differs[1:] |= column[1:] != column[:-1]
        columns.append(column)
        begins.append(differs & (column >= 0))
    leaf_rows = np.flatnonzero(differs)
    leaf_number = np.cumsum(differs, dtype=np.int32) - np.int32(1)
    leaf_depth = np.zeros(len(leaf_rows), np.uint8)
    for column in columns:
        leaf_depth += column[leaf_rows] >= 0
    node_rows = [np.flatnonzero(begin) for begin in begins]
    child_start = []
    for depth in range(levels):
        parents = np.zeros(min(rows, 1), np.intp) if depth == 0 else node_rows[depth - 1]
        starts = _exclusive_cumsum(begins[depth])[parents] if rows else np.zeros(1 if depth == 0 else 0, np.int32)
        child_start.append(np.append(starts, len(node_rows[depth])).astype(np.int32))
    return ItemTrie(
        codes=tuple(column[at] for column, at in zip(columns, node_rows, strict=True)),
        child_start=tuple(child_start),
        leaf_start=tuple(leaf_number[at] for at in node_rows),
        leaf_depth=leaf_depth,
        item_start=np.append(leaf_rows, rows).astype(np.int32),
        items=np.arange(rows, dtype=np.int32),
    )


def build_trie(
    codes: IntArray, lengths: NDArray[np.integer] | None = None, tie_rank: NDArray[np.generic] | None = None
) -> tuple[ItemTrie, NDArray[np.intp]]:
    """The trie of a catalog given as codes.

    Args:
        codes: [N, L] the SID of each item; codes beyond an item's length are ignored, or -1 when ``lengths`` is None.
        lengths: [N] number of codes of each SID.
        tie_rank: [N] order of the items that share a SID (ascending); default: row order.

    Returns:
        The trie, and ``order`` [N]: item ``r`` of the trie is row ``order[r]`` of ``codes``.

    Raises:
        CatalogError: a SID without codes, a negative code, or a hole inside a SID.
    """
    codes = np.asarray(codes)
    if codes.ndim != 2 or codes.shape[1] > 255:
        raise CatalogError(f"codes must be a table of items x levels with at most 255 levels, not {codes.shape}")
    if lengths is None:
        lengths = (codes >= 0).sum(axis=1)
    inside = np.arange(codes.shape[1]) < np.asarray(lengths)[:, None]
    if len(codes) and (int(np.min(lengths, initial=1)) < 1 or bool((inside & (codes < 0)).any())):
        raise CatalogError("a SID has no codes, or a code below 0")
    padded = np.where(inside, codes, -1).astype(np.int32)
    before = np.arange(len(codes)) if tie_rank is None else np.argsort(tie_rank, kind="stable")
    order = before[sid_order(padded[before])]
    return trie_of_sorted(padded[order]), order


def _packed_words(codes: IntArray) -> tuple[list[NDArray[np.uint64]], int]:
    """Levels packed into as few 64-bit words as possible, most significant first, and the bits used of the last."""
    words: list[NDArray[np.uint64]] = []
    used = 65  # no word yet
    for depth in range(codes.shape[1]):
        column = codes[:, depth]
        low, high = int(column.min(initial=0)), int(column.max(initial=0))
        bits = (high - low).bit_length()  # low is -1 where a SID ends before this level, so that it sorts first
        if used + bits > 64:
            words.append(np.zeros(len(codes), np.uint64))
            used = 0
        words[-1] <<= np.uint64(bits)
        words[-1] |= (column - np.int32(low)).astype(np.uint64)
        used += bits
    return words, used


def runs(start: NDArray[np.int64], size: NDArray[np.int64]) -> NDArray[np.int64]:
    """``start[0], .., start[0] + size[0] - 1, start[1], ..``: one run after the other."""
    before = np.cumsum(size) - size
    places: NDArray[np.int64] = np.repeat(start - before, size) + np.arange(int(size.sum()))
    return places


def _exclusive_cumsum(flags: NDArray[np.bool_]) -> IntArray:
    """[n + 1] how many flags are set before each position, and in all."""
    counts = np.zeros(len(flags) + 1, np.int32)
    np.cumsum(flags, out=counts[1:])
    return counts


def _ascending(values: IntArray, *, strictly: bool = False) -> bool:
    return bool((values[1:] > values[:-1]).all() if strictly else (values[1:] >= values[:-1]).all())


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise CatalogError(f"trie: {what}")
