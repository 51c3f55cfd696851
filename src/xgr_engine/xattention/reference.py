"""Attention of beams over a shared prompt, in plain torch: the definition, the oracle, and the CPU path.

Two kinds of keys meet in one softmax: the prompt, stored once a user and read by all of its beams, and the few tokens
each beam generated itself, found through a table of ancestors. Re-ordering beams therefore moves integers, never KV.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def beam_attention(
    q: Tensor,
    prompt_k: Tensor,
    prompt_v: Tensor,
    prompt_start: Tensor,
    gen_k: Tensor,
    gen_v: Tensor,
    ancestors: Tensor,
    scale: float,
) -> Tensor:
    """Decode attention (xAttention, arXiv 2512.11529, shared and unshared stage under one softmax).

    Args:
        q: [U, R, Hq, D] one query a beam row. Rows of dead beams may hold anything finite.
        prompt_k, prompt_v: [T, Hkv, D] the users' prompts back to back.
        prompt_start: int [U + 1]; user u owns the prompt rows ``prompt_start[u] : prompt_start[u + 1]``.
        gen_k, gen_v: [U, S, Hkv, D] keys and values of generated tokens, S slots a user.
        ancestors: int [U, R, A] the slots of this row's own generated tokens, the current one included; -1 = none.
        scale: factor on q.k, usually D ** -0.5.

    Returns:
        [U, R, Hq, D] in the dtype of q; sums in float32 (float64 for float64 inputs).
    """
    users, rows, heads, dim = q.shape
    kv_heads = prompt_k.shape[1]
    group = heads // kv_heads
    acc = torch.float64 if q.dtype == torch.float64 else torch.float32
    starts = prompt_start.tolist()
    out = torch.empty_like(q)
    for u in range(users):
        # [Hkv, R * G, D]: the group's heads are more query rows over the same keys
        query = q[u].view(rows, kv_heads, group, dim).permute(1, 0, 2, 3).reshape(kv_heads, rows * group, dim).to(acc)
        keys = prompt_k[starts[u] : starts[u + 1]].permute(1, 2, 0).to(acc)
        values = prompt_v[starts[u] : starts[u + 1]].permute(1, 0, 2).to(acc)
        length = keys.shape[-1]
        logits = torch.bmm(query, keys).mul_(scale).view(kv_heads, rows, group, length)
        if ancestors.shape[-1]:
            slots = ancestors[u].clamp_min(0).long()
            own_k = gen_k[u][slots].permute(2, 0, 3, 1).to(acc)  # [Hkv, R, D, A]
            own_v = gen_v[u][slots].permute(2, 0, 1, 3).to(acc)  # [Hkv, R, A, D]
            absent = (ancestors[u] < 0)[None, :, None, :]
            own = torch.matmul(query.view(kv_heads, rows, group, dim), own_k).mul_(scale)
            logits = torch.cat([logits, own.masked_fill(absent, -torch.inf)], dim=-1)
        weights = torch.softmax(logits, dim=-1)
        mixed = torch.bmm(weights[..., :length].reshape(kv_heads, rows * group, length), values)
        mixed = mixed.view(kv_heads, rows, group, dim)
        if ancestors.shape[-1]:
            # an absent slot has weight 0, but 0 * NaN is NaN: what lies in an unused slot must not matter
            own_v = own_v.masked_fill((ancestors[u] < 0)[None, :, :, None], 0)
            mixed = mixed + torch.matmul(weights[..., length:], own_v)
        out[u] = mixed.permute(1, 0, 2, 3).reshape(rows, heads, dim)
    return out


def prompt_attention(
    q: Tensor, k: Tensor, v: Tensor, query_start: list[int], key_start: list[int], scale: float
) -> Tensor:
    """Causal self-attention over ragged sequences packed back to back, without padding.

    Args:
        q: [N, Hq, D] the sequences' queries; k, v: [T, Hkv, D] their keys and values.
        query_start: [S + 1]; sequence s owns the queries ``query_start[s] : query_start[s + 1]``.
        key_start: [S + 1], likewise for keys. A sequence may have more keys than queries: its queries are then the
            last positions (a prefix whose keys were computed before).

    Returns:
        [N, Hq, D] in the dtype of q.
    """
    out = torch.empty_like(q)
    grouped = q.shape[1] != k.shape[1]
    for q0, q1, k0, k1 in zip(query_start, query_start[1:], key_start, key_start[1:], strict=False):
        queries, keys = q1 - q0, k1 - k0
        if queries == 0:
            continue
        square = queries == keys
        mask = None
        if not square:
            position = torch.arange(keys - queries, keys, device=q.device)
            mask = torch.arange(keys, device=q.device)[None, :] <= position[:, None]
        mixed = F.scaled_dot_product_attention(
            q[q0:q1].transpose(0, 1).unsqueeze(0),
            k[k0:k1].transpose(0, 1).unsqueeze(0),
            v[k0:k1].transpose(0, 1).unsqueeze(0),
            attn_mask=mask,
            is_causal=square,
            scale=scale,
            enable_gqa=grouped,
        )
        out[q0:q1] = mixed[0].transpose(0, 1)
    return out
