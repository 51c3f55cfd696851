"""Bootstrap confidence intervals of means over rows, for any number of metrics and millions of rows.

The percentile bootstrap (Efron and Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 13): draw as many
rows as there are, with replacement, take the mean, repeat, and read the interval off the quantiles of the means.
A draw is determined by how often each row occurs in it, and rows with equal values are interchangeable, so the draws
are made as multinomial counts over the *distinct* rows: the same distribution, and with one target per row there are at
most a few thousand distinct rows, however many users there are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from xgr_engine.metrics.ranking import FloatArray

DEFAULT_RESAMPLES = 1000
LEVEL = 0.95  # coverage of the intervals
_COUNTS_PER_BLOCK = 4_000_000  # 32 MB of counts at a time


def mean_intervals(
    values: FloatArray, *, resamples: int = DEFAULT_RESAMPLES, seed: int = 0
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Mean, lower and upper bound of each column.

    Args:
        values: [N, M], N >= 1; columns are resampled together.
        resamples: number of draws.
        seed: the same seed, values and numpy give the same bounds.

    Returns:
        three arrays [M]

    Raises:
        ValueError: no rows.
    """
    if len(values) == 0:
        raise ValueError("there is no mean of no rows")
    distinct, count = _distinct_rows(values)
    generator = np.random.default_rng(seed)
    means = np.empty((resamples, values.shape[1]))
    block = max(1, _COUNTS_PER_BLOCK // len(distinct))
    share = count / count.sum()
    for start in range(0, resamples, block):
        size = min(block, resamples - start)
        drawn = generator.multinomial(len(values), share, size=size)
        means[start : start + size] = drawn @ distinct / len(values)
    tail = (1.0 - LEVEL) / 2
    lower, upper = np.quantile(means, (tail, 1.0 - tail), axis=0)
    return count @ distinct / len(values), lower, upper


def _distinct_rows(values: FloatArray) -> tuple[FloatArray, NDArray[np.int64]]:
    """The distinct rows of ``values`` and how often each occurs.

    Column by column with Arrow's hash tables: far faster than sorting a million rows of many columns.
    """
    label = np.zeros(len(values), np.int64)
    for column in values.T:
        number = _codes(np.ascontiguousarray(column))
        label = _codes(label * (int(number.max()) + 1) + number)
    # Labels count up in order of first occurrence, so each one's first row is where the running maximum grows.
    running = np.maximum.accumulate(label)
    first = np.flatnonzero(np.concatenate(([True], running[1:] > running[:-1])))
    return values[first], np.bincount(label).astype(np.int64)


def _codes(values: NDArray[Any]) -> NDArray[np.int64]:
    """[N] the same number for equal values, numbered in order of first occurrence."""
    codes: NDArray[np.int64] = pa.array(values).dictionary_encode().indices.to_numpy().astype(np.int64)
    return codes
