"""One layer's decode attention in the forms of all contenders: the data of every measurement of it, and of the checks.

Nothing here needs Triton before a form that does is called.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from xgr_engine.bench.timing import call_ms
from xgr_engine.bench.workloads import Workload
from xgr_engine.xattention import reference

if TYPE_CHECKING:
    from xgr_engine.bench.kernels.paged_triton import PagedTiles

BLOCK = 16
_CHECKED_BEAMS = 4  # a user, spread over the beams: the definition in float64 is slow
_COLD_BYTES = 256 << 20  # prompts of the layers in a row, so that none finds its own in the L2 cache


@dataclass(frozen=True)
class DecodeShape:
    """One decode step: U users of ``context`` tokens, R beams with ``own`` generated tokens each."""

    context: int
    users: int
    beams: int
    own: int = 2  # at the last level of three
    heads: int = 16
    kv_heads: int = 8
    dim: int = 128
    dtype: torch.dtype = torch.bfloat16

    @classmethod
    def of(cls, workload: Workload) -> DecodeShape:
        """The widest step of a workload whose SIDs have three codes."""
        spec, decoder = workload.model.spec, workload.model.decoder
        heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        return cls(workload.context, workload.users, workload.search.beam, cls.own, *heads, decoder.dtype)

    def __str__(self) -> str:
        own = "" if self.own == 2 else f", {self.own} own"
        return f"{self.context} x {self.users} x {self.beams}, {self.heads}/{self.kv_heads} x {self.dim}{own}"

    @property
    def flops(self) -> float:
        """Operations of both products."""
        return 4.0 * self.users * self.beams * self.heads * self.dim * (self.context + self.own)

    @property
    def prompt_bytes(self) -> int:
        """Keys and values of the prompts, each once."""
        return 2 * self.users * self.context * self.kv_heads * self.dim * self.dtype.itemsize

    @property
    def bytes(self) -> float:
        """The prompts once, queries, result, own tokens of every beam."""
        a_row = 2 * self.own * self.kv_heads + 2 * self.heads
        return float(self.prompt_bytes + self.users * self.beams * a_row * self.dim * self.dtype.itemsize)


@dataclass(frozen=True, eq=False)
class Layer:
    """Keys and values of one layer in the forms of all three contenders, with the same contents.

    Attributes:
        q: [U, R, Hq, D].
        pool: keys and values [M, Hkv, D], the packed prompts, then a tail a beam: its last prompt block's copy, as
            after a fork, and its own tokens.
        tables: int32 [N, 1 + B] context and blocks of each beam (paged).
        start: int32 [U + 1] of the prompts.
        slots: keys and values [U, R * S, Hkv, D] of generated tokens, level after level; ancestors: int32 [U, R, S]
            the slots of each beam (the engine).
        own: keys and values [U, R, S, Hkv, D] of each beam's tokens (the paper's stages).
    """

    q: Tensor
    pool: tuple[Tensor, Tensor]
    tables: Tensor
    start: Tensor
    slots: tuple[Tensor, Tensor]
    ancestors: Tensor
    own: tuple[Tensor, Tensor]
    scale: float

    @classmethod
    def random(cls, shape: DecodeShape, device: torch.device, seed: int = 0) -> Layer:
        """Unit variance, the same prompt length for all; parents are monotone, as selection leaves them."""
        rng = torch.Generator(device).manual_seed(seed)
        normal = partial(torch.randn, generator=rng, device=device, dtype=shape.dtype)
        users, beams, own_count = shape.users, shape.beams, shape.own
        in_tail, tail_rows = shape.context % BLOCK, BLOCK - 1 + own_count
        prompt_rows, rows = users * shape.context, users * beams
        pool = normal(2, prompt_rows + rows * tail_rows, shape.kv_heads, shape.dim)
        slots = normal(2, users, beams * max(1, own_count), shape.kv_heads, shape.dim)
        parents = torch.randint(0, beams, (users, own_count, beams), generator=rng, device=device).sort(-1).values
        ancestors = (parents + beams * torch.arange(own_count, device=device)[:, None]).transpose(1, 2).contiguous()
        own = slots[:, torch.arange(users, device=device)[:, None, None], ancestors]
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
            slots=(slots[0], slots[1]),
            ancestors=ancestors.to(torch.int32),
            own=(own[0], own[1]),
            scale=shape.dim**-0.5,
        )

    def paged(self, kernel: Callable[..., Tensor]) -> Tensor:
        """One sequence a beam; ``kernel`` is a ``paged_attention``."""
        context, blocks = self.tables[:, 0], self.tables[:, 1:]
        out = kernel(self.q.flatten(0, 1), *self.pool, context, blocks, BLOCK, self.scale)
        return out.view(self.q.shape)

    def engine(self, kernel: Callable[..., Tensor]) -> Tensor:
        """Fused, the prompt read once a tile of beams; ``kernel`` is a ``beam_attention``."""
        return kernel(self.q, *self.pool, self.start, *self.slots, self.ancestors, self.scale)

    def staged(self) -> Tensor:
        """Shared stage, unshared stage, merge, in Triton."""
        from xgr_engine.bench.kernels import staged_triton

        shared = staged_triton.shared_stage(self.q, *self.pool, self.start, self.scale)
        own = staged_triton.unshared_stage(self.q, *self.own, self.ancestors.shape[2], self.scale)
        return staged_triton.merge_stages(shared, own, torch.empty_like(self.q))

    def error(self, out: Tensor, most_beams: int = _CHECKED_BEAMS) -> float:
        """Relative error of up to ``most_beams`` beams of each user, against the definition in float64."""
        beams = self.q.shape[1]
        some = torch.linspace(0, beams - 1, min(beams, most_beams), device=out.device).round().long()
        total, wrong = 0.0, 0.0
        for user in range(len(self.q)):
            part = slice(int(self.start[user]), int(self.start[user + 1]))
            prompt_k, prompt_v = (t[part].double() for t in self.pool)
            own_k, own_v = (t[user : user + 1].double() for t in self.slots)
            expected = reference.beam_attention(
                self.q[user : user + 1, some].double(),
                prompt_k,
                prompt_v,
                torch.tensor([0, part.stop - part.start], device=out.device),
                own_k,
                own_v,
                self.ancestors[user : user + 1, some],
                self.scale,
            )
            wrong += float((out[user, some].double() - expected[0]).square().sum())
            total += float(expected.square().sum())
        return math.sqrt(wrong / total)


def cold_layers(shape: DecodeShape, device: torch.device, most: int = 8) -> list[Layer]:
    """Layers to time one after the other: on a GPU several, so that short prompts are not always in the L2 cache."""
    count = 1 if device.type == "cpu" else max(1, min(most, -(-_COLD_BYTES // max(1, shape.prompt_bytes))))
    return [Layer.random(shape, device, seed) for seed in range(count)]


@cache
def fastest_tiles(shape: DecodeShape, device: torch.device) -> PagedTiles:
    """The fastest of Triton's paged variants at a shape, by trying them (a second or two, and once a shape)."""
    from xgr_engine.bench.kernels.paged_triton import VARIANTS, paged_attention

    layer = Layer.random(shape, device)
    times = {
        tiles: call_ms([partial(layer.paged, partial(paged_attention, tiles=tiles))], device, seconds=0.03)
        for tiles in VARIANTS
    }
    return min(times, key=times.__getitem__)
