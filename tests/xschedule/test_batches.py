"""Which prompts form a batch: sizes that fill captured shapes, limits with a common beginning, online closing."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from xgr_engine.options import LANES
from xgr_engine.xschedule.latency import LatencyModel
from xgr_engine.xschedule.memory import CostModel, plan_limits
from xgr_engine.xschedule.online import OnlineScheduler
from xgr_engine.xschedule.scheduler import BatchLimits, form_batches, largest_captured, split_too_long


def cut(prompt_lengths: list[int], limits: BatchLimits) -> tuple[list[NDArray[np.int64]], list[int]]:
    """Batches of prompts, as prompt numbers, and the prompts that are too long."""
    lengths = np.asarray(prompt_lengths, np.int64)
    order, too_long = split_too_long(lengths, limits)
    return list(form_batches(order, lengths, limits)), too_long


@given(
    st.lists(st.integers(1, 300), max_size=80),
    st.integers(1, 500),
    st.integers(1, 40),
    st.integers(1, 50),
    st.integers(1, 350),
)
@settings(max_examples=200, deadline=None)
def test_batches_hold_every_prompt_once_within_the_limits(
    lengths: list[int], tokens: int, rows: int, per_user: int, longest: int
) -> None:
    limits = BatchLimits(tokens, rows, per_user, longest)
    batches, too_long = cut(lengths, limits)
    placed = [int(prompt) for batch in batches for prompt in batch]
    assert sorted(placed + too_long) == list(range(len(lengths)))
    assert all(lengths[prompt] > longest for prompt in too_long)
    assert sorted((lengths[prompt] for prompt in placed), reverse=True) == [lengths[prompt] for prompt in placed]
    for batch in batches:
        alone = len(batch) == 1
        assert alone or sum(lengths[prompt] for prompt in batch) <= tokens
        assert alone or len(batch) * per_user <= rows
    again, _ = cut(lengths, limits)
    assert [batch.tolist() for batch in again] == [batch.tolist() for batch in batches]


def test_batches_are_filled_as_far_as_the_limits_go() -> None:
    batches, _ = cut([10] * 7, BatchLimits(tokens=30, rows=1000, rows_per_user=10, longest_prompt=99))
    assert [len(batch) for batch in batches] == [3, 3, 1]
    batches, _ = cut([10] * 7, BatchLimits(tokens=1000, rows=20, rows_per_user=10, longest_prompt=99))
    assert [len(batch) for batch in batches] == [2, 2, 2, 1]


def test_sizes_that_fill_a_captured_shape_are_those_of_the_engine() -> None:
    from xgr_engine.search.graphed import places_for

    for users in range(1, 600):
        assert places_for(largest_captured(users)) == largest_captured(users) <= users
        assert largest_captured(users) == max(size for size in range(1, users + 1) if places_for(size) == size)
    cost = CostModel(per_token=1000, per_row=500, per_user=2000, rows_per_user=64)
    assert plan_limits(cost, 10**9, 10_000, gpu=True).lanes == LANES


@given(st.lists(st.integers(1, 300), min_size=1, max_size=80), st.integers(1, 500), st.integers(1, 40))
@settings(max_examples=150, deadline=None)
def test_batches_of_fixed_shapes_fill_them_and_leave_room_for_the_common_beginning(
    lengths: list[int], tokens: int, users: int
) -> None:
    limits = BatchLimits(tokens, largest_captured(users), 1, 300, fixed_shapes=True)
    batches = cut(lengths, limits)[0]
    assert sorted(int(n) for batch in batches for n in batch) == list(range(len(lengths)))
    for number, batch in enumerate(batches):
        held = [lengths[prompt] for prompt in batch]
        assert len(batch) == 1 or sum(held) + min(held) <= tokens
        assert number + 1 == len(batches) or largest_captured(len(batch)) == len(batch)


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_gpus_budget_is_shared_by_its_lanes_unless_a_share_is_too_small_for_a_user(lanes: int) -> None:
    cost = CostModel(per_token=1000, per_row=500, per_user=2000, rows_per_user=64, level_rows=129)
    budget = 2 * 10**8
    limits = plan_limits(cost, budget, 10_000, gpu=True, lanes=lanes)
    assert limits.lanes == lanes and limits.fixed_shapes and limits.level_rows == 129
    held = lanes * cost.of_batch(limits.tokens, limits.users)
    assert 0.7 * budget < held <= budget and largest_captured(limits.users) == limits.users
    alone = plan_limits(cost, int(1.5 * cost.of_batch(1, 1) / 0.8), 10_000, gpu=True, lanes=lanes)
    assert alone.lanes == 1 and alone.users == 1 and alone.rows_per_user == 64
    cpu = plan_limits(cost, budget, 10_000, gpu=False, lanes=lanes)
    assert cpu.lanes == 1 and not cpu.fixed_shapes


# ---- arrivals ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    arrival: float
    prompt: np.ndarray


def arrivals(count: int, length: int = 10, at: float = 0.0) -> deque[Request]:
    return deque(Request(at, np.zeros(length, np.int32)) for _ in range(count))


LIMITS = BatchLimits(tokens=1000, rows=64, rows_per_user=1, longest_prompt=500)


def learned() -> LatencyModel:
    """10 ms a batch and 1 ms a user."""
    model = LatencyModel()
    for users in (1, 8, 2, 30, 16, 64, 4, 50, 11, 27) * 3:
        model.observe(10 * users, users, 0.010 + 0.001 * users)
    return model


def test_capacity_closes_a_batch_where_time_does_not() -> None:
    waiting = arrivals(100)
    assert len(OnlineScheduler(LIMITS, None).take(waiting, 0.0)) == 64 and len(waiting) == 36
    assert len(OnlineScheduler(LIMITS, 10.0, learned()).take(arrivals(100), 0.0)) == 64
    tokens = BatchLimits(tokens=95, rows=64, rows_per_user=1, longest_prompt=500)
    assert len(OnlineScheduler(tokens, None).take(arrivals(100), 0.0)) == 9
    assert len(OnlineScheduler(LIMITS, None).take(arrivals(1, length=2000), 0.0)) == 1


def test_predicted_time_closes_a_batch_and_waiting_counts_against_it() -> None:
    online = OnlineScheduler(LIMITS, 0.060, learned())
    assert abs(len(online.take(arrivals(100), 0.0)) - 50) <= 2
    assert abs(len(online.take(arrivals(100), 0.020)) - 30) <= 2, "20 ms of 60 are gone: 10 + 30 x 1"


def test_a_backlog_is_worked_off_in_batches_of_a_useful_size() -> None:
    online = OnlineScheduler(LIMITS, 0.060, learned())
    assert abs(len(online.take(arrivals(100), 5.0)) - 20) <= 2, "half of the limit: 10 + 20 x 1"
    strict = OnlineScheduler(LIMITS, 0.001, learned())
    assert len(strict.take(arrivals(100), 0.0)) == 1, "one request is always taken"


def test_what_is_observed_changes_the_next_batch() -> None:
    online: OnlineScheduler[Request] = OnlineScheduler(LIMITS, 0.060)
    waiting = arrivals(1000)
    assert len(online.take(waiting, 0.0)) == 64, "nothing is known yet"
    for users in (64, 20, 40, 10):
        online.observe(list(arrivals(users)), 0.010 + 0.002 * users)
    assert abs(len(online.take(waiting, 0.0)) - 25) <= 2
