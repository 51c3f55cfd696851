"""Where the time of one batch goes: phases by clock, kinds of work by the profiler, and a timeline of both."""

from __future__ import annotations

import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from xgr_engine.bench.baselines.engine import Xgr
from xgr_engine.bench.workloads import Workload
from xgr_engine.models.packing import PackedPrompts

# First match wins; names of kernels (GPU) and operators (CPU) in lower case.
_KINDS = (
    ("head", r"logsumexp|log_softmax"),
    ("attention", r"attention|prefill_kernel|flash|fmha|sdpa|merge_states|aten::_?softmax|bmm"),
    (
        "selection",
        r"topk|sort|select_kernel|shortlist|score_kernel|expand_kernel|searchsorted|cumsum|scatter|nonzero|masked_fill",
    ),
    ("linear", r"swiglu_kernel|gemm|cutlass|nvjet|xmma|splitk|::mm$|::addmm|linear|matmul"),
    ("copy", r"memcpy|memset|copy_|::to$|_to_copy|::fill_|pin_memory"),
    (
        "elementwise",
        r"norm|silu|rope|elementwise|embedding|::mul|::add|rsqrt|::cat|index|gather|pow|mean|where|::sub|sigmoid|clamp|square",
    ),
)
_REPEATS = 5  # of each phase, for its median
_SLOW_MS = 1000.0  # each phase of a slower batch is timed once: this part may begin when the time limit is over
_MAX_SPANS = 400  # rectangles of the timeline


@dataclass(frozen=True)
class Span:
    """Microseconds from the first to the last piece of one kind of work in a row."""

    kind: str
    start: float
    end: float


class Stretch(Protocol):
    """Something that runs from ``start`` to ``end``."""

    @property
    def start(self) -> float: ...

    @property
    def end(self) -> float: ...


def trace_batch(workload: Workload, record: dict[str, Any]) -> None:
    """Look into one batch of the engine: fills ``phases`` and ``timeline`` of a benchmark's record."""
    contender, batch = Xgr(), workload.batch(0)

    def run() -> None:
        contender.run(batch)

    contender.prepare(workload)
    run()
    latency = _median_ms(run, 1)
    repeats = 1 if latency > _SLOW_MS else _REPEATS
    if repeats > 1:
        latency = _median_ms(run, repeats)
    shape = {"model": workload.model.name, "context": workload.context, "users": workload.users}
    shape["beam"] = workload.search.beam
    record["phases"] = {**shape, "latency_ms": latency, "ms": phase_times(contender, workload, latency, repeats)}
    record["timeline"] = {**shape, **timeline(run, workload.model.device)}
    contender.release()


def phase_times(contender: Xgr, workload: Workload, latency_ms: float, repeats: int) -> dict[str, float]:
    """Milliseconds of a batch in the prefill, in all levels after it, and in ranking on the host.

    The prefill and the ranking are measured on their own; the levels are what is left of ``latency_ms``.
    """
    recommender, batch = contender.recommender, workload.batch(0)
    assert recommender is not None
    model, device = workload.model.decoder, workload.model.device
    pack = PackedPrompts.of(list(batch.prompts), device, share=model.causal)
    _synchronize(device)
    lane = recommender.lane
    cache = model.new_cache(pack.cache_tokens, len(batch.prompts), 1) if lane is None else None

    @torch.inference_mode()
    def prefill() -> None:
        if lane is not None:  # as the engine runs it, in its graph where it has one
            with torch.cuda.stream(lane.stream):
                lane.prefill.run(pack)
        elif cache is not None:
            model.prefill(pack, cache)
        _synchronize(device)

    prefill()
    prefill_ms = _median_ms(prefill, repeats)
    ranking = []
    for _ in range(repeats):
        pending = contender.submit(batch)
        _synchronize(device)
        start = time.perf_counter()
        contender.collect(pending)
        ranking.append(time.perf_counter() - start)
    rank_ms = statistics.median(ranking) * 1e3
    return {"prefill": prefill_ms, "levels": max(0.0, latency_ms - prefill_ms - rank_ms), "ranking": rank_ms}


def _median_ms(call: Callable[[], None], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) * 1e3


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timeline(run: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """Profile one batch: spans by kind, each kind's share of the busy time, and how busy the device was.

    On a GPU spans are kernels, on a CPU operators that no other operator called.
    """
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]
    run()
    with profile(activities=activities, acc_events=True) as profiler:
        start = time.perf_counter()
        run()
        _synchronize(device)
        wall_us = (time.perf_counter() - start) * 1e6
    wanted = DeviceType.CUDA if on_gpu else DeviceType.CPU
    spans = [
        Span(kind_of(event.name), float(event.time_range.start), float(event.time_range.end))
        for event in profiler.events()
        if event.device_type == wanted and (on_gpu or event.cpu_parent is None) and _is_work(event.name)
    ]
    spans.sort(key=lambda span: span.start)
    if not spans:
        return {"spans": [], "shares": {}, "busy": None, "span_us": 0.0, "wall_us": wall_us, "unit": "none recorded"}
    first = spans[0].start
    time_by_kind: dict[str, float] = defaultdict(float)
    for span in spans:
        time_by_kind[span.kind] += span.end - span.start
    total = sum(time_by_kind.values())
    extent = max(span.end for span in spans) - first
    merged = merge_spans(spans, extent)
    return {
        "spans": [[span.kind, round(span.start - first, 1), round(span.end - first, 1)] for span in merged],
        "shares": {kind: time / total for kind, time in sorted(time_by_kind.items(), key=lambda pair: -pair[1])},
        "busy": busy_time(spans) / extent if extent else None,
        "span_us": extent,
        "wall_us": wall_us,
        "unit": "kernels" if on_gpu else "operators",
    }


def kind_of(name: str) -> str:
    """The kind of work a kernel or operator does, by its name."""
    lower = name.lower()
    return next((kind for kind, pattern in _KINDS if re.search(pattern, lower)), "other")


def _is_work(name: str) -> bool:
    return not name.startswith(("cudaLaunch", "cudaStream", "cudaEvent", "ProfilerStep", "[memory]"))


def busy_time(spans: Iterable[Stretch]) -> float:
    """Length of the union of the spans (ascending by start): the time in which at least one runs."""
    total, end = 0.0, float("-inf")
    for span in spans:
        total += max(0.0, span.end - max(span.start, end))
        end = max(end, span.end)
    return total


def merge_spans(spans: list[Span], extent: float, limit: int = _MAX_SPANS) -> list[Span]:
    """Few enough spans to draw: neighbours of one kind become one while the gap between them cannot be seen."""
    gap = extent / 2000
    while True:
        last: dict[str, Span] = {}
        merged: list[Span] = []
        for span in spans:
            before = last.get(span.kind)
            if before is not None and span.start - before.end <= gap:
                last[span.kind] = Span(span.kind, before.start, max(before.end, span.end))
            else:
                if before is not None:
                    merged.append(before)
                last[span.kind] = span
        merged += last.values()
        if len(merged) <= limit:
            return sorted(merged, key=lambda span: span.start)
        gap *= 2
