"""The engine with one part switched off, for the ablations."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch

from xgr_engine.bench.baselines.engine import Xgr
from xgr_engine.bench.baselines.masked_search import with_full_rows
from xgr_engine.bench.workloads import Batch, Workload
from xgr_engine.models.packing import PackedPrompts
from xgr_engine.recommender import PendingBatch, ReadyBatch, Recommender
from xgr_engine.search.setup import DeadNodes
from xgr_engine.xattention.ragged import Ragged
from xgr_engine.xbeam.exclusions import find_dead_nodes

_NEEDS_GPU = "not available: the search runs without CUDA graphs on this device anyway"


class Eager(Xgr):
    """The same kernels, launched one by one."""

    name = "xgr-eager"
    what = "kernels launched one by one instead of one CUDA graph"
    graphs = False

    def available(self, workload: Workload) -> str | None:
        """Graphs exist on a GPU only."""
        return None if workload.model.device.type == "cuda" else _NEEDS_GPU


class FullRows(Xgr):
    """W rows per level, whether or not the trie has that many prefixes."""

    name = "xgr-full-rows"
    what = "W rows at every level but the root"

    def available(self, workload: Workload) -> str | None:
        """The search of fixed shapes has rows without a prefix; the one on a CPU computes live rows only."""
        if workload.model.decoder.ops.name != "triton":
            return "not available: the search on this device has no rows without a prefix"
        return None

    def make(self, workload: Workload) -> Recommender:
        """The engine's recommender, its search with the rows of :func:`with_full_rows`."""
        recommender = super().make(workload)
        recommender.setup = with_full_rows(recommender.setup)
        return recommender


class FullSort(Xgr):
    """No early termination: every live row is expanded, and every candidate sorted."""

    name = "xgr-full-sort"
    what = "every live row expanded, all candidates sorted"
    rows_at_once = 0

    def make(self, workload: Workload) -> Recommender:
        """On a CPU the engine without its order of rows, on a GPU with another selection."""
        if workload.model.decoder.ops.name != "triton":
            return super().make(workload)
        from xgr_engine.bench.baselines.sorted_search import SortedRecommender

        model = workload.model
        suffix, search = model.score_suffix, workload.search
        return SortedRecommender(
            model.decoder, model.head, workload.catalog.trie, model.table, search, score_suffix=suffix
        )


class NoOverlap(Xgr):
    """A batch is submitted when the one before it has been ranked."""

    name = "xgr-no-overlap"
    what = "one batch at a time, host and device by turns"
    in_flight = 1

    def available(self, workload: Workload) -> str | None:
        """On a CPU host and device are the same."""
        return None if workload.model.device.type == "cuda" else "not available: the CPU is both host and device"


class TwoStreams(Xgr):
    """Two batches compute side by side, where the engine queues the next behind the one that computes."""

    name = "xgr-two-streams"
    what = "two streams, in which batches in flight compete for the GPU"
    lanes = 2
    in_flight = 3

    def available(self, workload: Workload) -> str | None:
        """Streams exist on a GPU only."""
        return None if workload.model.device.type == "cuda" else "not available: a CPU has no streams"


class NoSharedPrefix(Xgr):
    """What all prompts begin with is computed once per user instead of once per batch."""

    name = "xgr-no-shared-prefix"
    what = "the prompts' common beginning computed once per user"

    def available(self, workload: Workload) -> str | None:
        """Needs prompts that share something, and a model that can share it."""
        if not workload.model.decoder.causal:
            return "not available: an encoder reads whole prompts, which share no computation"
        if workload.users < 2 or not (workload.shared_prefix or workload.prompts):
            return "not available: the prompts of this workload share no beginning"
        return None

    @torch.inference_mode()
    def submit(self, batch: Batch) -> PendingBatch:
        """As the recommender's own, with a pack that shares nothing."""
        recommender = self._prepared()
        prompts = list(batch.prompts)
        exclusions = find_dead_nodes(recommender.trie, [np.empty(0, np.int32)] * len(prompts))
        device = recommender.model.device
        pack, dead = pack_apart(batch, device), DeadNodes.of(exclusions).to(device)
        # copied in this thread's stream, used in a lane's
        copied = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        return recommender.launch(ReadyBatch(exclusions, pack, dead, copied))


def pack_apart(batch: Batch, device: torch.device) -> PackedPrompts:
    """The prompts packed without looking for a common beginning."""
    lengths = [len(prompt) for prompt in batch.prompts]
    start = np.cumsum([0, *lengths])
    tokens = np.concatenate(batch.prompts).astype(np.int64)
    positions = np.concatenate([np.arange(length) for length in lengths])

    def upload(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device)

    assert all(low < high for low, high in pairwise(start.tolist()))
    return PackedPrompts(
        tokens=upload(tokens),
        positions=upload(positions),
        prefix=0,
        lengths=lengths,
        sequences=Ragged.of(queries=lengths, keys=lengths),
        cache_rows=upload(np.arange(len(tokens))),
        prefix_rows=upload(np.empty((len(lengths), 0), np.int64)),
        last=upload(start[1:] - 1),
    )
