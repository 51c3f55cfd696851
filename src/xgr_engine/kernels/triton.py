"""The elementwise steps of a decoder layer, one Triton kernel each: the signatures of ``reference``.

All of them are bound by memory: every value is read once and written once, arithmetic is float32.
"""

# Triton kernels are compiled from source; annotations in them would describe nothing.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,no-any-return"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from xgr_engine.errors import UsageError


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
        block = triton.next_power_of_2(hidden)
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


def silu_mul(gate_up: Tensor) -> Tensor:
    """SwiGLU's gate; see :func:`xgr_engine.kernels.reference.silu_mul`."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    _require_rows("silu_mul", gate_up)
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        block = min(2048, triton.next_power_of_2(width))
        grid = (rows, triton.cdiv(width, block))
        _silu_mul_kernel[grid](gate_up, out, gate_up.stride(0), I=width, BLOCK=block, num_warps=max(1, block // 256))
    return out


@triton.jit
def _rotated_heads(source, weight, cos, sin, eps, h, h_ok, e, e_ok, D: tl.constexpr, NORM: tl.constexpr):
    """Load heads ``h`` as two halves, norm each head, rotate the halves against each other."""
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
        h = tl.arange(0, BLOCK_KV)
        keys = source + HEADS * D
        first, second, inner, mask = _rotated_heads(keys, k_norm, c, s, eps, h, h < KV_HEADS, e, e_ok, D, NORM)
        cell = keep * stride_slot + h[:, None] * stride_head + e[None, :]
        tl.store(k_cache + cell, first.to(k_cache.dtype.element_ty), mask=mask)
        tl.store(k_cache + cell + D // 2, second.to(k_cache.dtype.element_ty), mask=mask)
        values = keys + KV_HEADS * D + inner
        first = tl.load(values, mask=mask, other=0.0)
        second = tl.load(values + D // 2, mask=mask, other=0.0)
        tl.store(v_cache + cell, first.to(v_cache.dtype.element_ty), mask=mask)
        tl.store(v_cache + cell + D // 2, second.to(v_cache.dtype.element_ty), mask=mask)


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
) -> Tensor:
    """Head norms, rotary embedding and cache write; see :func:`xgr_engine.kernels.reference.rope_and_store`."""
    rows = len(qkv)
    kv_heads, dim = k_cache.shape[1:]
    heads = qkv.shape[1] // dim - 2 * kv_heads
    _require_rows("rope_and_store", qkv)
    if k_cache.stride() != v_cache.stride() or k_cache.stride(2) != 1:
        raise UsageError("rope_and_store: the caches of keys and values must have equal strides, last dimension 1")
    q = torch.empty((rows, heads, dim), dtype=qkv.dtype, device=qkv.device)
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
            BLOCK_H=triton.next_power_of_2(heads),
            BLOCK_KV=triton.next_power_of_2(kv_heads),
            BLOCK_E=triton.next_power_of_2(dim // 2),
            num_warps=4,
        )
    return q


def _require_rows(name: str, *tensors: Tensor) -> None:
    if any(t.dim() != 2 or t.stride(1) != 1 for t in tensors):
        raise UsageError(f"{name}: inputs must be matrices with contiguous rows")
