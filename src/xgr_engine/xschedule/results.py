"""Prompts that need computing, each once, and their results back in the order of all prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from xgr_engine.catalog.trie import runs
from xgr_engine.options import Exclusion, UserRules
from xgr_engine.xschedule.engines import BatchOutcome, IntArray

Fault = tuple[str, str]


@dataclass(frozen=True)
class Ranked:
    """Results of n prompts in the order of the prompts.

    Attributes:
        offsets: int64 [n + 1] into the arrays below; a failed prompt has no results.
        item_rows: int32 rows of ``items.parquet``, best first within a prompt.
        leaves: int32 the leaf of each item.
        scores: float32 log-probabilities.
        short: bool [n] whether fewer than K items were reachable.
        failed: number of a prompt -> (reason code, detail).
        batches: how many batches were computed.
        repeats: how many prompts got the result of an equal one.
        batch_seconds: of each batch that was computed as planned.
    """

    offsets: NDArray[np.int64]
    item_rows: IntArray
    leaves: IntArray
    scores: NDArray[np.float32]
    short: NDArray[np.bool_]
    failed: dict[int, Fault] = field(default_factory=dict)
    batches: int = 0
    repeats: int = 0
    batch_seconds: tuple[float, ...] = ()


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Mean, p50, p90, p95, p99 and max of the batches' seconds, for manifests; empty if there was no batch."""
    if not seconds:
        return {}
    names = ("p50", "p90", "p95", "p99", "max")
    found = dict(zip(names, np.percentile(np.asarray(seconds), (50, 90, 95, 99, 100)), strict=True))
    return {name: round(float(value), 6) for name, value in {"mean": np.mean(seconds), **found}.items()}


@dataclass(frozen=True)
class Distinct:
    """Groups of equal prompts with equal exclusions, each called a kind.

    Attributes:
        first: int64 [m] number of the first prompt of each kind, ascending.
        kind: int64 [n] the kind of each prompt.
    """

    first: NDArray[np.int64]
    kind: NDArray[np.int64]

    @classmethod
    def of(cls, prompts: Sequence[IntArray], excluded: Sequence[Exclusion]) -> Distinct:
        """Compares prompts by their tokens and exclusions by their content."""
        seen: dict[object, int] = {}
        first: list[int] = []
        kind = np.empty(len(prompts), np.int64)
        for number, (prompt, without) in enumerate(zip(prompts, excluded, strict=True)):
            key = (prompt.tobytes(), _content(without))
            found = seen.setdefault(key, len(first))
            if found == len(first):
                first.append(number)
            kind[number] = found
        return cls(np.asarray(first, np.int64), kind)


def _content(excluded: Exclusion) -> tuple[bytes, int | None]:
    if isinstance(excluded, UserRules):
        return excluded.excluded.tobytes(), excluded.tree
    return excluded.tobytes(), None


def in_order(
    total: int,
    done: Sequence[tuple[NDArray[np.int64], BatchOutcome]],
    failed: dict[int, Fault],
    batches: int,
    batch_seconds: Sequence[float] = (),
) -> Ranked:
    """The results of batches in the order of ``total`` prompts. ``done`` has each with the numbers of its prompts."""
    counts = np.zeros(total, np.int64)
    short = np.zeros(total, np.bool_)
    for batch, outcome in done:
        counts[batch] = outcome.counts
        short[batch] = outcome.short
    offsets = _offsets(counts)
    item_rows = np.empty(offsets[-1], np.int32)
    leaves = np.empty(offsets[-1], np.int32)
    scores = np.empty(offsets[-1], np.float32)
    for batch, outcome in done:
        places = runs(offsets[batch], outcome.counts.astype(np.int64))
        item_rows[places] = outcome.item_rows
        leaves[places] = outcome.leaves
        scores[places] = outcome.scores
    return Ranked(offsets, item_rows, leaves, scores, short, failed, batches, 0, tuple(batch_seconds))


def repeat(ranked: Ranked, kind: NDArray[np.int64]) -> Ranked:
    """From the results of each kind of prompt to those of all prompts; ``kind`` [n] as in :class:`Distinct`."""
    counts = np.diff(ranked.offsets)[kind]
    places = runs(ranked.offsets[:-1][kind], counts)
    return Ranked(
        offsets=_offsets(counts),
        item_rows=ranked.item_rows[places],
        leaves=ranked.leaves[places],
        scores=ranked.scores[places],
        short=ranked.short[kind],
        failed={number: ranked.failed[of] for number, of in enumerate(kind.tolist()) if of in ranked.failed},
        batches=ranked.batches,
        batch_seconds=ranked.batch_seconds,
        repeats=len(kind) - len(ranked.short),
    )


def _offsets(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
