"""Causal attention of ragged prompts on a GPU: one interface, several kernels, and the choice between them.

Sequences are packed back to back and never padded. Every kernel has the signature :data:`Kernel`, and ``KERNELS`` gives
it a name. :func:`choose` is the one place that knows which is fastest for a call.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from xgr_engine.errors import UsageError
from xgr_engine.kernels.launch import capability, is_hopper
from xgr_engine.xattention.prefill import flash3, fused, triton
from xgr_engine.xattention.prefill.fused import preferred_kernels
from xgr_engine.xattention.ragged import Ragged

__all__ = ["KERNELS", "Kernel", "choose", "preferred_kernels", "prompt_attention"]

# (q, k, v, sequences, scale) -> [N, Hq, D]; tensors as in reference.prompt_attention
Kernel = Callable[[Tensor, Tensor, Tensor, Ragged, float], Tensor]

_FEW_SHAPES = 2  # up to so many shapes one cuDNN call each beats one kernel for all; cuDNN builds a plan per shape
_LONG = 2048  # keys from which on FlashAttention-3 is faster than our kernel
_HALF = (torch.bfloat16, torch.float16)


def _hopper_covers(q: Tensor, k: Tensor, v: Tensor) -> bool:
    from xgr_engine.xattention.hopper import prefill as specialized

    return specialized.covers(q, k, v)


def _hopper(q: Tensor, k: Tensor, v: Tensor, sequences: Ragged, scale: float) -> Tensor:
    from xgr_engine.xattention.hopper import prefill as specialized  # Gluon is loaded only where it runs

    return specialized.prompt_attention(q, k, v, sequences, scale)


KERNELS: dict[str, Kernel] = {
    "runs": fused.by_run,
    "cudnn": fused.cudnn_ragged,
    "flash2": fused.flash2,
    "flash3": flash3.prompt_attention,
    "hopper": _hopper,
    "triton": triton.prompt_attention,
}


def choose(q: Tensor, k: Tensor, v: Tensor, sequences: Ragged) -> str:
    """The name of the fastest kernel for a call, by measurements on an H200 (``benchmarks/results/prefill_h200.json``).

    Milliseconds with 16/8 heads of D 128, for 8 x 1000 tokens, 8 x 512 to 1000, 8 x 5000, 8 x 3000 to 5000: ours
    0.076, 0.058, 1.45, 0.94; FlashAttention-3 0.086, 0.065, 1.41, 0.89; cuDNN 0.085, 0.164, 1.57, 1.28;
    FlashAttention-2 0.176, 0.133, 2.74, 1.83. At D 64, 8 x 5000: ours 0.83, cuDNN 0.74.
    """
    if not q.is_cuda:
        return "runs"
    few = sequences.square and len(sequences.runs) <= _FEW_SHAPES
    if q.dtype in _HALF and is_hopper(q.device):
        long = sequences.longest[1] >= _LONG
        if long and flash3.covers(q):
            return "flash3"
        cudnn_is_ahead = long and few and q.shape[2] == 64
        if not cudnn_is_ahead and _hopper_covers(q, k, v):
            return "hopper"
    if few or q.dtype not in _HALF:
        return "runs" if sequences.square else "triton"
    return "flash2" if capability(q.device) >= 8 else "triton"  # FlashAttention-2 begins with Ampere


def prompt_attention(
    q: Tensor, k: Tensor, v: Tensor, sequences: Ragged, scale: float, *, kernel: str = "auto"
) -> Tensor:
    """As :func:`xgr_engine.xattention.reference.prompt_attention`. Call it inside :func:`preferred_kernels`.

    Args:
        kernel: a name of ``KERNELS``, or ``auto`` for what :func:`choose` says.

    Raises:
        UsageError: no such kernel, or the one named does not cover the call.
    """
    if kernel != "auto" and kernel not in KERNELS:
        raise UsageError(f"prefill kernel {kernel}: must be auto, {', '.join(KERNELS)}")
    return KERNELS[choose(q, k, v, sequences) if kernel == "auto" else kernel](q, k, v, sequences, scale)
