"""One step of trie beam search on the device: the choices of ``reference``, without a wait for the host.

``reference`` lists, scores and selects with shapes that depend on the data. Here every buffer has a size known
beforehand and every count stays on the device, so a whole search can be captured in a CUDA graph. Each level runs four
kernels:

1. *expand*: where each row's children begin in the user's list of candidates, in node order.
2. *score*: one score a candidate, -inf where it is not live, and the maximum of each block of 32 candidates.
3. *shortlist*: the k-th largest block maximum is a lower bound of the k-th best candidate, because k blocks each hold
   one at least as good. So blocks below it are never read again (the early termination of xBeam, arXiv 2512.11529, in
   a form that suits a GPU). At most 33 k candidates remain: 32 of each block above the bound, of which there are fewer
   than k, and k that equal it.
4. *select*: the exact k-th best of the short list, ties to the lower node, and the rows of the next level.

A k-th best is found by radix selection over the bits of the scores: integer counts only, so two runs agree bit for
bit. Nothing is sorted: everything stays in node order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from xgr_engine.xbeam.state import Beams, TrieLevel
from xgr_engine.xbeam.triton import kernels

BLOCK = 32  # candidates that share one maximum
_TILE = 1024  # candidates of a step; buffers are padded to it


@dataclass(frozen=True)
class Workspace:
    """Buffers of a level's step.

    Attributes:
        begin: int32 [U, R + 1] place of each row's first candidate; the last entry is the user's number of candidates.
        shift: int32 [U, R] what to add to the place of a row's candidate to get its node.
        scores: float32 [U, capacity].
        maxima: float32 [U, capacity / 32] of each block of candidates.
        short_score: float32 [U, 33 k] the short list's scores.
        short_place: int32 [U, 33 k] their places.
        short_count: int32 [U] how many there are.
        read: int64 [U, 2] candidates listed, and candidates that the selection read again, summed over all calls.
    """

    begin: Tensor
    shift: Tensor
    scores: Tensor
    maxima: Tensor
    short_score: Tensor
    short_place: Tensor
    short_count: Tensor
    read: Tensor

    @classmethod
    def allocate(cls, users: int, rows: int, k: int, capacity: int, device: torch.device) -> Workspace:
        """Room per user for ``rows`` rows, ``k`` choices and ``capacity`` candidates (:func:`candidate_capacity`)."""
        padded = max(1, triton.cdiv(capacity, _TILE)) * _TILE
        short = min((BLOCK + 1) * k, padded)

        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            begin=empty(users, rows + 1),
            shift=empty(users, rows),
            scores=empty(users, padded, dtype=torch.float32),
            maxima=empty(users, padded // BLOCK, dtype=torch.float32),
            short_score=empty(users, short, dtype=torch.float32),
            short_place=empty(users, short),
            short_count=empty(users),
            read=torch.zeros((users, 2), dtype=torch.int64, device=device),
        )


def candidate_capacity(level: TrieLevel, rows: int) -> int:
    """The most children that ``rows`` distinct nodes of a level can have together."""
    counts = level.child_start[1:] - level.child_start[:-1]
    return int(counts.topk(min(rows, len(counts))).values.sum())


@dataclass(frozen=True)
class Logits:
    """Head outputs of a level's rows.

    Attributes:
        values: float32 [N, C].
        normaliser: float32 [N]; None to normalise over each row's live children.
        index: int [U, R] line of ``values`` of each row; None when N = U * R, in row-major order.
    """

    values: Tensor
    normaliser: Tensor | None
    index: Tensor | None = None


@dataclass(frozen=True)
class Step:
    """One level: :meth:`expand` lists the candidates, then each :meth:`select` takes the best of one kind.

    Args:
        dead_inner, dead_leaves: int32 [U, M], ascending, padded (:class:`xgr_engine.xbeam.exclusions.Exclusions`).
    """

    beams: Beams
    level: TrieLevel
    logits: Logits
    dead_inner: Tensor
    dead_leaves: Tensor
    workspace: Workspace

    def expand(self) -> Tensor:
        """List the candidates. Call it once, before any selection.

        Returns:
            The normaliser to score with: that of the logits, float32 [N], or one over live children, float32 [U * R].
        """
        users, rows = self.beams.node.shape
        work = self.workspace
        log_rows = (rows - 1).bit_length()
        kernels.expand_kernel[(users,)](
            self.beams.node, self.beams.score, self.level.child_start, work.begin, work.shift, rows, LOG_R=log_rows
        )
        if self.logits.normaliser is not None:
            return self.logits.normaliser
        out = torch.empty((users * rows,), dtype=torch.float32, device=work.begin.device)
        level, index = self.level, self.logits.index
        kernels.row_normaliser_kernel[(users, rows)](
            work.begin if index is None else index,
            self.logits.values,
            level.column,
            work.begin,
            work.shift,
            level.column if level.inner is None else level.inner,
            self.dead_inner,
            level.column if level.leaf is None else level.leaf,
            self.dead_leaves,
            out,
            rows,
            self.logits.values.shape[1],
            self.dead_inner.shape[1],
            self.dead_leaves.shape[1],
            DENSE=index is None,
            INNER=level.inner is not None,
            ALL=level.all_inner,
            STEPS=self.dead_inner.shape[1].bit_length(),
            LEAF=level.leaf is not None,
            LEAF_STEPS=self.dead_leaves.shape[1].bit_length(),
            TILE=128,
        )
        return out

    def select(self, normaliser: Tensor, k: int, *, leaves: bool, own_slot: int | None = None) -> Beams:
        """The ``k`` best open prefixes, or with ``leaves`` the ``k`` best complete SIDs.

        Args:
            normaliser: from :meth:`expand`.
            own_slot: append ``own_slot + place`` to the ancestors: the slot of the new row's own token. None: do not.

        Returns:
            Rows of the next level [U, k] in node order. Where there are fewer, the last places are dead: score -inf,
            node 0.

        Raises:
            ValueError: the level has none of that kind.
        """
        self._score(normaliser, leaves)
        self.shortlist(k)
        return self._choose(k, own_slot)

    def shortlist(self, k: int) -> None:
        """Fill the workspace's short list with those of its scores that the k best must be among, in node order."""
        work, rows = self.workspace, self.beams.node.shape[1]
        kernels.shortlist_kernel[(len(work.begin),)](
            work.begin,
            work.scores,
            work.maxima,
            work.short_score,
            work.short_place,
            work.short_count,
            work.read,
            rows,
            k,
            work.scores.shape[1],
            work.short_score.shape[1],
            TILE=_TILE,
            GROUP=BLOCK,
            num_warps=8,
        )

    def _score(self, normaliser: Tensor, leaves: bool) -> None:
        level, work, logits = self.level, self.workspace, self.logits
        users, rows = self.beams.node.shape
        flags, dead = (level.leaf, self.dead_leaves) if leaves else (level.inner, self.dead_inner)
        if flags is None:
            raise ValueError("this level has no " + ("complete SIDs" if leaves else "open prefixes"))
        capacity = work.scores.shape[1]
        # enough programs to fill a GPU, each walking over several tiles when there are more
        programs = max(1, min(capacity // _TILE, 512 // users + 1))
        kernels.score_kernel[(users, programs)](
            self.beams.score,
            work.begin if logits.index is None else logits.index,
            logits.values,
            normaliser,
            level.column,
            work.begin,
            work.shift,
            flags,
            dead,
            work.scores,
            work.maxima,
            rows,
            logits.values.shape[1],
            dead.shape[1],
            capacity,
            LOG_R=(rows - 1).bit_length(),
            DENSE=logits.index is None,
            NORM_BY_INDEX=logits.normaliser is not None,
            LEAF=leaves,
            ALL=level.all_inner,
            STEPS=dead.shape[1].bit_length(),
            TILE=_TILE,
            GROUP=BLOCK,
            num_warps=4,
        )

    def _choose(self, k: int, own_slot: int | None) -> Beams:
        work, device = self.workspace, self.workspace.begin.device
        users, rows, own_tokens = self.beams.ancestors.shape
        own = own_slot is not None
        # parent, the row that each descends from, is written by the kernel and read by nobody
        node, column, parent = (torch.empty((users, k), dtype=torch.int64, device=device) for _ in range(3))
        score = torch.empty((users, k), dtype=torch.float32, device=device)
        ancestors = torch.empty((users, k, own_tokens + own), dtype=torch.int32, device=device)
        kernels.select_kernel[(users,)](
            work.begin,
            work.shift,
            self.level.column,
            self.beams.ancestors,
            work.short_score,
            work.short_place,
            work.short_count,
            node,
            score,
            column,
            parent,
            ancestors,
            rows,
            k,
            work.short_score.shape[1],
            own_slot or 0,
            A=own_tokens,
            OWN=own,
            LOG_R=(rows - 1).bit_length(),
            TILE=_TILE,
            num_warps=8,
        )
        return Beams(node=node, score=score, column=column, ancestors=ancestors)
