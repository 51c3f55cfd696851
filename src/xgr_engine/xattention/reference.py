"""Attention of beams over a shared prompt, in plain torch: the definition, the oracle, and the CPU path.

Two kinds of keys meet in one softmax: the prompt, stored once per user and read by all of its beams, and the few tokens
each beam generated itself, found through a table of ancestors. Reordering beams therefore moves integers, never KV.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from xgr_engine.xattention.ragged import Ragged

# Attention scores of the users that are computed together, at most: 32 MiB of float32.
_GROUP_LOGITS = 8 << 20


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
    """Decode attention: the shared and the unshared stage of xAttention (arXiv 2512.11529) under one softmax.

    Args:
        q: [U, R, Hq, D] one query per beam row. Rows of dead beams may hold anything finite.
        prompt_k, prompt_v: [T, Hkv, D] the users' prompts back to back.
        prompt_start: int [U + 1]; user u owns the prompt rows ``prompt_start[u] : prompt_start[u + 1]``.
        gen_k, gen_v: [U, S, Hkv, D] keys and values of generated tokens, S slots per user.
        ancestors: int [U, R, A] the slots of this row's own generated tokens, the current one included; -1 = none.
        scale: factor on q.k, usually D ** -0.5.

    Returns:
        [U, R, Hq, D] in the dtype of q, zeros for a row without any key. Sums are float32 (float64 for float64 inputs).
    """
    starts = prompt_start.tolist()
    lengths = [stop - start for start, stop in pairwise(starts[: len(q) + 1])]
    out = torch.empty_like(q)
    for first, stop in _groups(lengths, lines=q.shape[1] * q.shape[2]):
        users = slice(first, stop)
        prompt = _padded(prompt_start[first:stop].long(), lengths[first:stop], len(prompt_k))
        out[users] = _attend(q[users], prompt_k, prompt_v, prompt, gen_k[users], gen_v[users], ancestors[users], scale)
    return out


def _groups(lengths: list[int], lines: int) -> list[tuple[int, int]]:
    """Runs of users to compute together: a few large products cost less than many small ones, but more memory."""
    groups, first, longest = [], 0, 0
    for user, length in enumerate(lengths):
        longest = max(longest, length)
        if user > first and (user + 1 - first) * lines * longest > _GROUP_LOGITS:
            groups.append((first, user))
            first, longest = user, length
    return [*groups, (first, len(lengths))] if lengths else []


def _padded(start: Tensor, lengths: list[int], total: int) -> tuple[Tensor, Tensor]:
    """Prompt rows of each user and whether they are padding, both [U, longest]. Padding is any row below ``total``."""
    length = torch.tensor(lengths, device=start.device)[:, None]
    place = torch.arange(max(lengths), device=start.device)
    rows = start[:, None] + torch.minimum(place, length - 1).clamp_min_(0)
    return rows.clamp_max_(total - 1), place >= length


def _attend(
    q: Tensor,
    prompt_k: Tensor,
    prompt_v: Tensor,
    prompt: tuple[Tensor, Tensor],
    gen_k: Tensor,
    gen_v: Tensor,
    ancestors: Tensor,
    scale: float,
) -> Tensor:
    """One softmax over a user's padded prompt rows and each beam's own tokens: [U, R, Hq, D]."""
    users, rows, heads, dim = q.shape
    kv_heads = prompt_k.shape[1]
    group = heads // kv_heads
    acc = torch.float64 if q.dtype == torch.float64 else torch.float32
    place, padding = prompt
    # [U, Hkv, R * G, D]: to the keys, the heads of a group are nothing but more query rows
    query = q.view(users, rows, kv_heads, group, dim).permute(0, 2, 1, 3, 4).to(acc)
    stacked = query.reshape(users, kv_heads, rows * group, dim)
    keys, values = prompt_k[place].permute(0, 2, 3, 1).to(acc), prompt_v[place].transpose(1, 2).to(acc)
    logits = torch.matmul(stacked, keys).mul_(scale)
    if padding.any():
        logits = logits.masked_fill_(padding[:, None, None, :], -torch.inf)
        # padding has weight 0, but 0 * NaN is NaN, and what padding a user without a prompt reads may be NaN
        values = values.masked_fill(padding[:, None, :, None], 0)
    length = logits.shape[-1]
    logits = logits.view(users, kv_heads, rows, group, length)
    absent = (ancestors < 0)[:, None, :, None, :]
    user, slots = torch.arange(users, device=q.device)[:, None, None], ancestors.clamp_min(0).long()
    if ancestors.shape[-1]:
        own_k = gen_k[user, slots].permute(0, 3, 1, 4, 2).to(acc)  # [U, Hkv, R, D, A]
        own = torch.matmul(query, own_k).mul_(scale)
        logits = torch.cat([logits, own.masked_fill_(absent, -torch.inf)], dim=-1)
    weights = torch.softmax(logits, dim=-1)
    if length == 0 or padding[:, 0].any():  # a user without a prompt: rows without any key get zeros
        weights = weights.masked_fill((logits == -torch.inf).all(dim=-1, keepdim=True), 0)
    shared = weights[..., :length].reshape(users, kv_heads, rows * group, length)
    mixed = torch.matmul(shared, values).view(users, kv_heads, rows, group, dim)
    if ancestors.shape[-1]:
        # an absent slot has weight 0, but 0 * NaN is NaN: what lies in an unused slot must not matter
        own_v = gen_v[user, slots].permute(0, 3, 1, 2, 4).to(acc).masked_fill(absent.transpose(3, 4), 0)
        mixed = mixed + torch.matmul(weights[..., length:], own_v)
    return mixed.permute(0, 2, 1, 3, 4).reshape(users, rows, heads, dim).to(q.dtype)


def prompt_attention(q: Tensor, k: Tensor, v: Tensor, sequences: Ragged, scale: float) -> Tensor:
    """Causal self-attention over ragged sequences packed back to back, without padding.

    Args:
        q: [N, Hq, D] the sequences' queries.
        k, v: [T, Hkv, D] their keys and values.
        sequences: which rows of q and of k, v belong together; rows of k and v after the last key are not read.
        scale: factor on q.k, usually D ** -0.5.

    Returns:
        [N, Hq, D] in the dtype of q.
    """
    out = torch.empty_like(q)
    grouped = q.shape[1] != k.shape[1]
    for (q0, q1), (k0, k1) in zip(pairwise(sequences.query_start), pairwise(sequences.key_start), strict=True):
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
