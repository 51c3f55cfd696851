"""A lane: the buffers one batch at a time runs in on a GPU, from packed prompts to a result on the host."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from xgr_engine.models.packing import PackedPrompts
from xgr_engine.search.device import DeviceSearch
from xgr_engine.search.graphed import GraphedSearch, places_for
from xgr_engine.search.setup import DeadNodes, Outcome, SearchSetup


class Lane:
    """Cache, graphs and result buffers for batches of up to ``users`` prompts and ``tokens`` prompt tokens."""

    def __init__(
        self,
        setup: SearchSetup,
        tokens: int,
        users: int,
        *,
        graphs: bool,
        make_search: Callable[[SearchSetup, int], DeviceSearch] = DeviceSearch,
    ) -> None:
        self.model = setup.model
        self.cache = self.model.new_cache(tokens, places_for(users), setup.slots)
        self.search = GraphedSearch(setup, self.cache, capture=graphs, make_search=make_search)

    def holds(self, tokens: int, users: int) -> bool:
        """Whether such a batch fits."""
        return tokens <= self.cache.tokens and users <= self.cache.users

    def run(self, pack: PackedPrompts, dead: DeadNodes) -> tuple[Outcome, torch.cuda.Event]:
        """Queue a batch; its result, copied to pinned host memory, stands when the event has happened."""
        found = self.search.run(self.model.prefill(pack, self.cache), dead)
        outcome = Outcome(*(_to_host(tensor) for tensor in (found.leaf, found.score, found.finite)))
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record()
        return outcome, ready


def _to_host(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
