"""The search with shapes that follow the data, in plain torch: the definition, and the fastest way on a CPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from xgr_engine.models.rows import Rows
from xgr_engine.search.setup import DeadNodes, Outcome, SearchSetup, score_suffix
from xgr_engine.xattention.cache import KVCache
from xgr_engine.xbeam.reference import (
    ScoredRows,
    finish,
    list_candidates,
    live_candidates,
    next_beams,
    score_candidates,
)
from xgr_engine.xbeam.state import Beams, Finished, TrieLevel


@dataclass
class SearchCounters:
    """What the search did, summed over batches.

    Attributes:
        rows_live: beam rows that were alive when a level began.
        rows_expanded: those of them that went through the model. The others scored below the k-th best candidate
            already found and could not matter.
        candidates: children of the expanded rows, the padding of the shorter lists included.
    """

    rows_live: int = 0
    rows_expanded: int = 0
    candidates: int = 0


class HostSearch:
    """Searches batch after batch.

    Args:
        rows_at_once: rows of a user to expand, best first, before checking whether the others can still win; 0: all.
        rows_per_pass: raises ``rows_at_once`` so that the users of a batch expand at least this many together: a pass
            of a small model over fewer is mostly overhead.
    """

    def __init__(self, setup: SearchSetup, rows_at_once: int, rows_per_pass: int = 0) -> None:
        self.setup = setup
        self.rows_at_once = rows_at_once
        self.rows_per_pass = rows_per_pass
        self.counters = SearchCounters()

    def run(self, hidden: Tensor, cache: KVCache, dead: DeadNodes) -> Outcome:
        """From the prompts' last hidden states [U, H] to the best complete SIDs of each user."""
        batch = _Batch(self, hidden, cache, dead)
        beams = Beams.root(len(hidden), hidden.device, dead.root)
        for depth, level in enumerate(self.setup.levels):
            beams = batch.advance(beams, level, depth)
            if beams.node.shape[1] == 0:
                break
        score = batch.pool.score
        if self.setup.score_suffix:
            score = score_suffix(self.setup, batch.pool, cache, batch.free_slot)
        return Outcome(batch.pool.leaf, score, batch.finite & ~score.isnan().any())


class _Batch:
    """The state of one batch on its way down the trie."""

    def __init__(self, search: HostSearch, hidden: Tensor, cache: KVCache, dead: DeadNodes) -> None:
        self.setup = search.setup
        users = max(1, len(hidden))
        self.rows_at_once = search.rows_at_once and max(search.rows_at_once, search.rows_per_pass // users)
        self.counters = search.counters
        self.hidden = hidden
        self.cache = cache
        self.dead = dead
        self.pool = Finished.empty(len(hidden), hidden.device)
        self.finite = hidden.isfinite().all()
        self.free_slot = 0

    def advance(self, beams: Beams, level: TrieLevel, depth: int) -> Beams:
        """One level: run the rows that can matter through the model, keep the best open prefixes and finished SIDs.

        A child never scores above its parent. So once k candidates are known, a row below the k-th best is left out:
        the result is the same as that of expanding every row (k is W, or K where only finished SIDs remain).
        """
        beams = self._with_slots(beams, depth)
        scored = ScoredRows(beams)
        waiting, at_once = beams.alive, self.rows_at_once
        self.counters.rows_live += int(waiting.sum())
        enough = self._enough(level, beams.node.shape[1])
        while True:
            chosen = waiting if enough is None else _best_rows(beams, waiting, at_once)
            waiting, at_once = waiting & ~chosen, 2 * at_once
            scored.add(chosen, *self._forward(beams, chosen, depth))
            seen = replace(beams, score=beams.score.masked_fill(~scored.done, -torch.inf))
            candidates = list_candidates(seen, level)
            open_, leaf = live_candidates(candidates, level, self.dead.inner[depth], self.dead.leaves)
            scores = score_candidates(candidates, seen, level, scored, open_ | leaf)
            if enough is None or not waiting.any():
                break
            waiting &= beams.score >= _kth_best(scores, enough)
            if not waiting.any():
                break
        self.counters.rows_expanded += scored.rows
        self.counters.candidates += scores.numel()
        if level.leaf is not None:
            self.pool = finish(self.pool, candidates, scores, leaf, beams, level, depth + 1, self.setup.answers)
        return next_beams(candidates, scores, open_, beams, level, self.setup.options.beam)

    def _enough(self, level: TrieLevel, rows: int) -> int | None:
        """How many candidates must be known before a row that scores below them all is pointless; None: expand all."""
        # a second pass for the few rows that the first one left out would cost more than it could save
        if not self.rows_at_once or rows <= self.rows_at_once + self.rows_at_once // 2:
            return None
        if level.leaf is None:
            return self.setup.options.beam
        last = level.inner is None and level.all_leaves and not self.setup.score_suffix
        return self.setup.options.top_k if last else None

    def _with_slots(self, beams: Beams, depth: int) -> Beams:
        """Give each row the slot for its own last code. The root needs none: its last token belongs to the prompt."""
        if depth == 0:
            return beams
        users, rows = beams.score.shape
        own = self.free_slot + torch.arange(rows, dtype=torch.int32, device=beams.score.device)
        self.free_slot += rows
        return replace(beams, ancestors=torch.cat([beams.ancestors, own.expand(users, -1)[:, :, None]], dim=2))

    def _forward(self, beams: Beams, chosen: Tensor, depth: int) -> tuple[Tensor, Tensor | None]:
        """Logits [N, C_level] and normaliser [N] of the chosen rows, in row-major order."""
        head, over = self.setup.head, self.setup.options.score_over
        if depth == 0:
            return self._checked(*head.level_scores(self.hidden, depth, over))
        user, row = chosen.nonzero(as_tuple=True)
        grid_row, ancestors = row, beams.ancestors
        if self.rows_at_once:  # a narrower grid: attention must not pay for rows that are not computed
            grid_row = (chosen.cumsum(1) - 1)[user, row]
            ancestors = ancestors.new_full((len(chosen), int(chosen.sum(1).max()), ancestors.shape[2]), -1)
            ancestors[user, grid_row] = beams.ancestors[user, row]
        rows = Rows(
            tokens=head.level_tokens[depth - 1][beams.column[user, row]],
            position=self.cache.lengths[user] + depth - 1,
            slots=user * self.cache.slots + beams.ancestors[user, row, -1],
            ancestors=ancestors,
            cells=None if len(user) == ancestors.shape[:2].numel() else user * ancestors.shape[1] + grid_row,
        )
        hidden = self.setup.model.decode(rows, self.cache)
        self.finite = self.finite & hidden.isfinite().all()
        return self._checked(*head.level_scores(hidden, depth, over))

    def _checked(self, logits: Tensor, normaliser: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Its arguments, once it is noted whether they are finite. A broken row of the head shows in the normaliser,
        or, where scores are normalised over the candidates, in the logits."""
        self.finite = self.finite & (logits if normaliser is None else normaliser).isfinite().all()
        return logits, normaliser


def _best_rows(beams: Beams, waiting: Tensor, count: int) -> Tensor:
    """bool [U, R]: the ``count`` best of the waiting rows of each user (more where scores tie)."""
    score = beams.score.masked_fill(~waiting, -torch.inf)
    return waiting & (score >= _kth_best(score, count))


def _kth_best(scores: Tensor, k: int) -> Tensor:
    """[U, 1] the k-th best candidate of each user, -inf where there are fewer."""
    if scores.shape[1] < k:
        return scores.new_full((len(scores), 1), -torch.inf)
    return torch.topk(scores, k, dim=1).values[:, -1:]
