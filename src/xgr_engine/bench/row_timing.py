"""What is taken of one contender of a row, in this order: memory and warm-up, an answer, samples of latency, the rate.

Latency is sampled in rounds of all contenders; the rate is that of several batches in flight, for those that can.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from xgr_engine.bench.baselines.base import Contender, NotAvailableError, OneAtATime
from xgr_engine.bench.measure import Budget, Estimate, interleaved, quantile, warm_up
from xgr_engine.bench.memory import Peak, free_memory, peak_memory
from xgr_engine.bench.record import one_line
from xgr_engine.bench.row_record import Measured
from xgr_engine.bench.workloads import Batch, Workload
from xgr_engine.xschedule.engines import is_out_of_memory

_COMPARED_USERS = 2
_ROUNDS_OF_THROUGHPUT = 3
_DIFFERENT_BATCHES = 8  # prompts of timed rounds repeat after these
_loaded: set[str] = set()  # contenders that this process has used


def compared_batch(workload: Workload) -> Batch:
    """The prompts whose answers are compared."""
    return workload.batch(0, min(_COMPARED_USERS, workload.users))


def warm_and_answer(
    contender: Contender, found: Measured, workload: Workload, budget: Budget, late: Callable[[], bool]
) -> None:
    """Prepare ``contender`` and run it until its times are stable; what that shows goes to ``found``.

    Args:
        late: whether the time limit is over for this contender.

    Raises:
        NotAvailableError: it cannot run after all, or was not prepared in time.
    """
    device, batch = workload.model.device, workload.batch(0)
    if device.type == "cpu":
        _load(contender, workload)
    free_memory(device)
    with peak_memory(device) as whole:
        contender.prepare(workload)
    if late():
        raise NotAvailableError("the time limit passed while it was prepared")
    peaks: list[Peak] = []

    def run() -> None:
        with peak_memory(device) as peak:
            contender.run(batch)
        peaks.append(peak)

    ran_before = getattr(contender, "ran_while_prepared", False)
    found.samples = warm_up(run, budget.seconds, over=budget.over, ran_before=ran_before)
    # of the last run alone: what preparing allocated and gave back does not count, what it kept does
    found.peak = replace(peaks[-1], device_before=whole.device_before, host_before=whole.host_before)
    if (own_peak := getattr(contender, "own_peak", None)) is not None:
        found.peak, found.own_weights = own_peak, True
    found.answer = getattr(contender, "run_scored", contender.run)(compared_batch(workload))
    found.notes = list(getattr(contender, "notes", []))
    if found.samples.seconds:
        found.interleaved = False
        found.notes.append("one run, timed by itself: a batch this long is not run again between those of others")


def _load(contender: Contender, workload: Workload) -> None:
    """Use a contender once on a tiny workload: otherwise the libraries and kernels that a process loads on first use
    would count as memory of the first row."""
    if contender.name in _loaded:
        return
    _loaded.add(contender.name)
    search = replace(workload.search, beam=min(4, workload.search.beam), top_k=1)
    small = replace(workload, users=1, search=search)
    contender.prepare(small)
    contender.run(small.batch(0))
    contender.release()


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
