"""The search with fixed shapes: nothing after the prefill waits for the host, so that one CUDA graph can hold it all.

A level has ``min(W, nodes with children)`` rows per user; rows without a live prefix are dead and stay so.
"""

from __future__ import annotations

import torch
from torch import Tensor

from xgr_engine.models.rows import Rows
from xgr_engine.search.setup import DeadNodes, Outcome, SearchSetup, score_suffix
from xgr_engine.xattention.cache import KVCache
from xgr_engine.xbeam.reference import merge_finished
from xgr_engine.xbeam.state import Beams, Finished, TrieLevel
from xgr_engine.xbeam.triton import Logits, Step, Workspace, candidate_capacity


class DeviceSearch:
    """Searches batches of up to ``users`` users.

    Args:
        setup: model, trie and options; its tensors are on a GPU (or Triton runs in its interpreter).
        users: places of a batch (U), for which buffers are allocated once.
    """

    step = Step  # chooses the best candidates of a level; a baseline of the bench has another

    def __init__(self, setup: SearchSetup, users: int) -> None:
        self.setup = setup
        width, rows = setup.options.beam, 1
        self._workspaces = []
        for level in setup.levels:
            capacity = candidate_capacity(level, rows)
            self._workspaces.append(Workspace.allocate(users, rows, width, capacity, setup.model.device))
            rows = min(width, level.inner_count)

    def candidates_read(self) -> tuple[int, int]:
        """Candidates scored so far, and how many of them the selection had to read again."""
        allowed, read = torch.stack([work.read.sum(0) for work in self._workspaces]).sum(0).tolist()
        return allowed, read

    def run(self, hidden: Tensor, cache: KVCache, dead: DeadNodes, present: Tensor) -> Outcome:
        """From the prompts' last hidden states [U, H] to the best complete SIDs of each user.

        Args:
            present: bool [U], which places of the batch hold a user; the others find nothing.
        """
        setup, users = self.setup, len(hidden)
        beams = Beams.root(users, hidden.device, dead.root)
        beams.score.masked_fill_(~present[:, None], -torch.inf)
        pool = Finished.empty(users, hidden.device)
        finite = _finite(hidden, beams)
        free_slot = 0
        for depth, level in enumerate(setup.levels):
            if depth:
                hidden = setup.model.decode(self._rows(beams, cache, depth), cache)
                finite = finite & _finite(hidden, beams)
            logits = Logits(*setup.head.level_scores(hidden, depth, setup.options.score_over))
            work = self._workspaces[depth]
            step = self.step(beams, level, logits, dead.inner[depth], dead.leaves, work)
            normaliser = step.expand()
            finite = finite & _finite(normaliser, beams)  # a NaN in the head's weights shows here
            if level.leaf is not None:
                chosen = step.select(normaliser, setup.answers, leaves=True)
                pool = self._finish(pool, chosen, level, depth + 1)
            if level.inner is None:
                break
            rows = min(setup.options.beam, level.inner_count)
            beams = step.select(normaliser, rows, leaves=False, own_slot=free_slot)
            free_slot += rows
        score = score_suffix(setup, pool, cache, free_slot) if setup.score_suffix else pool.score
        return Outcome(pool.leaf, score, finite & ~score.isnan().any())

    def _rows(self, beams: Beams, cache: KVCache, depth: int) -> Rows:
        """Every row of the grid. Dead ones are computed too, and nothing reads what they give."""
        users, rows = beams.node.shape
        first_slot = torch.arange(users, device=beams.node.device)[:, None] * cache.slots
        return Rows(
            tokens=self.setup.head.level_tokens[depth - 1][beams.column].flatten(),
            # for a single user, flatten would return a view with stride 0, and kernels read plain arrays
            position=(cache.lengths[:users, None] + (depth - 1)).expand(users, rows).flatten().contiguous(),
            slots=(first_slot + beams.ancestors[:, :, -1]).flatten(),
            ancestors=beams.ancestors,
            cells=None,
        )

    def _finish(self, pool: Finished, chosen: Beams, level: TrieLevel, depth: int) -> Finished:
        """The pool with the chosen complete SIDs of ``depth`` codes added."""
        assert level.leaf is not None
        new = Finished(
            leaf=level.leaf[chosen.node].long(),
            score=chosen.score,
            column=chosen.column,
            depth=torch.full_like(chosen.node, depth),
            ancestors=chosen.ancestors,
        )
        return new if pool.leaf.shape[1] == 0 else merge_finished(pool, new, self.setup.answers)


def _finite(values: Tensor, beams: Beams) -> Tensor:
    """Whether the values [U * R, ...] of all live rows are finite (bool scalar); those of dead rows mean nothing."""
    dead = beams.score.flatten() == -torch.inf
    return (values.isfinite().view(len(values), -1).all(1) | dead).all()
