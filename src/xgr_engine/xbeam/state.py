"""The trie on a device and the live beams of a batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xgr_engine.catalog.trie import ItemTrie


@dataclass(frozen=True)
class TrieLevel:
    """Depth d -> d + 1 of the trie, as the search reads it. int32, on the device.

    Attributes:
        child_start: [n_d + 1]; children of node i are ``child_start[i] : child_start[i + 1]``.
        column: [n_{d+1}] column of the child's code in the level's head slice.
        leaf: [n_{d+1}] the child's leaf number, -1 where it is not a complete SID. None where no child is one.
        inner: bool [n_{d+1}] whether the child has children. None where no child has any (the last level).
        inner_count: how many children have children; the next level needs no more rows than that.
        all_leaves: every child is a leaf, so no mask is needed; all_inner: every child has children.
    """

    child_start: Tensor
    column: Tensor
    leaf: Tensor | None
    inner: Tensor | None
    inner_count: int
    all_leaves: bool
    all_inner: bool


def upload_trie(trie: ItemTrie, columns: tuple[NDArray[np.int32], ...], device: torch.device) -> tuple[TrieLevel, ...]:
    """Copy what the search needs. ``columns`` is what :meth:`SidTokenTable.bind` returns for the same trie."""

    def put(values: NDArray[np.int32] | NDArray[np.bool_]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device)

    levels = []
    for depth in range(1, trie.levels + 1):
        is_leaf = trie.is_leaf(depth)
        if depth < trie.levels:
            inner = np.diff(trie.child_start[depth]) > 0
        else:
            inner = np.zeros(trie.num_nodes(depth), np.bool_)
        leaf = np.where(is_leaf, trie.leaf_start[depth - 1], -1).astype(np.int32)
        levels.append(
            TrieLevel(
                child_start=put(trie.child_start[depth - 1].astype(np.int32, copy=False)),
                column=put(columns[depth - 1]),
                leaf=put(leaf) if is_leaf.any() else None,
                inner=put(inner) if inner.any() else None,
                inner_count=int(inner.sum()),
                all_leaves=bool(is_leaf.all()),
                all_inner=bool(inner.all()),
            )
        )
    return tuple(levels)


@dataclass(frozen=True)
class Beams:
    """The open prefixes of U users after some level, R rows each, in node order (so ties settle by position).

    Attributes:
        node: int64 [U, R] trie node at this depth. Undefined (but in range) where dead.
        score: float32 [U, R] sum of log p; -inf = dead row.
        column: int64 [U, R] head-slice column of the last code.
        ancestors: int32 [U, R, A] slots of the generated tokens whose keys are in the cache, oldest first; -1 = none.
    """

    node: Tensor
    score: Tensor
    column: Tensor
    ancestors: Tensor

    @property
    def alive(self) -> Tensor:
        """bool [U, R]."""
        return self.score > -torch.inf

    @classmethod
    def root(cls, users: int, device: torch.device, node: Tensor | None = None) -> Beams:
        """One row a user: the empty prefix, at ``node`` (int64 [U]; default 0) of depth 0."""
        if node is None:
            node = torch.zeros(users, dtype=torch.int64, device=device)
        return cls(
            node=node[:, None],
            score=torch.zeros((users, 1), device=device),
            column=torch.zeros((users, 1), dtype=torch.int64, device=device),
            ancestors=torch.empty((users, 1, 0), dtype=torch.int32, device=device),
        )


@dataclass(frozen=True)
class Finished:
    """Complete SIDs found so far: the P best of each user (P <= W), in leaf order.

    Attributes:
        leaf: int64 [U, P].
        score: float32 [U, P], -inf = empty place.
        column: int64 [U, P] head-slice column of the last code.
        depth: int64 [U, P] number of codes.
        ancestors: int32 [U, P, A] slots of the codes before the last; -1 = none.
    """

    leaf: Tensor
    score: Tensor
    column: Tensor
    depth: Tensor
    ancestors: Tensor

    @classmethod
    def empty(cls, users: int, device: torch.device) -> Finished:
        """P = 0: there is nothing to keep before the first level that completes SIDs."""
        none = torch.empty((users, 0), dtype=torch.int64, device=device)
        return cls(
            leaf=none,
            score=torch.empty((users, 0), device=device),
            column=none,
            depth=none,
            ancestors=torch.empty((users, 0, 0), dtype=torch.int32, device=device),
        )
