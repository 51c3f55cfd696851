"""Timing on a GPU the way the figures in docs/performance.md were taken."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from xgr_engine.bench.timing import call_ms


def graph_ms(calls: Sequence[Callable[[], object]], *, seconds: float = 0.3) -> float:
    """:func:`call_ms` on the current GPU, the median of seven."""
    return call_ms(calls, torch.device("cuda", torch.cuda.current_device()), seconds, repeats=7)


def capture(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of all calls, each of which has run before, so that kernels are compiled."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def span_ms(run: Callable[[], object], calls: int, least_s: float) -> float:
    """Milliseconds a call between two events around ``run``, which makes ``calls`` of them, repeated for ``least_s``.

    For candidates that are timed in turns, round after round.
    """
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    run()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    torch.cuda.synchronize()
    inner = max(1, int(least_s / max(1e-6, time.perf_counter() - begin)))
    start.record()
    for _ in range(inner):
        run()
    stop.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(stop)) / inner / calls


def ceilings() -> dict[str, float]:
    """What this card reaches: bf16 matrix product in TFLOP/s and device copy in TB/s (read plus write), sustained."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = graph_ms([lambda: a @ b] * 4, seconds=2.0)
    source = torch.randn(2**30, device="cuda")
    target = torch.empty_like(source)
    copy = graph_ms([lambda: target.copy_(source)] * 4)
    return {"matmul_tflops": 2 * 8192**3 / product / 1e9, "copy_tbs": 2 * source.nbytes / copy / 1e9}


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """``|out - reference| / |reference|`` in float64; NaN anywhere gives NaN."""
    reference = reference.double()
    return float((out.double() - reference).norm() / reference.norm())
