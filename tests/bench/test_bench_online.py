"""Online mode on a clock of its own: queueing is counted, the limit decides, arrivals do not wait."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from bench_support import tiny_workload

from xgr_engine.bench.online import GreedyPolicy, Request, highest_rate, poisson_requests, run_trial, try_rate
from xgr_engine.bench.workloads import Batch


class FakeTime:
    """A clock that the engine below moves."""

    def __init__(self) -> None:
        self.moment = 0.0

    def now(self) -> float:
        return self.moment

    def wait_until(self, moment: float) -> None:
        self.moment = max(self.moment, moment)


def _requests(*arrivals: float) -> list[Request]:
    return [Request(arrival, np.zeros(3, np.int32)) for arrival in arrivals]


def test_waiting_for_the_batch_before_counts() -> None:
    clock = FakeTime()

    def run(batch: Batch) -> None:
        clock.moment += 1.0

    latencies, sizes, seconds = run_trial(run, _requests(0.0, 0.1, 0.2, 5.0), GreedyPolicy(2, 100), clock)
    # the first is alone; the next two wait for it and go together; the last finds an idle engine
    assert latencies == pytest.approx([1.0, 1.9, 1.8, 1.0])
    assert sizes == [1, 2, 1]
    assert seconds == pytest.approx(6.0)


def test_batches_keep_both_limits_and_the_order() -> None:
    waiting = deque(Request(at, np.zeros(size, np.int32)) for at, size in enumerate((4, 4, 4, 50, 1)))
    policy = GreedyPolicy(users=3, tokens=10)
    taken = [[len(request.prompt) for request in policy.take(waiting, 0.0)] for _ in range(4)]
    assert taken == [[4, 4], [4], [50], [1]]  # a prompt beyond the limit goes alone
    assert not waiting


def test_a_policy_that_holds_everybody_back_is_an_error() -> None:
    class Never:
        def take(self, waiting: deque[Request], now: float) -> list[Request]:
            return []

    with pytest.raises(RuntimeError, match="holds requests back"):
        run_trial(lambda batch: None, _requests(0.0), Never(), FakeTime())


def test_arrivals_are_poisson_and_fixed_by_the_seed() -> None:
    requests = poisson_requests(tiny_workload(), 50.0, 4000, seed=3)
    gaps = np.diff([request.arrival for request in requests])
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.05)
    assert gaps.std() == pytest.approx(1 / 50, rel=0.1)
    again = poisson_requests(tiny_workload(), 50.0, 4000, seed=3)
    assert [request.arrival for request in again] == [request.arrival for request in requests]


class FixedCost:
    """An engine whose batches take 20 ms, and 2 ms a user."""

    def __init__(self, clock: FakeTime) -> None:
        self.clock = clock

    def run(self, batch: Batch) -> None:
        self.clock.moment += 0.020 + 0.002 * len(batch.prompts)


def test_a_rate_beyond_what_can_be_served_breaks_the_limit() -> None:
    clock = FakeTime()
    engine, policy, workload = FixedCost(clock), GreedyPolicy(8, 10_000), tiny_workload(users=8)
    slow = try_rate(engine, workload, policy, 50.0, 200.0, 400, clock)  # type: ignore[arg-type]
    assert slow.holds
    assert slow.p50_ms >= 22.0
    fast = try_rate(engine, workload, policy, 2000.0, 200.0, 400, clock)  # type: ignore[arg-type]
    assert not fast.holds
    assert fast.served < 250  # 8 users in 36 ms


def test_search_for_the_highest_rate_ends_where_the_limit_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeTime()
    monkeypatch.setattr("xgr_engine.bench.online.time.perf_counter", clock.now)
    found = highest_rate(FixedCost(clock), tiny_workload(users=8), 200.0, 300, lambda text: None, clock)  # type: ignore[arg-type]
    assert found["largest_batch"] == 8
    assert found["p99_ms"] <= 200.0
    assert 100 < found["rate"] < 8 / 0.036
    assert len(found["trials"]) >= 2
    none = highest_rate(FixedCost(clock), tiny_workload(users=8), 10.0, 20, lambda text: None, clock)  # type: ignore[arg-type]
    assert none["rate"] is None
    assert "one user takes" in none["reason"]
