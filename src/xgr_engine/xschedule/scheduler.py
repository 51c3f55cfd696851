"""Which users form the next batch: planned from prompt lengths, before anything is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# (tokens [n], users [n]) -> seconds [n] that batches of these sizes are expected to take; see xschedule.latency.
Predict = Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.float64] | None]


@dataclass(frozen=True)
class BatchLimits:
    """What one batch may hold.

    Attributes:
        tokens: prompt tokens of all users together.
        rows: beam rows of all users together.
        rows_per_user: beam rows of one user at the widest level; never lowered to fit.
        longest_prompt: prompts with more tokens cannot be computed, not even alone.
        fixed_shapes: the engine runs in captured shapes with a few user counts (:func:`largest_captured`), over a cache
            of ``tokens`` in which what all prompts of a batch begin with is stored once more. Batches must fit both.
        level_rows: beam rows of one user, summed over the levels; the time of a batch grows with them.
        lanes: batches side by side on the device; the limits hold for each of them.
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
        """Users per batch; one user is always allowed."""
        return max(1, self.rows // max(1, self.rows_per_user))


def largest_captured(users: int) -> int:
    """The largest user count, up to ``users``, that fills a captured shape: 1, 2, 3, 4, 6, 8, 12, 16, ..."""
    power = 1 << (users.bit_length() - 1)
    return power * 3 // 2 if power >= 2 and users >= power * 3 // 2 else power


def split_too_long(lengths: NDArray[np.int64], limits: BatchLimits) -> tuple[NDArray[np.int64], list[int]]:
    """Prompt numbers that can be computed, longest first, and those above ``longest_prompt``, ascending.

    Neighbours of like length waste little, and a plan that does not fit fails on the first batch and not on the last.
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
    """Cuts ``order`` into batches, each closed by capacity or by predicted time, whichever comes first.

    A batch is cut when it is asked for, with what ``predict`` knows by then. One prompt is always allowed.

    Args:
        order: numbers of prompts.
        lengths: prompt tokens, by number.
        seconds: limit on the predicted time.
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
        lengths: of the next prompts, at least one.
        waiting: how many prompts there are in all.
        seconds: limit on the predicted time.
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
    return largest_captured(size) if limits.fixed_shapes and size < waiting else size
