"""Which users form the next batch: planned from prompt lengths, before anything is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class BatchLimits:
    """What one batch may hold.

    Attributes:
        tokens: prompt tokens of all users together.
        rows: beam rows of all users together.
        rows_per_user: beam rows of one user at the widest level; never lowered to fit.
        longest_prompt: prompts above it cannot be computed even alone.
    """

    tokens: int
    rows: int
    rows_per_user: int
    longest_prompt: int

    @property
    def users(self) -> int:
        """Users a batch; one user is always allowed."""
        return max(1, self.rows // max(1, self.rows_per_user))


@dataclass(frozen=True)
class BatchPlan:
    """Batches of a shard.

    Attributes:
        batches: int64 arrays of prompt numbers; every prompt stands in exactly one batch or in ``too_long``.
        too_long: prompts above ``longest_prompt``.
    """

    batches: list[NDArray[np.int64]]
    too_long: list[int]


def plan_batches(prompt_lengths: Sequence[int], limits: BatchLimits) -> BatchPlan:
    """Sorts by length, longest first, and fills batches up to the limits.

    Neighbours of like length waste nothing, and a plan that does not fit fails on the first batch and not on the last.
    The plan depends on nothing but the arguments, so a shard done again is computed in the same batches.
    """
    lengths = np.asarray(prompt_lengths, np.int64)
    order = np.argsort(-lengths, kind="stable")
    batches: list[NDArray[np.int64]] = []
    too_long = [int(prompt) for prompt in order if lengths[prompt] > limits.longest_prompt]
    first = len(too_long)
    while first < len(order):
        tokens = np.cumsum(lengths[order[first : first + limits.users]])
        # a single prompt above the token limit, but not above longest_prompt, is a batch of its own
        size = max(1, int(np.searchsorted(tokens, limits.tokens, side="right")))
        batches.append(order[first : first + size])
        first += size
    return BatchPlan(batches, sorted(too_long))
