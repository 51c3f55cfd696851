"""Beam attention for Hopper GPUs (compute capability 9.0); see ``kernel`` for the idea."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from xgr_engine.xattention.hopper.kernel import hopper_attention_kernel


def covers(q: Tensor, prompt_k: Tensor) -> bool:
    """Whether this kernel can run the call: a Hopper GPU, 16-bit inputs, D of 64 or 128, packed prompt rows."""
    tokens, _, dim = prompt_k.shape
    return (
        q.is_cuda
        and torch.cuda.get_device_capability(q.device)[0] == 9
        and q.dtype in (torch.bfloat16, torch.float16)
        and dim in (64, 128)
        and tokens > 0
        and prompt_k.stride() == (prompt_k.stride(0), dim, 1)
        and prompt_k.data_ptr() % 16 == 0
        and prompt_k.stride(0) % 8 == 0
    )


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
    rows: int,
    keys: int,
    stages: int,
    splits: int,
    programs: int,
) -> None:
    """Start the kernel on the current stream.

    Args as :func:`xgr_engine.xattention.reference.beam_attention` but ``scale``, which is in base 2 (times log2(e)),
    and: ``out`` [U, R, Hq, D], or with a ``state`` [2, splits, U, R, Hq] float32 of its own (not ``out`` itself)
    [splits, U, R, Hq, D]; tile sizes; ``programs`` at most, each walking over several work items.
    """
    users, beams, heads, dim = q.shape
    tokens, kv_heads, _ = prompt_k.shape
    group = heads // kv_heads
    layout = gl.NVMMASharedLayout.get_default_for([keys, dim], gl.bfloat16 if q.dtype == torch.bfloat16 else gl.float16)
    k_tiles, v_tiles = (
        TensorDescriptor(t, [tokens, kv_heads * dim], [t.stride(0), 1], [keys, dim], layout)
        for t in (prompt_k, prompt_v)
    )
    works = -(-beams * group // rows) * kv_heads * splits * users
    hopper_attention_kernel[(min(works, programs),)](
        k_tiles,
        v_tiles,
        prompt_v,
        prompt_start,
        q,
        gen_k,
        gen_v,
        ancestors,
        out,
        state,
        scale,
        works,
        users * beams * heads,
        beams,
        prompt_v.stride(0),
        q.stride(0),
        q.stride(1),
        q.stride(2),
        gen_k.stride(0),
        gen_k.stride(1),
        gen_k.stride(2),
        KV_HEADS=kv_heads,
        G=group,
        D=dim,
        A=ancestors.shape[-1],
        SPLITS=splits,
        PARTIAL=state is not out,
        ROWS=rows,
        KEYS=keys,
        STAGES=stages,
        num_warps=4,
    )
