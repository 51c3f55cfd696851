"""Which users form the next batch: planned from prompt lengths, before anything is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Seconds that batches are expected to take: (tokens [n], users [n]) -> [n]; see xschedule.latency.
Predict = Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.float64] | None]


@dataclass(frozen=True)
class BatchLimits:
    """What one batch may hold.

    Attributes:
        tokens: prompt tokens of all users together.
        rows: beam rows of all users together.
        rows_per_user: beam rows of one user at the widest level; never lowered to fit.
        longest_prompt: prompts above it cannot be computed even alone.
        fixed_shapes: the engine runs in captured shapes of a few user counts (:func:`filling`) over a cache of
            ``tokens`` that also holds once what all prompts of a batch begin with. Batches are made to fit both.
        level_rows: beam rows of one user, all levels together: what the time of a batch grows with.
        lanes: batches side by side on the device; the limits hold for each.
    """

    tokens: int
    rows: int
    rows_per_user: int
    longest_prompt: int
    fixed_shapes: bool = False
    level_rows: int = 1
    lanes: int = 1

    @property
    def users(self) -> int:
        """Users a batch; one user is always allowed."""
        return max(1, self.rows // max(1, self.rows_per_user))


def filling(users: int) -> int:
    """The most users, up to ``users``, that leave no place of a captured shape empty: 1, 2, 3, 4, 6, 8, 12, 16, ..."""
    power = 1 << (users.bit_length() - 1)
    return power * 3 // 2 if power >= 2 and users >= power * 3 // 2 else power


def split_too_long(lengths: NDArray[np.int64], limits: BatchLimits) -> tuple[NDArray[np.int64], list[int]]:
    """Prompt numbers that can be computed, longest first, and those above ``longest_prompt``, ascending.

    Neighbours of like length waste nothing, and a plan that does not fit fails on the first batch and not on the last.
    """
    order = np.argsort(-lengths, kind="stable")
    above = int((lengths > limits.longest_prompt).sum())
    return order[above:], sorted(order[:above].tolist())


def form_batches(
    order: NDArray[np.int64],
    lengths: NDArray[np.int64],
    limits: BatchLimits,
    predict: Predict | None = None,
    seconds: float = np.inf,
) -> Iterator[NDArray[np.int64]]:
    """Cuts ``order`` into batches, closing each by capacity or by predicted time, whichever comes first.

    A batch is cut when it is asked for, with what ``predict`` knows by then. One prompt is always allowed.
    """
    first = 0
    while first < len(order):
        candidates = lengths[order[first : first + limits.users]]
        first_next = first + batch_size(candidates, len(order) - first, limits, predict, seconds)
        yield order[first:first_next]
        first = first_next


def batch_size(
    lengths: NDArray[np.int64],
    waiting: int,
    limits: BatchLimits,
    predict: Predict | None = None,
    seconds: float = np.inf,
) -> int:
    """How many of the prompts, from the first on, form the next batch.

    Args:
        lengths: of the next prompts, at least one; waiting: prompts that are there in all.
    """
    lengths = lengths[: limits.users]
    tokens = np.cumsum(lengths)
    # What all prompts of a batch begin with is shorter than the shortest of them.
    taken = tokens + (np.minimum.accumulate(lengths) if limits.fixed_shapes else 0)
    size = int((taken <= limits.tokens).cumprod().sum())
    if predict is not None and np.isfinite(seconds):
        expected = predict(tokens, np.arange(1, len(tokens) + 1))
        if expected is not None:
            size = min(size, int((expected <= seconds).cumprod().sum()))
    # a single prompt above the token limit, but not above longest_prompt, is a batch of its own
    size = max(1, size)
    return filling(size) if limits.fixed_shapes and size < waiting else size
