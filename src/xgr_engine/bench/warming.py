"""A contender before it is timed: prepared, warmed up, its memory measured, and its answer taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from xgr_engine.bench.baselines.base import Contender, NotAvailableError
from xgr_engine.bench.measure import Budget, warm_up
from xgr_engine.bench.memory import Peak, free_memory, peak_memory
from xgr_engine.bench.row_record import Measured
from xgr_engine.bench.workloads import Batch, Workload

_COMPARED_USERS = 2
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
        raise NotAvailableError("the time limit was over while it was prepared")
    peaks: list[Peak] = []

    def run() -> None:
        with peak_memory(device) as peak:
            contender.run(batch)
        peaks.append(peak)

    ran_before = getattr(contender, "ran_while_prepared", False)
    found.samples = warm_up(run, budget.seconds, over=budget.over, ran_before=ran_before)
    # of the last run alone: what preparing tried and gave back does not count, what it kept does
    found.peak = replace(peaks[-1], device_before=whole.device_before, host_before=whole.host_before)
    if (own_peak := getattr(contender, "own_peak", None)) is not None:
        found.peak, found.own_weights = own_peak, True
    found.answer = getattr(contender, "run_scored", contender.run)(compared_batch(workload))
    found.notes = list(getattr(contender, "notes", []))
    if found.samples.seconds:
        found.interleaved = False
        found.notes.append("one run by itself: so long a batch is not computed again between those of others")


def _load(contender: Contender, workload: Workload) -> None:
    """Use a contender once on next to nothing: the libraries and kernels that a process loads with its first use would
    else count as memory of the first row."""
    if contender.name in _loaded:
        return
    _loaded.add(contender.name)
    search = replace(workload.search, beam=min(4, workload.search.beam), top_k=1)
    small = replace(workload, users=1, search=search)
    contender.prepare(small)
    contender.run(small.batch(0))
    contender.release()
