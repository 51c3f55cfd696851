"""The elementwise steps of a decoder layer in plain torch: definition, oracle and CPU path.

Everything is computed in float32 (float64 for float64 inputs) and rounded once, on the way to memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from xgr_engine.kernels.linear import linear

LOGITS_BYTES = 256 << 20  # of float32 logits over the vocabulary, at most, that exist at once


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def add_rms_norm(residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """``residual += delta`` in place, then the root-mean-square norm (arXiv 1910.07467) of the sum.

    Args:
        residual: [N, H] the residual stream; updated unless ``delta`` is None.
        delta: [N, H] what the block before adds to it, or None.
        weight: [H] scale of the norm.
        eps: added to the mean square.

    Returns:
        [N, H] the normed sum, dtype of ``residual``. The norm reads the sum as stored (rounded to its dtype).
    """
    if delta is not None:
        residual.copy_(_wide(residual) + _wide(delta))
    x = _wide(residual)
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * _wide(weight)).to(residual.dtype)


def silu_mul(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """``silu(gate) * up`` (arXiv 2002.05202). gate_up [N, 2 * I] holds gate and up side by side; returns [N, I]."""
    gate, up = _wide(gate_up).chunk(2, dim=-1)
    return _result((gate * torch.sigmoid(gate)).mul_(up).to(gate_up.dtype), out)


def swiglu(x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Gate and up products and :func:`silu_mul` of them: x [N, H], weight [2 * I, H] (gate's rows first) -> [N, I]."""
    return silu_mul(linear(x, weight, bias), out)


def _result(value: Tensor, out: Tensor | None) -> Tensor:
    return value if out is None else out.copy_(value)


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
    """Norm of each q and k head, rotary embedding, and the write of k and v to the cache.

    Args:
        qkv: [N, (Hq + 2 * Hkv) * D] output of the fused projection: all q heads, all k heads, all v heads.
        q_norm, k_norm: [D] weights of the heads' RMS norms (Qwen3), or both None.
        eps: of these norms.
        cos, sin: [P, D / 2] float32, by position; the first half of a head is rotated against the second.
        position: int [N] position of each row, below P.
        k_cache, v_cache: [M, Hkv, D]; row n is written to ``slot[n]``.
        slot: int [N] cache row of each row, all different; -1 = do not store.
        out: where to put the queries.

    Returns:
        [N, Hq, D] the queries, dtype of ``qkv``.
    """
    kv_heads, dim = k_cache.shape[1:]
    heads = _wide(qkv).view(len(qkv), qkv.shape[1] // dim, dim)
    q, k, v = torch.split(heads, [heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    q = _rotate(_head_norm(q, q_norm, eps), cos[position], sin[position])
    k = _rotate(_head_norm(k, k_norm, eps), cos[position], sin[position])
    stored = slot >= 0
    k_cache[slot[stored].long()] = k[stored].to(k_cache.dtype)
    v_cache[slot[stored].long()] = v[stored].to(v_cache.dtype)
    return _result(q.to(qkv.dtype), out)


def vocabulary_logsumexp(hidden: Tensor, weight: Tensor) -> Tensor:
    """Log-sum-exp of the logits ``hidden @ weight.T`` over the whole vocabulary, never rounded below float32.

    Args:
        hidden: [N, H].
        weight: [V, H], in the dtype of ``hidden``.

    Returns:
        float32 [N] (float64 for float64 inputs).
    """
    wide = _wide(weight)
    rows_at_once = max(1, LOGITS_BYTES // (4 * len(weight)))
    chunks = torch.split(hidden, rows_at_once)
    return torch.cat([torch.logsumexp(linear(_wide(rows), wide), dim=-1) for rows in chunks])


def _head_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    if weight is None:
        return x
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * _wide(weight)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
