"""Causal attention of ragged prompts as one Triton kernel, for any GPU and for float32 too.

A program owns a tile of query tokens of one head, an item of ``ragged.list_work``. It walks over the keys that all of
its queries see, without a mask, then over those around the diagonal, with one. Both feed one online softmax
(arXiv 2205.14135), kept in base 2.
"""

# Triton kernels are compiled from source; annotations in them would describe nothing.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,no-any-return"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from xgr_engine.errors import UsageError
from xgr_engine.kernels.launch import LOG2E, power_of_two
from xgr_engine.xattention.ragged import Cut, Ragged


@dataclass(frozen=True)
class PrefillTiles:
    """Query tokens per program, keys per step (powers of two, at least 16), warps, and stages of the pipeline."""

    rows: int = 128
    keys: int = 64
    warps: int = 8
    stages: int = 3


# IEEE products hold whole operands in registers: larger tiles spill
_FLOAT32 = PrefillTiles(32, 16, 8, 2)


@triton.jit
def _fold(s, v, m, total, acc, scale, PRECISION: tl.constexpr):
    """Fold products ``s`` = q.k [rows, keys] and values ``v`` into the running maximum, sum and weighted values. A row
    without any key so far keeps m = -inf."""
    m_new = tl.maximum(m, tl.max(s, 1) * scale)
    pivot = tl.where(m_new == float("-inf"), 0.0, m_new)  # -inf minus -inf is NaN
    p = tl.exp2(s * scale - pivot[:, None])
    alpha = tl.exp2(m - pivot)
    total = total * alpha + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    return m_new, total, acc


@triton.jit
def _prefill_kernel(
    q,  # [N, Hq, D]
    k,  # [T, Hkv, D]
    v,
    work_list,  # [programs, 5]
    out,  # [N, Hq, D], contiguous
    scale,  # softmax scale * log2(e)
    stride_q,
    stride_qh,
    stride_token,
    stride_head,
    HEADS: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    item = work_list + tl.program_id(0) * 5
    query_row = tl.load(item).to(tl.int64)
    rows = tl.load(item + 1)
    key_row = tl.load(item + 2).to(tl.int64)
    position = tl.load(item + 3)
    head = tl.load(item + 4)

    r = tl.arange(0, ROWS)
    n = tl.arange(0, KEYS)
    d = tl.arange(0, BLOCK_D)
    d_ok = d < D
    tile_ok = (r < rows)[:, None] & d_ok[None, :]
    line = query_row + r
    b_q = tl.load(q + line[:, None] * stride_q + head * stride_qh + d[None, :], mask=tile_ok, other=0.0)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)

    base = key_row * stride_token + head // G * stride_head
    offset = n[:, None] * stride_token + d[None, :]
    clear = (position + 1) // KEYS * KEYS  # keys before it are seen by every query of the tile
    for key in range(0, clear, KEYS):
        at = base + key * stride_token
        if BLOCK_D == D:
            b_k = tl.load(k + at + offset)
            b_v = tl.load(v + at + offset)
        else:
            b_k = tl.load(k + at + offset, mask=d_ok[None, :], other=0.0)
            b_v = tl.load(v + at + offset, mask=d_ok[None, :], other=0.0)
        s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        m, total, acc = _fold(s, b_v, m, total, acc, scale, PRECISION)
    seen = position + rows  # keys that the last query sees; nothing after them is read
    for key in range(clear, seen, KEYS):
        at = base + key * stride_token
        inside = (key + n < seen)[:, None] & d_ok[None, :]
        b_k = tl.load(k + at + offset, mask=inside, other=0.0)
        b_v = tl.load(v + at + offset, mask=inside, other=0.0)
        s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        s = tl.where((key + n)[None, :] <= (position + r)[:, None], s, float("-inf"))
        m, total, acc = _fold(s, b_v, m, total, acc, scale, PRECISION)

    acc = acc / total[:, None]  # key 0 is seen by all
    target = (line[:, None] * HEADS + head) * D + d[None, :]
    tl.store(out + target, acc.to(out.dtype.element_ty), mask=tile_ok)


def prompt_attention(
    q: Tensor, k: Tensor, v: Tensor, sequences: Ragged, scale: float, tiles: PrefillTiles | None = None
) -> Tensor:
    """As :func:`xgr_engine.xattention.reference.prompt_attention`; bfloat16, float16 or float32 (IEEE products).

    Raises:
        UsageError: strides or types that the kernel does not cover.
    """
    _check(q, k, v)
    (_, heads, dim), kv_heads = q.shape, k.shape[1]
    tiles = tiles or (_FLOAT32 if q.dtype == torch.float32 else PrefillTiles())
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not sequences.runs:
        return out
    cut = Cut(tiles.rows, tiles.keys)
    work_list = sequences.work_list(heads, kv_heads, 2 * dim * q.element_size(), cut, q.device)
    _prefill_kernel[(len(work_list),)](
        *(q, k, v, work_list, out, scale * LOG2E, *q.stride()[:2], *k.stride()[:2]),
        HEADS=heads,
        G=heads // kv_heads,
        D=dim,
        ROWS=tiles.rows,
        KEYS=tiles.keys,
        BLOCK_D=max(16, power_of_two(dim)),
        PRECISION="ieee",
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return out


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    problems = []
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        problems.append(f"dtype {q.dtype}")
    if q.shape[1] % k.shape[1]:
        problems.append(f"{q.shape[1]} query heads over {k.shape[1]} key-value heads")
    if k.stride() != v.stride():
        problems.append("keys and values with different strides")
    if not q.stride(2) == k.stride(2) == 1:
        problems.append("a last dimension that is not contiguous")
    if problems:
        raise UsageError(
            "the Triton prefill kernel does not cover this call: " + ", ".join(problems),
            hint="use the reference implementation",
        )
