"""When a device was at work: intervals of a profiler's trace, and the gaps between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from xgr_engine.bench.phases import busy_time

_COPIES = ("Memcpy", "Memset")
# what a device's track may hold beside work: waits and marks
_NO_WORK = ("Stream Wait", "Event Sync", "Stream Sync", "Context Sync", "ProfilerStep", "Activity Buffer")


@dataclass(frozen=True)
class Interval:
    """Microseconds from an arbitrary zero."""

    name: str
    start: float
    end: float

    @property
    def is_copy(self) -> bool:
        """A copy or a fill by the driver, not a kernel."""
        return self.name.startswith(_COPIES)


@dataclass(frozen=True)
class Gap:
    """Time in which nothing ran, between the interval that ended last and the next to start."""

    start: float
    end: float
    before: str
    after: str

    @property
    def us(self) -> float:
        """Length."""
        return self.end - self.start


def traced(work: Callable[[], object], device: torch.device) -> list[Interval]:
    """What ran on the device during ``work``, by start: kernels, copies and fills of all streams.

    On a CPU operators that no other operator called stand in, so that scripts can be tried without a GPU. Kernels
    launched by a CUDA graph are listed one by one.
    """
    gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU]) as trace:
        work()
        if gpu:
            torch.cuda.synchronize(device)
    wanted = DeviceType.CUDA if gpu else DeviceType.CPU
    found = [
        Interval(event.name, float(event.time_range.start), float(event.time_range.end))
        for event in trace.events()
        if event.device_type == wanted
        and (gpu or event.cpu_parent is None)
        and not event.name.startswith(_NO_WORK)
        and event.time_range.end > event.time_range.start
    ]
    return sorted(found, key=lambda one: one.start)


def extent_us(intervals: list[Interval]) -> float:
    """From the first start to the last end."""
    return max(one.end for one in intervals) - intervals[0].start if intervals else 0.0


def gaps_between(intervals: list[Interval]) -> list[Gap]:
    """Every stretch between the first start and the last end in which none runs (ascending by start)."""
    found: list[Gap] = []
    last: Interval | None = None
    for one in intervals:
        if last is not None and one.start > last.end:
            found.append(Gap(last.end, one.start, last.name, one.name))
        if last is None or one.end > last.end:
            last = one
    return found


def gap_report(intervals: list[Interval], most: int = 10) -> dict[str, Any]:
    """The longest gaps between kernels, gaps by size, and pairs of kernels by the time lost between them.

    ``copies_us`` of a gap is the part of it in which the driver copies or fills.
    """
    kernels = [one for one in intervals if not one.is_copy]
    copies = [one for one in intervals if one.is_copy]
    gaps = gaps_between(kernels)
    pairs: dict[tuple[str, str], list[float]] = {}
    for gap in gaps:
        pairs.setdefault((_short(gap.before), _short(gap.after)), []).append(gap.us)
    longest = sorted(gaps, key=lambda gap: -gap.us)[:most]
    first = kernels[0].start if kernels else 0.0
    return {
        "largest": [
            {
                "us": round(gap.us, 1),
                "at_ms": round((gap.start - first) / 1e3, 2),
                "copies_us": round(_covered(copies, gap), 1),
                "before": _short(gap.before),
                "after": _short(gap.after),
            }
            for gap in longest
        ],
        "by_size": _by_size(gaps),
        "by_pair": [
            {"total_us": round(sum(lost), 1), "count": len(lost), "before": pair[0], "after": pair[1]}
            for pair, lost in sorted(pairs.items(), key=lambda entry: -sum(entry[1]))[:most]
        ],
    }


def kernel_totals(intervals: list[Interval], batches: int, most: int = 28) -> list[dict[str, Any]]:
    """Names by time: milliseconds and launches a batch."""
    totals: dict[str, list[float]] = {}
    for one in intervals:
        totals.setdefault(one.name, []).append(one.end - one.start)
    ranked = sorted(totals.items(), key=lambda entry: -sum(entry[1]))[:most]
    return [
        {
            "ms": round(sum(times) / 1e3 / batches, 3),
            "launches": round(len(times) / batches, 1),
            "name": _short(name),
        }
        for name, times in ranked
    ]


def _by_size(gaps: list[Gap]) -> list[dict[str, Any]]:
    edges = [0.0, 1.0, 2.0, 5.0, 20.0, 100.0, 1000.0, float("inf")]
    lines = []
    for low, high in pairwise(edges):
        inside = [gap.us for gap in gaps if low < gap.us <= high]
        lines.append({"above_us": low, "count": len(inside), "total_ms": round(sum(inside) / 1e3, 3)})
    return lines


def _covered(copies: list[Interval], gap: Gap) -> float:
    inside = [
        Interval(one.name, max(one.start, gap.start), min(one.end, gap.end))
        for one in copies
        if one.start < gap.end and one.end > gap.start
    ]
    return busy_time(inside)


def _short(name: str) -> str:
    return name[:90]
