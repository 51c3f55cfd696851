"""A lane: stream and buffers of a GPU that compute one batch at a time, from packed prompts to a result on the host.

A lane's work runs in the order in which it was queued, so a batch may be queued before the one ahead of it has ended;
each result is copied to memory of its own. One lane is the default; several run side by side over the same weights.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from xgr_engine.models.packing import PackedPrompts
from xgr_engine.search.graphed import GraphedSearch, places_for
from xgr_engine.search.prefill import GraphedPrefill, rounded_up
from xgr_engine.search.setup import DeadNodes, Outcome, SearchSetup

if TYPE_CHECKING:
    from xgr_engine.search.device import DeviceSearch


@dataclass(frozen=True)
class Queued:
    """A batch in a lane's stream. ``outcome`` may be read, on the host, once the event ``ready`` has happened."""

    outcome: Outcome
    started: torch.cuda.Event
    ready: torch.cuda.Event
    lane: int


class Lane:
    """Cache, graphs and result buffers for batches of up to ``users`` prompts and ``tokens`` prompt tokens."""

    def __init__(
        self,
        setup: SearchSetup,
        tokens: int,
        users: int,
        *,
        graphs: bool,
        number: int = 0,
        make_search: Callable[[SearchSetup, int], DeviceSearch] | None = None,
    ) -> None:
        self.model = setup.model
        self.number = number
        self.stream = torch.cuda.Stream(self.model.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self.stream):
            self.cache = self.model.new_cache(rounded_up(tokens), places_for(users), setup.slots)
            self.prefill = GraphedPrefill(self.model, self.cache, capture=graphs)
            self.search = GraphedSearch(setup, self.cache, capture=graphs, make_search=make_search)
        self._last: torch.cuda.Event | None = None

    def holds(self, tokens: int, users: int) -> bool:
        """Whether a batch of that size fits."""
        return tokens <= self.cache.tokens and users <= self.cache.users

    @property
    def idle(self) -> bool:
        """Whether everything queued here has ended."""
        return self._last is None or bool(self._last.query())  # type: ignore[no-untyped-call]

    def run(self, pack: PackedPrompts, dead: DeadNodes, copied: torch.cuda.Event | None = None) -> Queued:
        """Queue a batch, to start after ``copied``, the event that ends the upload of its inputs."""
        with torch.cuda.stream(self.stream):
            if copied is not None:
                self.stream.wait_event(copied)
            for tensor in _inputs(pack, dead):
                if tensor.is_cuda:  # made in the uploads' stream: its memory must outlast the work queued here
                    tensor.record_stream(self.stream)
            started = _event()
            started.record()
            found = self.search.run(self.prefill.run(pack), dead)
            outcome = Outcome(*(_to_host(tensor) for tensor in (found.leaf, found.score, found.finite)))
            self._last = _event()
            self._last.record()
        return Queued(outcome, started, self._last, self.number)

    def wait(self) -> None:
        """Until everything queued here has ended."""
        self.stream.synchronize()


class Clock:
    """Translates a device's events to times of the host's clock."""

    def __init__(self, device: torch.device) -> None:
        with torch.cuda.device(device):
            self._zero = _event()
            self._zero.record()
            self._zero.synchronize()
        self._zero_at = time.perf_counter()

    def at(self, event: torch.cuda.Event) -> float:
        """When an event happened, in seconds of ``time.perf_counter``. It must have happened."""
        return self._zero_at + float(self._zero.elapsed_time(event)) / 1e3


class Lanes:
    """Up to ``most`` lanes. Another one is made when a batch comes and none is idle.

    Args:
        make: (tokens, users, number) -> lane.
    """

    def __init__(self, most: int, make: Callable[[int, int, int], Lane]) -> None:
        self._most = most
        self._make = make
        self._lanes: list[Lane] = []
        self._turn = 0
        self._lock = threading.Lock()

    @property
    def first(self) -> Lane | None:
        """The first lane, which takes every batch that does not overlap another; None before the first batch."""
        return self._lanes[0] if self._lanes else None

    def reserve(self, tokens: int, users: int) -> None:
        """Make sure that a batch of that size fits in the first lane."""
        with self._lock:
            self._sized(0, tokens, users)

    def run(self, pack: PackedPrompts, dead: DeadNodes, copied: torch.cuda.Event | None) -> Queued:
        """Queue a batch in an idle lane, else in a new one, else in the next in turn. One thread at a time."""
        with self._lock:
            lane = self._sized(self._next(), pack.cache_tokens, len(pack.lengths))
            return lane.run(pack, dead, copied)

    def _next(self) -> int:
        for number, lane in enumerate(self._lanes):
            if lane.idle:
                return number
        if len(self._lanes) < self._most:
            return len(self._lanes)
        self._turn = (self._turn + 1) % self._most
        return self._turn

    def _sized(self, number: int, tokens: int, users: int) -> Lane:
        """The lane, which is made anew if it is too small: then its graphs are lost."""
        if number == len(self._lanes):
            if number:  # as large as the first, which was made for the largest batch
                tokens = max(tokens, self._lanes[0].cache.tokens)
                users = max(users, self._lanes[0].cache.users)
            self._lanes.append(self._make(tokens, users, number))
        elif not self._lanes[number].holds(tokens, users):
            small = self._lanes[number].cache
            tokens, users = max(tokens, small.tokens), max(users, small.users)
            del small
            while len(self._lanes) > number:  # free their memory before taking more
                self._lanes.pop().wait()
            self._lanes.append(self._make(tokens, users, number))
        return self._lanes[number]


def _inputs(pack: PackedPrompts, dead: DeadNodes) -> list[Tensor]:
    # without what the prefill uploads for pack.sequences, which is both made and used in the lane's stream
    values = (*vars(pack).values(), *dead.inner, dead.leaves, dead.root)
    return [value for value in values if isinstance(value, Tensor)]


def _event() -> torch.cuda.Event:
    # blocking: a thread that waits for the event sleeps instead of keeping its core busy
    return torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]


def _to_host(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
