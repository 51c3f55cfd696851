"""Requests that arrive one by one, batched under a limit on their latency: the same closing rule as for a file.

A batch is closed by capacity or by predicted time, whichever comes first; nobody waits while the engine is free.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from xgr_engine.xschedule.latency import LatencyModel
from xgr_engine.xschedule.scheduler import BatchLimits, batch_size


class Arrival(Protocol):
    """A request."""

    @property
    def arrival(self) -> float:
        """When it arrived, in seconds of the caller's clock."""

    @property
    def prompt(self) -> NDArray[np.int32]: ...


Request = TypeVar("Request", bound=Arrival)


class OnlineScheduler(Generic[Request]):
    """Decides who is computed next.

    The oldest request should be answered within ``slo_seconds`` of its arrival. What is left of that time bounds the
    next batch, but never to less than half of ``slo_seconds``: a backlog must be worked off in batches of useful size,
    or it only grows.

    Args:
        limits: capacity of a batch.
        slo_seconds: None: batches are closed by capacity alone.
        latency: a cost model to share; None: a new one, fed by :meth:`observe`.
    """

    def __init__(self, limits: BatchLimits, slo_seconds: float | None, latency: LatencyModel | None = None) -> None:
        self.limits = limits
        self.slo_seconds = slo_seconds
        self.latency = latency or LatencyModel(limits.level_rows)

    def take(self, waiting: deque[Request], now: float) -> list[Request]:
        """Remove the next batch from ``waiting`` (oldest first, not empty): at least one request, in order."""
        lengths = np.array([len(waiting[at].prompt) for at in range(min(len(waiting), self.limits.users))], np.int64)
        seconds = np.inf
        if self.slo_seconds is not None:
            seconds = max(self.slo_seconds - (now - waiting[0].arrival), self.slo_seconds / 2)
        size = batch_size(lengths, len(waiting), self.limits, self.latency.predict, seconds)
        return [waiting.popleft() for _ in range(size)]

    def observe(self, batch: list[Request], seconds: float) -> None:
        """Learn that ``batch`` was computed in ``seconds``, for the predictions of the next ones."""
        self.latency.observe(sum(len(request.prompt) for request in batch), len(batch), seconds)
