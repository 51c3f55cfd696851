"""Attention of beams over a shared prompt as one Triton kernel: the signature of ``reference.beam_attention``.

A program owns a tile of query rows of one user and one key-value head. A query row is a beam and one of the head's
query heads (row = beam * G + g), so a prompt tile is read once for all beams of the tile and all heads of the group.
The program first folds in the rows' own generated tokens, found through the ancestor table, then walks the user's
prompt; both feed one online softmax (arXiv 2205.14135), kept in base 2. The prompt may be split over several
programs, whose partial states a second kernel merges in a fixed order.

Nothing is planned on the host: grids depend on shapes alone, lengths stay on the device, so a call can be captured in
a CUDA graph and replayed for other lengths.
"""

# Triton kernels are compiled from source; annotations in them would describe nothing.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,no-any-return"

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from xgr_engine.errors import UsageError
from xgr_engine.kernels.launch import LOG2E, ceil_div, is_hopper, multiprocessors, power_of_two

_MERGE_LINES = 8  # lines per program of the merging kernel


@dataclass(frozen=True)
class AttentionTiles:
    """How the work is cut. Results differ between cuts only by float32 rounding.

    Attributes:
        rows: query rows per program (a power of two, at least 16).
        keys: prompt tokens per step (a power of two, at least 16).
        warps, stages: Triton's ``num_warps`` and software-pipelining depth.
        splits: programs that share a prompt; partial results are merged by a second kernel when there are several.
        hopper: run the hand-scheduled kernel of ``hopper``. Rows must be 128, keys 64 or 128; ``warps`` is ignored.
    """

    rows: int = 64
    keys: int = 64
    warps: int = 4
    stages: int = 3
    splits: int = 1
    hopper: bool = False


@triton.jit
def _online_step(s, v, m, total, acc, scale, PRECISION: tl.constexpr):
    """Fold products ``s`` = q.k [rows, keys] and values ``v`` into the running maximum, sum and weighted values."""
    m_new = tl.maximum(m, tl.max(s, 1) * scale)
    p = tl.exp2(s * scale - m_new[:, None])  # one fused multiply-add a score
    alpha = tl.exp2(m - m_new)
    total = total * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None]
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return m_new, total, acc


@triton.jit
def _own_tokens(q, gen_k, gen_v, ancestors, row, active, stride_slot, d, d_ok, scale, A: tl.constexpr):
    """Softmax state over the generated tokens of each row: (m, total, acc). A row without any has m = -inf."""
    rows: tl.constexpr = q.shape[0]
    m = tl.full([rows], float("-inf"), tl.float32)
    total = tl.zeros([rows], tl.float32)
    acc = tl.zeros(q.shape, tl.float32)
    query = q.to(tl.float32)
    for a in tl.static_range(A):
        slot = tl.load(ancestors + row * A + a, mask=active, other=-1)
        present = slot >= 0
        offset = slot.to(tl.int64)[:, None] * stride_slot + d[None, :]
        mask = present[:, None] & d_ok[None, :]
        k = tl.load(gen_k + offset, mask=mask, other=0.0).to(tl.float32)
        v = tl.load(gen_v + offset, mask=mask, other=0.0).to(tl.float32)
        s = tl.where(present, tl.sum(query * k, 1) * scale, float("-inf"))
        m_new = tl.maximum(m, s)
        pivot = tl.where(m_new == float("-inf"), 0.0, m_new)  # -inf minus -inf is NaN
        alpha = tl.exp2(m - pivot)
        p = tl.exp2(s - pivot)
        total = total * alpha + p
        acc = acc * alpha[:, None] + p[:, None] * v
        m = m_new
    return m, total, acc


@triton.jit
def _beam_attention_kernel(
    q,  # [U, R, Hq, D]
    prompt_k,  # [T, Hkv, D]
    prompt_v,
    prompt_start,  # [U + 1]
    gen_k,  # [U, S, Hkv, D]
    gen_v,
    ancestors,  # [U, R, A]
    out,  # [U, R, Hq, D], or [splits, U, R, Hq, D] float32 when PARTIAL
    state,  # [2, splits, U, R, Hq] float32: maximum and sum, when PARTIAL
    scale,  # softmax scale * log2(e)
    lines,  # U * R * Hq
    beams,
    stride_qu,
    stride_qr,
    stride_qh,
    stride_token,
    stride_head,
    stride_gu,
    stride_slot,
    stride_gh,
    KV_HEADS: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    A: tl.constexpr,
    SPLITS: tl.constexpr,
    PARTIAL: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # tiles of the same user and head are neighbours, so that they find each other's prompt tiles in the L2 cache
    tiles = tl.cdiv(beams * G, ROWS)
    pid = tl.program_id(0)
    tile = pid % tiles
    rest = pid // tiles
    head = rest % KV_HEADS
    rest = rest // KV_HEADS
    split = rest % SPLITS
    user = (rest // SPLITS).to(tl.int64)

    r = tile * ROWS + tl.arange(0, ROWS)
    beam = r // G
    query_head = head * G + r % G
    active = beam < beams
    row = user * beams + beam
    d = tl.arange(0, BLOCK_D)
    d_ok = d < D
    tile_ok = active[:, None] & d_ok[None, :]
    query = q + user * stride_qu + (beam.to(tl.int64) * stride_qr + query_head * stride_qh)[:, None] + d[None, :]
    b_q = tl.load(query, mask=tile_ok, other=0.0)

    own = user * stride_gu + head * stride_gh
    first = active & (split == 0)
    m, total, acc = _own_tokens(b_q, gen_k + own, gen_v + own, ancestors, row, first, stride_slot, d, d_ok, scale, A)

    start = tl.load(prompt_start + user)
    length = tl.load(prompt_start + user + 1) - start
    share = tl.cdiv(tl.cdiv(length, SPLITS), KEYS) * KEYS
    low = tl.minimum(split * share, length)
    high = tl.minimum(low + share, length)
    whole = low + (high - low) // KEYS * KEYS

    n = tl.arange(0, KEYS)
    base = head * stride_head
    offset = n[:, None] * stride_token + d[None, :]
    for key in range(low, whole, KEYS):
        at = base + (start + key).to(tl.int64) * stride_token
        if BLOCK_D == D:
            k = tl.load(prompt_k + at + offset)
            v = tl.load(prompt_v + at + offset)
        else:
            k = tl.load(prompt_k + at + offset, mask=d_ok[None, :], other=0.0)
            v = tl.load(prompt_v + at + offset, mask=d_ok[None, :], other=0.0)
        s = tl.dot(b_q, tl.trans(k), input_precision=PRECISION)
        m, total, acc = _online_step(s, v, m, total, acc, scale, PRECISION)
    if whole < high:
        at = base + (start + whole).to(tl.int64) * stride_token
        n_ok = n < high - whole
        k = tl.load(prompt_k + at + offset, mask=n_ok[:, None] & d_ok[None, :], other=0.0)
        v = tl.load(prompt_v + at + offset, mask=n_ok[:, None] & d_ok[None, :], other=0.0)
        s = tl.dot(b_q, tl.trans(k), input_precision=PRECISION)
        s = tl.where(n_ok[None, :], s, float("-inf"))
        m, total, acc = _online_step(s, v, m, total, acc, scale, PRECISION)

    target = row * (KV_HEADS * G) + query_head
    if PARTIAL:
        target = split * tl.cast(lines, tl.int64) + target
        tl.store(state + target, m, mask=active)
        tl.store(state + SPLITS * tl.cast(lines, tl.int64) + target, total, mask=active)
    else:
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out + target[:, None] * D + d[None, :], acc.to(out.dtype.element_ty), mask=tile_ok)


@triton.jit
def _merge_kernel(
    partial,  # [splits, lines, D] float32
    state,  # [2, splits, lines] float32
    out,  # [lines, D]
    lines,
    SPLITS: tl.constexpr,
    D: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Merge the partial softmax states of each line, in split order."""
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    ok = line < lines
    d = tl.arange(0, BLOCK_D)
    mask = ok[:, None] & (d < D)[None, :]
    count = tl.cast(lines, tl.int64)
    m = tl.full([LINES], float("-inf"), tl.float32)
    for split in range(SPLITS):
        m = tl.maximum(m, tl.load(state + split * count + line, mask=ok, other=float("-inf")))
    pivot = tl.where(m == float("-inf"), 0.0, m)
    total = tl.zeros([LINES], tl.float32)
    acc = tl.zeros([LINES, BLOCK_D], tl.float32)
    for split in range(SPLITS):
        weight = tl.exp2(tl.load(state + split * count + line, mask=ok, other=float("-inf")) - pivot)
        total += weight * tl.load(state + (SPLITS + split) * count + line, mask=ok, other=0.0)
        at = (split * count + line)[:, None] * D + d[None, :]
        acc += weight[:, None] * tl.load(partial + at, mask=mask, other=0.0)
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out + line[:, None] * D + d[None, :], acc.to(out.dtype.element_ty), mask=mask)


@functools.lru_cache(maxsize=1024)
def choose_tiles(
    users: int, beams: int, kv_heads: int, group: int, dtype: torch.dtype, processors: int, hopper: bool = False
) -> AttentionTiles:
    """Tiles for a shape: large enough to feed the tensor cores; the prompt is split where there are too few programs.

    ``group`` is G, ``processors`` the GPU's multiprocessors, ``hopper`` whether the kernel of ``hopper`` may run.
    """
    lines = beams * group
    if dtype == torch.float32:
        rows, keys, warps, stages = 32, 16, 8, 2  # IEEE products hold whole operands in registers: larger tiles spill
    elif lines <= 16:
        rows, keys, warps, stages = 16, 64, 4, 3
    elif lines <= 64:
        rows, keys, warps, stages = 64, 64, 4, 3
    elif hopper:
        rows, keys, warps, stages = 128, 128, 4, 2
    else:
        rows, keys, warps, stages = 128, 64, 8, 3
    programs = ceil_div(lines, rows) * kv_heads * users
    splits = max(1, min(16, processors // programs))
    return AttentionTiles(rows, keys, warps, stages, splits, hopper=hopper and rows == 128)


def beam_attention(
    q: Tensor,
    prompt_k: Tensor,
    prompt_v: Tensor,
    prompt_start: Tensor,
    gen_k: Tensor,
    gen_v: Tensor,
    ancestors: Tensor,
    scale: float,
    *,
    tiles: AttentionTiles | None = None,
) -> Tensor:
    """As :func:`xgr_engine.xattention.reference.beam_attention`.

    Inputs are bfloat16, float16 or float32 (multiplied in IEEE float32), contiguous in their last dimension; ``scale``
    is positive. Only the rows and slots that the tables name can reach the result.

    Args:
        tiles: overrides :func:`choose_tiles`.

    Raises:
        UsageError: shapes or strides that the kernel does not cover.
    """
    users, beams, heads, dim = q.shape
    _check(q, prompt_k, prompt_v, gen_k, gen_v, ancestors, scale)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if out.numel() == 0:  # a search in which nobody found anything has no rows
        return out
    if tiles is None:
        tiles = tiles_for(q, prompt_k, prompt_v, gen_k, gen_v)
    elif tiles.hopper and not (tiles.rows == 128 and _hopper_covers(q, prompt_k, prompt_v, gen_k, gen_v)):
        raise UsageError("the Hopper attention kernel does not cover this call", hint="leave the choice of tiles open")
    lines, splits = users * beams * heads, tiles.splits
    target, state = out, out
    if splits > 1:
        target = torch.empty((splits, lines, dim), dtype=torch.float32, device=q.device)
        state = torch.empty((2, splits, lines), dtype=torch.float32, device=q.device)
    attend(q, prompt_k, prompt_v, prompt_start, gen_k, gen_v, ancestors, scale, target, state, tiles)
    if splits > 1:
        merge_states(target, state, out)
    return out


def attend(
    q: Tensor,
    prompt_k: Tensor,
    prompt_v: Tensor,
    prompt_start: Tensor,
    gen_k: Tensor,
    gen_v: Tensor,
    ancestors: Tensor,
    scale: float,
    out: Tensor,
    state: Tensor,
    tiles: AttentionTiles,
) -> None:
    """The kernel alone, without the merge of splits. Args as :func:`beam_attention`; ``out`` and ``state`` are written:

    with ``state is out`` the result [U, R, Hq, D], else float32 [splits, lines, D] weighted values of each split before
    the division, and float32 [2, splits, lines] their maximum and sum (base 2), where lines = U * R * Hq.
    """
    if tiles.hopper:
        from xgr_engine.xattention import hopper as specialized  # Gluon is loaded only where it runs

        specialized.launch(
            *(q, prompt_k, prompt_v, prompt_start, gen_k, gen_v, ancestors, scale * LOG2E, out, state),
            keys=tiles.keys,
            stages=tiles.stages,
            splits=tiles.splits,
            programs=multiprocessors(q.device),
        )
        return
    users, beams, heads, dim = q.shape
    kv_heads = prompt_k.shape[1]
    programs = ceil_div(beams * heads // kv_heads, tiles.rows) * kv_heads * tiles.splits * users
    _beam_attention_kernel[(programs,)](
        q,
        prompt_k,
        prompt_v,
        prompt_start,
        gen_k,
        gen_v,
        ancestors,
        out,
        state,
        scale * LOG2E,
        users * beams * heads,
        beams,
        q.stride(0),
        q.stride(1),
        q.stride(2),
        prompt_k.stride(0),
        prompt_k.stride(1),
        gen_k.stride(0),
        gen_k.stride(1),
        gen_k.stride(2),
        KV_HEADS=kv_heads,
        G=heads // kv_heads,
        D=dim,
        A=ancestors.shape[-1],
        SPLITS=tiles.splits,
        PARTIAL=state is not out,
        ROWS=tiles.rows,
        KEYS=tiles.keys,
        BLOCK_D=max(16, power_of_two(dim)),
        PRECISION="ieee",
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )


def merge_states(partial: Tensor, state: Tensor, out: Tensor) -> None:
    """Merge partial softmax states: partial float32 [splits, lines, D], state [2, splits, lines] -> out [lines, D]."""
    splits, lines, dim = partial.shape
    block_d = power_of_two(dim)
    grid = (ceil_div(lines, _MERGE_LINES),)
    _merge_kernel[grid](partial, state, out, lines, SPLITS=splits, D=dim, LINES=_MERGE_LINES, BLOCK_D=block_d)


def tiles_for(q: Tensor, prompt_k: Tensor, prompt_v: Tensor, gen_k: Tensor, gen_v: Tensor) -> AttentionTiles:
    """:func:`choose_tiles` for these inputs on their device."""
    (users, beams, heads, _), kv_heads, processors = q.shape, prompt_k.shape[1], multiprocessors(q.device)
    hopper = _hopper_covers(q, prompt_k, prompt_v, gen_k, gen_v)
    return choose_tiles(users, beams, kv_heads, heads // kv_heads, q.dtype, processors, hopper)


def _hopper_covers(*tensors: Tensor) -> bool:
    if not is_hopper(tensors[0].device):
        return False
    from xgr_engine.xattention import hopper as specialized

    return specialized.covers(*tensors)


def _check(
    q: Tensor, prompt_k: Tensor, prompt_v: Tensor, gen_k: Tensor, gen_v: Tensor, ancestors: Tensor, scale: float
) -> None:
    problems = []
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        problems.append(f"dtype {q.dtype}")
    if q.shape[2] % prompt_k.shape[1]:
        problems.append(f"{q.shape[2]} query heads over {prompt_k.shape[1]} key-value heads")
    if prompt_k.stride() != prompt_v.stride() or gen_k.stride() != gen_v.stride():
        problems.append("keys and values with different strides")
    if not q.stride(3) == prompt_k.stride(2) == gen_k.stride(3) == 1:
        problems.append("a last dimension that is not contiguous")
    if not ancestors.is_contiguous():
        problems.append("an ancestor table that is not contiguous")
    if not (scale > 0 and math.isfinite(scale)):
        problems.append(f"scale {scale}")
    if problems:
        raise UsageError(
            "the Triton attention kernel does not cover this call: " + ", ".join(problems),
            hint="use the reference implementation",
        )
