"""The elementwise steps of a decoder layer and the vocabulary's log-sum-exp in Triton: the signatures of ``reference``.

The elementwise steps are bound by memory: every value is read once and written once, arithmetic is float32.
"""

# Triton kernels are compiled from source; annotations in them would describe nothing.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,no-any-return"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from xgr_engine.errors import UsageError
from xgr_engine.kernels.launch import FEW_SWIGLU_ROWS, ceil_div, is_hopper, multiprocessors, power_of_two
from xgr_engine.kernels.linear import linear


@triton.jit
def _add_rms_norm_kernel(
    residual, delta, weight, out, stride_res, stride_delta, eps, H: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK)
    ok = h < H
    x = tl.load(residual + row * stride_res + h, mask=ok, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(delta + row * stride_delta + h, mask=ok, other=0.0).to(tl.float32)
        stored = x.to(residual.dtype.element_ty)
        tl.store(residual + row * stride_res + h, stored, mask=ok)
        x = stored.to(tl.float32)
    w = tl.load(weight + h, mask=ok, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, 0) / H + eps)
    tl.store(out + row * H + h, (x * inverse * w).to(out.dtype.element_ty), mask=ok)


def add_rms_norm(residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Residual addition in place and RMS norm; see :func:`xgr_engine.kernels.reference.add_rms_norm`."""
    rows, hidden = residual.shape
    _require_rows("add_rms_norm", residual, *([] if delta is None else [delta]))
    out = torch.empty((rows, hidden), dtype=residual.dtype, device=residual.device)
    if rows:
        block = power_of_two(hidden)
        addend = residual if delta is None else delta
        _add_rms_norm_kernel[(rows,)](
            residual,
            addend,
            weight,
            out,
            residual.stride(0),
            addend.stride(0),
            eps,
            H=hidden,
            BLOCK=block,
            ADD=delta is not None,
            num_warps=max(1, min(8, block // 512)),
        )
    return out


@triton.jit
def _silu_mul_kernel(gate_up, out, stride_row, I: tl.constexpr, BLOCK: tl.constexpr):  # noqa: E741
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = i < I
    gate = tl.load(gate_up + row * stride_row + i, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride_row + I + i, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + row * I + i, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=ok)


def silu_mul(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """SwiGLU's gate; see :func:`xgr_engine.kernels.reference.silu_mul`."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    _require_rows("silu_mul", gate_up)
    if out is None:
        out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    _require_result("silu_mul", out, (rows, width))
    if rows:
        block = min(2048, power_of_two(width))
        grid = (rows, ceil_div(width, block))
        _silu_mul_kernel[grid](gate_up, out, gate_up.stride(0), I=width, BLOCK=block, num_warps=max(1, block // 256))
    return out


def swiglu(x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Gate and up products with SwiGLU; see :func:`xgr_engine.kernels.reference.swiglu`.

    On a Hopper GPU this is one kernel where it covers the call and there are enough rows (``launch.gate_up_rows`` tells
    the memory planner). It takes 0.86 of the time of a product and a pass over it (8000 x 2048 x 2 * 6144, H200). Few
    rows make fewer tiles than the GPU has multiprocessors; cuBLAS cuts those smaller.
    """
    if bias is None and is_hopper(x.device) and len(x) > FEW_SWIGLU_ROWS:
        from xgr_engine.kernels import hopper  # Gluon is loaded only where it runs

        if hopper.covers(x, weight):
            return hopper.swiglu_product(x, weight, out)
    return silu_mul(linear(x, weight, bias), out)


@triton.jit
def _rotated_heads(source, weight, cos, sin, eps, h, h_ok, e, e_ok, D: tl.constexpr, NORM: tl.constexpr):
    """Load heads ``h`` as two halves, norm each head, and rotate the halves against each other."""
    mask = h_ok[:, None] & e_ok[None, :]
    at = h[:, None] * D + e[None, :]
    first = tl.load(source + at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + D // 2 + at, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        mean = (tl.sum(first * first, 1) + tl.sum(second * second, 1)) / D
        inverse = tl.rsqrt(mean + eps)[:, None]
        first = first * inverse * tl.load(weight + e, mask=e_ok, other=0.0).to(tl.float32)[None, :]
        second = second * inverse * tl.load(weight + D // 2 + e, mask=e_ok, other=0.0).to(tl.float32)[None, :]
    return first * cos - second * sin, second * cos + first * sin, at, mask


@triton.jit
def _rope_and_store_kernel(
    qkv,  # [N, (HEADS + 2 * KV_HEADS) * D]
    q_norm,
    k_norm,
    cos,  # [P, D / 2]
    sin,
    position,
    slot,
    q_out,  # [N, HEADS, D]
    k_cache,  # [M, KV_HEADS, D]
    v_cache,
    stride_row,
    stride_slot,
    stride_head,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK_E)
    e_ok = e < D // 2
    at = tl.load(position + row).to(tl.int64) * (D // 2) + e
    c = tl.load(cos + at, mask=e_ok, other=0.0)[None, :]
    s = tl.load(sin + at, mask=e_ok, other=0.0)[None, :]
    source = qkv + row * stride_row

    h = tl.arange(0, BLOCK_H)
    first, second, inner, mask = _rotated_heads(source, q_norm, c, s, eps, h, h < HEADS, e, e_ok, D, NORM)
    target = q_out + row * (HEADS * D) + inner
    tl.store(target, first.to(q_out.dtype.element_ty), mask=mask)
    tl.store(target + D // 2, second.to(q_out.dtype.element_ty), mask=mask)

    keep = tl.load(slot + row).to(tl.int64)
    if keep >= 0:
        kv = tl.arange(0, BLOCK_KV)
        keys = source + HEADS * D
        k_first, k_second, k_at, k_mask = _rotated_heads(keys, k_norm, c, s, eps, kv, kv < KV_HEADS, e, e_ok, D, NORM)
        cell = keep * stride_slot + kv[:, None] * stride_head + e[None, :]
        tl.store(k_cache + cell, k_first.to(k_cache.dtype.element_ty), mask=k_mask)
        tl.store(k_cache + cell + D // 2, k_second.to(k_cache.dtype.element_ty), mask=k_mask)
        values = keys + KV_HEADS * D + k_at
        tl.store(v_cache + cell, tl.load(values, mask=k_mask, other=0.0), mask=k_mask)
        tl.store(v_cache + cell + D // 2, tl.load(values + D // 2, mask=k_mask, other=0.0), mask=k_mask)


def rope_and_store(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    position: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """Head norms, rotary embedding and cache write; see :func:`xgr_engine.kernels.reference.rope_and_store`."""
    rows = len(qkv)
    kv_heads, dim = k_cache.shape[1:]
    heads = qkv.shape[1] // dim - 2 * kv_heads
    _require_rows("rope_and_store", qkv)
    if k_cache.stride() != v_cache.stride() or k_cache.stride(2) != 1:
        raise UsageError("rope_and_store: the caches of keys and values must have equal strides, the last of them 1")
    if not (position.is_contiguous() and slot.is_contiguous() and len(position) == len(slot) == rows):
        raise UsageError("rope_and_store: position and slot must be contiguous, with one entry per row")
    q = torch.empty((rows, heads, dim), dtype=qkv.dtype, device=qkv.device) if out is None else out
    _require_result("rope_and_store", q, (rows, heads, dim))
    if rows:
        _rope_and_store_kernel[(rows,)](
            qkv,
            cos if q_norm is None else q_norm,
            cos if k_norm is None else k_norm,
            cos,
            sin,
            position,
            slot,
            q,
            k_cache,
            v_cache,
            qkv.stride(0),
            k_cache.stride(0),
            k_cache.stride(1),
            eps,
            HEADS=heads,
            KV_HEADS=kv_heads,
            D=dim,
            NORM=q_norm is not None,
            BLOCK_H=power_of_two(heads),
            BLOCK_KV=power_of_two(kv_heads),
            BLOCK_E=power_of_two(dim // 2),
            num_warps=4,
        )
    return q


@triton.jit
def _tile_logsumexp_kernel(
    hidden,  # descriptor of [N, H], blocks [ROWS, DEPTH]
    weight,  # descriptor of [V, H], blocks [COLS, DEPTH]
    state,  # [2, tiles of V, N] maximum and sum of each tile
    rows,
    V,
    H,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Logits of a tile of rows and a tile of the vocabulary, reduced to a maximum and a sum before they are stored."""
    tiles_m = tl.cdiv(rows, ROWS)
    tiles_n = tl.cdiv(V, COLS)
    # the row tiles of one vocabulary tile run side by side, so that its weights are read from memory only once
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        m_tile = tile % tiles_m
        n_tile = tile // tiles_m
        acc = tl.zeros([ROWS, COLS], tl.float32)
        for k in range(0, H, DEPTH):
            a = hidden.load([m_tile * ROWS, k])
            b = weight.load([n_tile * COLS, k])
            acc = tl.dot(a, b.T, acc, input_precision="ieee")
        column = n_tile * COLS + tl.arange(0, COLS)
        acc = tl.where(column[None, :] < V, acc, float("-inf"))
        top = tl.max(acc, 1)
        mass = tl.sum(tl.exp2((acc - top[:, None]) * 1.4426950408889634), 1)
        row = m_tile * ROWS + tl.arange(0, ROWS)
        at = n_tile.to(tl.int64) * rows + row
        tl.store(state + at, top, mask=row < rows)
        tl.store(state + tl.cast(tiles_n, tl.int64) * rows + at, mass, mask=row < rows)


@triton.jit
def _merge_logsumexp_kernel(state, out, rows, tiles, ROWS: tl.constexpr, TILES: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[None, :]
    m = tl.full([TILES, ROWS], float("-inf"), tl.float32)
    total = tl.zeros([TILES, ROWS], tl.float32)
    for at in range(0, tiles, TILES):
        tile = at + tl.arange(0, TILES)[:, None]
        ok = (tile < tiles) & (row < rows)
        place = tile.to(tl.int64) * rows + row
        x = tl.load(state + place, mask=ok, other=float("-inf"))
        mass = tl.load(state + tl.cast(tiles, tl.int64) * rows + place, mask=ok, other=0.0)
        m_new = tl.maximum(m, x)
        pivot = tl.where(m_new == float("-inf"), 0.0, m_new)
        total = total * tl.exp(m - pivot) + mass * tl.exp(x - pivot)
        m = m_new
    top = tl.max(m, 0)
    pivot = tl.where(top == float("-inf"), 0.0, top)
    mass = tl.sum(total * tl.exp(m - pivot[None, :]), 0)
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tl.store(out + place, pivot + tl.log(tl.where(place < rows, mass, 1.0)), mask=place < rows)


def vocabulary_logsumexp(hidden: Tensor, weight: Tensor) -> Tensor:
    """Log-sum-exp over the vocabulary; see :func:`xgr_engine.kernels.reference.vocabulary_logsumexp`.

    Logits are never stored: the tiles of one matrix product are reduced in registers, and a second kernel merges them
    in a fixed order. 1.87 ms for 2048 rows of width 2048 over 151,936 tokens on an H200, where the bfloat16 product
    alone takes 1.96.
    """
    rows, (vocabulary, width) = len(hidden), weight.shape
    _require_rows("vocabulary_logsumexp", hidden, weight)
    out = torch.empty((rows,), dtype=torch.float32, device=hidden.device)
    if rows == 0:
        return out
    wide = hidden.dtype == torch.float32
    tile_rows, tile_cols, depth = (32, 64, 32) if wide else (128, 256, 64)
    tiles = ceil_div(vocabulary, tile_cols)
    state = torch.empty((2, tiles, rows), dtype=torch.float32, device=hidden.device)
    works = ceil_div(rows, tile_rows) * tiles
    programs = max(2, multiprocessors(hidden.device))
    _tile_logsumexp_kernel[(min(works, programs),)](
        TensorDescriptor.from_tensor(hidden, [tile_rows, depth]),
        TensorDescriptor.from_tensor(weight, [tile_cols, depth]),
        state,
        rows,
        vocabulary,
        width,
        ROWS=tile_rows,
        COLS=tile_cols,
        DEPTH=depth,
        num_warps=4 if wide else 8,
        num_stages=2 if wide else 4,
    )
    merge_rows = 8
    _merge_logsumexp_kernel[(ceil_div(rows, merge_rows),)](state, out, rows, tiles, ROWS=merge_rows, TILES=128)
    return out


def _require_rows(name: str, *tensors: Tensor) -> None:
    for t in tensors:
        if t.dim() != 2 or t.stride(1) != 1:
            raise UsageError(f"{name}: inputs must be matrices with contiguous rows")


def _require_result(name: str, out: Tensor, shape: tuple[int, ...]) -> None:
    if out.shape != shape or not out.is_contiguous():
        raise UsageError(f"{name}: the result must be contiguous, of shape {shape}")
