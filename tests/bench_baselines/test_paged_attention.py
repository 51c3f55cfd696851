"""Paged decode attention and the copies of forked blocks: Triton and plain torch against float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from xgr_engine.bench.kernels import paged_reference, paged_triton
from xgr_engine.bench.kernels.paged_triton import PagedTiles, choose_splits

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}


@dataclass(frozen=True)
class Call:
    """Sequences over a pool; rows that no sequence holds are NaN, and so are table entries beyond the context (-1)."""

    q: torch.Tensor
    pool_k: torch.Tensor
    pool_v: torch.Tensor
    context: torch.Tensor
    blocks: torch.Tensor
    block: int

    def run(self, implementation, **more) -> torch.Tensor:
        return implementation.paged_attention(*vars(self).values(), self.q.shape[-1] ** -0.5, **more)

    def expected(self) -> torch.Tensor:
        """One sequence after the other, from its definition."""
        out = []
        for n, length in enumerate(self.context.tolist()):
            rows = [int(self.blocks[n, i // self.block]) + i % self.block for i in range(length)]
            keys, values = self.pool_k[rows].double(), self.pool_v[rows].double()
            group = self.q.shape[1] // keys.shape[1]
            keys, values = (t.repeat_interleave(group, 1) for t in (keys, values))
            logits = torch.einsum("hd,thd->ht", self.q[n].double(), keys) * self.q.shape[-1] ** -0.5
            out.append(torch.einsum("ht,thd->hd", torch.softmax(logits, -1), values))
        return torch.stack(out)

    def error(self, out: torch.Tensor) -> float:
        expected = self.expected()
        return float((out.double() - expected).norm() / expected.norm())


def make(device, dtype, contexts, kv_heads, group, dim, block=16, seed=0) -> Call:
    """Blocks lie in random order; the first two sequences share all of their full blocks but the last."""
    rng = torch.Generator(device).manual_seed(seed)
    width = max(-(-length // block) for length in contexts) + 2
    count = len(contexts) * width
    order = torch.randperm(count, generator=rng, device=device).view(len(contexts), width) * block
    shared = max(0, min(contexts[:2]) // block - 1)
    order[:2, :shared] = order[0, :shared]
    pool = torch.full((2, count * block, kv_heads, dim), torch.nan, device=device, dtype=dtype)
    for n, length in enumerate(contexts):
        rows = torch.tensor([int(order[n, i // block]) + i % block for i in range(length)], device=device)
        pool[:, rows] = torch.randn(2, length, kv_heads, dim, generator=rng, device=device).to(dtype)
        order[n, -(-length // block) :] = -1
    q = torch.randn(len(contexts), kv_heads * group, dim, generator=rng, device=device).to(dtype)
    table = torch.cat([torch.tensor(contexts, device=device)[:, None], order], 1).to(torch.int32)
    return Call(q, pool[0], pool[1], table[:, 0], table[:, 1:], block)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(
    "tiles", [None, PagedTiles(32, 4, 2), PagedTiles(16, 2, 2, splits=3), PagedTiles(64, 4, splits=2)]
)
@pytest.mark.parametrize(
    ("contexts", "kv_heads", "group", "dim", "block"),
    [
        ((1, 17, 31), 2, 1, 64, 16),
        ((17, 200, 64, 65), 1, 2, 128, 16),
        ((130, 127), 2, 4, 64, 32),
        ((90, 33), 1, 8, 64, 8),
        ((70, 12), 2, 2, 80, 16),
    ],
)
def test_equals_the_definition(device, tiles, contexts, kv_heads, group, dim, block):
    call = make(device, torch.float32, contexts, kv_heads, group, dim, block)
    assert call.error(call.run(paged_triton, tiles=tiles)) < TOLERANCE[torch.float32]
    assert call.error(call.run(paged_reference)) < TOLERANCE[torch.float32]


@pytest.mark.usefixtures("poisoned_memory")
def test_long_contexts(device):
    call = make(device, torch.float32, (1000, 1000, 4097), 1, 2, 64)
    assert call.error(call.run(paged_triton, tiles=PagedTiles(128, splits=4))) < TOLERANCE[torch.float32]


def test_float64_reference_is_the_definition(device):
    call = make(device, torch.float64, (33, 70), 2, 2, 16)
    assert call.error(call.run(paged_reference)) < 1e-14


@pytest.mark.usefixtures("poisoned_memory")
def test_half_precision(device):
    dtype = torch.float16 if device == "cpu" else torch.bfloat16  # the interpreter multiplies bfloat16 wrongly
    call = make(device, dtype, (130, 77, 5), 2, 2, 128)
    out = call.run(paged_triton)
    assert out.dtype == dtype and call.error(out) < TOLERANCE[dtype]


@pytest.mark.parametrize("fault", ["wrong block", "one token less", "neighbour's table"])
def test_these_tests_can_fail(device, fault):
    call = make(device, torch.float32, (100, 100, 40), 2, 2, 64)
    expected, bad = call.expected(), call
    if fault == "wrong block":
        blocks = call.blocks.clone()
        blocks[0, 3] = blocks[0, 2]
        bad = replace(call, blocks=blocks)
    elif fault == "one token less":
        bad = replace(call, context=call.context - 1)
    else:
        bad = replace(call, blocks=call.blocks[[1, 0, 2]])
    out = bad.run(paged_triton).double()
    assert float((out - expected).norm() / expected.norm()) > 20 * TOLERANCE[torch.float32]


@pytest.mark.parametrize("implementation", [paged_reference, paged_triton])
def test_copies_only_the_filled_rows(device, implementation):
    pool = torch.randn(2, 3, 60, 3, 20, device=device)
    before = pool.clone()
    source = torch.tensor([0, 10, 0, 22], device=device)
    target = torch.tensor([30, 38, 45, 52], device=device)
    count = torch.tensor([5, 0, 1, 7], device=device)
    implementation.copy_rows(pool[0], pool[1], source, target, count, 7)
    expected = before.clone()
    for s, t, n in zip(source.tolist(), target.tolist(), count.tolist(), strict=True):
        expected[:, :, t : t + n] = before[:, :, s : s + n]
    assert torch.equal(pool, expected)


def test_few_programs_split_the_context():
    assert choose_splits(2048, 8, 132) == 1
    assert choose_splits(48, 8, 132) == 2
    assert choose_splits(8, 8, 132) == 16
    assert choose_splits(1, 1, 132) == 16
