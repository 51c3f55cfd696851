"""Samples and what may be said of them: quantiles with bootstrap intervals, warm-up until stable, A B A B."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

# Fewer samples than these say nothing about such a tail.
_NEEDED = {50: 1, 90: 10, 99: 50}
_RESAMPLES = 1000
_LATE_SAMPLES, _QUICK_S = 3, 0.5  # samples of a contender that takes less than that, when time is over
_STABLE = 0.05  # spread of the last runs relative to their median
_LONG_S = 3.0  # the drift that interleaving is for is small beside such a run


@dataclass(frozen=True)
class Budget:
    """Seconds of latency samples a contender, the most samples, and when (monotonic clock) no other may begin."""

    seconds: float
    max_repeats: int
    deadline: float = float("inf")

    def over(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() > self.deadline


@dataclass(frozen=True)
class Estimate:
    """A figure with its 95 % interval (equal to the figure where one sample is all there is)."""

    value: float
    low: float
    high: float

    def scaled(self, factor: float) -> Estimate:
        return Estimate(self.value * factor, self.low * factor, self.high * factor)

    def inverse(self, numerator: float) -> Estimate:
        """``numerator / figure``: a rate from a time."""
        return Estimate(numerator / self.value, numerator / self.high, numerator / self.low)

    def to_json(self) -> dict[str, float]:
        return {"value": self.value, "low": self.low, "high": self.high}


def quantile(samples: Sequence[float], percent: int) -> Estimate | None:
    """A percentile with its bootstrap 95 % interval; None where the samples are too few for that tail."""
    values = np.asarray(samples, np.float64)
    if len(values) < _NEEDED.get(percent, 1):
        return None
    generator = np.random.default_rng(0)
    drawn = values[generator.integers(0, len(values), (_RESAMPLES, len(values)))]
    low, high = np.percentile(np.percentile(drawn, percent, axis=1), [2.5, 97.5])
    return Estimate(float(np.percentile(values, percent)), float(low), float(high))


@dataclass
class Samples:
    """Seconds of single runs of one contender, in the order they were taken."""

    seconds: list[float] = field(default_factory=list)
    warm_up: int = 0
    stable: bool = False

    def summary(self) -> dict[str, object]:
        """Milliseconds: p50, p90, p99 with intervals (null where the samples are too few), and their number."""
        milliseconds = [second * 1e3 for second in self.seconds]
        quantiles = {percent: quantile(milliseconds, percent) for percent in (50, 90, 99)}
        return {
            **{f"p{percent}": found and found.to_json() for percent, found in quantiles.items()},
            "samples": len(milliseconds),
            "warm_up_runs": self.warm_up,
            "stable": self.stable,
        }


def _in_time() -> bool:
    """No limit."""
    return False


def warm_up(
    run: Callable[[], object],
    budget_s: float,
    clock: Callable[[], float] = time.perf_counter,
    over: Callable[[], bool] = _in_time,
    ran_before: bool = False,
) -> Samples:
    """Run until the last three runs lie within 5 % of their median, or the budget is spent; at least once.

    Args:
        over: whether no further run may begin.
        ran_before: it was run while it was prepared. Where its first run here takes longer than the budget and than
            3 s, that run is its sample: a batch of minutes is not computed twice to be timed once.

    Returns:
        Samples without any sample but such a one, holding the number of warm-up runs and whether they became stable.
    """
    taken: list[float] = []
    begin = clock()
    while True:
        start = clock()
        run()
        taken.append(clock() - start)
        if ran_before and len(taken) == 1 and taken[0] > max(budget_s, _LONG_S):
            return Samples(seconds=taken)
        last = taken[-3:]
        middle = float(np.median(last))
        stable = len(taken) > 3 and max(last) - min(last) <= _STABLE * middle
        if stable or clock() - begin + middle > budget_s or over():
            return Samples(warm_up=len(taken), stable=stable)


def interleaved(
    runs: Mapping[str, Callable[[int], float | None]],
    samples: Mapping[str, Samples],
    budget_s: float,
    max_repeats: int,
    clock: Callable[[], float] = time.perf_counter,
    over: Callable[[], bool] = _in_time,
) -> dict[str, Exception]:
    """Time the runs in rounds A B C, A B C, ..., so that drift of the machine meets everybody alike.

    Each gets at least one sample, and a further one while its samples so far and the next fit its budget. Who brings
    a sample from its warm-up has its own already.

    Args:
        runs: called with the number of the round; one that has a clock of its own (in another process, say) returns
            the seconds that count.
        samples: where the seconds go.
        over: whether the time is over: then only everybody's first sample is begun, and two more of who is quick.

    Returns:
        What stopped those that raised; they keep the samples that they have, and the others go on.
    """
    waiting = [name for name in runs if not samples[name].seconds]
    lost: dict[str, Exception] = {}

    def due(name: str, number: int) -> bool:
        quick = number < _LATE_SAMPLES and samples[name].seconds[-1:] < [_QUICK_S]
        return name not in lost and (number == 0 or quick or not over())

    for number in range(max_repeats):
        for name in waiting:
            if not due(name, number):
                continue
            start = clock()
            try:
                own = runs[name](number)
            except Exception as error:
                lost[name] = error.with_traceback(None)  # whose frames would keep what the run had allocated
            else:
                samples[name].seconds.append(clock() - start if own is None else own)
        waiting = [name for name in waiting if due(name, number + 1) and _another_fits(samples[name].seconds, budget_s)]
        if not waiting:
            break
    return lost


def _another_fits(seconds: Sequence[float], budget_s: float) -> bool:
    return sum(seconds) + float(np.median(seconds)) <= budget_s
