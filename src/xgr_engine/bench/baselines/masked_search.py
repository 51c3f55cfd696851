"""xBeam as the paper has it: masks over the vocabulary, sorted lists a beam, and a selection that stops early.

At each level every row's logits over the whole vocabulary are masked (the first level with one dense mask made once,
the later ones with a mask whose tensor stays and whose entries are set, and undone, in place), its best children are
sorted out by a top-k over the vocabulary, and the best W of all lists are chosen. Rows are W at every level.

Shapes are fixed and nothing waits for the host, so it is captured in a CUDA graph like the engine's own search.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from xgr_engine.bench.kernels import masks_reference
from xgr_engine.catalog.trie import ItemTrie
from xgr_engine.errors import UsageError
from xgr_engine.kernels.linear import float32_product
from xgr_engine.models.model import Model
from xgr_engine.options import SearchOptions
from xgr_engine.recommender import Recommender
from xgr_engine.search.device import DeviceSearch
from xgr_engine.search.host import SearchCounters
from xgr_engine.search.lanes import Lane
from xgr_engine.search.setup import DeadNodes, Outcome, SearchSetup, score_suffix
from xgr_engine.tokens.table import SidTokenTable
from xgr_engine.xattention.cache import KVCache
from xgr_engine.xbeam.state import Beams, Finished, TrieLevel

_CHUNK_BYTES = 256 << 20  # of logits alive at once; larger chunks gained nothing on an H200


@dataclass(frozen=True)
class MaskLevel:
    """What a level's step needs beside the trie.

    Attributes:
        token: int32 [n_{d+1}] vocabulary token of each child.
        pair: int64 [n_{d+1}], ascending: parent node * C + column of each child; a chosen token finds its node by it.
        column_of: int64 [V] column of each token in the level's codes, 0 for those that are none.
        codes: C; widest: the most children that a node has.
    """

    token: Tensor
    pair: Tensor
    column_of: Tensor
    codes: int
    widest: int

    @classmethod
    def of(cls, level: TrieLevel, tokens: Tensor, vocabulary: int) -> MaskLevel:
        """For a level whose codes have ``tokens`` int64 [C]."""
        count = (level.child_start[1:] - level.child_start[:-1]).long()
        parent = torch.repeat_interleave(torch.arange(len(count), device=count.device), count)
        column_of = torch.zeros(vocabulary, dtype=torch.int64, device=count.device)
        column_of[tokens] = torch.arange(len(tokens), device=count.device)
        return cls(
            token=tokens[level.column.long()].to(torch.int32),
            pair=parent * len(tokens) + level.column,
            column_of=column_of,
            codes=len(tokens),
            widest=int(count.max()),
        )


class MaskedSearch(DeviceSearch):
    """Searches batches of ``users`` places.

    Args:
        setup: as for the engine's search; its levels say how many rows there are.
        masks: a :class:`MaskLevel` for each level.
        early_termination: stop reading the sorted lists at the heap's minimum; else sort all their entries.
    """

    def __init__(
        self, setup: SearchSetup, users: int, *, masks: tuple[MaskLevel, ...], early_termination: bool
    ) -> None:
        self.setup = setup
        self._masks = masks
        self._early = early_termination
        self._kernels = _kernels(setup.model)
        device, vocabulary = setup.model.device, len(setup.head.weight)
        rows = max([1, *(min(setup.options.beam, level.inner_count) for level in setup.levels)])
        # allocated once; between batches everything is forbidden
        self._forbidden = torch.ones((users * rows, vocabulary), dtype=torch.bool, device=device)
        self._first = torch.ones((1, vocabulary), dtype=torch.bool, device=device)
        self._first[0, masks[0].token.long()] = False
        self._read = torch.zeros((users, 2), dtype=torch.int64, device=device)

    def candidates_read(self) -> tuple[int, int]:
        """Candidates that were allowed so far, and entries of the sorted lists that the selection read."""
        allowed, read = self._read.sum(0).tolist()
        return allowed, read

    def run(self, hidden: Tensor, cache: KVCache, dead: DeadNodes, present: Tensor) -> Outcome:
        """As :meth:`DeviceSearch.run`. Nobody may have anything excluded: the masks are the catalog's."""
        if any(table.shape[1] for table in (*dead.inner, dead.leaves)):
            raise UsageError("the masked search does not support exclusions", hint="benchmark without them")
        setup, users = self.setup, len(hidden)
        beams = Beams.root(users, hidden.device)
        beams.score.masked_fill_(~present[:, None], -torch.inf)
        finite = hidden.isfinite().all()
        free_slot = 0
        for depth, level in enumerate(setup.levels):
            forbidden = self._first
            if depth:
                hidden = setup.model.decode(self._rows(beams, cache, depth), cache)
                finite = finite & hidden.isfinite().all()
                self._set_children(beams, depth, False)
                forbidden = self._forbidden
            scores, tokens = self._best_children(hidden, depth, forbidden)
            if depth:
                self._set_children(beams, depth, True)  # undo this step's entries, and only them
            rows = setup.options.beam if level.inner is None else min(setup.options.beam, level.inner_count)
            beams = self._select(beams, scores, tokens, depth, rows, free_slot)
            free_slot += rows
        leaf = setup.levels[-1].leaf
        assert leaf is not None
        pool = Finished(
            leaf=leaf[beams.node].long(),
            score=beams.score,
            column=beams.column,
            depth=torch.full_like(beams.node, len(setup.levels)),
            ancestors=beams.ancestors[:, :, :-1],
        )
        first_suffix = free_slot - beams.node.shape[1]
        score = score_suffix(setup, pool, cache, first_suffix) if setup.score_suffix else pool.score
        return Outcome(pool.leaf, score, finite)

    def _set_children(self, beams: Beams, depth: int, value: bool) -> None:
        alive, node = beams.alive.flatten(), beams.node.flatten()
        level = self.setup.levels[depth]
        self._kernels.set_children(self._forbidden, node, alive, level.child_start, self._masks[depth].token, value)

    def _best_children(self, hidden: Tensor, depth: int, forbidden: Tensor) -> tuple[Tensor, Tensor]:
        """Each row's best allowed tokens, sorted: log p float32 [N, k], -inf where there are fewer, and int64 [N, k].

        No more than W of a row can be chosen, and no row has more children than the widest.
        """
        head, over = self.setup.head, self.setup.options.score_over
        most = min(self.setup.options.beam, self._masks[depth].widest)
        at_once = max(1, _CHUNK_BYTES // (4 * len(head.weight)))
        values, tokens = [], []
        for low in range(0, len(hidden), at_once):
            logits = float32_product(hidden[low : low + at_once], head.weight)
            mask = forbidden if len(forbidden) == 1 else forbidden[low : low + len(logits)]
            if over == "vocab":
                norm = torch.logsumexp(logits, 1, keepdim=True)
            elif over == "level":
                norm = torch.logsumexp(logits.index_select(1, head.level_tokens[depth]), 1, keepdim=True)
            logits.masked_fill_(mask, -torch.inf)
            if over == "allowed":
                norm = torch.logsumexp(logits, 1, keepdim=True).nan_to_num_(neginf=0.0)
            value, token = logits.topk(most, dim=1, sorted=True)
            values.append((value - norm).clamp_max_(0.0))
            tokens.append(token)
        return torch.cat(values), torch.cat(tokens)

    def _select(self, beams: Beams, log_p: Tensor, tokens: Tensor, depth: int, width: int, free_slot: int) -> Beams:
        """The best ``width`` of all rows' lists, in node order; places that stay empty come last, with node 0."""
        users, rows = beams.node.shape
        mask = self._masks[depth]
        total = beams.score[:, :, None] + log_p.view(users, rows, -1)
        lists = (total + 0.0).transpose(1, 2).contiguous()  # side by side: [U, K, R]; + 0.0 makes one zero of two
        if self._early:
            place, score = self._kernels.select_until_heap_minimum(lists, width, self._read)
        else:
            place, score = _full_sort(lists, width)
            self._read += lists[0].numel()
        alive = score > -torch.inf
        row, rank = place % rows, place // rows
        column = mask.column_of[tokens.view(users, -1).gather(1, row * log_p.shape[1] + rank)]
        pair = beams.node.gather(1, row) * mask.codes + column
        child = torch.where(alive, torch.searchsorted(mask.pair, pair), len(mask.pair))
        child, order = child.sort(dim=1, stable=True)
        alive, score = alive.gather(1, order), score.gather(1, order)
        row = torch.where(alive, row.gather(1, order), rows - 1)  # parents never descend
        own = free_slot + torch.arange(width, dtype=torch.int32, device=row.device)
        older = beams.ancestors.gather(1, row[:, :, None].expand(-1, -1, beams.ancestors.shape[2]))
        return Beams(
            node=torch.where(alive, child, 0),
            score=score,
            column=torch.where(alive, column.gather(1, order), 0),
            ancestors=torch.cat([older, own.expand(users, -1)[:, :, None]], 2),
        )


def with_full_rows(setup: SearchSetup) -> SearchSetup:
    """A setup whose levels claim W inner nodes: rows that the trie cannot fill are dead, but computed all the same."""
    levels = tuple(
        replace(level, inner_count=max(level.inner_count, setup.options.beam)) if level.inner is not None else level
        for level in setup.levels
    )
    return replace(setup, levels=levels)


def _full_sort(lists: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Places and scores of the k best of [U, K, R], from a sort of everything."""
    score, place = lists.flatten(1).sort(dim=1, descending=True, stable=True)
    missing = max(0, k - score.shape[1])
    score = torch.nn.functional.pad(score[:, :k], (0, missing), value=-torch.inf)
    return torch.nn.functional.pad(place[:, :k], (0, missing)), score


def _kernels(model: Model) -> ModuleType:
    if model.ops.name != "triton":
        return masks_reference
    from xgr_engine.bench.kernels import masks_triton

    return masks_triton


class _HostMaskedSearch:
    """A masked search in the place of the engine's search on a CPU."""

    def __init__(self, setup: SearchSetup, options: dict[str, Any]) -> None:
        self.setup = setup
        self.options = options
        self.counters = SearchCounters()

    def run(self, hidden: Tensor, cache: KVCache, dead: DeadNodes) -> Outcome:
        """One batch, with masks of its size."""
        search = MaskedSearch(self.setup, len(hidden), **self.options)
        present = torch.ones(len(hidden), dtype=torch.bool, device=hidden.device)
        outcome = search.run(hidden, cache, dead, present)
        self.counters.candidates += search.candidates_read()[1]
        return outcome


class MaskedRecommender(Recommender):
    """The engine with its search replaced.

    Args:
        full_rows: W rows at every level but the root, whether or not the trie has that many prefixes.
        early_termination: see :class:`MaskedSearch`.
    """

    def __init__(
        self,
        model: Model,
        head_weight: Tensor,
        trie: ItemTrie,
        table: SidTokenTable,
        options: SearchOptions,
        *,
        score_suffix: tuple[int, ...] = (),
        graphs: bool = True,
        full_rows: bool = True,
        early_termination: bool = True,
    ) -> None:
        if reason := self.covers(trie):
            raise UsageError(reason)
        super().__init__(model, head_weight, trie, table, options, score_suffix=score_suffix, graphs=graphs)
        if full_rows:
            self.setup = with_full_rows(self.setup)
        head = self.setup.head
        masks = tuple(
            MaskLevel.of(level, tokens, len(head.weight))
            for level, tokens in zip(self.setup.levels, head.level_tokens, strict=True)
        )
        self._search: dict[str, Any] = {"masks": masks, "early_termination": early_termination}
        self._host = _HostMaskedSearch(self.setup, self._search)  # type: ignore[assignment]

    @staticmethod
    def covers(trie: ItemTrie) -> str | None:
        """None, or why the masks cannot hold this catalog."""
        if trie.num_leaves and bool((trie.leaf_depth == trie.levels).all()):
            return None
        return "not available: the paper's masks work for SIDs of one length only"

    def _new_lane(self, tokens: int, users: int, number: int) -> Lane:
        make_search: Any = partial(MaskedSearch, **self._search)
        return Lane(self.setup, tokens, users, graphs=self._graphs, number=number, make_search=make_search)
