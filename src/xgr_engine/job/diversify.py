"""``--diversify attribute=max``: at most so many items with the same value in a list.

A user's list is taken greedily from the ranked items of a search: once a value has ``max`` items in the list it is
full, and its other items are skipped. If the list comes out short, the search runs again for this user with the items
of full values denied, except those in the list, until the list is full or nothing more can be added. So every list
comes from one search, with that search's order and scores, and everything not denied competes for the beam. Items whose
attribute is null have no value in common and are never skipped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xgr_engine.job.engine import LoadedEngine
from xgr_engine.job.filters import ItemFilters
from xgr_engine.options import Exclusion, SearchOptions, UserRules
from xgr_engine.xschedule.engines import BatchOutcome, Engine, Span, staged

IntArray = NDArray[np.int32]


@dataclass(frozen=True)
class DiverseResult:
    """A :class:`xgr_engine.xschedule.engines.BatchOutcome` of capped lists."""

    counts: IntArray
    item_rows: IntArray
    leaves: IntArray
    scores: NDArray[np.float32]
    short: NDArray[np.bool_]


class DiverseEngine:
    """An engine whose lists hold at most ``most`` items of one value.

    Args:
        engine: made with :func:`search_for`, so that it ranks W items a user.
        filters: with ``cap`` and ``capped``.
        search: the options that the user asked for.

    Attributes:
        passes: how often the search ran: for ``users`` in all ``searches`` times, ``longest`` times for one of them.
    """

    def __init__(self, engine: Engine, filters: ItemFilters, search: SearchOptions) -> None:
        assert filters.cap is not None and filters.capped is not None
        self.passes = {"users": 0, "searches": 0, "longest": 0}
        self._engine = engine
        self._steps = staged(engine)
        self._most = filters.cap.most
        self._value = filters.capped.of_item
        self._search = search
        # items of value v: _by_value[_first[v] : _first[v + 1]]
        self._by_value = np.argsort(self._value, kind="stable").astype(np.int32)
        values = np.arange(len(filters.capped.values) + 1)
        self._first = np.searchsorted(self._value[self._by_value], values)

    def reserve(self, tokens: int, users: int) -> None:
        self._engine.reserve(tokens, users)

    def run(self, prompts: list[IntArray], excluded: list[Exclusion]) -> DiverseResult:
        """Capped lists of a batch; arguments as of the engine."""
        return self.collect(self.launch(self.prepare(prompts, excluded)))

    # The three steps of :class:`xgr_engine.xschedule.engines.StagedEngine`. Further searches run inside ``collect``.

    def prepare(self, prompts: list[IntArray], excluded: list[Exclusion]) -> _Steps:
        return _Steps(prompts, excluded, self._steps.prepare(prompts, excluded))

    def launch(self, ready: _Steps) -> _Steps:
        return replace(ready, inner=self._steps.launch(ready.inner))

    def collect(self, pending: _Steps) -> DiverseResult:
        return self._complete(pending.prompts, pending.excluded, self._steps.collect(pending.inner))

    def span(self, pending: _Steps) -> Span:
        return self._steps.span(pending.inner)

    def _complete(self, prompts: list[IntArray], excluded: list[Exclusion], first: BatchOutcome) -> DiverseResult:
        """Searches again until no list can become longer."""
        rules = list(excluded)
        closed: list[set[int]] = [set() for _ in prompts]
        done: list[_List | None] = [None] * len(prompts)
        pending, outcome, searches = list(range(len(prompts))), first, 1
        while pending:
            again = []
            self.passes["searches"] += len(pending)
            for user, ranked in zip(pending, _split(outcome), strict=True):
                kept = self._take(ranked)
                full = self._full(kept) - closed[user]
                if len(kept.rows) == self._search.top_k or not full or self._complete_already(ranked):
                    done[user] = kept
                    continue
                closed[user] |= full
                rules[user] = self._deny(rules[user], full, kept.rows)
                again.append(user)
            pending = again
            if pending:
                searches += 1
                outcome = self._engine.run([prompts[user] for user in pending], [rules[user] for user in pending])
        self.passes["users"] += len(prompts)
        self.passes["longest"] = max(self.passes["longest"], searches)
        return self._joined([kept for kept in done if kept is not None])

    def _take(self, ranked: _List) -> _List:
        """The first ``top_k`` items within the cap."""
        value = self._value[ranked.rows]
        order = np.argsort(value, kind="stable")
        starts = np.flatnonzero(np.diff(value[order], prepend=-2) != 0)
        rank = np.empty(len(value), np.int64)  # how many items of the same value stand before it
        rank[order] = np.arange(len(value)) - np.repeat(starts, np.diff([*starts, len(value)]))
        kept = np.flatnonzero((rank < self._most) | (value < 0))[: self._search.top_k]
        return _List(ranked.rows[kept], ranked.leaves[kept], ranked.scores[kept], ranked.short)

    def _full(self, kept: _List) -> set[int]:
        values, counts = np.unique(self._value[kept.rows], return_counts=True)
        return {int(value) for value in values[(counts >= self._most) & (values >= 0)]}

    def _complete_already(self, ranked: _List) -> bool:
        """Whether everything reachable was ranked. The first item of a shared SID may hide others, so not there."""
        return ranked.short and self._search.collisions == "all"

    def _deny(self, rules: Exclusion, full: set[int], kept: IntArray) -> Exclusion:
        items = [self._by_value[self._first[value] : self._first[value + 1]] for value in sorted(full)]
        denied = np.setdiff1d(np.concatenate(items), kept)
        if isinstance(rules, UserRules):
            return replace(rules, excluded=np.union1d(rules.excluded, denied).astype(np.int32))
        return np.union1d(rules, denied).astype(np.int32)

    def _joined(self, lists: list[_List]) -> DiverseResult:
        counts = np.array([len(kept.rows) for kept in lists], np.int32)
        return DiverseResult(
            counts=counts,
            item_rows=np.concatenate([kept.rows for kept in lists]).astype(np.int32),
            leaves=np.concatenate([kept.leaves for kept in lists]).astype(np.int32),
            scores=np.concatenate([kept.scores for kept in lists]).astype(np.float32),
            short=counts < self._search.top_k,
        )


@dataclass(frozen=True)
class _Steps:
    """A batch in flight; ``inner`` is what the engine underneath made of it."""

    prompts: list[IntArray]
    excluded: list[Exclusion]
    inner: Any


@dataclass(frozen=True)
class _List:
    """One user's items, best first; ``short``: the search found everything reachable."""

    rows: IntArray
    leaves: IntArray
    scores: NDArray[np.float32]
    short: bool


def _split(outcome: BatchOutcome) -> list[_List]:
    ends = np.cumsum(outcome.counts)
    spans = [slice(int(end - count), int(end)) for end, count in zip(ends, outcome.counts, strict=True)]
    return [
        _List(outcome.item_rows[span], outcome.leaves[span], outcome.scores[span], bool(short))
        for span, short in zip(spans, outcome.short, strict=True)
    ]


def search_for(filters: ItemFilters, search: SearchOptions) -> SearchOptions:
    """Options for the engine underneath: with a cap it ranks all W items of the beam, which saves passes."""
    return search if filters.cap is None else replace(search, top_k=search.beam)


def capped_engine(
    loaded: LoadedEngine, filters: ItemFilters, search: SearchOptions, record: dict[str, Any]
) -> LoadedEngine:
    """The engine for ``filters``: itself, or one whose lists keep the cap.

    Args:
        search: what the user asked for; ``loaded`` was made with :func:`search_for`.
        record: gets ``diversify``, how often the search ran, kept up to date while it does.
    """
    if filters.cap is None:
        return loaded
    engine = DiverseEngine(loaded.engine, filters, search)
    record["diversify"] = engine.passes
    return replace(loaded, engine=engine)
