"""Online mode: requests arrive at random, whoever waits is batched, and the P99 of the whole wait must hold.

Open loop: arrivals follow a Poisson process fixed beforehand and do not slow down when the engine falls behind. A
request's latency counts from its arrival to its answer, queueing included. Who is computed next is decided by the
engine's own scheduler (:mod:`xgr_engine.xschedule.online`), the same for every contender, with a latency model that
learns from each contender's own batches.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np

from xgr_engine.bench.baselines.base import Contender, NotAvailableError, make_contender
from xgr_engine.bench.cost import rows_a_level
from xgr_engine.bench.memory import free_device_bytes, free_memory, peak_memory
from xgr_engine.bench.workloads import Batch, Prompt, Workload
from xgr_engine.xschedule.engines import is_out_of_memory
from xgr_engine.xschedule.online import OnlineScheduler
from xgr_engine.xschedule.scheduler import BatchLimits, largest_captured

T = TypeVar("T")
Note = Callable[[str], None]
MOST_USERS = 64  # per batch; larger ones gain nothing under a limit of a fraction of a second
_PROBED_USERS = 8
_STEPS = 5  # at most so many halvings of the interval that holds the highest rate
_CLOSE = 0.04  # or until its ends are this close, relative to the upper one
_LONGEST_TRIAL_S = 20.0  # a slow engine gets fewer requests, so that a trial ends in about this time
_FEWEST = 20
_TIMED_BATCHES = 3  # for the median time of a batch
_PROMPTS = 64  # different ones; requests beyond repeat them


@dataclass(frozen=True)
class Request:
    """A prompt and when it arrives, in seconds since the trial began."""

    arrival: float
    prompt: Prompt


@dataclass(frozen=True)
class Trials:
    """What a trial is.

    Attributes:
        slo_ms: what the P99 must keep.
        requests: at least so many, where 20 seconds suffice for them; seconds: and for at least so long.
    """

    slo_ms: float
    requests: int
    seconds: float

    def requests_at(self, rate: float) -> int:
        """How many requests a trial at ``rate`` has."""
        wanted = max(self.requests, rate * self.seconds)
        return int(max(_FEWEST, min(wanted, rate * _LONGEST_TRIAL_S)))


@dataclass(frozen=True)
class Trial:
    """One rate tried.

    Attributes:
        rate: requests a second offered; served: requests a second finished, the emptying of the queue included.
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


class Server:
    """A contender behind the scheduler.

    Args:
        contender: prepared for batches of ``users`` prompts of ``workload``.
        fixed_shapes: batches run in captured shapes of a few user counts.
    """

    def __init__(
        self, contender: Contender, workload: Workload, users: int, slo_ms: float, clock: Clock, *, fixed_shapes: bool
    ) -> None:
        self.contender = contender
        self.workload = workload
        self.clock = clock
        longest = max(workload.context, *(len(prompt) for prompt in workload.prompts), 1)
        limits = BatchLimits(
            tokens=(users + 1) * longest,
            rows=users,
            rows_per_user=1,
            longest_prompt=longest,
            fixed_shapes=fixed_shapes,
            level_rows=sum(rows_a_level(workload)),
        )
        self.scheduler: OnlineScheduler[Request] = OnlineScheduler(limits, slo_ms / 1e3)

    def warm_up(self) -> None:
        """Every shape that may come up is compiled and captured, and the latency model learns what each takes."""
        most, fixed = self.scheduler.limits.users, self.scheduler.limits.fixed_shapes
        for users in shapes(most) if fixed else sorted({1, (most + 1) // 2, most}):
            requests = [Request(0.0, prompt) for prompt in self.workload.batch(users, users).prompts]
            self.contender.run(Batch(tuple(request.prompt for request in requests)))
            for _ in range(2):
                self._compute(requests)

    def serve(self, requests: list[Request]) -> tuple[list[float], list[int], float]:
        """Compute the requests as they arrive.

        Returns:
            Latency in seconds of each request in order of arrival, the batch sizes, and the seconds it took.
        """
        begin = self.clock.now()
        waiting: deque[Request] = deque()
        latencies: list[float] = []
        sizes: list[int] = []
        upcoming = deque(requests)
        while upcoming or waiting:
            now = self.clock.now() - begin
            while upcoming and upcoming[0].arrival <= now:
                waiting.append(upcoming.popleft())
            if not waiting:
                self.clock.wait_until(begin + upcoming[0].arrival)
                waiting.append(upcoming.popleft())  # it is here, whatever rounding makes of the clock
                now = self.clock.now() - begin
            batch = self.scheduler.take(waiting, now)
            self._compute(batch)
            done = self.clock.now() - begin
            sizes.append(len(batch))
            latencies += [done - request.arrival for request in batch]  # the scheduler keeps the order of arrival
        return latencies, sizes, self.clock.now() - begin

    def _compute(self, batch: list[Request]) -> None:
        start = self.clock.now()
        self.contender.run(Batch(tuple(request.prompt for request in batch)))
        self.scheduler.observe(batch, self.clock.now() - start)


def shapes(users: int) -> list[int]:
    """Sizes of the captured shapes that batches of up to ``users`` run in: 1, 2, 3, 4, 6, 8, 12, ..."""
    return sorted({largest_captured(count) for count in range(1, users + 1)} | {users})


def poisson_requests(workload: Workload, rate: float, count: int, seed: int) -> list[Request]:
    """``count`` requests in ``count / rate`` seconds; prompts as the workload draws them.

    Given their number, the arrivals of a Poisson process are independent and uniform: so the rate is met exactly.
    """
    arrivals = np.sort(np.random.default_rng(seed).uniform(0.0, count / rate, count))
    prompts = [workload.batch(number, 1).prompts[0] for number in range(min(count, _PROMPTS))]
    return [Request(float(arrival), prompts[at % len(prompts)]) for at, arrival in enumerate(arrivals)]


def try_rate(server: Server, rate: float, slo_ms: float, count: int, seed: int = 0) -> Trial:
    """Offer one rate and judge it."""
    latencies, sizes, seconds = server.serve(poisson_requests(server.workload, rate, count, seed))
    p50, p99 = (float(np.percentile(latencies, percent)) * 1e3 for percent in (50, 99))
    return Trial(rate, count / seconds, p50, p99, p99 <= slo_ms, float(np.mean(sizes)), count)


def batch_ms(contender: Contender, workload: Workload, users: int, clock: Clock) -> float:
    """Median milliseconds of a batch, after one that is not counted."""
    batch, times = workload.batch(0, users), []
    contender.run(batch)
    for _ in range(_TIMED_BATCHES):
        start = clock.now()
        contender.run(batch)
        times.append((clock.now() - start) * 1e3)
    return float(np.median(times))


def users_within(alone_ms: float, together_ms: float, users: int, slo_ms: float) -> int:
    """The most users, of the shapes' sizes and up to :data:`MOST_USERS`, whose batch ends within the limit, from the
    time of one user and that of a batch of ``users``. 1 where even one takes longer."""
    slope = max(together_ms - alone_ms, 0.02 * together_ms) / (users - 1) if users > 1 else alone_ms
    return largest_captured(int(np.clip(1 + (slo_ms - alone_ms) / max(slope, 1e-9), 1, MOST_USERS)))


def highest_rate(
    server: Server, first_rate: float, trials: Trials, note: Note, deadline: float = float("inf")
) -> dict[str, Any]:
    """Search for the highest rate whose P99 keeps the limit.

    Args:
        server: warmed up.
        first_rate: an estimate of what it can serve at most.
        deadline: of ``time.monotonic``; no trial begins after it, except the first.

    Returns:
        The rate (None where none tried held), every trial on the way, and ``reason``: why there is no rate, or how far
        from the highest one it may be since the deadline ended the search.
    """
    low, high = 0.0, first_rate
    best: Trial | None = None
    tried: list[Trial] = []
    rate = 0.8 * first_rate
    reason = ""
    for step in range(_STEPS):
        if tried and time.monotonic() > deadline:
            reason = f"the time limit ended the search, the highest rate may lie anywhere up to {high:,.1f}"
            break
        trial = try_rate(server, rate, trials.slo_ms, trials.requests_at(rate), seed=step)
        tried.append(trial)
        note(
            f"    {trial.rate:,.1f} requests/s: P99 {trial.p99_ms:,.0f} ms of {trial.requests}, "
            f"{trial.mean_batch:.1f} users per batch"
        )
        if trial.holds:
            low, best = rate, trial
        else:
            high = rate
        if high - low <= _CLOSE * high:
            break
        rate = (low + high) / 2
    return {
        "rate": best.rate if best else None,
        "p99_ms": best.p99_ms if best else None,
        "mean_batch": best.mean_batch if best else None,
        "requests": best.requests if best else None,
        "reason": reason or ("" if best else "no rate tried kept the limit"),
        "trials": [asdict(trial) for trial in tried],
    }


def online_figures(name: str, workload: Workload, trials: Trials, note: Note, deadline: float) -> dict[str, Any]:
    """``status`` and ``rate`` of the contender of that name; where it ran, all of :func:`measure_online`."""
    contender = make_contender(name, deadline)
    if reason := contender.available(workload):
        return {"status": "not run", "reason": reason, "rate": None}
    try:
        found = measure_online(contender, workload, trials, note, deadline=deadline)
    except NotAvailableError as error:
        return {"status": "not run", "reason": error.what, "rate": None}
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return {"status": "out of memory", "rate": None}
    finally:
        contender.release()
        free_memory(workload.model.device)
    return {"status": "ok", **found}


def measure_online(
    contender: Contender,
    workload: Workload,
    trials: Trials,
    note: Note,
    clock: Clock | None = None,
    deadline: float = float("inf"),
) -> dict[str, Any]:
    """Prepare a contender for the largest batch that the limit and memory allow, and find its highest rate.

    Args:
        contender: not prepared; it is when this returns or raises, and the caller releases it.
        workload: its number of users does not matter.

    Returns:
        :func:`highest_rate`, the largest batch, and how far the latency model's predictions were off.
    """
    clock = clock or WallClock()
    device = workload.model.device
    ready_for, most_users = 0, MOST_USERS
    fitted, own = 0, None  # users whose batches were probed, and the bytes that they took on the device

    def prepare(users: int) -> None:
        nonlocal ready_for
        if ready_for:
            contender.release()
        ready_for = 0
        contender.prepare(replace(workload, users=users))
        ready_for = users

    def probe(users: int) -> tuple[float, float]:
        nonlocal own, fitted
        with peak_memory(device) as peak:
            prepare(users)
            alone_ms = batch_ms(contender, workload, 1, clock)
            together_ms = batch_ms(contender, workload, users, clock) if alone_ms <= trials.slo_ms else 0.0
        own, fitted = peak.device_own, users
        return alone_ms, together_ms

    def serve(users: int) -> dict[str, Any]:
        if users > ready_for:
            prepare(users)
        server = Server(contender, workload, users, trials.slo_ms, clock, fixed_shapes=device.type == "cuda")
        server.warm_up()
        largest_ms = batch_ms(contender, workload, users, clock)
        capacity = max(size / ms for size, ms in ((1, alone_ms), (users, largest_ms))) * 1e3
        found = highest_rate(server, capacity, trials, note, deadline)
        latency_model = server.scheduler.latency.report()
        return {"largest_batch": users, "batch_ms": largest_ms, **found, "latency_model": latency_model}

    def smaller(users: int) -> int:
        """After running out of memory: half, or what fits by the memory of the probed batches."""
        nonlocal ready_for, most_users
        contender.release()
        ready_for, most_users = 0, users - 1
        free_memory(device)
        fits = max(users // 2, fitted if fitted < users else 0)
        if own and (free := free_device_bytes(device)) is not None:
            fits = free * fitted * 9 // (own * 10)
        less = largest_captured(int(np.clip(fits, 1, users - 1)))
        note(f"    {users} users do not fit in memory, trying {less}")
        return less

    probed, (alone_ms, together_ms) = _within_memory(min(_PROBED_USERS, most_users), probe, smaller)
    if alone_ms > trials.slo_ms:
        why = f"one user takes {alone_ms:,.0f} ms"
        return {"slo_ms": trials.slo_ms, "rate": None, "p99_ms": None, "reason": why, "trials": []}
    users = min(most_users, users_within(alone_ms, together_ms, probed, trials.slo_ms))
    _, found = _within_memory(users, serve, smaller)
    return {"slo_ms": trials.slo_ms, **found}


def _within_memory(users: int, attempt: Callable[[int], T], smaller: Callable[[int], int]) -> tuple[int, T]:
    """An attempt with so many users, or with as few as memory takes, and how many these are.

    Raises:
        torch.OutOfMemoryError: one user is too many.
    """
    while True:
        try:
            return users, attempt(users)
        except Exception as error:
            if users == 1 or not is_out_of_memory(error):
                raise
        users = smaller(users)  # outside the handler: the exception holds what the attempt had allocated
