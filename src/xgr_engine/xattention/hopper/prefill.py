"""Launch of the Hopper kernel for ragged prompts; see ``prefill_kernel`` for the idea."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from xgr_engine.errors import UsageError
from xgr_engine.kernels.launch import LOG2E, is_hopper, multiprocessors
from xgr_engine.xattention.hopper.prefill_kernel import hopper_prefill_kernel
from xgr_engine.xattention.ragged import Cut, Ragged

ROWS = 128  # query tokens of a work item


@dataclass(frozen=True)
class PrefillTiles:
    """Keys per tile (64 or 128), tiles in flight, and items whose queries are in flight (1 or 2)."""

    keys: int = 128
    stages: int = 2
    q_stages: int = 2


def covers(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernel can run a call: a Hopper GPU, 16-bit inputs, D of 64 or 128, the heads of a token back to back
    and tokens at multiples of 16 bytes."""
    return (
        is_hopper(q.device)
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[2] in (64, 128)
        and all(t.stride(2) == 1 and t.stride(1) == t.shape[2] for t in (q, k, v))
        and not any(t.data_ptr() % 16 or t.stride(0) % 8 for t in (q, k, v))
    )


def prompt_attention(
    q: Tensor, k: Tensor, v: Tensor, sequences: Ragged, scale: float, tiles: PrefillTiles | None = None
) -> Tensor:
    """As :func:`xgr_engine.xattention.reference.prompt_attention`, for inputs that it :func:`covers`.

    Raises:
        UsageError: other inputs.
    """
    if not covers(q, k, v):
        raise UsageError("the Hopper prefill kernel does not cover this call", hint="leave the choice of kernel open")
    tiles = tiles or PrefillTiles()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not sequences.runs:
        return out
    (_, heads, dim), kv_heads = q.shape, k.shape[1]
    cut = Cut(ROWS, tiles.keys, multiprocessors(q.device))
    work_list = sequences.work_list(heads, kv_heads, 2 * dim * q.element_size(), cut, q.device)
    works = len(work_list)
    hopper_prefill_kernel[(min(works, multiprocessors(q.device)),)](
        _matrix(q, sequences.query_start[-1], ROWS // 2),
        *(_matrix(t, sequences.key_start[-1], tiles.keys) for t in (k, v)),
        *(work_list, out, scale * LOG2E, works),
        HEADS=heads,
        G=heads // kv_heads,
        D=dim,
        ROWS=ROWS,
        KEYS=tiles.keys,
        STAGES=tiles.stages,
        Q_STAGES=tiles.q_stages,
        num_warps=4,
    )
    return out


def _matrix(t: Tensor, rows: int, block: int) -> TensorDescriptor:
    """The first ``rows`` tokens of [tokens, heads, D] as a matrix, in blocks of tokens of a head."""
    _, heads, dim = t.shape
    return TensorDescriptor(t, [rows, heads * dim], [t.stride(0), 1], [block, dim], _layout(block, dim, t.dtype))


@functools.cache
def _layout(rows: int, dim: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([rows, dim], gl.bfloat16 if dtype == torch.bfloat16 else gl.float16)
