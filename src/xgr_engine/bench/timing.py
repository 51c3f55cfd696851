"""Time of a call that only queues work: CUDA graph replays on a GPU, the clock on a CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from xgr_engine.search.capture import capturing


def call_ms(
    calls: Sequence[Callable[[], object]], device: torch.device, seconds: float = 0.3, repeats: int = 5
) -> float:
    """Median milliseconds of one of ``calls``, which run one after the other.

    On a GPU they are captured in a graph, so that launches cost nothing, and replayed on a busy card. Give each call
    data of its own where one set would fit in the L2 cache.

    Args:
        seconds: for how long, about; on a GPU half of it keeps the card busy first, so that clocks are those of
            sustained work.
        repeats: times on a GPU that the median is taken of.
    """
    if device.type != "cuda":
        return _clock_ms(calls, seconds)
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):  # compile, and let libraries make their handles
        for call in calls:
            call()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        for call in calls:
            call()
    begin, rounds = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds / 2 or rounds < 2:
        graph.replay()
        torch.cuda.synchronize(device)
        rounds += 1
    inner = max(1, min(50, rounds // 5))  # so many that the events' own cost does not show
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    times: list[float] = []
    for _ in range(repeats):
        start.record()
        for _ in range(inner):
            graph.replay()
        stop.record()
        torch.cuda.synchronize(device)
        times.append(start.elapsed_time(stop) / inner / len(calls))
    return statistics.median(times)


def _clock_ms(calls: Sequence[Callable[[], object]], seconds: float) -> float:
    for call in calls:
        call()
    times: list[float] = []
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds or len(times) < 3:
        start = time.perf_counter()
        for call in calls:
            call()
        times.append((time.perf_counter() - start) * 1e3 / len(calls))
    return statistics.median(times)
