"""FlashInfer's cascade attention in this engine: model, prefill, head, search and graphs are the engine's own objects.

``MultiLevelCascadeAttentionWrapper`` runs one kernel over what rows share and one over what each has alone, and merges.
Here level 0 is a user's prompt under all of its beams, and level 1 a beam's own few tokens. Both are read through page
tables over one pool a layer: the engine's packed prompts, then its slots of generated tokens. Pages hold one token, so
the engine's ancestor table is the page table of level 1 and nothing is copied, neither prompts nor on a fork.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType

import torch
from torch import Tensor

from xgr_engine.bench.baselines.base import NotAvailableError, OneAtATime, decoder_only, other_architecture
from xgr_engine.bench.baselines.cascade_plan import CascadePlans, load_flashinfer, trial
from xgr_engine.bench.baselines.engine import Xgr
from xgr_engine.bench.baselines.pool import PooledCache, pool_fields
from xgr_engine.bench.foreign.packages import FLASHINFER
from xgr_engine.bench.workloads import Workload
from xgr_engine.models.decoder_only import DecoderOnly
from xgr_engine.models.rows import Rows
from xgr_engine.recommender import Recommender
from xgr_engine.search.graphed import GraphedSearch, places_for
from xgr_engine.search.lanes import Lane
from xgr_engine.search.setup import DeadNodes, Outcome
from xgr_engine.xattention.cache import KVCache
from xgr_engine.xschedule.engines import describe, is_out_of_memory


@dataclass(frozen=True)
class CascadeCache(PooledCache):
    """A pool, and the library's plans for it.

    Attributes:
        plans: the wrappers for this pool, whose buffers a captured graph reads.
    """

    plans: CascadePlans

    def begin(self, lengths: list[int], shared: int) -> None:
        """As :meth:`KVCache.begin`; what was planned for other lengths no longer holds."""
        super().begin(lengths, shared)
        self.plans.begin(lengths, shared)


class CascadeDecoder(DecoderOnly):
    """A model whose decode attention is FlashInfer's.

    Args:
        model: whose weights and kernels are used.
        library: the ``flashinfer`` module.
    """

    def __init__(self, model: DecoderOnly, library: ModuleType) -> None:
        super().__init__(model.spec, model.embed, model.norm, model.layers, model.ops)
        self._library = library

    def new_cache(self, tokens: int, users: int, slots: int) -> CascadeCache:
        """As :meth:`DecoderOnly.new_cache`."""
        pool = super().new_cache(tokens + users * slots, users, 0)
        heads = (self.spec.num_heads, self.spec.num_kv_heads, self.spec.head_dim)
        plans = CascadePlans(self._library, heads, self.scale, self.dtype, tokens, self.device)
        return CascadeCache(**pool_fields(pool, tokens, slots), plans=plans)

    def decode(self, rows: Rows, cache: KVCache) -> Tensor:
        """As :meth:`DecoderOnly.decode`. Every row must have a token in each column of its ancestors, except those
        that nobody reads."""
        assert isinstance(cache, CascadeCache)
        users, width, tokens = rows.ancestors.shape
        planned = cache.plans.get(users, width, tokens)
        first = cache.tokens + torch.arange(users, device=self.device)[:, None, None] * cache.slots
        planned.own_pages.copy_((first + rows.ancestors.clamp_min(0)).flatten())
        ops = self.ops
        self.ops = replace(ops, beam_attention=partial(self._attend, planned.run))
        try:
            return super().decode(rows, cache)
        finally:
            self.ops = ops

    @staticmethod
    def _attend(
        run: Callable[[Tensor, tuple[Tensor, Tensor]], Tensor],
        q: Tensor,
        pool_k: Tensor,
        pool_v: Tensor,
        prompt_start: Tensor,
        gen_k: Tensor,
        gen_v: Tensor,
        ancestors: Tensor,
        scale: float,
    ) -> Tensor:
        """All arguments but the first as the engine's attention has them; the plan knows the rest."""
        return run(q.flatten(0, 1), (pool_k.unsqueeze(1), pool_v.unsqueeze(1))).view(q.shape)


class PlannedSearch(GraphedSearch):
    """Plans every step before a graph that holds it is replayed: plan() runs on the host and cannot be captured."""

    def run(self, hidden: Tensor, dead: DeadNodes) -> Outcome:
        """As :meth:`GraphedSearch.run`; the prefill is queued by now, so that planning hides behind it."""
        assert isinstance(self.cache, CascadeCache)
        self.cache.plans.refresh(places_for(len(hidden)))
        return super().run(hidden, dead)


class CascadeRecommender(Recommender):
    """The engine over a :class:`CascadeDecoder`."""

    def _new_lane(self, tokens: int, users: int, number: int) -> Lane:
        lane = super()._new_lane(tokens, users, number)
        with torch.cuda.stream(lane.stream):
            lane.search = PlannedSearch(self.setup, lane.cache, capture=self._graphs)
        return lane


class Cascade(Xgr, OneAtATime):
    """xAttention replaced by FlashInfer's cascade attention."""

    name = "cascade"
    what = (
        "FlashInfer's MultiLevelCascadeAttentionWrapper: a user's prompt under all beams, a beam's own tokens, and a "
        "merge, over the engine's cache in pages of one token; one batch at a time; all else as xgr"
    )
    in_flight = 1  # plan() writes into pinned memory that the batch before may not have read yet
    devices: tuple[str, ...] = ("cuda",)
    dtypes: tuple[str, ...] = ("bfloat16", "float16")
    head_dims: tuple[int, ...] = (64, 128, 256)

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []

    def available(self, workload: Workload) -> str | None:
        """The package is there, in a version that is known, and has kernels for this model."""
        if reason := other_architecture(workload):
            return reason
        model = workload.model
        if model.device.type not in self.devices:
            return "flashinfer-python needs a CUDA GPU"
        if reason := FLASHINFER.missing():
            return reason
        if model.dtype not in self.dtypes:
            return f"FlashInfer computes in {' or '.join(self.dtypes)}, but the weights are {model.dtype}"
        if model.spec.head_dim not in self.head_dims:
            return f"FlashInfer has no kernels for a head dimension of {model.spec.head_dim}"
        if model.score_suffix and not workload.catalog.uniform:
            return "not available: a score suffix after SIDs of several lengths is not supported here"
        return None

    def make(self, workload: Workload) -> Recommender:
        """The engine's recommender over a model that decodes with FlashInfer, once that gave the right numbers.

        Raises:
            NotAvailableError: a trial call failed or was wrong.
        """
        model = workload.model
        try:
            library = load_flashinfer()
            trial(library, decoder_only(model), captured=False)
        except Exception as error:  # whatever a foreign binary raises
            if is_out_of_memory(error):
                raise
            what = f"a trial call of flashinfer-python {FLASHINFER.installed()} failed"
            raise NotAvailableError(f"{what}: {describe(error)}") from error
        graphs, self.notes = model.device.type == "cuda", []
        if graphs:
            try:
                trial(library, decoder_only(model), captured=True)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                why = f"a trial in a CUDA graph failed ({describe(error)})"
                graphs, self.notes = False, [f"kernels launched one by one: {why}"]
        return CascadeRecommender(
            CascadeDecoder(decoder_only(model), library),
            model.head,
            workload.catalog.trie,
            model.table,
            workload.search,
            score_suffix=model.score_suffix,
            graphs=graphs,
        )
