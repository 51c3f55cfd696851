"""The whole algorithm: prompts -> prefill once a user -> search down the trie, level by level -> items, ranked."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xgr_engine.catalog.trie import ItemTrie
from xgr_engine.errors import XgrError
from xgr_engine.models.decoder_only import DecoderOnly
from xgr_engine.models.head import Head
from xgr_engine.models.packing import PackedPrompts
from xgr_engine.options import SearchOptions
from xgr_engine.search.host import HostSearch, SearchCounters
from xgr_engine.search.setup import DeadNodes, SearchSetup
from xgr_engine.tokens.table import SidTokenTable
from xgr_engine.xbeam.exclusions import find_dead_nodes
from xgr_engine.xbeam.ranking import BatchResult, rank_items
from xgr_engine.xbeam.state import upload_trie

# Rows a user expands on a CPU before the search looks whether the rest can still matter: docs/performance.md, "Rows
# that cannot win".
ROWS_AT_ONCE = 48


class Recommender:
    """Trie beam search over one model and one catalog.

    Args:
        model: a decoder; head_weight: its output projection [V, H].
        trie: the catalog; table: the model's SID tokens. A code without a token is an error.
        options: beam width and the rest.
        score_suffix: token ids that belong to every answer's score but to no SID (the model's score contract).
        rows_at_once: see :class:`HostSearch`. None decides by device: on a CPU it saves time, on a GPU the host would
            wait for the device.
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
        levels = upload_trie(trie, table.bind(trie), model.device)
        tokens = [torch.from_numpy(ids.astype(np.int64)).to(model.device) for ids in table.token_ids[: trie.levels]]
        self.setup = SearchSetup(model, Head(head_weight, tokens), levels, options, score_suffix)
        by_device = ROWS_AT_ONCE if model.device.type == "cpu" else 0
        self.search = HostSearch(self.setup, by_device if rows_at_once is None else rows_at_once)

    @property
    def implementation(self) -> str:
        """Which kernels run, for the manifest."""
        return self.model.ops.name

    @property
    def counters(self) -> SearchCounters:
        """What the search has done so far."""
        return self.search.counters

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
        device = self.model.device
        pack = PackedPrompts.of(prompts, device)
        cache = self.model.new_cache(pack.cache_tokens, len(prompts), self.setup.slots)
        hidden = self.model.prefill(pack, cache)
        dead = DeadNodes(
            inner=tuple(torch.from_numpy(table).to(device) for table in exclusions.inner),
            leaves=torch.from_numpy(exclusions.leaves).to(device),
        )
        found = self.search.run(hidden, cache, dead)
        if not found.finite:
            raise XgrError(
                "the model produced a hidden state that is not a number",
                why="a weight or an activation is NaN or overflowed",
                hint="convert with --dtype float32 or bfloat16, and check the checkpoint with `xgr inspect`",
            )
        return rank_items(self.trie, exclusions, found.leaf.cpu().numpy(), found.score.cpu().numpy(), self.options)
