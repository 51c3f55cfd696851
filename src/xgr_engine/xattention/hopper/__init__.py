"""Beam attention for Hopper GPUs (compute capability 9.0); see ``kernel`` for the idea."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from xgr_engine.xattention.hopper.folded import folded_attention_kernel
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
    own_tile: bool = False,
    take_turns: bool = False,
    query_registers: bool = False,
) -> None:
    """Start the kernel on the current stream.

    Args as :func:`xgr_engine.xattention.reference.beam_attention` but ``scale``, which is in base 2 (times log2(e)),
    and: ``out`` [U, R, Hq, D], or with a ``state`` [2, splits, U, R, Hq] float32 of its own (not ``out`` itself)
    [splits, U, R, Hq, D]; tile sizes; ``programs`` at most, each walking over several work items; ``own_tile``,
    ``take_turns`` and ``query_registers`` as in ``AttentionTiles``. Inputs whose rows do not start
    at multiples of 16 elements never use ``own_tile``: its copies move 16 bytes at a time.
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
    arguments = (
        *(k_tiles, v_tiles, prompt_v, prompt_start, q, gen_k, gen_v, ancestors, out, state, scale, works),
        *(users * beams * heads, beams, prompt_v.stride(0), *q.stride()[:3], *gen_k.stride()[:3]),
    )
    own = ancestors.shape[-1]
    constants = {"KV_HEADS": kv_heads, "G": group, "D": dim, "A": own, "SPLITS": splits, "PARTIAL": state is not out}
    constants.update(ROWS=rows, KEYS=keys, STAGES=stages)
    grid = (min(works, programs),)
    if own_tile and _rows_are_aligned(q, gen_k, gen_v, prompt_v):
        most_beams = rows // group if rows % group == 0 else (rows - 1) // group + 2
        constants.update(OWN=-(-most_beams * own // keys), PINGPONG=take_turns, QUERY_REGISTERS=query_registers)
        folded_attention_kernel[grid](*arguments, **constants, num_warps=4)
    else:
        hopper_attention_kernel[grid](*arguments, **constants, num_warps=4)


def _rows_are_aligned(*tensors: Tensor) -> bool:
    """Whether Triton can prove that every row starts at a multiple of 16 bytes: it looks for factors of 16 alone."""
    return all(t.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in t.stride()[:-1]) for t in tensors)
