"""Scores of the prefixes and SIDs of one prompt, by plain torch: every row goes through the model, none is skipped."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from xgr_engine.bench.plain import float32_model, same_dtype_model
from xgr_engine.bench.workloads import Prompt, Workload
from xgr_engine.models.head import Head
from xgr_engine.models.packing import PackedPrompts
from xgr_engine.models.rows import Rows
from xgr_engine.options import ScoreOver
from xgr_engine.search.setup import SearchSetup, score_suffix
from xgr_engine.xbeam.reference import ScoredRows, list_candidates, score_candidates
from xgr_engine.xbeam.state import Beams, Finished, upload_trie

_ROWS_AT_ONCE = 1024  # through the model


def exact_setup(workload: Workload) -> SearchSetup:
    """The workload's model in plain torch and float32. Embedding and head are copies."""
    model, trie = workload.model, workload.catalog.trie
    exact = float32_model(model.decoder)
    tokens = [torch.from_numpy(ids.astype(np.int64)).to(model.device) for ids in model.table.token_ids[: trie.levels]]
    head = Head(exact.embed if model.spec.tied else model.head.float(), tokens, exact.ops)
    levels = upload_trie(trie, model.table.bind(trie), model.device)
    return SearchSetup(exact, head, levels, workload.search, model.score_suffix)


def rounded_setup(workload: Workload, exact: SearchSetup) -> SearchSetup:
    """The same in the model's own dtype."""
    plain = same_dtype_model(workload.model.decoder)
    return replace(exact, model=plain, head=_RoundedHead(workload.model.head, exact.head.level_tokens, plain.ops))


class _RoundedHead(Head):
    """Logits rounded to the model's dtype, as the linear layer at the end of a model in that dtype returns them."""

    def level_scores(self, hidden: Tensor, level: int, over: ScoreOver) -> tuple[Tensor, Tensor | None]:
        """As :meth:`Head.level_scores`."""
        logits, normaliser = super().level_scores(hidden, level, over)
        return logits.to(self.weight.dtype).float(), normaliser


@dataclass(frozen=True)
class Prefixes:
    """Prefixes of one depth, or complete SIDs, in SID order.

    Attributes:
        node: int64 [N] trie node, or leaf; score: float32 [N]; column: int64 [N] head-slice column of the last code.
        ancestors: int32 [N, L - 1] cache slots of the codes whose keys are there; -1 = none.
        exact: bool [N] the definition keeps it; possible: bool [N] a search with blurred scores may.
        margin: float32 [N] by how much it, or the closest of its prefixes, is above what a cut left out.
    """

    node: Tensor
    score: Tensor
    column: Tensor
    ancestors: Tensor
    exact: Tensor
    possible: Tensor
    margin: Tensor

    def at(self, place: Tensor) -> Prefixes:
        """Those at ``place`` (indices or bool)."""
        return Prefixes(**{field.name: getattr(self, field.name)[place] for field in fields(self)})

    def joined(self, other: Prefixes) -> Prefixes:
        """Both, in node order."""
        pairs = {field.name: (getattr(self, field.name), getattr(other, field.name)) for field in fields(self)}
        both = Prefixes(**{name: torch.cat(pair) for name, pair in pairs.items()})
        return both.at(both.node.argsort(stable=True))


class PromptScores:
    """One prompt, computed once, from where the trie is walked down any number of times.

    Args:
        most_rows: that will be expanded at a level.
    """

    @torch.inference_mode()
    def __init__(self, setup: SearchSetup, prompt: Prompt, most_rows: int) -> None:
        self.setup = setup
        slots = sum(min(most_rows, level.inner_count) for level in setup.levels[:-1])
        slots += most_rows * len(setup.score_suffix)
        self._cache = setup.model.new_cache(len(prompt), 1, slots)
        self._hidden = setup.model.prefill(PackedPrompts.of([prompt], setup.head.weight.device), self._cache)
        self._free_slot = 0

    def root(self) -> Prefixes:
        """The empty prefix, to begin (again) with. What was expanded before is forgotten."""
        self._free_slot = 0
        beams, yes = Beams.root(1, self._hidden.device), torch.ones(1, dtype=torch.bool, device=self._hidden.device)
        return Prefixes(
            node=beams.node[0],
            score=beams.score[0],
            column=beams.column[0],
            ancestors=torch.full((1, len(self.setup.levels) - 1), -1, dtype=torch.int32, device=yes.device),
            exact=yes,
            possible=yes,
            margin=torch.full_like(beams.score[0], torch.inf),
        )

    def children(self, rows: Prefixes, depth: int) -> tuple[Prefixes, Prefixes]:
        """All children of ``rows``, which have ``depth`` codes: open prefixes, and complete SIDs by leaf."""
        level = self.setup.levels[depth]
        if depth:  # the root's token is the prompt's
            rows = self._with_slots(rows, depth)
        beams = Beams(rows.node[None], rows.score[None], rows.column[None], rows.ancestors[None])
        scored = ScoredRows(beams)
        scored.add(torch.ones_like(beams.alive), *self._forward(rows, depth))
        candidates = list_candidates(beams, level)
        scores = score_candidates(candidates, beams, level, scored, candidates.exists)[0]
        child = candidates.child[0]
        children = rows.at(candidates.parent[0])
        children = replace(children, node=child, score=scores, column=level.column[child].long())
        leaf = torch.full_like(child, -1) if level.leaf is None else level.leaf[child].long()
        is_open = torch.zeros_like(leaf, dtype=torch.bool) if level.inner is None else level.inner[child]
        return children.at(is_open), replace(children, node=leaf).at(leaf >= 0)

    def with_suffix(self, sids: Prefixes) -> Prefixes:
        """Complete SIDs with the score contract's tokens after each."""
        pool = Finished(
            leaf=sids.node[None],
            score=sids.score[None],
            column=sids.column[None],
            depth=1 + (sids.ancestors >= 0).sum(1)[None],  # of the last code there is no key
            ancestors=sids.ancestors[None],
        )
        return replace(sids, score=score_suffix(self.setup, pool, self._cache, self._free_slot)[0])

    def _with_slots(self, rows: Prefixes, depth: int) -> Prefixes:
        """Each row's last code gets a slot."""
        ancestors = rows.ancestors.clone()
        ancestors[:, depth - 1] = self._free_slot + torch.arange(len(ancestors), device=ancestors.device)
        self._free_slot += len(ancestors)
        return replace(rows, ancestors=ancestors)

    def _forward(self, rows: Prefixes, depth: int) -> tuple[Tensor, Tensor | None]:
        """Logits [N, C_level] and normaliser [N] of the rows."""
        head, over = self.setup.head, self.setup.options.score_over
        if depth == 0:
            return head.level_scores(self._hidden, 0, over)
        hidden = []
        for some in torch.split(torch.arange(len(rows.node), device=rows.node.device), _ROWS_AT_ONCE):
            ancestors = rows.ancestors[some, :depth]
            batch = Rows(
                tokens=head.level_tokens[depth - 1][rows.column[some]],
                position=self._cache.lengths[:1].expand(len(some)) + depth - 1,
                slots=ancestors[:, -1].long(),
                ancestors=ancestors[None],
                cells=None,
            )
            hidden.append(self.setup.model.decode(batch, self._cache))
        return head.level_scores(torch.cat(hidden), depth, over)
