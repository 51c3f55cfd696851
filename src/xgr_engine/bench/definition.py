"""The search by its definition, and what its list leaves open to a contender whose scores are slightly blurred.

Plain torch, one user at a time, float32, every row expanded. Rounding moves scores, and a score that moves can lose an
item although its own score is well above the last of the list: one of its *prefixes* lay near the cut of its level. A
prefix kept instead brings children of its own, which move the cuts below. So rows that may have survived are expanded
beside those that did, and each cut is judged twice:

* a prefix is *safe* where fewer than W others that may be there can have scored above it;
* a prefix is *possible* unless W others that are certainly there must have scored above it.

Every safe SID has to be in a contender's list, and nothing that is not possible may be.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xgr_engine.bench.plain import float32_model, same_dtype_model
from xgr_engine.bench.workloads import Prompt, Workload
from xgr_engine.models.head import Head
from xgr_engine.models.model import Model
from xgr_engine.models.packing import PackedPrompts
from xgr_engine.models.rows import Rows
from xgr_engine.options import ScoreOver
from xgr_engine.search.setup import DeadNodes, SearchSetup, score_suffix
from xgr_engine.xattention.cache import KVCache
from xgr_engine.xbeam.reference import ScoredRows, list_candidates, live_candidates, score_candidates, select_top
from xgr_engine.xbeam.state import Beams, Finished, TrieLevel, upload_trie

# How far a float32 contender's score may lie from the definition's: sums in another order.
_FLOAT32_SCORE = 5e-4
# Half precision: this many times what plain torch in that precision (logits rounded to it, as usual) deviates on the
# same SIDs, in this run, and at least the second number. Plain torch computes each step in float32 and rounds its
# result, where kernels round in between as well: on an H200 the engine deviated 1.55 times as much as plain torch
# (Qwen3-1.7B, 1000 tokens, W 256: 0.198 and 0.127). The rest is for what a sample of some hundred SIDs does not show.
_HALF_FACTOR, _HALF_LEAST = 2.5, 0.05
# Where scores are blurred that much few SIDs are certain. So a list must also have about as many of the definition's
# SIDs as that of plain torch: it may lack this many times what that lacks, and this share more.
_LOSS_FACTOR, _LOSS_MORE = 2.0, 0.1
# Rows a level that may be there, in widths, before the judgement is given up; rows through the model at once.
_MOST_WIDTHS, _ROWS_AT_ONCE = 4, 1024

Leaves = NDArray[np.int64]


@dataclass(frozen=True)
class Tolerance:
    """How far rounding may move scores, in nats.

    Attributes:
        score: of one SID or prefix, against the definition's.
        measured: what it comes from: the largest deviation of plain torch in the model's dtype. None in float32.
        overlap: share of the definition's SIDs that plain torch in that dtype finds. None in float32.
    """

    score: float
    measured: float | None = None
    overlap: float | None = None

    @property
    def difference(self) -> float:
        """Of the distance between two scores. Both are blurred, and in opposite directions at worst, so it takes twice
        the tolerance of one before their order is certain."""
        return 2 * self.score

    @property
    def least_overlap(self) -> float | None:
        """Share of the definition's SIDs that every list must have; None in float32, where they are certain."""
        return None if self.overlap is None else 1 - _LOSS_FACTOR * (1 - self.overlap) - _LOSS_MORE

    @classmethod
    def from_noise(cls, measured: float) -> Tolerance:
        """For half precision, from the deviation of plain torch."""
        return cls(max(_HALF_LEAST, _HALF_FACTOR * measured), measured)


FLOAT32 = Tolerance(_FLOAT32_SCORE)


@dataclass(frozen=True, eq=False)
class Truth:
    """What a list of one user may be.

    Attributes:
        leaves: [n] the definition's list, best first (ties by SID); scores: float32 [n].
        margins: float32 [n] the least distance of the SID, or of one of its prefixes, to what a cut left out and that
            might have been there. Above ``tolerance.difference`` the SID must be in every list.
        known: the definition's score of every SID that it has one for: its list's and those asked for.
        possible: ascending leaves that may be in a list; None where that is not known.
    """

    leaves: Leaves
    scores: NDArray[np.float32]
    margins: NDArray[np.float32]
    known: dict[int, float]
    possible: Leaves | None
    tolerance: Tolerance


class Definition:
    """The definition of a workload's search, for :meth:`judge`. It holds the embedding and the head in float32."""

    def __init__(self, workload: Workload) -> None:
        model = workload.model
        self.workload = workload
        self._levels = upload_trie(workload.catalog.trie, model.table.bind(workload.catalog.trie), model.device)
        exact = float32_model(model.decoder)
        self._exact = self._setup(exact, exact.embed if model.spec.tied else model.head.float(), Head)
        self._rounded: SearchSetup | None = None
        if model.dtype != "float32":
            self._rounded = self._setup(same_dtype_model(model.decoder), model.head, _RoundedHead)

    def _setup(self, decoder: Model, weight: Tensor, make_head: type[Head]) -> SearchSetup:
        model, levels = self.workload.model, self.workload.catalog.trie.levels
        tokens = [torch.from_numpy(ids.astype(np.int64)).to(model.device) for ids in model.table.token_ids[:levels]]
        head = make_head(weight, tokens, decoder.ops)
        return SearchSetup(decoder, head, self._levels, self.workload.search, model.score_suffix)

    def judge(self, prompts: list[Prompt], asked: list[Leaves]) -> list[Truth]:
        """What the lists of these prompts may be.

        Args:
            asked: per prompt leaves whose scores are wanted whether or not the search meets them.
        """
        if self._rounded is None:
            return [
                self._search(self._exact, prompt, leaves).run(FLOAT32)
                for prompt, leaves in zip(prompts, asked, strict=True)
            ]
        found, noise, same = [], 0.0, []
        for prompt, leaves in zip(prompts, asked, strict=True):
            search = self._search(self._exact, prompt, leaves)
            exact = search.run(Tolerance(0.0))
            wanted = np.union1d(exact.leaves, leaves)
            rounded = self._search(self._rounded, prompt, wanted).run(Tolerance(0.0))
            noise = max(noise, *(abs(rounded.known[leaf] - exact.known[leaf]) for leaf in wanted.tolist()))
            same.append(float(np.isin(exact.leaves, rounded.leaves).mean()))
            found.append(search)
        tolerance = replace(Tolerance.from_noise(noise), overlap=float(np.mean(same)))
        return [search.run(tolerance) for search in found]

    def _search(self, setup: SearchSetup, prompt: Prompt, asked: Leaves) -> _Search:
        return _Search(setup, self.workload, prompt, np.unique(asked))


class _RoundedHead(Head):
    """Logits rounded to the model's dtype, as the linear layer at the end of a model in that dtype returns them."""

    def level_scores(self, hidden: Tensor, level: int, over: ScoreOver) -> tuple[Tensor, Tensor | None]:
        """As :meth:`Head.level_scores`."""
        logits, normaliser = super().level_scores(hidden, level, over)
        return logits.to(self.weight.dtype).float(), normaliser


@dataclass(frozen=True)
class _Entries:
    """Prefixes of one depth, or complete SIDs, in SID order.

    Attributes:
        node: int64 [N] trie node, or leaf; score: float32 [N]; column: int64 [N] head-slice column of the last code.
        ancestors: int32 [N, A] slots of the codes whose keys are in the cache, -1 = none; depth: int64 [N] codes.
        member: bool [N] the definition keeps it; possible: bool [N] a blurred search may; margin: float32 [N].
    """

    node: Tensor
    score: Tensor
    column: Tensor
    ancestors: Tensor
    depth: Tensor
    member: Tensor
    possible: Tensor
    margin: Tensor

    def at(self, place: Tensor) -> _Entries:
        """Those at ``place`` (indices or bool)."""
        return _Entries(**{field.name: getattr(self, field.name)[place] for field in fields(self)})

    def joined(self, other: _Entries) -> _Entries:
        """Both, in node order; the shorter ancestor table is padded."""
        widest = max(self.ancestors.shape[1], other.ancestors.shape[1])
        padded = [
            replace(
                one, ancestors=torch.nn.functional.pad(one.ancestors, (0, widest - one.ancestors.shape[1]), value=-1)
            )
            for one in (self, other)
        ]
        both = _Entries(
            **{field.name: torch.cat([getattr(one, field.name) for one in padded]) for field in fields(self)}
        )
        return both.at(both.node.argsort(stable=True))


class _Search:
    """One user's prompt, computed once, and searches over it."""

    @torch.inference_mode()
    def __init__(self, setup: SearchSetup, workload: Workload, prompt: Prompt, asked: Leaves) -> None:
        self.setup = setup
        self.trie = workload.catalog.trie
        self.top_k = workload.top_k
        self.asked = asked
        self.device = workload.model.device
        self.most = _MOST_WIDTHS * setup.options.beam
        rows = [min(self.most + len(asked), level.inner_count) for level in setup.levels[:-1]]
        slots = sum(rows) + (self.most + len(asked)) * len(setup.score_suffix)
        pack = PackedPrompts.of([prompt], self.device)
        self.cache: KVCache = setup.model.new_cache(len(prompt), 1, slots)
        self.hidden = setup.model.prefill(pack, self.cache)

    @torch.inference_mode()
    def run(self, tolerance: Tolerance) -> Truth:
        """Down the trie once, with the rows that scores blurred by ``tolerance`` may keep."""
        self.tolerance = tolerance.difference
        self.overrun = False
        self.free_slot = 0
        width = self.setup.options.beam
        rows, finished = self._root(), None
        for depth, level in enumerate(self.setup.levels):
            open_, complete = self._children(rows, level, depth)
            if complete is not None:
                finished = complete if finished is None else finished.joined(complete)
            if not len(open_.node):
                break
            rows = self._kept(self._bounded(self._cut(open_, width)), self._asked_nodes(depth))
        assert finished is not None
        asked = torch.from_numpy(self.asked).to(self.device)
        if self.setup.score_suffix:
            finished = self._with_suffix(self._kept(self._bounded(self._cut(finished, width)), asked))
        return self._truth(self._cut(finished, self.top_k), tolerance)

    def _root(self) -> _Entries:
        def one(value: float, dtype: torch.dtype) -> Tensor:
            return torch.full((1,), value, dtype=dtype, device=self.device)

        return _Entries(
            node=one(0, torch.int64),
            score=one(0, torch.float32),
            column=one(0, torch.int64),
            ancestors=torch.empty((1, 0), dtype=torch.int32, device=self.device),
            depth=one(0, torch.int64),
            member=one(1, torch.bool),
            possible=one(1, torch.bool),
            margin=one(torch.inf, torch.float32),
        )

    def _children(self, rows: _Entries, level: TrieLevel, depth: int) -> tuple[_Entries, _Entries | None]:
        """All children of ``rows``: open prefixes, and complete SIDs (by leaf) where the level has any."""
        rows = self._with_slots(rows, depth)
        beams = Beams(rows.node[None], rows.score[None], rows.column[None], rows.ancestors[None])
        scored = ScoredRows(beams)
        scored.add(torch.ones_like(beams.alive), *self._forward(rows, depth))
        candidates = list_candidates(beams, level)
        nothing = DeadNodes.none(len(self.setup.levels), 1, self.device)
        open_, leaf = live_candidates(candidates, level, nothing.inner[depth], nothing.leaves)
        scores = score_candidates(candidates, beams, level, scored, open_ | leaf)[0]
        child, parent = candidates.child[0], candidates.parent[0]
        children = _Entries(
            node=child,
            score=scores,
            column=level.column[child].long(),
            ancestors=rows.ancestors[parent],
            depth=torch.full_like(child, depth + 1),
            member=rows.member[parent],
            possible=rows.possible[parent],
            margin=rows.margin[parent],
        )
        if level.leaf is None:
            return children.at(open_[0]), None
        complete = children.at(leaf[0])
        return children.at(open_[0]), replace(complete, node=level.leaf[complete.node].long())

    def _with_slots(self, rows: _Entries, depth: int) -> _Entries:
        """Each row gets the slot of its own last code; the root's token is the prompt's."""
        if depth == 0:
            return rows
        own = self.free_slot + torch.arange(len(rows.node), dtype=torch.int32, device=self.device)
        self.free_slot += len(own)
        return replace(rows, ancestors=torch.cat([rows.ancestors, own[:, None]], 1))

    def _forward(self, rows: _Entries, depth: int) -> tuple[Tensor, Tensor | None]:
        """Logits [N, C_level] and normaliser [N] of the rows."""
        head, over = self.setup.head, self.setup.options.score_over
        if depth == 0:
            return head.level_scores(self.hidden, 0, over)
        hidden = []
        for some in torch.split(torch.arange(len(rows.node), device=self.device), _ROWS_AT_ONCE):
            ancestors = rows.ancestors[some]
            batch = Rows(
                tokens=head.level_tokens[depth - 1][rows.column[some]],
                position=self.cache.lengths[:1].expand(len(some)) + depth - 1,
                slots=ancestors[:, -1].long(),
                ancestors=ancestors[None],
                cells=None,
            )
            hidden.append(self.setup.model.decode(batch, self.cache))
        return head.level_scores(torch.cat(hidden), depth, over)

    def _cut(self, entries: _Entries, width: int) -> _Entries:
        """What goes on where the best ``width`` do: the definition's own choice, and what another may have made."""
        place, score = select_top(entries.score.masked_fill(~entries.member, -torch.inf)[None], width)
        member = torch.zeros_like(entries.member)
        member[place[0][score[0] > -torch.inf]] = True
        # Safe ones are everywhere: whoever scores clearly below the width-th of them is nowhere.
        safe = entries.margin > self.tolerance
        certain = _kth_best(entries.score[safe], width)
        possible = entries.possible & (entries.score >= certain - self.tolerance)
        # Of the possible ones the best `width` may all be there: whoever is clearly above the next one is everywhere.
        left_out = _kth_best(entries.score[entries.possible], width + 1)
        margin = torch.minimum(entries.margin, entries.score - left_out)
        return replace(entries, member=member, possible=possible, margin=margin)

    def _bounded(self, entries: _Entries) -> _Entries:
        """Few enough possible rows to expand. With more nothing can be said of any list but the definition's own."""
        if int(entries.possible.sum()) <= self.most:
            return entries
        self.overrun = True
        return replace(entries, possible=entries.member)

    def _kept(self, entries: _Entries, asked: Tensor) -> _Entries:
        return entries.at(entries.possible | torch.isin(entries.node, asked))

    def _asked_nodes(self, depth: int) -> Tensor:
        """Nodes at ``depth + 1`` above the leaves asked for."""
        first, end = self.trie.leaf_start[depth], self.trie.leaf_end[depth]
        node = np.searchsorted(first, self.asked, side="right") - 1
        return torch.from_numpy(np.unique(node[(node >= 0) & (self.asked < end[node])])).to(self.device)

    def _with_suffix(self, finished: _Entries) -> _Entries:
        """The score contract's tokens after each SID."""
        pool = Finished(
            leaf=finished.node[None],
            score=finished.score[None],
            column=finished.column[None],
            depth=finished.depth[None],
            ancestors=finished.ancestors[None],
        )
        return replace(finished, score=score_suffix(self.setup, pool, self.cache, self.free_slot)[0])

    def _truth(self, finished: _Entries, tolerance: Tolerance) -> Truth:
        listed = finished.at(finished.member)
        listed = listed.at(listed.score.sort(descending=True, stable=True).indices)
        kept = self._kept(finished, torch.from_numpy(self.asked).to(self.device))
        kept = kept.at(kept.node.argsort())
        leaves = kept.node.cpu().numpy()
        margins = listed.margin.masked_fill(torch.tensor(self.overrun, device=self.device), -torch.inf)
        return Truth(
            leaves=listed.node.cpu().numpy(),
            scores=listed.score.cpu().numpy(),
            margins=margins.cpu().numpy(),
            known=dict(zip(leaves.tolist(), kept.score.tolist(), strict=True)),
            possible=None if self.overrun else leaves[kept.possible.cpu().numpy()],
            tolerance=tolerance,
        )


def _kth_best(scores: Tensor, k: int) -> Tensor:
    """Scalar: the k-th best, -inf where there are fewer."""
    if len(scores) < k:
        return scores.new_full((), -torch.inf)
    return torch.topk(scores, k).values[-1]
