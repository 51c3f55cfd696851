"""Timing on a GPU the way the figures in docs/performance.md were taken."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch


def graph_ms(calls: Sequence[Callable[[], object]], *, warm_s: float = 0.15, repeats: int = 7) -> float:
    """Median milliseconds of one call, from replays of a CUDA graph holding all ``calls`` one after the other.

    Give each call its own inputs where a single set would fit in the L2 cache. The card is kept busy for ``warm_s``
    first, so that clocks are those of sustained work.
    """
    for call in calls:  # compile, and let libraries make their handles
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin = time.perf_counter()
    rounds = 0
    while time.perf_counter() - begin < warm_s:
        graph.replay()
        torch.cuda.synchronize()
        rounds += 1
    # enough replays a measurement that the events' own cost does not show
    inner = max(1, min(50, rounds // 4))
    times: list[float] = []
    for _ in range(repeats):
        start.record()
        for _ in range(inner):
            graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / inner / len(calls))
    return statistics.median(times)


def ceilings() -> dict[str, float]:
    """What this card reaches: bf16 matrix product in TFLOP/s and device copy in TB/s (read plus write), sustained."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = graph_ms([lambda: a @ b] * 4, warm_s=1.0)
    source = torch.randn(2**30, device="cuda")
    target = torch.empty_like(source)
    copy = graph_ms([lambda: target.copy_(source)] * 4)
    return {"matmul_tflops": 2 * 8192**3 / product / 1e9, "copy_tbs": 2 * source.nbytes / copy / 1e9}


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """``|out - reference| / |reference|`` in float64; NaN anywhere gives NaN."""
    reference = reference.double()
    return float((out.double() - reference).norm() / reference.norm())
