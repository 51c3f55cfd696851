"""Time of a row's contenders: latency in rounds of all, then the rate of those that keep several batches in flight."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch

from xgr_engine.bench.baselines.base import Contender, OneAtATime
from xgr_engine.bench.measure import Budget, Estimate, interleaved, quantile
from xgr_engine.bench.memory import free_memory
from xgr_engine.bench.record import one_line
from xgr_engine.bench.row_record import Measured
from xgr_engine.bench.workloads import Batch, Workload
from xgr_engine.xschedule.engines import is_out_of_memory

_ROUNDS_OF_THROUGHPUT = 3
_DIFFERENT_BATCHES = 8  # prompts of timed rounds repeat after these


def take_samples(
    ready: Mapping[str, Contender], measured: Mapping[str, Measured], workload: Workload, budget: Budget
) -> None:
    """Time all that are ready; the figures go to ``measured``, under the same names."""
    device = workload.model.device
    batches = [workload.batch(number) for number in range(_DIFFERENT_BATCHES)]
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    runs = {name: _round_of(contender, batches) for name, contender in ready.items()}
    samples = {name: measured[name].samples for name in ready}
    lost = interleaved(runs, samples, budget.seconds, budget.max_repeats, over=budget.over)
    for name, contender in ready.items():
        found = measured[name]
        latency = quantile(found.samples.seconds, 50)
        if latency is None:
            found.fail(lost[name])
            continue
        if name in lost:
            found.notes.append(f"no further samples: {one_line(lost[name])}")
        if name in lost or isinstance(contender, OneAtATime) or device.type == "cpu":
            found.rate, found.rate_from = latency.inverse(workload.users), "median latency"
        else:
            found.rate, found.rate_from = _overlapped_rate(contender, batches, latency, workload, budget)
        if (statistics := getattr(contender, "statistics", None)) is not None:
            found.statistics = statistics()


def _round_of(contender: Contender, batches: Sequence[Batch]) -> Callable[[int], float | None]:
    def run(number: int) -> float | None:
        contender.run(batches[number % len(batches)])
        return getattr(contender, "own_seconds", None)

    return run


def _overlapped_rate(
    contender: Contender, batches: Sequence[Batch], latency: Estimate, workload: Workload, budget: Budget
) -> tuple[Estimate, str]:
    """Batches in flight need buffers of their own; where these do not fit, the rate is that of one at a time."""
    try:
        return _rate(contender, batches, latency.value, workload.users, budget), "batches in flight"
    except Exception as error:
        reason = "no memory for batches in flight" if is_out_of_memory(error) else one_line(error)
    free_memory(workload.model.device)
    return latency.inverse(workload.users), f"median latency: {reason}"


def _rate(contender: Contender, batches: Sequence[Batch], latency: float, users: int, budget: Budget) -> Estimate:
    """Users a second over runs of many batches; of few when the time is over."""
    late = budget.over()
    count = 3 if late else max(3, min(50, int(budget.seconds / _ROUNDS_OF_THROUGHPUT / latency)))
    flight = [batches[number % len(batches)] for number in range(count)]
    for _answer in contender.run_many(flight[:3]):  # the first overlap makes buffers and graphs
        pass
    rates = []
    for _ in range(1 if late else _ROUNDS_OF_THROUGHPUT):
        start = time.perf_counter()
        for _answer in contender.run_many(flight):
            pass
        rates.append(count * users / (time.perf_counter() - start))
    estimate = quantile(rates, 50)
    assert estimate is not None
    return estimate
