"""Metrics of many lists at once against a plain loop over one list, and against values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xgr_engine.metrics.bootstrap import mean_intervals
from xgr_engine.metrics.ranking import UNKNOWN, Lists, metric_names, row_metrics

KS = (1, 3, 5)


def lists(rows: list[list[int]]) -> Lists:
    row = np.repeat(np.arange(len(rows)), [len(entries) for entries in rows])
    return Lists(row.astype(np.int64), np.array([key for entries in rows for key in entries], np.int64))


def by_loop(predicted: list[int], truth: list[int], ks: tuple[int, ...]) -> list[float]:
    """The definitions, one list at a time."""
    kept: list[int] = []
    for key in predicted:
        if key == UNKNOWN or key not in kept:
            kept.append(key)
    targets = [key for at, key in enumerate(truth) if key == UNKNOWN or key not in truth[:at]]
    hit = [key != UNKNOWN and key in targets for key in kept]
    recall, ndcg, rate = [], [], []
    for k in ks:
        found = sum(hit[:k])
        ideal = sum(1 / math.log2(rank + 2) for rank in range(min(len(targets), k)))
        gain = sum(1 / math.log2(rank + 2) for rank, is_hit in enumerate(hit[:k]) if is_hit)
        recall.append(found / len(targets) if targets else 0.0)
        ndcg.append(gain / ideal if targets else 0.0)
        rate.append(float(found > 0))
    first = next((rank for rank, is_hit in enumerate(hit) if is_hit), None)
    return [*recall, *ndcg, *rate, 0.0 if first is None else 1 / (first + 1)]


def vectorised(predicted: list[list[int]], truth: list[list[int]], ks: tuple[int, ...] = KS) -> np.ndarray:
    return row_metrics(len(predicted), lists(predicted).distinct()[0], lists(truth).distinct()[0], ks)


def test_hand_computed_values() -> None:
    predicted = [[7, 8, 9], [1, 2, 3, 4], [5], []]
    truth = [[8], [4, 2, 99], [6], [1]]
    values = dict(zip(metric_names(KS), vectorised(predicted, truth).T.tolist(), strict=True))
    assert values["recall@1"] == [0, 0, 0, 0]
    assert values["recall@3"] == pytest.approx([1, 1 / 3, 0, 0])
    assert values["recall@5"] == pytest.approx([1, 2 / 3, 0, 0])
    # Row 0: hit at rank 2 -> 1/log2(3). Row 1: hits at ranks 2 and 4, three targets -> ideal 1 + 1/log2(3) + 1/2.
    ideal = 1 + 0.6309297535714575 + 0.5
    assert values["ndcg@5"] == pytest.approx(
        [0.6309297535714575, (0.6309297535714575 + 0.43067655807339306) / ideal, 0, 0]
    )
    assert values["hit_rate@3"] == [1, 1, 0, 0]
    assert values["mrr"] == pytest.approx([0.5, 0.5, 0, 0])


def test_repeated_prediction_counts_once_and_is_reported() -> None:
    """Duplicates in the predictions: [a, a] against [a] gives 1.0 and one repeat, and [a, a, b] puts b on rank 2."""
    kept, repeats = lists([[4, 4], [4, 4, 5], [4, 5]]).distinct()
    assert repeats == 2
    assert kept.row.tolist() == [0, 1, 1, 2, 2]
    values = dict(zip(metric_names(KS), row_metrics(3, kept, lists([[4], [5], [5]]), KS).T.tolist(), strict=True))
    assert values["recall@1"] == [1, 0, 0]
    assert values["ndcg@5"] == pytest.approx([1, 1 / math.log2(3), 1 / math.log2(3)])


def test_unknown_keys_equal_nothing_but_keep_their_place() -> None:
    values = vectorised([[UNKNOWN, UNKNOWN, 3], [UNKNOWN]], [[3], [UNKNOWN]])
    assert values[0, -1] == pytest.approx(1 / 3)
    assert values[1].tolist() == [0.0] * len(metric_names(KS))


def test_unknown_target_counts_in_the_number_of_targets() -> None:
    assert vectorised([[3]], [[3, UNKNOWN]])[0, 0] == pytest.approx(0.5)


rows_of_keys = st.lists(
    st.tuples(st.lists(st.integers(-1, 6), max_size=9), st.lists(st.integers(-1, 6), min_size=1, max_size=4)),
    min_size=1,
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(rows_of_keys, st.lists(st.integers(1, 11), min_size=1, max_size=4, unique=True))
def test_equal_to_the_plain_loop(rows: list[tuple[list[int], list[int]]], ks: list[int]) -> None:
    predicted, truth = [row[0] for row in rows], [row[1] for row in rows]
    values = vectorised(predicted, truth, tuple(ks))
    for at, (guess, target) in enumerate(rows):
        assert values[at] == pytest.approx(by_loop(guess, target, tuple(ks)), abs=1e-12)


def test_interval_is_that_of_the_plain_bootstrap() -> None:
    """Multinomial counts over distinct rows are the same experiment as drawing rows: the bounds agree closely."""
    generator = np.random.default_rng(3)
    values = np.column_stack([generator.random(400) < 0.3, generator.integers(0, 4, 400) / 3]).astype(float)
    mean, lower, upper = mean_intervals(values, resamples=4000, seed=1)
    plain = np.array([values[generator.integers(0, 400, 400)].mean(0) for _ in range(4000)])
    assert mean == pytest.approx(values.mean(0))
    assert lower == pytest.approx(np.quantile(plain, 0.025, axis=0), abs=0.005)
    assert upper == pytest.approx(np.quantile(plain, 0.975, axis=0), abs=0.005)


def test_interval_is_seeded_and_does_not_depend_on_block_size(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).integers(0, 2, (57, 3)).astype(float)
    first = mean_intervals(values, resamples=50, seed=5)
    monkeypatch.setattr("xgr_engine.metrics.bootstrap._COUNTS_PER_BLOCK", 40)
    for one, other in zip(first, mean_intervals(values, resamples=50, seed=5), strict=True):
        assert one == pytest.approx(other)
    assert not np.allclose(first[1], mean_intervals(values, resamples=50, seed=6)[1])


def test_constant_values_have_an_interval_of_width_zero() -> None:
    mean, lower, upper = mean_intervals(np.ones((10, 2)))
    assert mean.tolist() == lower.tolist() == upper.tolist() == [1, 1]


def test_no_rows_is_an_error() -> None:
    with pytest.raises(ValueError, match="no rows"):
        mean_intervals(np.empty((0, 2)))
