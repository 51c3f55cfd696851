"""Causal attention of ragged prompts on a GPU, through the fastest fused kernel that torch has for the machine."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

# cuDNN's kernel reaches 603 TFLOP/s on an H200 (8 x 5000 tokens, D 128), torch's FlashAttention-2 298.
# Distinct shapes in a batch from which one call for all is better: cuDNN compiles a plan for each shape it meets.
_FEW_SHAPES = 2
_PREFERRED = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def prompt_attention(
    q: Tensor, k: Tensor, v: Tensor, query_start: list[int], key_start: list[int], scale: float
) -> Tensor:
    """Args and result as :func:`xgr_engine.xattention.reference.prompt_attention`.

    Sequences of equal shape that follow one another run as one call, through the quickest kernel there is; more than
    a few shapes share one call of FlashAttention-2, which needs no plan for each. No padding either way. Call it inside
    :func:`preferred_kernels`.
    """
    runs = _runs(query_start, key_start)
    # with a prefix (more keys than queries) torch's other kernels would be given a mask as large as the scores
    prefixed = any(queries != keys for _, _, queries, keys in runs)
    if (prefixed or len(runs) > _FEW_SHAPES) and q.dtype in (torch.bfloat16, torch.float16) and q.is_cuda:
        return _ragged(q, k, v, query_start, key_start, scale)
    parts = []
    for first, last, queries, keys in runs:
        q0, k0, count = query_start[first], key_start[first], last - first
        mixed = _attend(
            q[q0 : q0 + count * queries].view(count, queries, *q.shape[1:]),
            k[k0 : k0 + count * keys].view(count, keys, *k.shape[1:]),
            v[k0 : k0 + count * keys].view(count, keys, *v.shape[1:]),
            scale,
        )
        parts.append(mixed.flatten(0, 1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@contextmanager
def preferred_kernels() -> Iterator[None]:
    """torch's fused attention kernels in our order of preference, for all calls inside (entering it costs time)."""
    with sdpa_kernel(_PREFERRED, set_priority=True):
        yield


def _ragged(q: Tensor, k: Tensor, v: Tensor, query_start: list[int], key_start: list[int], scale: float) -> Tensor:
    longest = [max(stop - start for start, stop in pairwise(starts)) for starts in (query_start, key_start)]
    offsets = [_on_device(tuple(starts), q.device) for starts in (query_start, key_start)]
    result: Tensor = torch.ops.aten._flash_attention_forward(
        q, k, v, *offsets, *longest, dropout_p=0.0, is_causal=True, return_debug_mask=False, scale=scale
    )[0]
    return result


@functools.lru_cache(maxsize=8)
def _on_device(starts: tuple[int, ...], device: torch.device) -> Tensor:
    """The same for all layers of a prefill, so it is uploaded once."""
    return torch.tensor(starts, dtype=torch.int32, pin_memory=True).to(device, non_blocking=True)


def _runs(query_start: list[int], key_start: list[int]) -> list[tuple[int, int, int, int]]:
    """Runs of neighbouring sequences with equal (queries, keys): (first, one past the last, queries, keys)."""
    shapes = [(q1 - q0, k1 - k0) for (q0, q1), (k0, k1) in zip(pairwise(query_start), pairwise(key_start), strict=True)]
    runs: list[tuple[int, int, int, int]] = []
    for index, (queries, keys) in enumerate(shapes):
        if runs and runs[-1][2:] == (queries, keys):
            runs[-1] = (runs[-1][0], index + 1, queries, keys)
        elif queries:
            runs.append((index, index + 1, queries, keys))
    return runs


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
