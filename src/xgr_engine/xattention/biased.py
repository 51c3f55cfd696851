"""Attention with a bias on the scores that depends on the distance alone (T5, arXiv 1910.10683), in plain torch.

Two forms: an encoder's over whole sequences, every token to every token, and a beam row's over its own generated
tokens, found through the table of ancestors. Scores are not scaled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from xgr_engine.xattention.upload import upload

# not cuDNN, which torch may prefer on Hopper: it builds a plan for every shape, and here every length is a new shape
_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True)
class SameLength:
    """Sequences of ``length`` tokens each, wherever they lie among the packed ones.

    Attributes:
        rows: int64 [S, length] the packed rows of each.
    """

    length: int
    rows: Tensor


def by_length(starts: Sequence[int], lengths: Sequence[int], device: torch.device) -> list[SameLength]:
    """Packed sequences that begin at ``starts``, those of equal length together; none is padded.

    The rows go to the device in one copy that nothing waits for.
    """
    groups: dict[int, list[int]] = {}
    for start, length in zip(starts, lengths, strict=True):
        groups.setdefault(length, []).append(start)
    tables = [torch.tensor(group)[:, None] + torch.arange(length) for length, group in groups.items()]
    flat = upload(torch.cat([table.flatten() for table in tables]), device)
    parts = torch.split(flat, [table.numel() for table in tables])
    return [SameLength(table.shape[1], part.view(table.shape)) for table, part in zip(tables, parts, strict=True)]


def distance_bucket(distance: Tensor, *, both_ways: bool, buckets: int, max_distance: int) -> Tensor:
    """Which of ``buckets`` biases belongs to a key ``distance`` tokens after its query (negative: before it).

    Half of a direction's buckets hold one distance each; the others widen logarithmically up to ``max_distance``, and
    everything farther shares the last one. Computed in float32, as transformers does, so that every distance falls into
    the same bucket.

    Args:
        distance: int64, any shape.
        both_ways: keys after the query have half of the buckets (encoder); else they count as distance 0.
    """
    first = torch.zeros_like(distance)
    if both_ways:
        buckets //= 2
        first = (distance > 0).long() * buckets
        away = distance.abs()
    else:
        away = (-distance).clamp_min(0)
    exact = buckets // 2
    growth = torch.log(away.clamp_min(1).float() / exact) / math.log(max_distance / exact) * (buckets - exact)
    large = (exact + growth.long()).clamp_max(buckets - 1)
    return first + torch.where(away < exact, away, large)


def distance_table(weight: Tensor, *, both_ways: bool, max_distance: int) -> Tensor:
    """The bias of every distance up to ``max_distance``, [distances, H] in the dtype of ``weight`` [buckets, H].

    An encoder (``both_ways``) has distances -max_distance .. max_distance, a decoder 0 .. max_distance back; everything
    farther has the bias at the table's end. Buckets are found on the host, so that a device whose logarithm rounds
    otherwise puts no distance into another bucket.
    """
    distance = torch.arange(-max_distance, max_distance + 1) if both_ways else -torch.arange(max_distance + 1)
    bucket = distance_bucket(distance, both_ways=both_ways, buckets=len(weight), max_distance=max_distance)
    return weight[bucket.to(weight.device)]


def encoder_bias(table: Tensor, longest: int) -> Tensor:
    """Biases [H, m, m], query by key, from the :func:`distance_table` of an encoder; m is ``longest`` or a little more.

    Shorter sequences read a corner of it, since the bias depends on the distance alone. m is a multiple of 8, so that
    rows begin at multiples of 16 bytes: torch's GPU kernels would copy other ones at every call.
    """
    size = -(-longest // 8) * 8
    far = len(table) // 2
    distance = torch.arange(1 - size, size, device=table.device).clamp_(-far, far).add_(far)
    # row s of the windows begins at distance s + 1 - size: the last query's is the first
    return table.t()[:, distance].unfold(1, size, 1).flip(1)


def encoder_kernels() -> AbstractContextManager[None]:
    """Limits torch to the kernels that suit :func:`encoder_attention`; entered once around all layers."""
    return sdpa_kernel(_KERNELS)


def encoder_attention(q: Tensor, k: Tensor, v: Tensor, groups: list[SameLength], bias: Tensor) -> Tensor:
    """Every token attends to every token of its sequence. Call it inside :func:`encoder_kernels`.

    Args:
        q, k, v: [N, H, D] packed sequences.
        groups: which rows belong together; each row in exactly one.
        bias: [H, m, m], query by key, in the dtype of q; m at least the longest sequence.

    Returns:
        [N, H, D].
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for group in groups:
        shape = (*group.rows.shape, *q.shape[1:])
        taken = (t.index_select(0, group.rows.flatten()).view(shape) for t in (q, k, v))
        query, keys, values = (t.transpose(1, 2) for t in taken)  # [S, H, n, D]
        corner = bias[None, :, : group.length, : group.length]
        mixed = F.scaled_dot_product_attention(query, keys, values, attn_mask=corner, scale=1.0)
        out[group.rows] = mixed.transpose(1, 2)
    return out


def own_attention(q: Tensor, gen_k: Tensor, gen_v: Tensor, ancestors: Tensor, bias: Tensor) -> Tensor:
    """A beam row's attention over the tokens of its own path, without a prompt.

    Args:
        q: [U, R, H, D].
        gen_k, gen_v: [U, S, H, D] keys and values of generated tokens, S slots per user.
        ancestors: int [U, R, A] the slots of a row's tokens in order, the current one last; -1 = none. The first must
            not be -1.
        bias: float32 [P, H] by distance back to a token; distances beyond P - 1 count as P - 1.

    Returns:
        [U, R, H, D] in the dtype of q; sums in float32 (float64 for float64 inputs).
    """
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    there = ancestors >= 0
    distance = (there.sum(-1, keepdim=True) - there.cumsum(-1)).clamp_max_(len(bias) - 1)
    # a hole reads the first token instead: its weight is 0, but an unused slot may hold NaN, and 0 * NaN is NaN
    slots = torch.where(there, ancestors, ancestors[..., :1]).long()
    slots += torch.arange(len(q), device=q.device)[:, None, None] * gen_k.shape[1]
    columns = [own.flatten() for own in slots.unbind(-1)]
    keys, values = gen_k.flatten(0, 1), gen_v.flatten(0, 1)
    query = q.to(wide)
    # One column at a time: all at once would copy A keys per row. On a CPU, index_select takes a quarter of the time
    # that indexing takes.
    found = (keys.index_select(0, own).view(q.shape) for own in columns)
    scores = torch.stack([(query * key.to(wide)).sum(-1) for key in found], dim=-1)
    scores += bias[distance].transpose(2, 3).to(wide)  # [U, R, H, A]
    weights = torch.softmax(scores.masked_fill_(~there[:, :, None, :], -torch.inf), dim=-1)
    mixed = torch.zeros_like(query)
    for column, own in enumerate(columns):
        mixed.addcmul_(weights[..., column, None], values.index_select(0, own).view(q.shape).to(wide))
    return mixed.to(q.dtype)
