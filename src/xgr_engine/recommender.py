"""A batch from prompts to ranked items: prefill once per user, search down the trie level by level, rank the items.

:meth:`Recommender.run` is ``collect(launch(prepare(...)))``: three steps, so that the next batch is prepared while one
computes. The loop over the levels is ``search/host.py`` (plain torch, the definition) or ``search/device.py`` (GPU).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xgr_engine.catalog.trie import ItemTrie
from xgr_engine.errors import InputError, XgrError
from xgr_engine.models.head import Head
from xgr_engine.models.model import Model
from xgr_engine.models.packing import PackedPrompts
from xgr_engine.options import LANES, SearchOptions, UserRules
from xgr_engine.search.host import HostSearch, SearchCounters
from xgr_engine.search.lanes import Clock, Lane, Lanes, Queued
from xgr_engine.search.setup import DeadNodes, Outcome, SearchSetup
from xgr_engine.tokens.table import SidTokenTable
from xgr_engine.xbeam.exclusions import Exclusions, find_dead_nodes
from xgr_engine.xbeam.ranking import BatchResult, rank_items
from xgr_engine.xbeam.state import upload_trie

# Rows per user that a search on a CPU expands before it checks whether the rest can still matter (docs/performance.md,
# "rows are expanded best first").
_ROWS_AT_ONCE = 48
# A pass with fewer operations per layer than this (2 ms of one core) is mostly overhead: 1000 rows of a model of 1
# million parameters in 4 layers.
_PASS_FLOPS = 5e8


@dataclass(frozen=True)
class ReadyBatch:
    """A batch's inputs, on the device or on their way to it: on a GPU ``copied`` is the event of their arrival."""

    exclusions: Exclusions
    pack: PackedPrompts
    dead: DeadNodes
    copied: torch.cuda.Event | None = None


@dataclass(frozen=True)
class PendingBatch:
    """A batch that the device is computing (GPU) or has computed (CPU).

    Attributes:
        queued: GPU: the events of its start and of its result's arrival on the host.
        seconds: CPU: start and end of the computation, in seconds of ``time.perf_counter``.
    """

    users: int
    exclusions: Exclusions
    outcome: Outcome
    queued: Queued | None = None
    seconds: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True)
class Span:
    """When a batch was computed, in seconds of ``time.perf_counter``, and in which lane; None on a CPU."""

    start: float
    end: float
    lane: int | None


class Recommender:
    """Trie beam search over one model and one catalog.

    Args:
        model: any architecture.
        head_weight: its output projection [V, H].
        trie: the catalog.
        table: the model's SID tokens.
        options: beam width, number of results, and what else changes them.
        score_suffix: token ids that belong to every answer's score but to no SID (the model's score contract).
        rows_at_once: CPU only, see :class:`HostSearch`; None chooses by the model's size.
        graphs: GPU only: capture everything after the prefill, and the prefill of a single prompt, in CUDA graphs.
        lanes: GPU only: batches computed side by side, each in its own buffers.

    Raises:
        InputError: a code of the catalog has no token.

    :meth:`prepare`, :meth:`launch` and :meth:`collect` may be called from different threads, :meth:`run` from several.
    """

    def __init__(
        self,
        model: Model,
        head_weight: Tensor,
        trie: ItemTrie,
        table: SidTokenTable,
        options: SearchOptions,
        *,
        score_suffix: tuple[int, ...] = (),
        rows_at_once: int | None = None,
        graphs: bool = True,
        lanes: int = LANES,
    ) -> None:
        self.model = model
        self.trie = trie
        self.options = options
        levels = upload_trie(trie, table.bind(trie), model.device)
        tokens = [torch.from_numpy(ids.astype(np.int64)).to(model.device) for ids in table.token_ids[: trie.levels]]
        self.setup = SearchSetup(model, Head(head_weight, tokens, model.ops), levels, options, score_suffix)
        # the device search is written in Triton; plain torch kernels, asked for by name, go with the host search
        self._on_device = model.ops.name == "triton"
        self._graphs = graphs
        self._host = _host_search(self.setup, rows_at_once)
        self._lanes = Lanes(lanes, self._new_lane)
        self._host_lock = threading.Lock()
        gpu = model.device.type == "cuda"
        self._uploads = torch.cuda.Stream(model.device) if gpu else None  # type: ignore[no-untyped-call]
        self._clock = Clock(model.device) if gpu else None

    @property
    def implementation(self) -> str:
        """Which kernels run, for the manifest."""
        return self.model.ops.name + (" in CUDA graphs" if self._on_device and self._graphs else "")

    @property
    def counters(self) -> SearchCounters:
        """What the host search has done so far."""
        return self._host.counters

    @property
    def lane(self) -> Lane | None:
        """GPU: the lane that batches run in when there is one at a time; None before the first."""
        return self._lanes.first

    def _new_lane(self, tokens: int, users: int, number: int) -> Lane:
        return Lane(self.setup, tokens, users, graphs=self._graphs, number=number)

    def reserve(self, tokens: int, users: int) -> None:
        """GPU: allocate buffers for batches of up to ``users`` prompts and ``tokens`` prompt tokens together.

        A larger batch makes them grow, and the graphs captured so far are lost.
        """
        if self._on_device:
            self._lanes.reserve(tokens, users)

    def run(self, prompts: list[NDArray[np.int32]], excluded: Sequence[NDArray[np.int32] | UserRules]) -> BatchResult:
        """Recommend for a batch.

        Args:
            prompts: per user the prompt's token ids, at least one.
            excluded: per user the rows of ``items.parquet`` that must not be returned, or :class:`UserRules`, which a
                trie with several roots needs.

        Returns:
            Per user exactly ``min(K, reachable)`` items, best first.

        Raises:
            InputError: a prompt is empty, or longer than the model's context.
            XgrError: the model produced a hidden state that is not a number.
        """
        return self.collect(self.submit(prompts, excluded))

    def submit(
        self, prompts: list[NDArray[np.int32]], excluded: Sequence[NDArray[np.int32] | UserRules]
    ) -> PendingBatch:
        """:meth:`prepare` and :meth:`launch`."""
        return self.launch(self.prepare(prompts, excluded))

    @torch.inference_mode()
    def prepare(
        self, prompts: list[NDArray[np.int32]], excluded: Sequence[NDArray[np.int32] | UserRules]
    ) -> ReadyBatch:
        """Make a batch's inputs and, on a GPU, start to copy them while other batches compute. Args as :meth:`run`.

        Raises:
            InputError: as :meth:`run`.
        """
        self._check_lengths(prompts)
        exclusions = find_dead_nodes(self.trie, excluded)
        dead = DeadNodes.of(exclusions)
        device = self.model.device
        share = self.model.causal
        if self._uploads is None:
            return ReadyBatch(exclusions, PackedPrompts.of(prompts, device, share=share), dead.to(device))
        with torch.cuda.stream(self._uploads):
            pack = PackedPrompts.of(prompts, device, share=share)
            return ReadyBatch(exclusions, pack, dead.to(device), self._uploads.record_event())

    @torch.inference_mode()
    def launch(self, ready: ReadyBatch) -> PendingBatch:
        """Start a batch; on a GPU this returns as soon as the work is queued, on a CPU when it is done."""
        users = len(ready.pack.lengths)
        if self._on_device:
            queued = self._lanes.run(ready.pack, ready.dead, ready.copied)
            return PendingBatch(users, ready.exclusions, queued.outcome, queued)
        if ready.copied is not None:
            ready.copied.synchronize()
        with self._host_lock:
            start = time.perf_counter()
            cache = self.model.new_cache(ready.pack.cache_tokens, users, self.setup.slots)
            outcome = self._host.run(self.model.prefill(ready.pack, cache), cache, ready.dead)
            return PendingBatch(users, ready.exclusions, outcome, None, (start, time.perf_counter()))

    def span(self, batch: PendingBatch) -> Span:
        """When the device worked on a batch. Call it after :meth:`collect`."""
        if batch.queued is None or self._clock is None:
            return Span(*batch.seconds, None)
        return Span(self._clock.at(batch.queued.started), self._clock.at(batch.queued.ready), batch.queued.lane)

    def _check_lengths(self, prompts: list[NDArray[np.int32]]) -> None:
        room = self.model.spec.max_context - self.trie.levels - len(self.setup.score_suffix)
        lengths = [len(prompt) for prompt in prompts]
        shortest, longest = min(lengths), max(lengths)
        if shortest < 1 or longest > room:
            raise InputError(
                f"prompts must have 1 to {room} tokens, not {shortest if shortest < 1 else longest}",
                why=f"the model's context is {self.model.spec.max_context} tokens, including those of the answer",
                hint="shorten the histories (--max-history)",
            )

    def collect(self, batch: PendingBatch) -> BatchResult:
        """Wait for a batch and rank its items on the host. Raises as :meth:`run`."""
        if batch.queued is not None:
            batch.queued.ready.synchronize()
        if not batch.outcome.finite:
            raise XgrError(
                "the model produced a hidden state that is not a number",
                why="a weight or an activation is NaN or overflowed",
                hint="try `xgr convert --dtype float32`, and check the checkpoint with `xgr inspect`",
            )
        leaves = batch.outcome.leaf[: batch.users].cpu().numpy()
        scores = batch.outcome.score[: batch.users].cpu().numpy()
        return rank_items(self.trie, batch.exclusions, leaves, scores, self.options)


def _host_search(setup: SearchSetup, rows_at_once: int | None) -> HostSearch:
    """The search in plain torch. On a GPU it serves only the reference kernels, and expands every row."""
    if setup.model.device.type == "cuda":
        return HostSearch(setup, 0)
    if rows_at_once is not None:
        return HostSearch(setup, rows_at_once)
    spec = setup.model.spec
    row_flops = 2 * sum(math.prod(shape) for shape in spec.tensor_shapes().values())
    return HostSearch(setup, _ROWS_AT_ONCE, math.ceil(_PASS_FLOPS * spec.num_layers / row_flops))
