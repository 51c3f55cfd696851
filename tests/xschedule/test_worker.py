"""Batches in the loop in memory: equal prompts once, batches halved when memory is short, bad rows found."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_support import LIMITS, FakeEngine, OutOfMemoryError, expected, lists, make_piece

from xgr_engine.options import UserRules
from xgr_engine.xschedule.latency import LatencyModel
from xgr_engine.xschedule.pipeline import Pipeline, Settings, Stages
from xgr_engine.xschedule.results import Ranked
from xgr_engine.xschedule.worker import BatchError, BatchWorker, Window, compute_batches

NONE = np.empty(0, np.int32)


def compute(engine: Any, prompts: list[Any], excluded: list[Any], **given: Any) -> Ranked:
    return compute_batches(engine, prompts, excluded, LIMITS, **{"reject_errors": True, **given})


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1)), max_size=30))
@settings(max_examples=60, deadline=None)
def test_equal_prompts_with_equal_exclusions_are_computed_once(kinds: list[tuple[int, int]]) -> None:
    """Same results as computing each by itself."""
    texts = [np.array([3, 1, 2], np.int32), np.array([3, 1], np.int32), np.array([9], np.int32)]
    rules = [NONE, np.array([6, 4, 9], np.int32)]
    prompts, excluded = [texts[text].copy() for text, _ in kinds], [rules[rule].copy() for _, rule in kinds]
    engine = FakeEngine()
    ranked = compute(engine, prompts, excluded)
    assert sum(len(batch) for batch in engine.batches) == len(set(kinds))
    assert ranked.repeats == len(kinds) - len(set(kinds))
    one_by_one = [compute(FakeEngine(), [p], [e]) for p, e in zip(prompts, excluded, strict=True)]
    assert lists(ranked) == [lists(one)[0] for one in one_by_one] or not kinds
    assert ranked.short.tolist() == [bool(one.short[0]) for one in one_by_one]


def test_users_of_different_trees_are_not_equal() -> None:
    prompt = np.array([4, 5], np.int32)
    window = Window([prompt] * 3, [UserRules(NONE, 0), UserRules(NONE, 1), UserRules(NONE, 0)], LIMITS)
    assert len(window.prompts) == 2


def test_repeats_of_a_prompt_that_fails_all_fail() -> None:
    def fails(prompts: list[Any]) -> None:
        if any(len(prompt) == 2 for prompt in prompts):
            raise ValueError("two")

    prompts = [np.array([1], np.int32), np.array([1, 2], np.int32), np.array([1, 2], np.int32)]
    ranked = compute(FakeEngine(fails=fails), prompts, [NONE] * 3)
    assert ranked.failed == {1: ("engine-error", "ValueError: two"), 2: ("engine-error", "ValueError: two")}
    assert lists(ranked) == [[1], [], []]


# ---- memory ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["prepare", "launch", "collect"])
def test_out_of_memory_halves_the_batch_until_it_fits(where: str) -> None:
    """cases.md: LC-Rec: out of memory in a batch: it is split and retried; the width is never lowered."""

    def fails(prompts: list[Any]) -> None:
        if len(prompts) > 3:
            raise OutOfMemoryError("CUDA out of memory. Tried to allocate 7 GiB")

    piece = make_piece(3, 30, longest=5)
    engine = FakeEngine(where=where, fails=fails)
    worker = BatchWorker(engine, reject_errors=False)
    window = Window(piece.prompts, piece.excluded, LIMITS)
    for batch in window.batches():
        window.add(worker.settle(worker.launch(worker.prepare(batch))))
    ranked = window.ranked()
    assert lists(ranked) == expected(piece) and not ranked.failed
    assert [halving.users for halving in worker.halvings[:3]] == [8, 4, 4]
    assert all(halving.users > 3 and "out of memory" in halving.detail for halving in worker.halvings)


def test_halvings_are_in_the_summary_and_nothing_else_flies_meanwhile() -> None:
    flying: list[int] = []

    def fails(prompts: list[Any]) -> None:
        if len(prompts) == 8:
            raise MemoryError("host")
        flying.append(engine.flying)

    engine = FakeEngine(fails=fails, seconds=0.005)
    pieces = [make_piece(4, 32, longest=5)]
    out: list[Ranked] = []
    stages = Stages(lambda n: n, lambda n, rows: pieces[rows], lambda n, ready, ranked: out.append(ranked))
    summary = Pipeline(engine, LIMITS, stages, Settings()).run([0])
    assert lists(out[0]) == expected(pieces[0])
    record = summary.to_json()["out_of_memory"]
    assert [entry["users"] for entry in record] == [8] * len(record) and len(record) >= 3
    assert all(entry["tokens"] > 0 and entry["detail"] == "MemoryError: host" for entry in record)
    assert max(flying) == 0, "halves are computed while nothing else is on the device"


def test_a_user_that_does_not_fit_alone_is_rejected_for_memory() -> None:
    def fails(prompts: list[Any]) -> None:
        if any(len(prompt) > 9 for prompt in prompts):
            raise OutOfMemoryError("no")

    prompts = [np.arange(length, dtype=np.int32) for length in (3, 10, 4)]
    ranked = compute(FakeEngine(fails=fails), prompts, [NONE] * 3)
    assert ranked.failed == {1: ("too-much-memory", "OutOfMemoryError: no")}
    assert [len(items) for items in lists(ranked)] == [3, 0, 3]


def test_frames_of_a_failed_batch_are_gone_before_it_is_tried_again() -> None:
    """They hold the batch's tensors."""
    kept: list[Any] = []

    def fails(prompts: list[Any]) -> None:
        if len(prompts) > 1:
            kept.append(error := OutOfMemoryError("no"))
            raise error
        assert all(error.__traceback__ is None for error in kept)

    ranked = compute(FakeEngine(fails=fails), [np.array([1]), np.array([2])], [NONE] * 2)
    assert len(kept) == 1 and not ranked.failed


# ---- rows that raise ---------------------------------------------------------------------------------------------


@given(st.sets(st.integers(0, 19), max_size=6))
@settings(max_examples=40, deadline=None)
def test_exactly_the_bad_rows_are_found(bad: set[int]) -> None:
    prompts = [np.array([number, 7, 7], np.int32) for number in range(20)]

    def fails(batch: list[Any]) -> None:
        if any(int(prompt[0]) in bad for prompt in batch):
            raise ValueError("bad")

    ranked = compute(FakeEngine(fails=fails), prompts, [NONE] * 20)
    assert set(ranked.failed) == bad
    assert [not items for items in lists(ranked)] == [number in bad for number in range(20)]


def test_an_engine_that_fails_always_is_not_asked_row_by_row_for_ever() -> None:
    asked: list[int] = []

    def fails(prompts: list[Any]) -> None:
        asked.append(len(prompts))
        raise ValueError("always")

    prompts = [np.array([number], np.int32) for number in range(80)]
    ranked = compute(FakeEngine(fails=fails), prompts, [NONE] * 80)
    assert len(ranked.failed) == 80
    assert len(asked) <= 15 + 9 + 2, "the first batch of 8 row by row, the other nine once"


def test_a_lost_device_ends_the_run_even_where_errors_are_rejected() -> None:
    def fails(prompts: list[Any]) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(BatchError, match="illegal memory access") as error:
        compute(FakeEngine(fails=fails), [np.array([1])] * 3, [NONE] * 3)
    assert "--on-error" not in str(error.value), "no choice of it would have helped"


# ---- cost model --------------------------------------------------------------------------------------------------


def test_the_cost_model_finds_the_coefficients_of_what_it_measured() -> None:
    generator = np.random.default_rng(0)
    model = LatencyModel(rows_per_user=10)
    assert model.predict_one(1, 1) is None
    for _ in range(60):
        users = int(generator.integers(1, 100))
        tokens = users * int(generator.integers(10, 1000))
        model.observe(tokens, users, 0.01 + 2e-6 * tokens + 3e-5 * users * 10)
    for tokens, users in ((100, 1), (50_000, 90), (9000, 30)):
        exact = 0.01 + 2e-6 * tokens + 3e-5 * users * 10
        assert model.predict_one(tokens, users) == pytest.approx(exact, rel=0.02)
    report = model.report()
    assert report["relative_error"]["p50_abs"] < 0.02 and report["observed_batches"] == 60
    assert report["predicted_batches"] == 57


def test_the_cost_model_never_falls_with_size_whatever_it_was_fed() -> None:
    model = LatencyModel()
    for tokens, users, seconds in ((100, 10, 1.0), (200, 20, 0.5), (300, 30, 0.1), (400, 5, 0.3)):
        model.observe(tokens, users, seconds)
    found = model.predict(np.arange(1, 500), np.arange(1, 500))
    assert found is not None and (np.diff(found) >= 0).all() and (found >= 0).all()


def test_a_limit_on_time_closes_batches_earlier_and_reports_its_error() -> None:
    """--slo-ms: 2 ms a user, 9 ms allowed: batches of at most 4 once that is known, by capacity before."""

    class Steady(FakeEngine):
        def launch(self, ready: Any) -> Any:
            self.seconds = 0.002 * len(ready[0])
            return super().launch(ready)

    generator = np.random.default_rng(1)
    pieces = [make_piece(seed, 8) for seed in range(12)]
    for piece in pieces:  # equal lengths, so that users are what time grows with
        piece.prompts[:] = [generator.integers(0, 9999, 2).astype(np.int32) for _ in piece.prompts]
    engine = Steady()
    stages = Stages(lambda n: n, lambda n, rows: pieces[rows], lambda n, ready, ranked: None)
    settings = Settings(slo_seconds=0.009, in_flight=1)
    summary = Pipeline(engine, LIMITS, stages, settings).run(range(12))
    sizes = [len(batch) for batch in engine.batches]
    assert sizes[0] == 8 and max(sizes[8:]) <= 4 and sum(sizes) == 96
    assert summary.latency["relative_error"]["p90_abs"] < 0.5
