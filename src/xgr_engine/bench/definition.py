"""What a list of one user may be: the search by its definition, and what rounding may do to it.

Plain torch, one user at a time, float32, every row expanded. Rounding moves scores, and a score that moves can lose an
item although its own score is well above the last of the list: one of its *prefixes* lay near the cut of its level. A
prefix kept instead brings children of its own, which move the cuts below. So rows that may have survived are expanded
beside those that did, and each cut is judged twice:

* a prefix is *certain* where fewer than W others that may be there can have scored above it;
* a prefix is *possible* unless W others that are certainly there must have scored above it.

Every certain SID has to be in a contender's list, and nothing that is not possible may be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xgr_engine.bench.prefix_scores import Prefixes, PromptScores, exact_setup, rounded_setup
from xgr_engine.bench.tolerance import FLOAT32, NO_ROUNDING, Tolerance
from xgr_engine.bench.workloads import Prompt, Workload
from xgr_engine.search.setup import SearchSetup
from xgr_engine.xbeam.reference import select_top

# Rows a level that may be there, in widths, before the judgement is given up.
_MOST_WIDTHS = 4

Leaves = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Truth:
    """What a list of one user may be.

    Attributes:
        leaves: [n] the definition's list, best first (ties by SID); scores: float32 [n].
        margins: float32 [n] the least distance of the SID, or of one of its prefixes, to what a cut left out and that
            might have been there.
        known: the definition's score of every SID that it has one for: its list's and those asked for.
        possible: ascending leaves that may be in a list; None where that is not known.
    """

    leaves: Leaves
    scores: NDArray[np.float32]
    margins: NDArray[np.float32]
    known: dict[int, float]
    possible: Leaves | None
    tolerance: Tolerance

    @property
    def certain(self) -> NDArray[np.bool_]:
        """Which of ``leaves`` must be in every list."""
        return self.margins > self.tolerance.difference


def find_truths(workload: Workload, prompts: Sequence[Prompt], asked: Sequence[Leaves]) -> list[Truth]:
    """What the lists of these prompts may be.

    Args:
        asked: per prompt leaves whose scores are wanted whether or not the search meets them.
    """
    exact = exact_setup(workload)
    pairs = list(zip(prompts, asked, strict=True))
    if workload.model.dtype == "float32":
        return [UserSearch(exact, workload, *pair).run(FLOAT32) for pair in pairs]
    rounded = rounded_setup(workload, exact)
    searches, deviation, overlaps = [], 0.0, []
    for prompt, leaves in pairs:
        search = UserSearch(exact, workload, prompt, leaves)
        wanted = search.run(NO_ROUNDING)
        both = np.union1d(wanted.leaves, leaves)
        found = UserSearch(rounded, workload, prompt, both).run(NO_ROUNDING)
        deviation = max(deviation, *(abs(found.known[leaf] - wanted.known[leaf]) for leaf in both.tolist()))
        overlaps.append(float(np.isin(wanted.leaves, found.leaves).mean()))
        searches.append(search)
    tolerance = Tolerance.half_precision(deviation, float(np.mean(overlaps)))
    return [search.run(tolerance) for search in searches]


class UserSearch:
    """One user's prompt, computed once, and searches over it."""

    def __init__(self, setup: SearchSetup, workload: Workload, prompt: Prompt, asked: Leaves) -> None:
        self.trie, self.top_k = workload.catalog.trie, workload.top_k
        self.width = setup.options.beam
        self.most_possible = _MOST_WIDTHS * self.width
        self.asked = np.unique(asked)
        self.scores = PromptScores(setup, prompt, self.most_possible + len(self.asked))
        self.asked_leaves = torch.from_numpy(self.asked).to(workload.model.device)

    @torch.inference_mode()
    def run(self, tolerance: Tolerance) -> Truth:
        """Down the trie once, with the rows that scores blurred by ``tolerance`` may keep."""
        self.difference = tolerance.difference
        self.given_up = False
        rows = self.scores.root()
        finished = rows.at(~rows.exact)  # none yet
        for depth in range(self.trie.levels):
            prefixes, sids = self.scores.children(rows, depth)
            finished = finished.joined(sids)
            if not len(prefixes.node):
                break
            rows = self._to_expand(self._cut(prefixes, self.width), self._asked_nodes(depth + 1))
        if self.scores.setup.score_suffix:
            finished = self._to_expand(self._cut(finished, self.width), self.asked_leaves)
            finished = self.scores.with_suffix(finished)
        return self._truth(self._cut(finished, self.top_k), tolerance)

    def _cut(self, rows: Prefixes, width: int) -> Prefixes:
        """What goes on where the best ``width`` do: the definition's own choice, and what another may have made."""
        place, score = select_top(rows.score.masked_fill(~rows.exact, -torch.inf)[None], width)
        exact = torch.zeros_like(rows.exact)
        exact[place[0][score[0] > -torch.inf]] = True
        # Certain ones are everywhere: whoever scores clearly below the width-th of them is nowhere.
        bar = _kth_best(rows.score[rows.margin > self.difference], width)
        possible = rows.possible & (rows.score >= bar - self.difference)
        # Of the possible ones the best `width` may all be there: whoever is clearly above the next one is everywhere.
        left_out = _kth_best(rows.score[rows.possible], width + 1)
        return replace(rows, exact=exact, possible=possible, margin=torch.minimum(rows.margin, rows.score - left_out))

    def _to_expand(self, rows: Prefixes, asked: Tensor) -> Prefixes:
        """The possible rows and those asked for. Of too many nothing can be said but which the definition keeps."""
        if int(rows.possible.sum()) > self.most_possible:
            self.given_up = True
            rows = replace(rows, possible=rows.exact)
        return rows.at(rows.possible | torch.isin(rows.node, asked))

    def _asked_nodes(self, depth: int) -> Tensor:
        """Nodes of ``depth`` codes above the leaves asked for."""
        first, end = self.trie.leaf_start[depth - 1], self.trie.leaf_end[depth - 1]
        node = np.searchsorted(first, self.asked, side="right") - 1
        nodes = np.unique(node[(node >= 0) & (self.asked < end[node])])
        return torch.from_numpy(nodes).to(self.asked_leaves.device)

    def _truth(self, sids: Prefixes, tolerance: Tolerance) -> Truth:
        best = sids.at(sids.exact)
        best = best.at(best.score.sort(descending=True, stable=True).indices)
        known = sids.at(sids.possible | torch.isin(sids.node, self.asked_leaves))
        leaves = known.node.cpu().numpy()
        margins = torch.full_like(best.margin, -torch.inf) if self.given_up else best.margin
        return Truth(
            leaves=best.node.cpu().numpy(),
            scores=best.score.cpu().numpy(),
            margins=margins.cpu().numpy(),
            known=dict(zip(leaves.tolist(), known.score.tolist(), strict=True)),
            possible=None if self.given_up else leaves[known.possible.cpu().numpy()],
            tolerance=tolerance,
        )


def _kth_best(scores: Tensor, k: int) -> Tensor:
    """Scalar: the k-th best, -inf where there are fewer."""
    if len(scores) < k:
        return scores.new_full((), -torch.inf)
    return torch.topk(scores, k).values[-1]
