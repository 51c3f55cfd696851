"""The engine itself as a contender."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from xgr_engine.bench.baselines.base import NotAvailableError, RankedSids
from xgr_engine.bench.workloads import Batch, BenchCatalog, Workload
from xgr_engine.options import LANES
from xgr_engine.recommender import PendingBatch, Recommender
from xgr_engine.xbeam.ranking import BatchResult
from xgr_engine.xschedule.worker import IN_FLIGHT


class Xgr:
    """The engine as ``xgr recommend`` runs it."""

    name = "xgr"
    what = "this engine: each prompt computed once, beams as rows over it, allowed children only"
    graphs = True
    rows_at_once: int | None = None
    in_flight = IN_FLIGHT
    lanes = LANES

    def __init__(self) -> None:
        self.recommender: Recommender | None = None
        self._catalog: BenchCatalog | None = None

    def available(self, workload: Workload) -> str | None:
        """Runs everywhere."""
        return None

    def prepare(self, workload: Workload) -> None:
        """Bind the catalog; on a GPU, allocate and capture for the workload's batches."""
        self._catalog = workload.catalog
        self.recommender = self.make(workload)
        tokens = workload.shared_prefix + workload.users * workload.context
        self.recommender.reserve(tokens, workload.users)

    def make(self, workload: Workload) -> Recommender:
        """The recommender that is measured."""
        model = workload.model
        return Recommender(
            model.decoder,
            model.head,
            workload.catalog.trie,
            model.table,
            workload.search,
            score_suffix=model.score_suffix,
            rows_at_once=self.rows_at_once,
            graphs=self.graphs,
            lanes=self.lanes,
        )

    def run(self, batch: Batch) -> RankedSids:
        """One batch, from prompts to ranked SIDs."""
        return self.collect(self.submit(batch))

    def run_many(self, batches: Sequence[Batch]) -> Iterator[RankedSids]:
        """On a GPU the next batch is queued while one computes."""
        waiting: deque[PendingBatch] = deque()
        for batch in batches:
            waiting.append(self.submit(batch))
            if len(waiting) >= self.in_flight:
                yield self.collect(waiting.popleft())
        while waiting:
            yield self.collect(waiting.popleft())

    def submit(self, batch: Batch) -> PendingBatch:
        """Queue a batch."""
        nothing = [np.empty(0, np.int32)] * len(batch.prompts)
        return self._prepared().submit(list(batch.prompts), nothing)

    def collect(self, pending: PendingBatch) -> RankedSids:
        """Wait for a batch."""
        assert self._catalog is not None
        return sids_of(self._prepared().collect(pending), self._catalog)

    def release(self) -> None:
        """Drop buffers and graphs."""
        self.recommender = None

    def statistics(self) -> dict[str, Any]:
        """What the search did so far: rows and candidates looked at."""
        recommender = self._prepared()
        lane = recommender.lane
        if lane is not None:
            allowed, read = lane.search.candidates_read()
            return {"candidates_allowed": allowed, "candidates_read_again": read}
        counters = recommender.counters
        return {
            "rows_live": counters.rows_live,
            "rows_expanded": counters.rows_expanded,
            "candidates": counters.candidates,
        }

    def _prepared(self) -> Recommender:
        if self.recommender is None:
            raise NotAvailableError(f"{self.name} was not prepared")
        return self.recommender


def sids_of(result: BatchResult, catalog: BenchCatalog) -> RankedSids:
    """An engine's result, user by user."""
    ends = np.cumsum(result.counts)
    spans = [slice(end - count, end) for count, end in zip(result.counts.tolist(), ends.tolist(), strict=True)]
    return RankedSids(
        codes=[catalog.sids[result.leaves[span]] for span in spans], scores=[result.scores[span] for span in spans]
    )
