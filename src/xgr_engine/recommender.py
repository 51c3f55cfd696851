"""The whole algorithm: prompts -> prefill once a user -> search down the trie, level by level -> items, ranked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xgr_engine.catalog.trie import ItemTrie
from xgr_engine.errors import InputError, XgrError
from xgr_engine.models.decoder_only import DecoderOnly
from xgr_engine.models.head import Head
from xgr_engine.models.packing import PackedPrompts
from xgr_engine.options import SearchOptions, UserRules
from xgr_engine.search.host import HostSearch, SearchCounters
from xgr_engine.search.lanes import Lane
from xgr_engine.search.setup import DeadNodes, Outcome, SearchSetup
from xgr_engine.tokens.table import SidTokenTable
from xgr_engine.xbeam.exclusions import Exclusions, find_dead_nodes
from xgr_engine.xbeam.ranking import BatchResult, rank_items
from xgr_engine.xbeam.state import upload_trie

# Rows a user expands on a CPU before the search looks whether the rest can still matter: docs/performance.md, "Rows
# that cannot win".
ROWS_AT_ONCE = 48


@dataclass(frozen=True)
class PendingBatch:
    """A batch given to the device. Its result is on the way to the host; ``ready`` (a GPU's event) says when."""

    users: int
    exclusions: Exclusions
    outcome: Outcome
    ready: torch.cuda.Event | None


class Recommender:
    """Trie beam search over one model and one catalog.

    Args:
        model: a decoder; head_weight: its output projection [V, H].
        trie: the catalog; table: the model's SID tokens. A code without a token is an error.
        options: beam width and the rest.
        score_suffix: token ids that belong to every answer's score but to no SID (the model's score contract).
        rows_at_once: CPU only, see :class:`HostSearch`.
        graphs: GPU only: capture everything after the prefill in CUDA graphs.
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
        rows_at_once: int = ROWS_AT_ONCE,
        graphs: bool = True,
    ) -> None:
        self.model = model
        self.trie = trie
        self.options = options
        levels = upload_trie(trie, table.bind(trie), model.device)
        tokens = [torch.from_numpy(ids.astype(np.int64)).to(model.device) for ids in table.token_ids[: trie.levels]]
        self.setup = SearchSetup(model, Head(head_weight, tokens, model.ops), levels, options, score_suffix)
        # the device search is written in Triton; plain torch kernels, asked for by name, go with the host search
        self._on_device = model.ops.name == "triton"
        self._graphs = graphs
        self._host = HostSearch(self.setup, 0 if model.device.type == "cuda" else rows_at_once)
        self._lane: Lane | None = None

    @property
    def implementation(self) -> str:
        """Which kernels run, for the manifest."""
        return self.model.ops.name + (" in CUDA graphs" if self._on_device and self._graphs else "")

    @property
    def counters(self) -> SearchCounters:
        """What the host search has done so far."""
        return self._host.counters

    def reserve(self, tokens: int, users: int) -> None:
        """GPU: buffers for batches of up to ``users`` prompts and ``tokens`` prompt tokens, allocated once.

        A larger batch makes them grow, which costs the graphs captured so far.
        """
        if self._on_device and (self._lane is None or not self._lane.holds(tokens, users)):
            self._lane = None  # free first
            self._lane = Lane(self.setup, tokens, users, graphs=self._graphs)

    def run(self, prompts: list[NDArray[np.int32]], excluded: Sequence[NDArray[np.int32] | UserRules]) -> BatchResult:
        """Recommend for a batch.

        Args:
            prompts: per user the prompt's token ids, at least one.
            excluded: per user the rows of ``items.parquet`` that must not be returned, or more rules; over a forest
                the rules say each user's tree.

        Returns:
            Per user exactly ``min(K, reachable)`` items, best first.

        Raises:
            InputError: a prompt is empty, or longer than the model's context.
            XgrError: the model produced a hidden state that is no number.
        """
        return self.collect(self.submit(prompts, excluded))

    @torch.inference_mode()
    def submit(
        self, prompts: list[NDArray[np.int32]], excluded: Sequence[NDArray[np.int32] | UserRules]
    ) -> PendingBatch:
        """Start a batch; on a GPU this returns as soon as the work is queued. Args as in :meth:`run`."""
        self._check_lengths(prompts)
        exclusions = find_dead_nodes(self.trie, excluded)
        dead = DeadNodes(
            inner=tuple(torch.from_numpy(table) for table in exclusions.inner),
            leaves=torch.from_numpy(exclusions.leaves),
            root=torch.from_numpy(exclusions.root),
        )
        pack = PackedPrompts.of(prompts, self.model.device)
        if self._on_device:
            self.reserve(pack.cache_tokens, len(prompts))
            assert self._lane is not None
            outcome, ready = self._lane.run(pack, dead)
        else:
            cache = self.model.new_cache(pack.cache_tokens, len(prompts), self.setup.slots)
            hidden = self.model.prefill(pack, cache)
            outcome, ready = self._host.run(hidden, cache, dead.to(self.model.device)), None
        return PendingBatch(len(prompts), exclusions, outcome, ready)

    def _check_lengths(self, prompts: list[NDArray[np.int32]]) -> None:
        room = self.model.spec.max_context - self.trie.levels - len(self.setup.score_suffix)
        shortest, longest = (pick(len(prompt) for prompt in prompts) for pick in (min, max))
        if shortest < 1 or longest > room:
            raise InputError(
                f"prompts must have 1 to {room} tokens, not {shortest if shortest < 1 else longest}",
                why=f"the model's context is {self.model.spec.max_context} tokens, the answer's included",
                hint="shorten the histories (--max-history)",
            )

    def collect(self, batch: PendingBatch) -> BatchResult:
        """Wait for a batch, and rank its items on the host. Raises as :meth:`run`."""
        if batch.ready is not None:
            batch.ready.synchronize()
        if not batch.outcome.finite:
            raise XgrError(
                "the model produced a hidden state that is not a number",
                why="a weight or an activation is NaN or overflowed",
                hint="convert with --dtype float32 or bfloat16, and check the checkpoint with `xgr inspect`",
            )
        leaves = batch.outcome.leaf[: batch.users].cpu().numpy()
        scores = batch.outcome.score[: batch.users].cpu().numpy()
        return rank_items(self.trie, batch.exclusions, leaves, scores, self.options)
