"""The whole algorithm: prompts -> semantic IDs -> items. Prefill once a user, then level by level down the trie."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xgr_engine.catalog.trie import ItemTrie
from xgr_engine.errors import XgrError
from xgr_engine.models.decoder_only import DecoderOnly, Rows
from xgr_engine.models.head import Head
from xgr_engine.options import SearchOptions
from xgr_engine.tokens.table import SidTokenTable
from xgr_engine.xattention.cache import KVCache
from xgr_engine.xbeam.exclusions import Exclusions, find_dead_nodes
from xgr_engine.xbeam.ranking import BatchResult, rank_items
from xgr_engine.xbeam.reference import (
    ScoredRows,
    finish,
    list_candidates,
    live_candidates,
    next_beams,
    score_candidates,
)
from xgr_engine.xbeam.state import Beams, Finished, TrieLevel, upload_trie

# Rows a user expands on a CPU before the search looks whether the rest can still matter: docs/performance.md, "Rows
# that cannot win".
ROWS_AT_ONCE = 48


@dataclass
class SearchCounters:
    """What the search did, summed over batches.

    ``rows_live`` beam rows were alive when a level began, ``rows_expanded`` of them went through the model; the others
    scored below the k-th best candidate already found and could not matter.
    """

    rows_live: int = 0
    rows_expanded: int = 0
    candidates: int = 0


@dataclass
class _Search:
    """One batch under way."""

    cache: KVCache
    hidden: Tensor
    exclusions: Exclusions
    dead_inner: list[Tensor]
    dead_leaves: Tensor
    pool: Finished
    finite: Tensor
    free_slot: int = 0


class Recommender:
    """Trie beam search over one model and one catalog.

    Args:
        model: a decoder; head_weight: its output projection [V, H].
        trie: the catalog; table: the model's SID tokens. A code without a token is an error.
        score_suffix: token ids that belong to every answer's score but to no SID (the model's score contract).
        options: beam width and the rest.
        rows_at_once: expand that many rows, best first, before looking whether the others can still win; 0: all at
            once. None decides by device (on a CPU it saves time, on a GPU the host would wait for the device).
    """

    def __init__(
        self,
        model: DecoderOnly,
        head_weight: Tensor,
        trie: ItemTrie,
        table: SidTokenTable,
        options: SearchOptions,
        *,
        score_suffix: tuple[int, ...] = (),
        rows_at_once: int | None = None,
    ) -> None:
        self.model = model
        self.trie = trie
        self.options = options
        self.score_suffix = score_suffix
        by_device = ROWS_AT_ONCE if model.device.type == "cpu" else 0
        self.rows_at_once = by_device if rows_at_once is None else rows_at_once
        self.levels = upload_trie(trie, table.bind(trie), model.device)
        tokens = [torch.from_numpy(ids.astype(np.int64)).to(model.device) for ids in table.token_ids[: trie.levels]]
        self.head = Head(head_weight, tokens)
        self.counters = SearchCounters()

    @property
    def implementation(self) -> str:
        """Which kernels run, for the manifest."""
        return self.model.ops.name

    @property
    def slots(self) -> int:
        """Generated tokens the KV cache must hold a user: the rows of every level but the last, and the suffix's."""
        rows = sum(min(self.options.beam, level.inner_count) for level in self.levels[:-1])
        return rows + self.options.beam * len(self.score_suffix)

    @torch.inference_mode()
    def run(self, prompts: list[NDArray[np.int32]], excluded: list[NDArray[np.int32]]) -> BatchResult:
        """Recommend for a batch.

        Args:
            prompts: per user the prompt's token ids, at least one.
            excluded: per user the rows of ``items.parquet`` that must not be returned.

        Returns:
            Per user exactly ``min(K, reachable)`` items, best first.

        Raises:
            XgrError: the model produced a score that is no number.
        """
        exclusions = find_dead_nodes(self.trie, excluded)
        search = self._start(prompts, exclusions)
        beams = Beams.root(len(prompts), self.model.device)
        for depth, level in enumerate(self.levels):
            beams = self._advance(search, beams, level, depth)
            if beams.node.shape[1] == 0:
                break
        scores = self._score_suffix(search) if self.score_suffix else search.pool.score
        if not search.finite:
            raise XgrError(
                "the model produced a hidden state that is not a number",
                why="a weight or an activation is NaN or overflowed",
                hint="convert with --dtype float32 or bfloat16, and check the checkpoint with `xgr inspect`",
            )
        return rank_items(self.trie, exclusions, search.pool.leaf.cpu().numpy(), scores.cpu().numpy(), self.options)

    def _start(self, prompts: list[NDArray[np.int32]], exclusions: Exclusions) -> _Search:
        device = self.model.device
        hidden, cache = self.model.prefill(prompts, self.slots)
        return _Search(
            cache=cache,
            hidden=hidden,
            exclusions=exclusions,
            dead_inner=[torch.from_numpy(table).to(device) for table in exclusions.inner],
            dead_leaves=torch.from_numpy(exclusions.leaves).to(device),
            pool=Finished.empty(len(prompts), device),
            finite=hidden.isfinite().all(),
        )

    def _advance(self, search: _Search, beams: Beams, level: TrieLevel, depth: int) -> Beams:
        """One level: run the rows that can matter through the model, keep the best open prefixes and finished SIDs.

        A child never scores above its parent. So once k candidates are known, a row below the k-th best is left out:
        the result is the same as that of expanding every row (k is W, or K where only finished SIDs remain).
        """
        beams = self._with_slots(search, beams, depth)
        scored = ScoredRows(beams)
        waiting, at_once = beams.alive, self.rows_at_once
        self.counters.rows_live += int(waiting.sum()) if self.rows_at_once else 0
        enough = self._enough(level)
        while True:
            chosen = waiting if enough is None else _best_rows(beams, waiting, at_once)
            waiting, at_once = waiting & ~chosen, 2 * at_once
            scored.add(chosen, *self._forward(search, beams, chosen, depth))
            seen = replace(beams, score=beams.score.masked_fill(~scored.done, -torch.inf))
            candidates = list_candidates(seen, level)
            open_, leaf = live_candidates(candidates, level, search.dead_inner[depth], search.dead_leaves)
            scores = score_candidates(candidates, seen, level, scored, open_ | leaf)
            if enough is None or not waiting.any():
                break
            waiting &= beams.score >= _kth_best(scores, enough)
            if not waiting.any():
                break
        self.counters.rows_expanded += scored.rows
        self.counters.candidates += scores.numel()
        width = self.options.beam
        if level.leaf is not None:
            search.pool = finish(search.pool, candidates, scores, leaf, beams, level, depth + 1, width)
        return next_beams(candidates, scores, open_, beams, level, width)

    def _enough(self, level: TrieLevel) -> int | None:
        """How many candidates make a row that scores below them all pointless; None to expand every row."""
        if not self.rows_at_once:
            return None
        if level.leaf is None:
            return self.options.beam
        last = level.inner is None and level.all_leaves and not self.score_suffix
        return self.options.top_k if last else None

    def _with_slots(self, search: _Search, beams: Beams, depth: int) -> Beams:
        """Give each row the slot that its own last code will occupy. The root has none: its token is the prompt's."""
        if depth == 0:
            return beams
        users, rows = beams.score.shape
        own = search.free_slot + torch.arange(rows, dtype=torch.int32, device=beams.score.device)
        search.free_slot += rows
        return replace(beams, ancestors=torch.cat([beams.ancestors, own.expand(users, -1)[:, :, None]], dim=2))

    def _forward(self, search: _Search, beams: Beams, chosen: Tensor, depth: int) -> tuple[Tensor, Tensor | None]:
        """Logits [N, C_level] and normaliser [N] of the chosen rows, in row-major order."""
        if depth == 0:
            return self.head.level_scores(search.hidden, depth, self.options.score_over)
        user, row = chosen.nonzero(as_tuple=True)
        grid_row, ancestors = row, beams.ancestors
        if self.rows_at_once:  # a narrower grid: attention must not pay for rows that are not computed
            grid_row = (chosen.cumsum(1) - 1)[user, row]
            ancestors = ancestors.new_full((len(chosen), int(chosen.sum(1).max()), ancestors.shape[2]), -1)
            ancestors[user, grid_row] = beams.ancestors[user, row]
        rows = Rows(
            tokens=self.head.level_tokens[depth - 1][beams.column[user, row]],
            position=search.cache.lengths[user] + depth - 1,
            slots=user * self.slots + beams.ancestors[user, row, -1],
            ancestors=ancestors,
            cells=user * ancestors.shape[1] + grid_row,
        )
        hidden = self.model.decode(rows, search.cache)
        search.finite = (
            search.finite & hidden.isfinite().all()
        )  # looked at once, at the end: no wait for the device here
        return self.head.level_scores(hidden, depth, self.options.score_over)

    def _score_suffix(self, search: _Search) -> Tensor:
        """Scores of the finished SIDs with the contract's tokens after them: float32 [U, P].

        These tokens are no codes, so they are measured over the whole vocabulary in every mode.
        """
        pool, score = search.pool, search.pool.score.clone()
        user, row = (score > -torch.inf).nonzero(as_tuple=True)
        depth = pool.depth[user, row]
        tokens = self._last_tokens(pool, user, row)
        ancestors = pool.ancestors
        for offset, token in enumerate(self.score_suffix):
            own = search.free_slot + torch.arange(score.shape[1], dtype=torch.int32, device=score.device)
            search.free_slot += score.shape[1]
            ancestors = torch.cat([ancestors, own.expand(len(score), -1)[:, :, None]], dim=2)
            position = search.cache.lengths[user] + depth - 1 + offset
            rows = Rows(tokens, position, user * self.slots + own[row], ancestors, user * ancestors.shape[1] + row)
            hidden = self.model.decode(rows, search.cache)
            score[user, row] += self.head.token_log_probs(hidden, token)
            tokens = torch.full_like(tokens, token)
        return score

    def _last_tokens(self, pool: Finished, user: Tensor, row: Tensor) -> Tensor:
        """The model token of each finished SID's last code, int64 [N]."""
        column, depth = pool.column[user, row], pool.depth[user, row]
        tokens = torch.empty_like(column)
        for level, ids in enumerate(self.head.level_tokens):
            here = depth == level + 1
            tokens[here] = ids[column[here]]
        return tokens


def _best_rows(beams: Beams, waiting: Tensor, count: int) -> Tensor:
    """bool [U, R]: the ``count`` best of the waiting rows of each user (more where scores tie)."""
    score = beams.score.masked_fill(~waiting, -torch.inf)
    return waiting & (score >= _kth_best(score, count))


def _kth_best(scores: Tensor, k: int) -> Tensor:
    """[U, 1] the k-th best candidate of each user, -inf where there are fewer."""
    if scores.shape[1] < k:
        return scores.new_full((len(scores), 1), -torch.inf)
    return torch.topk(scores, k, dim=1).values[:, -1:]
