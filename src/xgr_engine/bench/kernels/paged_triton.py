"""Paged decode attention in Triton: the signatures of ``paged_reference``.

A program owns one sequence, one key-value head and one part of the context. The query heads of the group are the rows
of the matrix products (padded to the 16 that tensor cores take), so that keys and values are read once a group. The
context is split where there are few programs; the partial states are merged by the engine's own kernel.

Every beam reads the whole prompt, which is what this form costs; reads of one prompt by many beams meet in the L2
cache, so programs of one user are neighbours.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,no-any-return"

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from xgr_engine.kernels.launch import LOG2E
from xgr_engine.xattention.triton import merge_states

_COPY_LINE = 1024  # elements a program of the copy moves at once


@dataclass(frozen=True)
class PagedTiles:
    """How the work is cut.

    Attributes:
        keys: tokens of a step, a multiple of 16; a step may span several blocks.
        warps, stages: Triton's ``num_warps`` and software-pipelining depth.
        splits: programs that share a context; None: as many as the shape needs.
    """

    keys: int = 32
    warps: int = 1
    stages: int = 3
    splits: int | None = None


# Worth timing on a new card. With one warp nothing has to be synchronised inside the loop, so that is the default.
VARIANTS = (
    PagedTiles(32, 1, 3),
    PagedTiles(32, 1, 4),
    PagedTiles(16, 1, 4),
    PagedTiles(32, 2, 3),
    PagedTiles(64, 2, 3),
    PagedTiles(64, 4, 3),
    PagedTiles(64, 4, 4),
    PagedTiles(128, 4, 3),
    PagedTiles(32, 1, 1),
    PagedTiles(64, 4, 1),
)


@triton.jit
def _fold(b_q, k, v, ok, m, total, acc, scale, MASKED: tl.constexpr):
    """Fold a tile of keys and values into the online softmax (base 2)."""
    s = tl.dot(b_q, tl.trans(k), input_precision="ieee") * scale
    if MASKED:
        s = tl.where(ok[None, :], s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1))
    p = tl.exp2(s - m_new[:, None])
    alpha = tl.exp2(m - m_new)
    total = total * alpha + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
    return m_new, total, acc


@triton.jit
def paged_attention_kernel(
    q,  # [N, Hq, D]
    pool_k,  # [M, Hkv, D]
    pool_v,
    context,  # [N]
    blocks,  # [N, B]
    out,  # [N, Hq, D], or [splits, N, Hq, D] float32 when PARTIAL
    state,  # [2, splits, N, Hq] float32: maximum and sum, when PARTIAL
    scale,  # softmax scale * log2(e)
    lines,  # N * Hq
    stride_q,
    stride_context,
    stride_blocks,
    stride_row,
    stride_head,
    KV_HEADS: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    PARTIAL: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    pid = tl.program_id(0)
    head = pid % KV_HEADS
    split = (pid // KV_HEADS) % SPLITS
    n = (pid // (KV_HEADS * SPLITS)).to(tl.int64)
    length = tl.load(context + n * stride_context)
    share = tl.cdiv(tl.cdiv(length, SPLITS), KEYS) * KEYS
    low = tl.minimum(split * share, length)
    high = tl.minimum(low + share, length)
    whole = low + (high - low) // KEYS * KEYS

    g = tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    d_ok = d < D
    q_ok = (g < G)[:, None] & d_ok[None, :]
    b_q = tl.load(q + n * stride_q + (head * G + g)[:, None] * D + d[None, :], mask=q_ok, other=0.0)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)

    blocks += n * stride_blocks
    pool_k += head * stride_head
    pool_v += head * stride_head
    token = tl.arange(0, KEYS)
    row = tl.load(blocks + (low + token) // BLOCK, mask=low + token < high, other=0) + (low + token) % BLOCK
    for at in range(low, whole, KEYS):
        offset = row.to(tl.int64)[:, None] * stride_row + d[None, :]
        if BLOCK_D == D:
            k = tl.load(pool_k + offset)
            v = tl.load(pool_v + offset)
        else:
            k = tl.load(pool_k + offset, mask=d_ok[None, :], other=0.0)
            v = tl.load(pool_v + offset, mask=d_ok[None, :], other=0.0)
        ahead = at + KEYS + token  # the next step's rows, so that its loads need not wait for the table
        row = tl.load(blocks + ahead // BLOCK, mask=ahead < high, other=0) + ahead % BLOCK
        m, total, acc = _fold(b_q, k, v, token >= 0, m, total, acc, scale, False)
    if whole < high:
        ok = whole + token < high
        offset = row.to(tl.int64)[:, None] * stride_row + d[None, :]
        mask = ok[:, None] & d_ok[None, :]
        k = tl.load(pool_k + offset, mask=mask, other=0.0)
        v = tl.load(pool_v + offset, mask=mask, other=0.0)
        m, total, acc = _fold(b_q, k, v, ok, m, total, acc, scale, True)

    target = n * (KV_HEADS * G) + head * G + g
    if PARTIAL:
        target += split * tl.cast(lines, tl.int64)
        tl.store(state + target, m, mask=g < G)
        tl.store(state + SPLITS * tl.cast(lines, tl.int64) + target, total, mask=g < G)
    else:
        acc = acc / total[:, None]
    tl.store(out + target[:, None] * D + d[None, :], acc.to(out.dtype.element_ty), mask=q_ok)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1


def choose_splits(sequences: int, kv_heads: int, processors: int) -> int:
    """Enough programs for eight on each multiprocessor, at most 16 a context."""
    return max(1, min(16, 8 * processors // (sequences * kv_heads)))


def paged_attention(
    q: Tensor,
    pool_k: Tensor,
    pool_v: Tensor,
    context: Tensor,
    blocks: Tensor,
    block: int,
    scale: float,
    *,
    tiles: PagedTiles | None = None,
) -> Tensor:
    """Args and result as :func:`xgr_engine.bench.kernels.paged_reference.paged_attention`; ``block`` a power of two.

    ``q`` is contiguous, the pools are alike; ``tiles`` overrides the automatic choice.
    """
    count, heads, dim = q.shape
    kv_heads = pool_k.shape[1]
    tiles = tiles or PagedTiles()
    out = torch.empty_like(q)
    if out.numel() == 0:
        return out
    splits = tiles.splits or choose_splits(count, kv_heads, _multiprocessors(q.device))
    lines = count * heads
    target, state = out, out
    if splits > 1:
        target = torch.empty((splits, lines, dim), dtype=torch.float32, device=q.device)
        state = torch.empty((2, splits, lines), dtype=torch.float32, device=q.device)
    paged_attention_kernel[(count * kv_heads * splits,)](
        q,
        pool_k,
        pool_v,
        context,
        blocks,
        target,
        state,
        scale * LOG2E,
        lines,
        q.stride(0),
        context.stride(0),
        blocks.stride(0),
        pool_k.stride(0),
        pool_k.stride(1),
        KV_HEADS=kv_heads,
        G=heads // kv_heads,
        D=dim,
        BLOCK=block,
        SPLITS=splits,
        PARTIAL=splits > 1,
        ROWS=max(16, triton.next_power_of_2(heads // kv_heads)),
        KEYS=tiles.keys,
        BLOCK_D=max(16, triton.next_power_of_2(dim)),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    if splits > 1:
        merge_states(target, state, out)
    return out


@triton.jit
def copy_rows_kernel(
    pool_k, pool_v, origins, goals, count, stride_layer, stride_row,
    LINE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64) * stride_layer
    rows = tl.load(count + n)
    origin = layer + tl.load(origins + n) * stride_row
    goal = layer + tl.load(goals + n) * stride_row
    for row in range(rows):
        for part in tl.static_range(0, LINE, TILE):
            e = part + tl.arange(0, TILE)
            ok = e < LINE
            at = row * stride_row + e
            tl.store(pool_k + goal + at, tl.load(pool_k + origin + at, mask=ok, other=0.0), mask=ok)
            tl.store(pool_v + goal + at, tl.load(pool_v + origin + at, mask=ok, other=0.0), mask=ok)


def copy_rows(pool_k: Tensor, pool_v: Tensor, source: Tensor, target: Tensor, count: Tensor, most: int) -> None:
    """Args as :func:`xgr_engine.bench.kernels.paged_reference.copy_rows`; ``most`` is not needed here."""
    layers, _, kv_heads, dim = pool_k.shape
    if len(source) == 0:
        return
    copy_rows_kernel[(len(source), layers)](
        pool_k,
        pool_v,
        source,
        target,
        count,
        pool_k.stride(0),
        pool_k.stride(1),
        LINE=kv_heads * dim,
        TILE=min(_COPY_LINE, triton.next_power_of_2(kv_heads * dim)),
        num_warps=4,
    )
