"""One layer's decode attention in the forms of all contenders, and the tiles at which the paged one is fastest."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from xgr_engine.bench.kernels import paged_triton, staged_triton
from xgr_engine.bench.kernels.paged_triton import VARIANTS, PagedTiles
from xgr_engine.bench.timing import call_ms
from xgr_engine.xattention import reference
from xgr_engine.xattention.triton import beam_attention

BLOCK = 16
_CHECKED_BEAMS = 4  # a user, spread over the beams: the definition in float64 is slow


@dataclass(frozen=True)
class DecodeShape:
    """One decode step: U users of ``context`` tokens, R beams with ``own`` generated tokens each."""

    context: int
    users: int
    beams: int
    own: int = 2
    heads: int = 16
    kv_heads: int = 8
    dim: int = 128
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        return f"{self.context} x {self.users} x {self.beams}, {self.heads}/{self.kv_heads} x {self.dim}"


@dataclass(frozen=True, eq=False)
class Layer:
    """Keys and values of one layer in the forms of all three contenders, with the same contents.

    Attributes:
        pool: keys and values [M, Hkv, D], the packed prompts, then a tail a beam; tables: int32 [N, 1 + B] context
            and blocks.
        own: keys and values [U, R, S, Hkv, D] of generated tokens; ancestors: int32 [U, R, S] places in [R * S].
    """

    q: Tensor
    pool: tuple[Tensor, Tensor]
    tables: Tensor
    start: Tensor
    own: tuple[Tensor, Tensor]
    ancestors: Tensor
    scale: float

    @classmethod
    def random(cls, shape: DecodeShape, device: torch.device, seed: int = 0) -> Layer:
        """Unit variance, the same prompt length for all."""
        rng = torch.Generator(device).manual_seed(seed)
        normal = partial(torch.randn, generator=rng, device=device, dtype=shape.dtype)
        users, beams, own_count = shape.users, shape.beams, shape.own
        in_tail, tail_rows = shape.context % BLOCK, BLOCK - 1 + own_count
        prompt_rows, rows = users * shape.context, users * beams
        pool = normal(2, prompt_rows + rows * tail_rows, shape.kv_heads, shape.dim)
        own = normal(2, users, beams, own_count, shape.kv_heads, shape.dim)
        start = torch.arange(users + 1, device=device) * shape.context
        tail = prompt_rows + torch.arange(rows, device=device) * tail_rows
        user = torch.arange(rows, device=device) // beams
        for row in range(in_tail):
            pool[:, tail + row] = pool[:, start[user] + shape.context - in_tail + row]
        for token in range(own_count):
            pool[:, tail + in_tail + token] = own[:, :, :, token].flatten(1, 2)
        block = torch.arange(-(-(shape.context + own_count) // BLOCK), device=device)
        whole = shape.context // BLOCK
        table = torch.where(block < whole, start[user, None] + block * BLOCK, tail[:, None] + (block - whole) * BLOCK)
        context = torch.full((rows, 1), shape.context + own_count, device=device)
        return cls(
            q=normal(users, beams, shape.heads, shape.dim),
            pool=(pool[0], pool[1]),
            tables=torch.cat([context, table], 1).to(torch.int32),
            start=start.to(torch.int32),
            own=(own[0], own[1]),
            ancestors=torch.arange(beams * own_count, dtype=torch.int32, device=device)
            .view(1, beams, own_count)
            .expand(users, -1, -1)
            .contiguous(),
            scale=shape.dim**-0.5,
        )

    def paged(self, tiles: PagedTiles | None = None) -> Tensor:
        """One sequence a beam."""
        context, blocks = self.tables[:, 0], self.tables[:, 1:]
        q = self.q.flatten(0, 1)
        out = paged_triton.paged_attention(q, *self.pool, context, blocks, BLOCK, self.scale, tiles=tiles)
        return out.view(self.q.shape)

    def engine(self) -> Tensor:
        """Fused, the prompt read once a tile of beams."""
        own_k, own_v = (t.flatten(1, 2) for t in self.own)
        return beam_attention(self.q, *self.pool, self.start, own_k, own_v, self.ancestors, self.scale)

    def staged(self) -> Tensor:
        """Shared stage, unshared stage, merge."""
        shared = staged_triton.shared_stage(self.q, *self.pool, self.start, self.scale)
        own = staged_triton.unshared_stage(self.q, *self.own, self.ancestors.shape[2], self.scale)
        return staged_triton.merge_stages(shared, own, torch.empty_like(self.q))

    def error(self, out: Tensor) -> float:
        """Relative error of a few beams of each user, against the definition in float64."""
        beams = self.q.shape[1]
        some = torch.linspace(0, beams - 1, min(beams, _CHECKED_BEAMS), device=out.device).long()
        total, wrong = 0.0, 0.0
        for user in range(len(self.q)):
            part = slice(int(self.start[user]), int(self.start[user + 1]))
            prompt_k, prompt_v = (t[part].double() for t in self.pool)
            own_k, own_v = (t[user : user + 1].flatten(1, 2).double() for t in self.own)
            expected = reference.beam_attention(
                self.q[user : user + 1, some].double(),
                prompt_k,
                prompt_v,
                torch.tensor([0, part.stop - part.start]),
                own_k,
                own_v,
                self.ancestors[user : user + 1, some],
                self.scale,
            )
            wrong += float((out[user, some].double() - expected[0]).square().sum())
            total += float(expected.square().sum())
        return math.sqrt(wrong / total)


@cache
def fastest_tiles(shape: DecodeShape, device: torch.device) -> PagedTiles:
    """The fastest of the variants at a shape, by trying them (a second or two, and once a shape)."""
    layer = Layer.random(shape, device)
    times = {tiles: call_ms([partial(layer.paged, tiles)], device, seconds=0.03) for tiles in VARIANTS}
    return min(times, key=times.__getitem__)
