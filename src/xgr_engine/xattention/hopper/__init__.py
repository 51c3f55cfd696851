"""Beam attention for Hopper GPUs (compute capability 9.0); see ``kernel`` for the idea."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import functools

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from xgr_engine.xattention.hopper.kernel import hopper_attention_kernel

ROWS = 128  # query rows of a work item


def covers(q: Tensor, prompt_k: Tensor, prompt_v: Tensor, gen_k: Tensor, gen_v: Tensor) -> bool:
    """Whether the kernel can run a call, given a Hopper GPU.

    It needs 16-bit inputs, D of 64 or 128, packed prompt rows, and every row at a multiple of 16 elements: copies move
    16 bytes at a time, and Triton specialises strides only for divisibility by 16.
    """
    tokens, _, dim = prompt_k.shape
    return (
        q.dtype in (torch.bfloat16, torch.float16)
        and dim in (64, 128)
        and tokens > 0
        and prompt_k.stride(1) == dim
        and all(_aligned(t) for t in (q, prompt_k, prompt_v, gen_k, gen_v))
    )


def _aligned(t: Tensor) -> bool:
    return not (t.data_ptr() % 16 or any(stride % 16 for stride in t.stride()[:-1]))


@functools.cache
def _tile_layout(keys: int, dim: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([keys, dim], gl.bfloat16 if dtype == torch.bfloat16 else gl.float16)


def launch(
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
    *,
    keys: int,
    stages: int,
    splits: int,
    programs: int,
) -> None:
    """Start the kernel on the current stream, for inputs that it :func:`covers`.

    Args as :func:`xgr_engine.xattention.triton.attend`, except that ``scale`` is multiplied by log2(e), and:

    Args:
        keys: per tile, 64 or 128.
        stages: tiles in flight.
        splits: work items that share a prompt.
        programs: started at most; each walks over several items.
    """
    users, beams, heads, dim = q.shape
    tokens, kv_heads, _ = prompt_k.shape
    group, own = heads // kv_heads, ancestors.shape[-1]
    layout = _tile_layout(keys, dim, q.dtype)
    k_tiles, v_tiles = (
        TensorDescriptor(t, [tokens, kv_heads * dim], [t.stride(0), 1], [keys, dim], layout)
        for t in (prompt_k, prompt_v)
    )
    works = -(-beams * group // ROWS) * kv_heads * splits * users
    most_beams = ROWS // group if ROWS % group == 0 else (ROWS - 1) // group + 2
    hopper_attention_kernel[(min(works, programs),)](
        *(k_tiles, v_tiles, prompt_v, prompt_start, q, gen_k, gen_v, ancestors, out, state, scale, works),
        *(users * beams * heads, beams, prompt_v.stride(0), *q.stride()[:3], *gen_k.stride()[:3]),
        KV_HEADS=kv_heads,
        G=group,
        D=dim,
        A=own,
        SPLITS=splits,
        PARTIAL=state is not out,
        ROWS=ROWS,
        KEYS=keys,
        STAGES=stages,
        OWN=-(-most_beams * own // keys),
        num_warps=4,
    )
