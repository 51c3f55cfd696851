"""Causal attention of ragged prompts through the fused kernels that come with torch: cuDNN and FlashAttention-2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from xgr_engine.xattention.ragged import Ragged

_PREFERRED = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# cuDNN builds a plan for every pair of longest length and number of sequences. Both are rounded up to multiples of
# these, so that few plans serve a job.
_LENGTHS = 512
_SEQUENCES = 8


@contextmanager
def preferred_kernels() -> Iterator[None]:
    """torch's fused attention kernels in our order of preference. Entering costs time: do it once around all layers."""
    with sdpa_kernel(_PREFERRED, set_priority=True):
        yield


def by_run(q: Tensor, k: Tensor, v: Tensor, sequences: Ragged, scale: float) -> Tensor:
    """One call of scaled dot product attention for each run of equal sequences; any device and dtype.

    Sequences with a prefix need a mask as large as the scores. Call it inside :func:`preferred_kernels`.
    """
    parts = []
    for run in sequences.runs:
        q0, k0, count = sequences.query_start[run.first], sequences.key_start[run.first], run.stop - run.first
        mixed = _attend(
            q[q0 : q0 + count * run.queries].view(count, run.queries, *q.shape[1:]),
            k[k0 : k0 + count * run.keys].view(count, run.keys, *k.shape[1:]),
            v[k0 : k0 + count * run.keys].view(count, run.keys, *v.shape[1:]),
            scale,
        )
        parts.append(mixed.flatten(0, 1))
    if not parts:
        return torch.empty_like(q)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """q [B, N, Hq, D]; k, v [B, M, Hkv, D] with M >= N, queries last -> [B, N, Hq, D]."""
    queries, keys = q.shape[1], k.shape[1]
    mask = None
    if queries != keys:
        position = torch.arange(keys - queries, keys, device=q.device)
        mask = torch.arange(keys, device=q.device)[None, :] <= position[:, None]
    mixed = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return mixed.transpose(1, 2)


def flash2(q: Tensor, k: Tensor, v: Tensor, sequences: Ragged, scale: float) -> Tensor:
    """FlashAttention-2 in one call, bfloat16 and float16 on a GPU; its causal mask is aligned with the last keys."""
    result: Tensor = torch.ops.aten._flash_attention_forward(
        *(q, k, v, *sequences.offsets(q.device), *sequences.longest),
        dropout_p=0.0,
        is_causal=True,
        return_debug_mask=False,
        scale=scale,
    )[0]
    return result


def cudnn_ragged(q: Tensor, k: Tensor, v: Tensor, sequences: Ragged, scale: float) -> Tensor:
    """cuDNN over ragged sequences in one call, bfloat16 and float16 on a GPU.

    Empty sequences are added to round up their number.

    Raises:
        ValueError: the sequences are not ``square``: cuDNN's causal mask is aligned with the first keys.
    """
    if not sequences.square:
        raise ValueError("cuDNN's causal mask would be wrong for sequences with a prefix")
    count = len(sequences.shapes)
    room = -(-count // _SEQUENCES) * _SEQUENCES
    longest = -(-sequences.longest[0] // _LENGTHS) * _LENGTHS
    starts = (*sequences.query_start, *([sequences.query_start[-1]] * (room - count)))
    offsets = sequences.uploaded(("padded", q.device), q.device, lambda: np.array(starts, np.int32))
    result: Tensor = torch.ops.aten._cudnn_attention_forward(
        *(q, k, v, None, offsets, offsets, longest, longest, False, 0.0, True, False), scale=scale
    )[0]
    return result
