"""Online mode: requests arrive at random, whoever waits is batched, and the P99 of the whole wait must hold.

Open loop: arrivals follow a Poisson process fixed beforehand and do not slow down when the engine falls behind. A
request's latency counts from its arrival to its answer, queueing included.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from xgr_engine.bench.baselines.base import Contender
from xgr_engine.bench.measure import quantile
from xgr_engine.bench.workloads import Batch, Prompt, Workload

Note = Callable[[str], None]
_STEPS = 5  # halvings of the interval that holds the highest rate
_CLOSE = 0.04  # or until its ends are this close
_TRIAL_S = 10.0  # a slow engine gets fewer requests, so that a trial ends in about this time
_FEWEST = 20


@dataclass(frozen=True)
class Request:
    """A prompt and when it arrives, in seconds since the trial began."""

    arrival: float
    prompt: Prompt


class BatchPolicy(Protocol):
    """Decides who is computed next. A scheduler of the engine can take this place."""

    def take(self, waiting: deque[Request], now: float) -> list[Request]:
        """Remove the next batch from ``waiting`` (oldest first, not empty); an empty list waits for more."""
        ...


@dataclass(frozen=True)
class GreedyPolicy:
    """Everybody who waits, oldest first, up to ``users`` prompts and ``tokens`` prompt tokens; never waits for more."""

    users: int
    tokens: int

    def take(self, waiting: deque[Request], now: float) -> list[Request]:
        """As :class:`BatchPolicy`."""
        batch: list[Request] = []
        tokens = 0
        while waiting and len(batch) < self.users:
            tokens += len(waiting[0].prompt)
            if batch and tokens > self.tokens:
                break
            batch.append(waiting.popleft())
        return batch


@dataclass(frozen=True)
class Trial:
    """One rate tried.

    Attributes:
        rate: requests a second offered; served: requests a second finished.
        p50_ms, p99_ms: latency with queueing; holds: whether the P99 kept the limit.
        mean_batch: users a batch.
    """

    rate: float
    served: float
    p50_ms: float
    p99_ms: float
    holds: bool
    mean_batch: float
    requests: int


class Clock(Protocol):
    """Time of a trial; tests put their own in place."""

    def now(self) -> float:
        """Seconds."""
        ...

    def wait_until(self, moment: float) -> None:
        """Return at ``moment`` or later."""
        ...


class WallClock:
    """Real time."""

    def now(self) -> float:
        """Seconds of the performance counter."""
        return time.perf_counter()

    def wait_until(self, moment: float) -> None:
        """Sleep, and spin over the last millisecond."""
        while (left := moment - time.perf_counter()) > 0:
            if left > 1e-3:
                time.sleep(left - 1e-3)


def run_trial(
    run: Callable[[Batch], object], requests: list[Request], policy: BatchPolicy, clock: Clock
) -> tuple[list[float], list[int], float]:
    """Serve the requests.

    Returns:
        Latency in seconds of each request in order of arrival, the batch sizes, and the seconds the trial took.
    """
    begin = clock.now()
    waiting: deque[Request] = deque()
    finished: dict[float, float] = {}
    sizes: list[int] = []
    upcoming = deque(requests)
    while upcoming or waiting:
        now = clock.now() - begin
        while upcoming and upcoming[0].arrival <= now:
            waiting.append(upcoming.popleft())
        batch = policy.take(waiting, now) if waiting else []
        if not batch:
            if not upcoming:
                raise RuntimeError("the batch policy holds requests back though nobody else will come")
            clock.wait_until(begin + upcoming[0].arrival)
            waiting.append(upcoming.popleft())  # it is here, whatever rounding makes of the clock
            continue
        run(Batch(tuple(request.prompt for request in batch)))
        done = clock.now() - begin
        sizes.append(len(batch))
        finished |= {request.arrival: done - request.arrival for request in batch}
    return [finished[request.arrival] for request in requests], sizes, clock.now() - begin


def poisson_requests(workload: Workload, rate: float, count: int, seed: int) -> list[Request]:
    """``count`` requests at ``rate`` a second on average; prompts as the workload draws them."""
    generator = np.random.default_rng(seed)
    arrivals = np.cumsum(generator.exponential(1.0 / rate, count))
    prompts = [workload.batch(number, 1).prompts[0] for number in range(min(count, 64))]
    return [Request(float(arrival), prompts[at % len(prompts)]) for at, arrival in enumerate(arrivals)]


def try_rate(
    contender: Contender,
    workload: Workload,
    policy: BatchPolicy,
    rate: float,
    slo_ms: float,
    count: int,
    clock: Clock | None = None,
    seed: int = 0,
) -> Trial:
    """Offer one rate and judge it."""
    requests = poisson_requests(workload, rate, count, seed)
    latencies, sizes, seconds = run_trial(contender.run, requests, policy, clock or WallClock())
    p50, p99 = (float(np.percentile(latencies, percent)) * 1e3 for percent in (50, 99))
    return Trial(rate, count / seconds, p50, p99, p99 <= slo_ms, float(np.mean(sizes)), count)


def largest_batch(contender: Contender, workload: Workload, slo_ms: float) -> tuple[int, float]:
    """The most users whose batch takes at most half the limit (a request may have to wait for one batch before its
    own), and that batch's milliseconds. 1 user where even that takes longer."""
    users, best, best_ms = 1, 1, float("inf")
    while users <= workload.users:
        batch = workload.batch(0, users)
        contender.run(batch)
        times = []
        for _ in range(3):
            start = time.perf_counter()
            contender.run(batch)
            times.append((time.perf_counter() - start) * 1e3)
        found = quantile(times, 50)
        assert found is not None
        if users > 1 and found.value > slo_ms / 2:
            break
        best, best_ms = users, found.value
        users *= 2
    return best, best_ms


def highest_rate(
    contender: Contender,
    workload: Workload,
    slo_ms: float,
    count: int,
    note: Note,
    clock: Clock | None = None,
    deadline: float = float("inf"),
) -> dict[str, Any]:
    """Search for the highest rate whose P99 keeps the limit.

    Args:
        contender: prepared for ``workload``, whose number of users bounds the batches.
        count: requests of a trial, at most.
        deadline: of ``time.monotonic``; no trial begins after it.

    Returns:
        The rate (None where not even one user in time is possible) and every trial on the way.
    """
    users, batch_ms = largest_batch(contender, workload, slo_ms)
    for size in range(1, users + 1):  # every shape that may come up is compiled and captured before the clock runs
        contender.run(workload.batch(0, size))
    policy = GreedyPolicy(users, users * workload.context)
    trials: list[Trial] = []
    record: dict[str, Any] = {"slo_ms": slo_ms, "largest_batch": users, "batch_ms": batch_ms}
    if batch_ms > slo_ms:
        return {**record, "rate": None, "p99_ms": None, "reason": f"one user takes {batch_ms:,.0f} ms", "trials": []}
    low, high = 0.0, users / (batch_ms / 1e3)  # beyond it the queue grows without end
    best: Trial | None = None
    rate = 0.8 * high
    for _ in range(_STEPS):
        if trials and time.monotonic() > deadline:
            break
        requests = max(_FEWEST, min(count, int(rate * _TRIAL_S)))
        trial = try_rate(contender, workload, policy, rate, slo_ms, requests, clock)
        trials.append(trial)
        note(f"    {trial.rate:,.1f} requests/s: P99 {trial.p99_ms:,.0f} ms, {trial.mean_batch:.1f} users a batch")
        if trial.holds:
            low, best = rate, trial
        else:
            high = rate
        if high - low <= _CLOSE * high:
            break
        rate = (low + high) / 2
    return {
        **record,
        "rate": best.rate if best else None,
        "p99_ms": best.p99_ms if best else None,
        "reason": "" if best else "no rate tried kept the limit",
        "trials": [vars(trial) for trial in trials],
    }
