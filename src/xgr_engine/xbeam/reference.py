"""One step of trie beam search in plain torch: the definition, the oracle, and the CPU path.

Candidates of a beam are its children in the trie and nothing else: no mask over the vocabulary, no invalid item. Rows,
children and leaves are all in SID order, so "ties by SID" is "first position wins", and nothing is ever sorted
before the final ranking.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from xgr_engine.xbeam.exclusions import contains
from xgr_engine.xbeam.state import Beams, Finished, TrieLevel


@dataclass(frozen=True)
class Candidates:
    """All children of a batch's live rows, ragged lists padded to the longest: [U, C], in node order.

    Attributes:
        child: int64 node at the next depth.
        parent: int64 row of :class:`Beams` that it descends from.
        exists: bool, false in the padding.
    """

    child: Tensor
    parent: Tensor
    exists: Tensor


def list_candidates(beams: Beams, level: TrieLevel) -> Candidates:
    """The children of every live row."""
    first = level.child_start[beams.node].long()
    count = torch.where(beams.alive, level.child_start[beams.node + 1] - first, 0)
    end = count.cumsum(1)
    place = torch.arange(int(end[:, -1].max()), device=first.device).expand(len(first), -1).contiguous()
    # the row that holds place j is the first whose running total exceeds j
    parent = torch.searchsorted(end, place, right=True).clamp_max_(first.shape[1] - 1)
    offset = first - (end - count)
    child = offset.gather(1, parent) + place
    exists = place < end[:, -1:]
    return Candidates(torch.where(exists, child, 0), parent, exists)


class ScoredRows:
    """Head outputs of the rows that went through the model, packed, and where to find those of a row.

    Attributes:
        done: bool [U, R] which rows went through.
        logits: float32 [N, C_level].
        normaliser: float32 [N]; None to normalise over the live candidates.
        index: int64 [U, R] line of ``logits`` of each row, 0 where not done.
    """

    def __init__(self, beams: Beams) -> None:
        self.done = torch.zeros_like(beams.alive)
        self.index = torch.zeros_like(beams.node)
        self.logits = beams.score.new_empty(0, 0)
        self.normaliser: Tensor | None = None

    @property
    def rows(self) -> int:
        """How many rows went through (N)."""
        return len(self.logits)

    def add(self, chosen: Tensor, logits: Tensor, normaliser: Tensor | None) -> None:
        """Add the outputs of the rows ``chosen`` (bool [U, R]), which come in row-major order."""
        self.index[chosen] = torch.arange(self.rows, self.rows + len(logits), device=logits.device)
        if self.rows:
            logits = torch.cat([self.logits, logits])
            normaliser = (
                None if normaliser is None or self.normaliser is None else torch.cat([self.normaliser, normaliser])
            )
        self.done = self.done | chosen
        self.logits, self.normaliser = logits, normaliser


def score_candidates(
    candidates: Candidates, beams: Beams, level: TrieLevel, scored: ScoredRows, live: Tensor
) -> Tensor:
    """``score(parent) + log p(code | parent)`` of each candidate, -inf for those that are not live (bool [U, C]).

    Returns:
        float32 [U, C]. Each log p is at most 0, so a child never scores above its parent.
    """
    place = scored.index.gather(1, candidates.parent)
    raw = scored.logits[place, level.column[candidates.child].long()]
    if scored.normaliser is None:
        raw_live = raw.masked_fill(~live, -torch.inf)
        normaliser = _row_logsumexp(raw_live, candidates.parent, beams.node.shape[1]).gather(1, candidates.parent)
    else:
        normaliser = scored.normaliser[place]
    log_p = (raw - normaliser).clamp_max_(0.0)
    total = beams.score.gather(1, candidates.parent) + log_p
    return total.masked_fill_(~live, -torch.inf)


def _row_logsumexp(values: Tensor, row: Tensor, rows: int) -> Tensor:
    """Log-sum-exp of ``values`` [U, C] over the runs of equal ``row`` (ascending): [U, rows]. No atomics."""
    count = torch.zeros((len(row), rows), dtype=torch.int64, device=row.device)
    start = torch.searchsorted(row, torch.arange(rows, device=row.device).expand(len(row), -1).contiguous())
    count[:, :-1] = start[:, 1:] - start[:, :-1]
    count[:, -1] = row.shape[1] - start[:, -1]
    result = []
    # one user at a time bounds the padded copy: a skewed trie may give one row thousands of children
    for user in range(len(row)):
        place = start[user][:, None] + torch.arange(int(count[user].max()), device=row.device)
        inside = place < (start[user] + count[user])[:, None]
        padded = values[user][place.clamp_max(row.shape[1] - 1)].masked_fill(~inside, -torch.inf)
        result.append(torch.logsumexp(padded, dim=-1))
    # a row without a live child has -inf here: no score depends on it, but -inf - -inf would be NaN
    return torch.stack(result).nan_to_num_(neginf=0.0)


def select_top(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Positions of the k best of each row, in ascending position; of equal scores the first positions win.

    Args:
        scores: float32 [U, C], -inf = not a candidate.

    Returns:
        int64 [U, min(k, C)] positions, and their float32 scores, -inf where a row has too few candidates.
    """
    users, width = scores.shape
    if k == 0:
        return torch.empty((users, 0), dtype=torch.int64, device=scores.device), scores[:, :0]
    if width <= k:
        place = torch.arange(width, device=scores.device).expand(users, -1)
        return place, scores
    threshold = torch.topk(scores, k, dim=1).values[:, -1:]
    above = scores > threshold
    equal = (scores == threshold) & (threshold > -torch.inf)
    keep = above | (equal & (equal.cumsum(1) <= k - above.sum(1, keepdim=True)))
    target = torch.where(keep, keep.cumsum(1) - 1, k)
    place = torch.zeros((users, k + 1), dtype=torch.int64, device=scores.device)
    place.scatter_(1, target, torch.arange(width, device=scores.device).expand(users, -1))
    found = torch.arange(k, device=scores.device) < keep.sum(1, keepdim=True)
    place = place[:, :k]
    return place, scores.gather(1, place).masked_fill_(~found, -torch.inf)


def live_candidates(
    candidates: Candidates, level: TrieLevel, dead_inner: Tensor, dead_leaves: Tensor
) -> tuple[Tensor, Tensor]:
    """Which candidates may go on, and which complete an allowed SID: (open, leaf), bool [U, C].

    Args:
        dead_inner: int32 [U, M], those of the children's depth (see :class:`Exclusions`).
        dead_leaves: int32 [U, M'].
    """
    nothing = torch.zeros_like(candidates.exists)
    open_, leaf = nothing, nothing
    if level.inner is not None:
        open_ = candidates.exists & ~contains(dead_inner, candidates.child)
        if not level.all_inner:
            open_ &= level.inner[candidates.child]
    if level.leaf is not None:
        number = level.leaf[candidates.child].long()
        leaf = candidates.exists & ~contains(dead_leaves, number)
        if not level.all_leaves:
            leaf &= number >= 0
    return open_, leaf


def next_beams(
    candidates: Candidates, scores: Tensor, open_: Tensor, beams: Beams, level: TrieLevel, width: int
) -> Beams:
    """The best ``min(width, open nodes of the level)`` open candidates as rows of the next level."""
    place, score = select_top(scores.masked_fill(~open_, -torch.inf), min(width, level.inner_count))
    child = candidates.child.gather(1, place)
    return Beams(
        node=child,
        score=score,
        column=level.column[child].long(),
        ancestors=_gather_rows(beams.ancestors, candidates.parent.gather(1, place)),
    )


def finish(
    pool: Finished,
    candidates: Candidates,
    scores: Tensor,
    leaf: Tensor,
    beams: Beams,
    level: TrieLevel,
    depth: int,
    width: int,
) -> Finished:
    """The pool with this level's complete SIDs (of ``depth`` codes) added, cut to the ``width`` best."""
    assert level.leaf is not None
    place, score = select_top(scores.masked_fill(~leaf, -torch.inf), width)
    child = candidates.child.gather(1, place)
    new = Finished(
        leaf=level.leaf[child].long(),
        score=score,
        column=level.column[child].long(),
        depth=torch.full_like(child, depth),
        ancestors=_gather_rows(beams.ancestors, candidates.parent.gather(1, place)),
    )
    return new if pool.leaf.shape[1] == 0 else merge_finished(pool, new, width)


def merge_finished(old: Finished, new: Finished, width: int) -> Finished:
    """The ``width`` best of two pools. SIDs of ``new`` are longer, so they have at least as many ancestors."""
    missing = new.ancestors.shape[2] - old.ancestors.shape[2]
    padded = torch.nn.functional.pad(old.ancestors, (0, missing), value=-1)
    leaf = torch.cat([old.leaf, new.leaf], 1)
    # back to leaf order, so that ties settle by SID; where empty places end up does not matter
    order = leaf.argsort(dim=1, stable=True)
    place, score = select_top(torch.cat([old.score, new.score], 1).gather(1, order), width)
    chosen = order.gather(1, place)
    return Finished(
        leaf=leaf.gather(1, chosen),
        score=score,
        column=torch.cat([old.column, new.column], 1).gather(1, chosen),
        depth=torch.cat([old.depth, new.depth], 1).gather(1, chosen),
        ancestors=_gather_rows(torch.cat([padded, new.ancestors], 1), chosen),
    )


def _gather_rows(table: Tensor, row: Tensor) -> Tensor:
    """table [U, R, A], row [U, N] -> [U, N, A]."""
    return table.gather(1, row[:, :, None].expand(-1, -1, table.shape[2]))
