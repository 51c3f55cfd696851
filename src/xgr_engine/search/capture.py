"""Recording CUDA graphs, and keeping those of the shapes that came up last."""

from __future__ import annotations

import gc
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Generic, TypeVar

import torch

Shape = TypeVar("Shape")
Captured = TypeVar("Captured")


class RecentGraphs(Generic[Shape, Captured]):
    """At most ``most`` captured graphs, of the shapes used last."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: OrderedDict[Shape, Captured] = OrderedDict()

    def get(self, shape: Shape, record: Callable[[], Captured]) -> Captured:
        """The graph of a shape; where there is none, one is let go before ``record`` takes memory for a new one."""
        captured = self._kept.get(shape)
        if captured is None:
            while len(self._kept) >= self._most:
                self._kept.popitem(last=False)
            captured = self._kept[shape] = record()
        self._kept.move_to_end(shape)
        return captured

    def kept(self) -> Iterable[Captured]:
        """All of them."""
        return self._kept.values()


_one_at_a_time = threading.RLock()  # a restriction of torch, for the whole process


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: Any = None) -> Iterator[None]:
    """Record what is launched inside on the current GPU into ``graph``, whatever other threads do meanwhile; one that
    records as well waits.

    Python's cycle collector rests: were it to free another graph now, CUDA would call this recording invalid.

    Args:
        pool: memory that several graphs share, of ``torch.cuda.graph_pool_handle``; None: its own.
    """
    with _one_at_a_time:
        collected = gc.isenabled()
        gc.disable()
        try:
            stream = _side_stream(torch.cuda.current_device())
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                yield
        finally:
            if collected:
                gc.enable()


@cache
def _side_stream(gpu: int) -> torch.cuda.Stream:
    """Where a GPU's graphs are recorded. torch's own stream belongs to the GPU that recorded first."""
    return torch.cuda.Stream(gpu)  # type: ignore[no-untyped-call]
