"""The search with fixed shapes as CUDA graphs: one replay per batch, whatever the number of levels and layers.

A graph belongs to one shape: places of the batch and width of the exclusion tables, both rounded up to a few sizes, so
that a handful of graphs serves a job. They share a memory pool, since only one of a lane's graphs runs at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from xgr_engine.search.capture import RecentGraphs, capturing
from xgr_engine.search.setup import DeadNodes, Outcome, SearchSetup
from xgr_engine.xattention.cache import KVCache
from xgr_engine.xbeam.exclusions import NO_NODE

if TYPE_CHECKING:  # imports Triton, which may be missing on a machine without a GPU
    from xgr_engine.search.device import DeviceSearch

_GRAPHS_KEPT = 12  # enough for every number of places up to 64 where nothing is excluded


def places_for(users: int) -> int:
    """Places of a batch: 1, 2, 3, 4, 6, 8, 12, 16, 24, ...: at most a third of them empty."""
    power = 1 << (users - 1).bit_length()
    return power * 3 // 4 if power >= 4 and users <= power * 3 // 4 else power


def table_width_for(entries: int) -> int:
    """Width of an exclusion table: 0, 16, 128, 1024, ..."""
    width = 0
    while width < entries:
        width = 16 if width == 0 else width * 8
    return width


@dataclass(frozen=True)
class _Captured:
    """A graph, the buffers that it reads (``hidden``, ``dead``, ``present``) and those that it fills (``outcome``)."""

    graph: torch.cuda.CUDAGraph
    hidden: Tensor
    dead: DeadNodes
    present: Tensor
    outcome: Outcome
    search: DeviceSearch


class GraphedSearch:
    """Searches batches over one cache, with a captured graph for each shape that comes up.

    Args:
        cache: the keys and values that the prefill writes; graphs hold its addresses.
        capture: False runs the same kernels one by one, to measure what graphs save.
        make_search: (setup, places) -> what is captured; None: :class:`DeviceSearch`.
    """

    def __init__(
        self,
        setup: SearchSetup,
        cache: KVCache,
        *,
        capture: bool = True,
        make_search: Callable[[SearchSetup, int], DeviceSearch] | None = None,
    ) -> None:
        if make_search is None:
            from xgr_engine.search.device import DeviceSearch

            make_search = DeviceSearch
        self.setup = setup
        self.cache = cache
        self.capture = capture
        self._make_search = make_search
        self._graphs: RecentGraphs[tuple[int, int], _Captured] = RecentGraphs(_GRAPHS_KEPT)
        self._eager: dict[int, DeviceSearch] = {}
        self._pool = torch.cuda.graph_pool_handle() if capture else None

    @torch.inference_mode()
    def run(self, hidden: Tensor, dead: DeadNodes) -> Outcome:
        """Search from the prompts' last hidden states [U, H]; ``dead`` may be on the host.

        The result [places, P] may have more places than there are users, and is overwritten by the next call.
        """
        users = len(hidden)
        places = places_for(users)
        width = table_width_for(max(table.shape[1] for table in (*dead.inner, dead.leaves)))
        if not self.capture:
            buffers = self._buffers(places, width, hidden)
            _load(*buffers, hidden, dead)
            if places not in self._eager:
                self._eager[places] = self._make_search(self.setup, places)
            return self._eager[places].run(buffers[0], self.cache, buffers[1], buffers[2])
        captured = self._graphs.get((places, width), lambda: self._record(places, width, hidden))
        _load(captured.hidden, captured.dead, captured.present, hidden, dead)
        captured.graph.replay()
        return captured.outcome

    def candidates_read(self) -> tuple[int, int]:
        """:meth:`DeviceSearch.candidates_read` summed over all graphs that are still kept."""
        searches = [*self._eager.values(), *(captured.search for captured in self._graphs.kept())]
        counts = [search.candidates_read() for search in searches]
        return sum(allowed for allowed, _ in counts), sum(read for _, read in counts)

    def _buffers(self, places: int, width: int, hidden: Tensor) -> tuple[Tensor, DeadNodes, Tensor]:
        device = hidden.device
        dead = DeadNodes.none(len(self.setup.levels), places, device, width)
        inputs = torch.zeros((places, hidden.shape[1]), dtype=hidden.dtype, device=device)
        return inputs, dead, torch.zeros(places, dtype=torch.bool, device=device)

    def _record(self, places: int, width: int, hidden: Tensor) -> _Captured:
        """Run the search once to compile and to let libraries allocate, then record it."""
        search = self._make_search(self.setup, places)
        inputs, dead, present = self._buffers(places, width, hidden)
        side = torch.cuda.Stream(hidden.device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(hidden.device))
        with torch.cuda.stream(side):
            search.run(inputs, self.cache, dead, present)
        torch.cuda.current_stream(hidden.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, self._pool):
            outcome = search.run(inputs, self.cache, dead, present)
        return _Captured(graph, inputs, dead, present, outcome, search)


def _load(inputs: Tensor, tables: DeadNodes, present: Tensor, hidden: Tensor, dead: DeadNodes) -> None:
    """Fill a shape's buffers for a batch; places beyond its users are marked empty."""
    users = len(hidden)
    inputs[:users] = hidden
    present[:users] = True
    present[users:] = False
    tables.root[:users].copy_(dead.root, non_blocking=True)
    for target, source in zip((*tables.inner, tables.leaves), (*dead.inner, dead.leaves), strict=True):
        if target.shape[1]:
            target.fill_(NO_NODE)
            pinned = source if source.is_cuda or not target.is_cuda else source.pin_memory()
            target[:users, : source.shape[1]].copy_(pinned, non_blocking=True)
