"""What every search of a model over a catalog shares, and the step that both kinds of search take last."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from xgr_engine.models.head import Head
from xgr_engine.models.model import Model
from xgr_engine.models.rows import Rows
from xgr_engine.options import SearchOptions
from xgr_engine.xattention.cache import KVCache
from xgr_engine.xattention.upload import upload
from xgr_engine.xbeam.exclusions import NO_NODE, Exclusions
from xgr_engine.xbeam.state import Finished, TrieLevel


@dataclass(frozen=True)
class SearchSetup:
    """A model, a catalog's trie on its device, and the options.

    Attributes:
        score_suffix: token ids scored after each finished SID (the model's score contract).
    """

    model: Model
    head: Head
    levels: tuple[TrieLevel, ...]
    options: SearchOptions
    score_suffix: tuple[int, ...] = ()

    @property
    def slots(self) -> int:
        """Generated tokens the KV cache must hold a user: the rows of every level but the last, and the suffix's."""
        rows = sum(min(self.options.beam, level.inner_count) for level in self.levels[:-1])
        return rows + self.options.beam * len(self.score_suffix)

    @property
    def answers(self) -> int:
        """Complete SIDs a user that may still be among the best: K, each has an item. A suffix can reorder all W."""
        return self.options.beam if self.score_suffix else self.options.top_k


@dataclass(frozen=True)
class DeadNodes:
    """What each user may not get, as tensors (:class:`xgr_engine.xbeam.exclusions.Exclusions`).

    Attributes:
        inner: per depth int32 [U, M_d]; leaves: int32 [U, M].
        root: int64 [U] node of depth 0 where each user's search starts.
    """

    inner: tuple[Tensor, ...]
    leaves: Tensor
    root: Tensor

    @classmethod
    def none(cls, levels: int, users: int, device: torch.device, width: int = 0) -> DeadNodes:
        """Nobody has anything excluded: tables of ``width`` without an entry, each a tensor of its own."""

        def table() -> Tensor:
            return torch.full((users, width), NO_NODE, dtype=torch.int32, device=device)

        root = torch.zeros(users, dtype=torch.int64, device=device)
        return cls(inner=tuple(table() for _ in range(levels)), leaves=table(), root=root)

    @classmethod
    def of(cls, exclusions: Exclusions) -> DeadNodes:
        """The tables as tensors on the host."""
        return cls(
            inner=tuple(torch.from_numpy(table) for table in exclusions.inner),
            leaves=torch.from_numpy(exclusions.leaves),
            root=torch.from_numpy(exclusions.root),
        )

    def to(self, device: torch.device) -> DeadNodes:
        """The same on ``device``; from host to GPU without a wait for the copy."""
        inner = tuple(upload(table, device) for table in self.inner)
        return DeadNodes(inner, upload(self.leaves, device), upload(self.root, device))


@dataclass(frozen=True)
class Outcome:
    """What a search found.

    Attributes:
        leaf: int64 [U, P] complete SIDs; score: float32 [U, P], -inf = empty place. In no particular order.
        finite: bool scalar: every hidden state, and all that scores are measured against, were numbers. If not, the
            rest means nothing.
    """

    leaf: Tensor
    score: Tensor
    finite: Tensor


def score_suffix(setup: SearchSetup, pool: Finished, cache: KVCache, free_slot: int) -> Tensor:
    """Scores of the finished SIDs with the contract's tokens after them: float32 [U, P].

    These tokens are no codes, so they are measured over the whole vocabulary in every mode. Empty places of the pool
    go along and stay at -inf.
    """
    users, places = pool.leaf.shape
    device = pool.leaf.device
    score, ancestors = pool.score, pool.ancestors
    tokens = torch.zeros_like(pool.column)
    for level, ids in enumerate(setup.head.level_tokens):
        tokens = torch.where(pool.depth == level + 1, ids[pool.column.clamp_max(len(ids) - 1)], tokens)
    first_row = torch.arange(users, device=device)[:, None] * cache.slots
    for offset, token in enumerate(setup.score_suffix):
        own = free_slot + offset * places + torch.arange(places, dtype=torch.int32, device=device).expand(users, -1)
        ancestors = torch.cat([ancestors, own[:, :, None]], dim=2)
        rows = Rows(
            tokens=tokens.flatten(),
            position=(cache.lengths[:users, None] + pool.depth - 1 + offset).flatten(),
            slots=(first_row + own).flatten(),
            ancestors=ancestors,
            cells=None,
        )
        hidden = setup.model.decode(rows, cache)
        log_p = setup.head.token_log_probs(hidden, token).view(users, places)
        score = torch.where(pool.score > -torch.inf, score + log_p, -torch.inf)
        tokens = torch.full_like(tokens, token)
    return score
