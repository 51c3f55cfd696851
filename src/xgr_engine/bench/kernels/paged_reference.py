"""Paged decode attention (PagedAttention, arXiv 2309.06180) in plain torch: definition, oracle and CPU path.

A *pool* holds the keys (or values) of many sequences, one row a token. A sequence is a list of blocks of ``block``
consecutive rows, and its block table says where they lie: token i stands in row ``blocks[i // block] + i % block``.
Entries are first rows rather than block numbers, so that a prompt that prefill packed behind its neighbour can be cut
into blocks where it stands.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SEQUENCES_AT_ONCE = 64  # bounds the gathered copy


def paged_attention(
    q: Tensor, pool_k: Tensor, pool_v: Tensor, context: Tensor, blocks: Tensor, block: int, scale: float
) -> Tensor:
    """One query token a sequence.

    Args:
        q: [N, Hq, D] a sequence each.
        pool_k, pool_v: [M, Hkv, D].
        context: int [N] tokens of each sequence, at least 1, the current one included.
        blocks: int [N, B] block tables; entries beyond the context mean nothing.
        block: tokens a block.
        scale: factor on q.k.

    Returns:
        [N, Hq, D] in the dtype of q; sums in float32 (float64 for float64 inputs).
    """
    acc = torch.float64 if q.dtype == torch.float64 else torch.float32
    kv_heads, dim = pool_k.shape[1:]
    out = torch.empty_like(q)
    for low in range(0, len(q), _SEQUENCES_AT_ONCE):
        part = slice(low, low + _SEQUENCES_AT_ONCE)
        token = torch.arange(int(context[part].max()), device=q.device)
        inside = token < context[part, None]
        row = torch.where(inside, blocks[part].long()[:, token // block] + token % block, 0)
        absent = ~inside[:, None, None, :]
        keys, values = pool_k[row].to(acc), pool_v[row].to(acc)  # [n, T, Hkv, D]
        query = q[part].to(acc).view(len(row), kv_heads, -1, dim)
        logits = torch.einsum("nhgd,nthd->nhgt", query, keys).mul_(scale).masked_fill_(absent, -torch.inf)
        values = values.masked_fill(~inside[:, :, None, None], 0)  # 0 * NaN is NaN
        out[part] = torch.einsum("nhgt,nthd->nhgd", torch.softmax(logits, -1), values).flatten(1, 2).to(q.dtype)
    return out


def copy_rows(pool_k: Tensor, pool_v: Tensor, source: Tensor, target: Tensor, count: Tensor, most: int) -> None:
    """Copy the filled part of forked blocks, in all layers: rows ``source[n] : source[n] + count[n]`` to ``target[n]``.

    Args:
        pool_k, pool_v: [layers, M, Hkv, D], changed in place. No source row is a target row.
        source, target: int64 [N]; count: int [N], at most ``most``.
    """
    row = torch.arange(most, device=source.device)
    filled = row < count[:, None]
    origin, goal = (source[:, None] + row)[filled], (target[:, None] + row)[filled]
    for pool in (pool_k, pool_v):
        pool[:, goal] = pool[:, origin]
