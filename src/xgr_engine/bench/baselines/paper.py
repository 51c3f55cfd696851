"""xGR in the paper's own forms (arXiv 2512.11529), inside this engine: what is left when they are replaced one by one.

xAttention: shared stage (beams as query rows over the prompt), unshared stage (each beam over its own tokens), merge;
three kernels a layer. A beam's own tokens lie in its own row, and before each step the rows are re-ordered in place
to follow their parents. xBeam: see ``masked_search``. Model, linears, prefill and graphs are the engine's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType

import torch
from torch import Tensor

from xgr_engine.bench.baselines.base import decoder_only, other_architecture
from xgr_engine.bench.baselines.engine import Xgr
from xgr_engine.bench.baselines.masked_search import MaskedRecommender
from xgr_engine.bench.kernels import staged_reference
from xgr_engine.bench.workloads import Workload
from xgr_engine.models.decoder_only import DecoderOnly
from xgr_engine.models.model import Model
from xgr_engine.models.rows import Rows
from xgr_engine.recommender import Recommender
from xgr_engine.xattention.cache import KVCache


@dataclass(frozen=True)
class PaperCache(KVCache):
    """The engine's cache with one row of ``steps`` generated tokens a beam: slot ``row * steps + step``.

    Attributes:
        row_of_slot: int64 [users, slots] the beam row that a slot of the search was given to.
        steps: tokens a beam generates at most.
    """

    row_of_slot: Tensor
    steps: int


class PaperDecoder(DecoderOnly):
    """A model whose decode re-orders and runs three stages. It takes the search's ancestor tables and finds each row's
    parent in them; every call brings all rows of a level, in the order of their parents.

    Args:
        model: whose weights and kernels are used.
        beam: W, the most rows a level has.
        generated: tokens a beam generates at most.
    """

    def __init__(self, model: DecoderOnly, *, beam: int, generated: int) -> None:
        super().__init__(model.spec, model.embed, model.norm, model.layers, model.ops)
        self.ops = replace(model.ops, beam_attention=partial(self._attend, model.ops.beam_attention))
        self.beam = beam
        self.generated = generated
        self._kernels = _kernels(model)

    def new_cache(self, tokens: int, users: int, slots: int) -> PaperCache:
        """As :meth:`DecoderOnly.new_cache`; ``slots`` are the search's, of all levels together."""
        cache = super().new_cache(tokens, users, self.beam * self.generated)
        row_of_slot = torch.zeros((users, slots), dtype=torch.int64, device=self.device)
        return PaperCache(**vars(cache), row_of_slot=row_of_slot, steps=self.generated)

    def decode(self, rows: Rows, cache: KVCache) -> Tensor:
        """As :meth:`DecoderOnly.decode`, after the rows' own tokens were moved to follow their parents."""
        assert isinstance(cache, PaperCache) and rows.cells is None
        users, width, tokens = rows.ancestors.shape
        own = rows.ancestors.long()
        row_of_slot = cache.row_of_slot[:users]
        if tokens > 1:
            # rows without a live prefix name any parent: cummax keeps the order that the passes rely on
            parent = row_of_slot.gather(1, own[:, :, -2]).cummax(1).values
            shape = (self.spec.num_layers, cache.users, self.beam, cache.steps, *cache.generated_k.shape[2:])
            own_k, own_v = (t.view(shape) for t in (cache.generated_k, cache.generated_v))
            self._kernels.reorder_in_place(own_k, own_v, parent.contiguous(), tokens - 1)
        row = torch.arange(width, device=own.device)
        row_of_slot.scatter_(1, own[:, :, -1], row.expand(users, -1))
        first = torch.arange(users, device=own.device)[:, None] * cache.slots
        slots = (first + row * cache.steps + tokens - 1).flatten()
        return super().decode(replace(rows, slots=slots), cache)

    def _attend(
        self,
        engine_attention: Callable[..., Tensor],
        q: Tensor,
        prompt_k: Tensor,
        prompt_v: Tensor,
        prompt_start: Tensor,
        gen_k: Tensor,
        gen_v: Tensor,
        ancestors: Tensor,
        scale: float,
    ) -> Tensor:
        """The three stages. Without generated tokens it is the prefill that asks, for its last tokens."""
        steps = ancestors.shape[2]
        if steps == 0:
            return engine_attention(q, prompt_k, prompt_v, prompt_start, gen_k, gen_v, ancestors, scale)
        own_k, own_v = (t.view(len(t), self.beam, self.generated, *t.shape[2:]) for t in (gen_k, gen_v))
        shared = self._kernels.shared_stage(q, prompt_k, prompt_v, prompt_start, scale)
        own = self._kernels.unshared_stage(q, own_k, own_v, steps, scale)
        mixed: Tensor = self._kernels.merge_stages(shared, own, torch.empty_like(q))
        return mixed


def _kernels(model: DecoderOnly) -> ModuleType:
    if model.ops.name != "triton":
        return staged_reference
    from xgr_engine.bench.kernels import staged_triton

    return staged_triton


class PaperMasks(Xgr):
    """The constraint off: the engine's attention under the paper's masks."""

    name = "paper-masks"
    what = "dense mask at the first level, sparse masks updated in place later, top-k over the vocabulary"
    full_rows = False

    def available(self, workload: Workload) -> str | None:
        """Masks know SIDs of one depth only."""
        return MaskedRecommender.covers(workload.catalog.trie)

    def make(self, workload: Workload) -> Recommender:
        """The engine's model under a masked search; rows follow the trie, as the engine's do."""
        model = workload.model
        return MaskedRecommender(
            self.decoder(workload),
            model.head,
            workload.catalog.trie,
            model.table,
            workload.search,
            score_suffix=model.score_suffix,
            graphs=self.graphs,
            full_rows=self.full_rows,
        )

    def decoder(self, workload: Workload) -> Model:
        """The model that is searched."""
        return workload.model.decoder


class Paper(PaperMasks):
    """Everything in the paper's form."""

    name = "paper"
    what = (
        "the paper's forms: three attention stages, own KV re-ordered in place, masks over the vocabulary, "
        "sorted lists cut at a heap's minimum, W rows per level"
    )
    full_rows = True

    def available(self, workload: Workload) -> str | None:
        """Its attention is that of decoder-only models."""
        return other_architecture(workload) or super().available(workload)

    def decoder(self, workload: Workload) -> DecoderOnly:
        """The workload's model in three stages."""
        model = workload.model
        generated = max(1, workload.catalog.trie.levels - 1 + len(model.score_suffix))
        return PaperDecoder(decoder_only(model), beam=workload.search.beam, generated=generated)
