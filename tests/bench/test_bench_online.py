"""Online mode on a clock of its own: queueing is counted, the limit decides, arrivals do not wait."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest
from bench_support import tiny_workload

from xgr_engine.bench.memory import Peak
from xgr_engine.bench.online import (
    MOST_USERS,
    Request,
    Server,
    Trials,
    measure_online,
    poisson_requests,
    shapes,
    try_rate,
    users_within,
)
from xgr_engine.bench.workloads import Batch, Workload
from xgr_engine.search.graphed import _GRAPHS_KEPT, places_for
from xgr_engine.xschedule.online import OnlineScheduler


class FakeTime:
    """A clock that the engine below moves."""

    def __init__(self) -> None:
        self.moment = 0.0

    def now(self) -> float:
        return self.moment

    def wait_until(self, moment: float) -> None:
        self.moment = max(self.moment, moment)


class FixedCost:
    """An engine whose batches take 20 ms, and 2 ms a user."""

    def __init__(self, clock: FakeTime, fixed: float = 0.020, each: float = 0.002) -> None:
        self.clock = clock
        self.fixed, self.each = fixed, each
        self.prepared: list[int] = []
        self.sizes: list[int] = []

    def prepare(self, workload: Workload) -> None:
        self.prepared.append(workload.users)

    def release(self) -> None:
        pass

    def run(self, batch: Batch) -> None:
        assert len(batch.prompts) <= (self.prepared or [MOST_USERS])[-1]
        self.sizes.append(len(batch.prompts))
        self.clock.moment += self.fixed + self.each * len(batch.prompts)


def server(engine: FixedCost, users: int, slo_ms: float = 200.0) -> Server:
    return Server(engine, tiny_workload(), users, slo_ms, engine.clock, fixed_shapes=True)  # type: ignore[arg-type]


def _requests(*arrivals: float) -> list[Request]:
    return [Request(arrival, np.zeros(13, np.int32)) for arrival in arrivals]


def test_waiting_for_the_batch_before_counts() -> None:
    engine = FixedCost(FakeTime(), fixed=1.0, each=0.0)
    latencies, sizes, seconds = server(engine, 2, 1e6).serve(_requests(0.0, 0.1, 0.2, 5.0))
    # the first is alone; the next two wait for it and go together; the last finds an idle engine
    assert latencies == pytest.approx([1.0, 1.9, 1.8, 1.0])
    assert sizes == [1, 2, 1]
    assert seconds == pytest.approx(6.0)


def test_the_engine_s_own_scheduler_decides_and_learns_from_measured_batches() -> None:
    """A limit of 60 ms holds 20 users; a backlog is worked off in batches that take half of it."""
    engine = FixedCost(FakeTime())
    busy = server(engine, 64, slo_ms=60.0)
    assert isinstance(busy.scheduler, OnlineScheduler)
    busy.warm_up()
    report = busy.scheduler.latency.report()
    assert report["observed_batches"] == 2 * len(shapes(64))
    assert report["seconds_a_batch"] == pytest.approx(0.020, rel=0.02)
    assert report["relative_error"]["p90_abs"] < 0.05
    _, sizes, _ = busy.serve(_requests(*[0.0] * 200))
    assert sizes[0] == 16  # 20 would end in time, but a shape of 24 would run for them
    assert set(sizes[1:-1]) == {4}


def test_arrivals_are_poisson_and_fixed_by_the_seed() -> None:
    requests = poisson_requests(tiny_workload(), 50.0, 4000, seed=3)
    gaps = np.diff([request.arrival for request in requests])
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.01)
    assert gaps.std() == pytest.approx(1 / 50, rel=0.1)
    again = poisson_requests(tiny_workload(), 50.0, 4000, seed=3)
    assert [request.arrival for request in again] == [request.arrival for request in requests]


def test_a_rate_beyond_what_can_be_served_breaks_the_limit() -> None:
    busy = server(FixedCost(FakeTime()), 8)
    busy.warm_up()
    slow = try_rate(busy, 50.0, 200.0, 400)
    assert slow.holds
    assert slow.p50_ms >= 22.0
    fast = try_rate(busy, 2000.0, 200.0, 400)
    assert not fast.holds
    assert fast.served < 250  # 8 users in 36 ms


def test_search_for_the_highest_rate_ends_where_the_limit_holds() -> None:
    engine = FixedCost(FakeTime())
    trials = Trials(200.0, 300, 4.0)
    found = measure_online(engine, tiny_workload(), trials, lambda text: None, engine.clock)  # type: ignore[arg-type]
    assert found["largest_batch"] == 64  # 148 ms
    assert engine.prepared == [8, 64]
    assert found["p99_ms"] <= 200.0
    # 90 users take 200 ms at once, but whoever waits for a batch of 40 has 100 ms left for the next of 40
    assert 250 < found["rate"] < 64 / 0.148
    assert len(found["trials"]) >= 2
    assert all(trial["requests"] >= 300 for trial in found["trials"])
    assert found["latency_model"]["relative_error"]["p90_abs"] < 0.05
    impossible = Trials(10.0, 20, 0.1)
    none = measure_online(engine, tiny_workload(), impossible, lambda text: None, engine.clock)  # type: ignore[arg-type]
    assert none["rate"] is None
    assert "one user takes" in none["reason"]


@pytest.mark.parametrize("each", [0.002, 0.050])
def test_a_search_that_the_deadline_ends_says_how_high_the_rate_may_be(each: float) -> None:
    """The first trial is made in any case; what it leaves open is not what cannot be served."""
    engine = FixedCost(FakeTime(), each=each)
    trials = Trials(200.0, 300, 4.0)
    found = measure_online(engine, tiny_workload(), trials, lambda text: None, engine.clock, deadline=0.0)  # type: ignore[arg-type]
    (trial,) = found["trials"]
    open_to = trial["rate"] / 0.8 if trial["holds"] else trial["rate"]
    assert found["reason"].startswith("the time limit ended the search")
    assert found["reason"].endswith(f"up to {open_to:,.1f}")
    assert found["rate"] == (trial["rate"] if trial["holds"] else None)


class Greedy(FixedCost):
    """Has memory for so many users."""

    def __init__(self, clock: FakeTime, room: int, most: str = "prepare") -> None:
        super().__init__(clock)
        self.room, self.most = room, most

    def prepare(self, workload: Workload) -> None:
        super().prepare(workload)
        if self.most == "prepare" and workload.users > self.room:
            raise MemoryError

    def run(self, batch: Batch) -> None:
        super().run(batch)
        if len(batch.prompts) > self.room:
            raise MemoryError


@pytest.mark.parametrize(
    ("room", "prepared"), [(64, [8, 64]), (40, [8, 64, 32]), (15, [8, 64, 32, 16, 8]), (2, [8, 4, 2, 3, 2])]
)
@pytest.mark.parametrize("most", ["prepare", "run"])
def test_users_that_do_not_fit_cost_no_set_up_of_what_is_known(room: int, prepared: list[int], most: str) -> None:
    """Times of small batches are taken once: what did not fit is prepared smaller, and nothing else is done again."""
    engine = Greedy(FakeTime(), room, most)
    trials = Trials(200.0, 20, 0.1)
    found = measure_online(engine, tiny_workload(), trials, lambda text: None, engine.clock)  # type: ignore[arg-type]
    assert engine.prepared == prepared
    assert found["rate"] and found["largest_batch"] == prepared[-1]


def test_memory_of_small_batches_says_how_many_users_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not half of what failed: 8 users take 8 GiB, 15 are free, a tenth stays free: 13 fit, and 12 fill a shape."""
    from xgr_engine.bench import online

    engine = Greedy(FakeTime(), 41)

    @contextlib.contextmanager
    def eight_gigabytes(device: object) -> Iterator[Peak]:
        yield Peak(device_before=0, device=8 << 30)

    monkeypatch.setattr(online, "peak_memory", eight_gigabytes)
    monkeypatch.setattr(online, "free_device_bytes", lambda device: 15 << 30)
    trials = Trials(200.0, 20, 0.1)
    found = measure_online(engine, tiny_workload(), trials, lambda text: None, engine.clock)  # type: ignore[arg-type]
    assert engine.prepared == [8, 64, 12] and found["largest_batch"] == 12


def test_one_user_that_does_not_fit_is_out_of_memory() -> None:
    engine = Greedy(FakeTime(), 0)
    with pytest.raises(MemoryError):
        trials = Trials(200.0, 20, 0.1)
        measure_online(engine, tiny_workload(), trials, lambda text: None, engine.clock)  # type: ignore[arg-type]
    assert engine.prepared == [8, 4, 2, 1]


def test_trials_are_long_enough_for_a_tail() -> None:
    trials = Trials(200.0, 200, 4.0)
    assert trials.requests_at(1000.0) == 4000
    assert trials.requests_at(30.0) == 200
    assert trials.requests_at(2.0) == 40  # 20 seconds
    assert trials.requests_at(0.1) == 20


def test_the_largest_batch_follows_the_limit() -> None:
    assert users_within(22.0, 36.0, 8, 200.0) == 64
    assert users_within(60.0, 200.0, 8, 200.0) == 8
    assert users_within(60.0, 100.0, 2, 200.0) == 4  # 4.5 would fit
    assert users_within(300.0, 900.0, 8, 200.0) == 1
    assert users_within(10.0, 10.0, 8, 200.0) == MOST_USERS


def test_every_shape_of_a_trial_is_warm() -> None:
    """Whatever number of users the scheduler takes, its captured shape was run before, and none was thrown away."""
    for users in (1, 3, 5, 16, 48, 64):
        assert {places_for(count) for count in range(1, users + 1)} == {places_for(count) for count in shapes(users)}
    assert len(shapes(MOST_USERS)) <= _GRAPHS_KEPT
