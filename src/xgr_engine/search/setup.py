"""What the host search and the device search share: inputs, result, and the last step, the score suffix."""

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
        levels: the trie, from the root down.
        score_suffix: token ids scored after each finished SID (the model's score contract).
    """

    model: Model
    head: Head
    levels: tuple[TrieLevel, ...]
    options: SearchOptions
    score_suffix: tuple[int, ...] = ()

    @property
    def slots(self) -> int:
        """Generated tokens per user in the KV cache: those of the rows of all levels but the last, and the suffix's."""
        rows = sum(min(self.options.beam, level.inner_count) for level in self.levels[:-1])
        return rows + self.options.beam * len(self.score_suffix)

    @property
    def answers(self) -> int:
        """Complete SIDs to keep per user. K are enough, since each has an item; but a suffix may reorder all W."""
        return self.options.beam if self.score_suffix else self.options.top_k


@dataclass(frozen=True)
class DeadNodes:
    """What each user may not get, as tensors (:class:`xgr_engine.xbeam.exclusions.Exclusions`).

    Attributes:
        inner: per depth int32 [U, M_d].
        leaves: int32 [U, M].
        root: int64 [U] node of depth 0 where each user's search starts.
    """

    inner: tuple[Tensor, ...]
    leaves: Tensor
    root: Tensor

    @classmethod
    def none(cls, levels: int, users: int, device: torch.device, width: int = 0) -> DeadNodes:
        """Nothing is excluded for anybody: tables [users, ``width``] without an entry, which share no memory."""

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
        """The same on ``device``; see :func:`upload`."""
        inner = tuple(upload(table, device) for table in self.inner)
        return DeadNodes(inner, upload(self.leaves, device), upload(self.root, device))


@dataclass(frozen=True)
class Outcome:
    """What a search found.

    Attributes:
        leaf: int64 [U, P] complete SIDs, in no particular order.
        score: float32 [U, P], -inf = empty place.
        finite: bool scalar, whether all hidden states and normalisers were finite. If not, the rest means nothing.
    """

    leaf: Tensor
    score: Tensor
    finite: Tensor


def score_suffix(setup: SearchSetup, pool: Finished, cache: KVCache, free_slot: int) -> Tensor:
    """Scores of the finished SIDs, float32 [U, P], with those of the contract's tokens after them added.

    These tokens are not codes, so they are normalised over the whole vocabulary, whatever ``score_over`` says. Empty
    places of the pool are computed too, and stay at -inf.

    Args:
        free_slot: the first slot of each user that no row has taken.
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
