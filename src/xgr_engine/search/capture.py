"""Recording CUDA graphs, and keeping those of the shapes that were used last."""

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
        """The graph of a shape. A new one is recorded after the oldest has been dropped, so that its memory is free."""
        captured = self._kept.get(shape)
        if captured is None:
            while len(self._kept) >= self._most:
                self._kept.popitem(last=False)
            captured = self._kept[shape] = record()
        self._kept.move_to_end(shape)
        return captured

    def kept(self) -> Iterable[Captured]:
        """All graphs that are kept, least recently used first."""
        return self._kept.values()


_one_at_a_time = threading.RLock()  # a restriction of torch, for the whole process


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: Any = None) -> Iterator[None]:
    """Record what is launched inside, on the current GPU, into ``graph``.

    Other threads may use the GPU meanwhile; one that wants to record waits. Python's cycle collector is off: if it
    freed another graph now, CUDA would declare this recording invalid.

    Args:
        pool: from ``torch.cuda.graph_pool_handle``, memory that several graphs share; None: memory of its own.
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
    """The stream on which a GPU's graphs are recorded. torch would use one stream, of the GPU that recorded first."""
    return torch.cuda.Stream(gpu)  # type: ignore[no-untyped-call]
