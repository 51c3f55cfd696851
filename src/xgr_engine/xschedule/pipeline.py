"""read -> prepare -> compute -> write, shard by shard. One after the other; each stage sees only its own input.

A stage is a plain function from one value to the next, so that an overlapped pipeline needs no change in any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from xgr_engine.xschedule.scheduler import BatchLimits, plan_batches

Work = TypeVar("Work")
Read = TypeVar("Read")
Ready = TypeVar("Ready")
Done = TypeVar("Done")

IntArray = NDArray[np.int32]


class BatchOutcome(Protocol):
    """``xbeam.ranking.BatchResult``: ranked items of the batch's users back to back."""

    @property
    def counts(self) -> IntArray: ...
    @property
    def item_rows(self) -> IntArray: ...
    @property
    def leaves(self) -> IntArray: ...
    @property
    def scores(self) -> NDArray[np.float32]: ...
    @property
    def short(self) -> NDArray[np.bool_]: ...


class Engine(Protocol):
    """``recommender.Recommender``."""

    def run(self, prompts: list[IntArray], excluded: list[IntArray]) -> BatchOutcome: ...
    def reserve(self, tokens: int, users: int) -> None: ...


@dataclass(frozen=True)
class Ranked:
    """Results of n prompts in the order of the prompts.

    Attributes:
        offsets: int64 [n + 1] into the arrays below; a failed prompt has no results.
        item_rows: int32; leaves: int32; scores: float32, best first within a prompt.
        short: bool [n].
        failed: prompt -> (reason code, detail).
        batches: how many were computed.
    """

    offsets: NDArray[np.int64]
    item_rows: IntArray
    leaves: IntArray
    scores: NDArray[np.float32]
    short: NDArray[np.bool_]
    failed: dict[int, tuple[str, str]] = field(default_factory=dict)
    batches: int = 0


@dataclass(frozen=True)
class Stages(Generic[Work, Read, Ready, Done]):
    """The four steps of a piece of work."""

    read: Callable[[Work], Read]
    prepare: Callable[[Work, Read], Ready]
    compute: Callable[[Work, Ready], Done]
    write: Callable[[Work, Done], None]


def run_stages(pieces: Iterable[Work], stages: Stages[Work, Read, Ready, Done]) -> None:
    """Takes each piece through all stages before the next one begins."""
    for piece in pieces:
        stages.write(piece, stages.compute(piece, stages.prepare(piece, stages.read(piece))))


def compute_batches(
    engine: Engine,
    prompts: Sequence[IntArray],
    excluded: Sequence[IntArray],
    limits: BatchLimits,
    *,
    reject_errors: bool,
    on_batch: Callable[[int], None] = lambda users: None,
) -> Ranked:
    """Computes prompts in planned batches and puts the results back into the order of the prompts.

    Args:
        reject_errors: a batch that raises fails its prompts; else the exception goes up.
        on_batch: told the number of users after each batch.
    """
    plan = plan_batches([len(prompt) for prompt in prompts], limits)
    failed = {
        prompt: (
            "too-much-memory",
            f"{len(prompts[prompt])} prompt tokens, and memory was planned for {limits.longest_prompt}",
        )
        for prompt in plan.too_long
    }
    done: list[tuple[NDArray[np.int64], BatchOutcome]] = []
    for batch in plan.batches:
        try:
            outcome = engine.run([prompts[prompt] for prompt in batch], [excluded[prompt] for prompt in batch])
            done.append((batch, outcome))
        except Exception as error:
            if not reject_errors:
                raise
            detail = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            failed.update((int(prompt), ("engine-error", detail)) for prompt in batch)
        on_batch(len(batch))
    return _in_order(len(prompts), done, failed, len(plan.batches))


def _in_order(
    total: int,
    done: list[tuple[NDArray[np.int64], BatchOutcome]],
    failed: dict[int, tuple[str, str]],
    batches: int,
) -> Ranked:
    counts = np.zeros(total, np.int64)
    short = np.zeros(total, np.bool_)
    for batch, outcome in done:
        counts[batch] = outcome.counts
        short[batch] = outcome.short
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    item_rows = np.empty(offsets[-1], np.int32)
    leaves = np.empty(offsets[-1], np.int32)
    scores = np.empty(offsets[-1], np.float32)
    for batch, outcome in done:
        size = outcome.counts.astype(np.int64)
        own_start = np.cumsum(size) - size
        places = np.repeat(offsets[batch] - own_start, size) + np.arange(size.sum())
        item_rows[places] = outcome.item_rows
        leaves[places] = outcome.leaves
        scores[places] = outcome.scores
    return Ranked(offsets, item_rows, leaves, scores, short, failed, batches)
