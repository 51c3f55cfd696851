"""What PagedAttention costs on this workload: the engine with every beam a sequence of its own over block tables.

Only the decode attention and where generated tokens live differ from the engine: model, linears, prefill, head,
search and graphs are the same objects. Full blocks of a prompt are shared by reference. The partly filled last block
is copied when a beam forks; a parent's first child takes its block over, so that W beams hold W blocks, as with
reference counts. The new token's key and value go into the beam's own block, and the attention kernel finds all keys
through the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from xgr_engine.bench.baselines.base import decoder_only, other_architecture
from xgr_engine.bench.baselines.engine import Xgr
from xgr_engine.bench.baselines.masked_search import MaskedRecommender
from xgr_engine.bench.baselines.pool import PooledCache, pool_fields
from xgr_engine.bench.baselines.variants import NoSharedPrefix
from xgr_engine.bench.kernels import paged_reference
from xgr_engine.bench.kernels.decode_layer import DecodeShape, fastest_tiles
from xgr_engine.bench.workloads import Workload
from xgr_engine.models.decoder_only import DecoderOnly
from xgr_engine.models.rows import Rows
from xgr_engine.recommender import Recommender
from xgr_engine.xattention.cache import KVCache

if TYPE_CHECKING:
    from xgr_engine.bench.kernels.paged_triton import PagedTiles

BLOCK = 16  # tokens a block: the least copying, and no slower than larger ones


@dataclass(frozen=True)
class PagedCache(PooledCache):
    """A pool of the packed prompts, then each user's tails (a beam's last prompt block and what follows it).

    Attributes:
        tail_rows: rows of a tail; tails: how many a user has.
        tail_of_slot: int64 [users, slots + 1] the tail that holds the token of each of the search's slots (the last
            column takes what belongs to no row).
    """

    tail_rows: int
    tails: int
    tail_of_slot: Tensor


class PagedDecoder(DecoderOnly):
    """A model whose decode reads block tables. It takes the search's ancestor tables and keeps block tables from them.

    Args:
        model: whose weights and kernels are used.
        beam: W, the most rows a level has.
        generated: tokens a beam generates at most.
        longest_prompt: tokens of the longest prompt; it decides how wide block tables are.
        reuse: a parent's first child takes over its tail. For a search that decodes all rows of a level at once, with
            SIDs of one depth. Otherwise each slot of the search has a tail of its own, which takes more memory.
        tiles: of the Triton kernel; None: its default.
    """

    def __init__(
        self,
        model: DecoderOnly,
        *,
        beam: int,
        generated: int,
        longest_prompt: int,
        reuse: bool,
        tiles: PagedTiles | None = None,
    ) -> None:
        super().__init__(model.spec, model.embed, model.norm, model.layers, model.ops)
        self.ops = replace(model.ops, beam_attention=partial(self._attend, model.ops.beam_attention))
        self.beam = beam
        self.tail_rows = BLOCK - 1 + generated
        self.table_width = -(-(longest_prompt + generated) // BLOCK)
        self.reuse = reuse
        self._paged_attention, self._copy_rows = _kernels(model, tiles)

    def new_cache(self, tokens: int, users: int, slots: int) -> PagedCache:
        """Room for ``users`` prompts of ``tokens`` tokens together; ``slots`` rows of all levels together a user."""
        tails = min(self.beam, slots) if self.reuse else slots
        rows = tails * self.tail_rows
        pool = super().new_cache(tokens + users * rows, users, 0)
        return PagedCache(
            **pool_fields(pool, tokens, rows),
            tail_rows=self.tail_rows,
            tails=tails,
            tail_of_slot=torch.arange(slots + 1, device=self.device).repeat(users, 1),
        )

    def decode(self, rows: Rows, cache: KVCache) -> Tensor:
        """As :meth:`DecoderOnly.decode`, after the forks that the rows' ancestors tell of."""
        assert isinstance(cache, PagedCache)
        return super().decode(self._fork(rows, cache), cache)

    def _fork(self, rows: Rows, cache: PagedCache) -> Rows:
        """Give each row a tail that begins with what its parent had; its table and its write place follow."""
        users = len(rows.ancestors)
        ancestors = rows.ancestors.long()
        generated = (ancestors >= 0).sum(2)
        own, parent = ancestors[:, :, -1], _last_present(ancestors[:, :, :-1])
        start = cache.prompt_start[:users, None].long()
        length = cache.prompt_start[1 : users + 1, None] - start
        in_tail = length % BLOCK
        first_tail = cache.tokens + torch.arange(users, device=own.device)[:, None] * cache.slots

        parent_tail = cache.tail_of_slot[:users].gather(1, parent.clamp_min(0))
        tail, inherited = own.clamp_min(0), torch.zeros_like(own, dtype=torch.bool)
        if self.reuse:
            tail, inherited = _assign_tails(parent, parent_tail, cache.tails)
            place = torch.where(own < 0, cache.tail_of_slot.shape[1] - 1, own)
            cache.tail_of_slot[:users].scatter_(1, place, tail)
        target = first_tail + tail * cache.tail_rows
        source = torch.where(parent < 0, start + length - in_tail, first_tail + parent_tail * cache.tail_rows)
        filled = in_tail + generated - 1
        copied = torch.where(inherited | (own < 0), 0, filled)
        flat = (source.flatten(), target.flatten(), copied.flatten())
        self._copy_rows(cache.prompt_k, cache.prompt_v, *flat, cache.tail_rows - 1)

        block = torch.arange(self.table_width, device=own.device)
        whole = (length // BLOCK)[:, :, None]
        shared = start[:, :, None] + block * BLOCK
        table = torch.where(block < whole, shared, target[:, :, None] + (block - whole) * BLOCK)
        context = (length + generated)[:, :, None]
        slots = (target + filled - cache.tokens).flatten()
        return Rows(
            tokens=rows.tokens,
            position=rows.position,
            slots=slots if rows.cells is None else slots[rows.cells],
            ancestors=torch.cat([context, table], 2).to(torch.int32),
            cells=rows.cells,
        )

    def _attend(
        self,
        engine_attention: Callable[..., Tensor],
        q: Tensor,
        pool_k: Tensor,
        pool_v: Tensor,
        prompt_start: Tensor,
        gen_k: Tensor,
        gen_v: Tensor,
        tables: Tensor,
        scale: float,
    ) -> Tensor:
        """``tables`` int32 [U, R, 1 + B]: a row's context length and its block table. Without any, it is the prefill
        that asks, for its last tokens."""
        if tables.shape[2] == 0:
            return engine_attention(q, pool_k, pool_v, prompt_start, gen_k, gen_v, tables, scale)
        flat = tables.flatten(0, 1)
        queries = q.flatten(0, 1)
        return self._paged_attention(queries, pool_k, pool_v, flat[:, 0], flat[:, 1:], BLOCK, scale).view(q.shape)


def _kernels(model: DecoderOnly, tiles: PagedTiles | None) -> tuple[Callable[..., Tensor], Callable[..., None]]:
    """Attention and copy, of the model's implementation."""
    if model.ops.name != "triton":
        return paged_reference.paged_attention, paged_reference.copy_rows
    from xgr_engine.bench.kernels import paged_triton

    return partial(paged_triton.paged_attention, tiles=tiles), paged_triton.copy_rows


def _last_present(slots: Tensor) -> Tensor:
    """The last entry of each row's table [U, R, A] that is not -1: [U, R], -1 where there is none."""
    found = slots.new_full(slots.shape[:2], -1)
    for level in range(slots.shape[2]):
        found = torch.where(slots[:, :, level] >= 0, slots[:, :, level], found)
    return found


def _assign_tails(parent: Tensor, parent_tail: Tensor, tails: int) -> tuple[Tensor, Tensor]:
    """A tail for each row [U, R]: its parent's for the first child, a free one for the others. Rows stand in the order
    of their parents; those without a parent (-1) take tails as they come.

    Returns:
        int64 [U, R] tails, each once a user, and bool [U, R] whether it is the parent's.
    """
    before = torch.cat([torch.full_like(parent[:, :1], -1), parent.cummax(1).values[:, :-1]], 1)
    inherits = parent > before
    taken = torch.zeros((len(parent), tails + 1), dtype=torch.int32, device=parent.device)
    taken.scatter_(1, torch.where(inherits, parent_tail, tails), 1)
    free = taken[:, :tails].argsort(dim=1, stable=True)
    rank = ((~inherits).cumsum(1) - 1).clamp(0, tails - 1)
    return torch.where(inherits, parent_tail, free.gather(1, rank)), inherits


def fastest_paged_tiles(workload: Workload) -> PagedTiles | None:
    """The attention kernel's tiles that are fastest at the workload's shape, by trying them; None without a GPU."""
    decoder = workload.model.decoder
    if decoder.device.type != "cuda" or decoder.ops.name != "triton":
        return None
    return fastest_tiles(DecodeShape.of(workload), decoder.device)


def paged_decoder(workload: Workload) -> PagedDecoder:
    """The workload's model with paged attention."""
    model, catalog = workload.model, workload.catalog
    return PagedDecoder(
        decoder_only(model),
        beam=workload.search.beam,
        generated=max(1, catalog.trie.levels - 1 + len(model.score_suffix)),
        longest_prompt=workload.context,
        reuse=catalog.uniform and model.decoder.ops.name == "triton",
        tiles=fastest_paged_tiles(workload),
    )


class Paged(Xgr):
    """xAttention off: one sequence per beam."""

    name = "paged"
    what = f"one sequence per beam over tables of {BLOCK}-token blocks, copied on fork; all else as xgr"

    def available(self, workload: Workload) -> str | None:
        """Its attention is that of decoder-only models."""
        return other_architecture(workload)

    def make(self, workload: Workload) -> Recommender:
        """The engine's recommender over a model that decodes pages."""
        paged = replace(workload.model, decoder=paged_decoder(workload))
        return super().make(replace(workload, model=paged))


class AllOff(NoSharedPrefix):
    """Everything that xgr adds, switched off at once (its parent keeps prompts apart)."""

    name = "all-off"
    what = (
        "one sequence per beam over block tables; masks over the vocabulary; W rows per level; a full sort; no graphs; "
        "one batch at a time; no shared prefix"
    )
    graphs = False
    in_flight = 1

    def available(self, workload: Workload) -> str | None:
        """Its attention is that of decoder-only models, and masks know SIDs of one depth only."""
        return other_architecture(workload) or MaskedRecommender.covers(workload.catalog.trie)

    def make(self, workload: Workload) -> Recommender:
        """Pages and masks together."""
        model = workload.model
        return MaskedRecommender(
            paged_decoder(workload),
            model.head,
            workload.catalog.trie,
            model.table,
            workload.search,
            score_suffix=model.score_suffix,
            graphs=False,
            full_rows=True,
            early_termination=False,
        )
