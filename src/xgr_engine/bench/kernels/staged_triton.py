"""The paper's three attention stages and its re-ordering in Triton: the signatures of ``staged_reference``.

The shared stage is the engine's own attention kernel, asked for the prompt alone and for its softmax state, so that
the stages are compared and not the kernels. Values between the stages have the model's dtype, as in the open code of
the paper's authors; maxima and sums are float32.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,no-any-return"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from xgr_engine.bench.kernels.staged_reference import State
from xgr_engine.kernels.launch import LOG2E
from xgr_engine.xattention.triton import attend, tiles_for

_LINES = 8  # queries (a row's heads) of a program
_MOVED = 256  # elements of a row that a re-ordering program moves


def shared_stage(q: Tensor, prompt_k: Tensor, prompt_v: Tensor, prompt_start: Tensor, scale: float) -> State:
    """Args and result as the reference's; float32, bfloat16 or float16."""
    users, rows, heads, _ = q.shape
    nothing = torch.empty((users, rows, 0), dtype=torch.int32, device=q.device)
    no_keys = prompt_k[:1].unsqueeze(0)
    tiles = tiles_for(q, prompt_k, prompt_v, no_keys, no_keys)
    values = torch.empty((tiles.splits, *q.shape), dtype=q.dtype, device=q.device)
    state = torch.empty((2, tiles.splits, users, rows, heads), dtype=torch.float32, device=q.device)
    attend(q, prompt_k, prompt_v, prompt_start, no_keys, no_keys, nothing, scale, values, state, tiles)
    return values, state


@triton.jit
def unshared_kernel(
    q,  # [U, R, Hq, D]
    own_k,  # [U, W, S, Hkv, D]
    own_v,
    values,  # [U, R, Hq, D]
    state,  # [2, U, R, Hq]
    scale,
    lines,
    R,
    stride_user,
    stride_row,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    STEPS: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    ok = line < lines
    row = line // HEADS
    head = (line % HEADS) // (HEADS // KV_HEADS)
    d = tl.arange(0, BLOCK_D)
    mask = ok[:, None] & (d < D)[None, :]
    query = tl.load(q + line[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
    own = (row // R) * stride_user + (row % R) * stride_row + head * D
    m = tl.full([LINES], float("-inf"), tl.float32)
    total = tl.zeros([LINES], tl.float32)
    acc = tl.zeros([LINES, BLOCK_D], tl.float32)
    for step in tl.static_range(STEPS):
        at = (own + step * KV_HEADS * D)[:, None] + d[None, :]
        k = tl.load(own_k + at, mask=mask, other=0.0).to(tl.float32)
        v = tl.load(own_v + at, mask=mask, other=0.0).to(tl.float32)
        s = tl.sum(query * k, 1) * scale
        m_new = tl.maximum(m, s)
        alpha = tl.exp2(m - m_new)
        p = tl.exp2(s - m_new)
        total = total * alpha + p
        acc = acc * alpha[:, None] + p[:, None] * v
        m = m_new
    tl.store(state + line, m, mask=ok)
    tl.store(state + lines + line, total, mask=ok)
    tl.store(values + line[:, None] * D + d[None, :], acc.to(values.dtype.element_ty), mask=mask)


def unshared_stage(q: Tensor, own_k: Tensor, own_v: Tensor, steps: int, scale: float) -> State:
    """Args and result as the reference's; q contiguous, own_k and own_v alike and contiguous in a row."""
    users, rows, heads, dim = q.shape
    values = torch.empty((1, *q.shape), dtype=q.dtype, device=q.device)
    state = torch.empty((2, 1, users, rows, heads), dtype=torch.float32, device=q.device)
    lines = users * rows * heads
    if lines:
        unshared_kernel[(triton.cdiv(lines, _LINES),)](
            q,
            own_k,
            own_v,
            values,
            state,
            scale * LOG2E,
            lines,
            rows,
            own_k.stride(0),
            own_k.stride(1),
            HEADS=heads,
            KV_HEADS=own_k.shape[3],
            D=dim,
            STEPS=steps,
            LINES=_LINES,
            BLOCK_D=triton.next_power_of_2(dim),
            num_warps=4,
        )
    return values, state


@triton.jit
def merge_kernel(
    shared,  # [P, lines, D]
    shared_state,  # [2, P, lines]
    own,  # [lines, D]
    own_state,  # [2, lines]
    out,  # [lines, D]
    lines,
    PARTS: tl.constexpr,
    D: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    ok = line < lines
    d = tl.arange(0, BLOCK_D)
    mask = ok[:, None] & (d < D)[None, :]
    place = line[:, None] * D + d[None, :]
    count = tl.cast(lines, tl.int64)
    m_own = tl.load(own_state + line, mask=ok, other=0.0)
    m = m_own
    for part in range(PARTS):
        m = tl.maximum(m, tl.load(shared_state + part * count + line, mask=ok, other=float("-inf")))
    weight = tl.exp2(m_own - m)
    total = weight * tl.load(own_state + count + line, mask=ok, other=1.0)
    acc = weight[:, None] * tl.load(own + place, mask=mask, other=0.0).to(tl.float32)
    for part in range(PARTS):
        weight = tl.exp2(tl.load(shared_state + part * count + line, mask=ok, other=float("-inf")) - m)
        total += weight * tl.load(shared_state + (PARTS + part) * count + line, mask=ok, other=0.0)
        acc += weight[:, None] * tl.load(shared + part * count * D + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + place, (acc / total[:, None]).to(out.dtype.element_ty), mask=mask)


def merge_stages(shared: State, own: State, out: Tensor) -> Tensor:
    """Args and result as the reference's."""
    parts, dim = len(shared[0]), out.shape[-1]
    lines = out.numel() // dim
    if lines:
        merge_kernel[(triton.cdiv(lines, _LINES),)](
            *(*shared, *own, out, lines),
            PARTS=parts,
            D=dim,
            LINES=_LINES,
            BLOCK_D=triton.next_power_of_2(dim),
            num_warps=4,
        )
    return out


@triton.jit
def _move(own, origin, i, moving, e, stride_row):
    """One step of a pass: every row's source is read before any row is written."""
    if tl.sum(moving.to(tl.int32), 0) > 0:
        mask = moving[:, None] & (e >= 0)[None, :]
        at = tl.where(e >= 0, e, 0)[None, :]
        value = tl.load(own + origin[:, None] * stride_row + at, mask=mask, other=0.0)
        tl.debug_barrier()
        tl.store(own + i.to(tl.int64)[:, None] * stride_row + at, value, mask=mask)
        tl.debug_barrier()


@triton.jit
def reorder_kernel(
    own_k, own_v, parent, R, moved, stride_layer, stride_user, stride_row,
    ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    user = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1).to(tl.int64) * stride_layer + user * stride_user
    e = tl.program_id(2) * TILE + tl.arange(0, TILE)
    e = tl.where(e < moved, e, -1)
    parent += user * R
    tiles = tl.cdiv(R, ROWS)
    for tile in range(tiles):
        i = tile * ROWS + tl.arange(0, ROWS)
        origin = tl.load(parent + i, mask=i < R, other=-1)
        _move(own_k + start, origin, i, origin > i, e, stride_row)
        _move(own_v + start, origin, i, origin > i, e, stride_row)
    for tile in range(tiles):
        i = (tiles - 1 - tile) * ROWS + tl.arange(0, ROWS)
        origin = tl.load(parent + i, mask=i < R, other=0)
        moving = (origin < i) & (i < R)
        _move(own_k + start, origin, i, moving, e, stride_row)
        _move(own_v + start, origin, i, moving, e, stride_row)


def reorder_in_place(own_k: Tensor, own_v: Tensor, parent: Tensor, steps: int) -> None:
    """Args as the reference's. Several rows move at once: the two passes' argument holds for a run of rows as well,
    if all of them are read before one is written."""
    layers, _, _, _, kv_heads, dim = own_k.shape
    moved = steps * kv_heads * dim
    reorder_kernel[(len(parent), layers, triton.cdiv(moved, _MOVED))](
        own_k,
        own_v,
        parent,
        parent.shape[1],
        moved,
        own_k.stride(0),
        own_k.stride(1),
        own_k.stride(2),
        ROWS=16,
        TILE=_MOVED,
        num_warps=8,
    )
