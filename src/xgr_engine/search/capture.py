"""Recording CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: Any = None) -> Iterator[None]:
    """Record what is launched inside into ``graph``, whatever other threads do meanwhile.

    Python's cycle collector rests: were it to free another graph now, CUDA would call this recording invalid.

    Args:
        pool: memory that several graphs share, of ``torch.cuda.graph_pool_handle``; None: its own.
    """
    collected = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            yield
    finally:
        if collected:
            gc.enable()
