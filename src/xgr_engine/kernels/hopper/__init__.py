"""Gate and up products with SwiGLU in one kernel for Hopper GPUs; ``swiglu_kernel`` explains it."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from xgr_engine.errors import UsageError
from xgr_engine.kernels.hopper.swiglu_kernel import hopper_swiglu_kernel
from xgr_engine.kernels.launch import ceil_div, multiprocessors

ROWS, COLS, DEPTH = 128, 128, 64  # of a tile of the result, and a slice of the inner dimension


@dataclass(frozen=True)
class SwigluTiles:
    """How the work is scheduled; the result is the same to the bit.

    Attributes:
        group: rows of tiles that run side by side, so that caches keep their inputs.
        stages: slices of the inputs in flight, 2 to 4 (48 KiB each).
        lead: slices by which one half of a program runs ahead of the other; less than ``stages``.
        producers: warps that start copies, 1 or 4.
    """

    group: int = 16
    stages: int = 4
    lead: int = 2
    producers: int = 4


DEFAULT = SwigluTiles()


def covers(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel can run a call, given a Hopper GPU.

    It needs 16-bit matrices of one dtype, contiguous rows that begin at multiples of 16 bytes (so H and I are multiples
    of 8), and at least one row.
    """
    return (
        x.dtype == weight.dtype
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.dim() == weight.dim() == 2
        and x.shape[1] == weight.shape[1]
        and x.numel() > 0
        and weight.shape[0] > 0
        and weight.shape[0] % 16 == 0
        and all(t.stride(1) == 1 and t.stride(0) % 8 == 0 and t.data_ptr() % 16 == 0 for t in (x, weight))
    )


@functools.cache
def _layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    kind = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for([rows, columns], kind)


def _blocks(t: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(t, list(t.shape), [t.stride(0), 1], [rows, columns], _layout(rows, columns, t.dtype))


def swiglu_product(x: Tensor, weight: Tensor, out: Tensor | None = None, tiles: SwigluTiles = DEFAULT) -> Tensor:
    """``silu(x @ gate.T) * (x @ up.T)`` with float32 sums that are rounded once, at the end.

    Args:
        x: [M, H], bfloat16 or float16.
        weight: [2 * I, H], the rows of gate and then those of up.
        out: [M, I], contiguous; made if absent.
        tiles: the schedule.

    Raises:
        UsageError: inputs that the kernel does not cover (see :func:`covers`), or a result of another shape.
    """
    if not covers(x, weight):
        raise UsageError(
            f"swiglu_product: x {tuple(x.shape)} {x.dtype} and weight {tuple(weight.shape)} {weight.dtype} must be "
            "matrices of one 16-bit type with aligned rows; use linear and silu_mul instead"
        )
    rows, width = len(x), len(weight) // 2
    if out is None:
        out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if out.shape != (rows, width) or not out.is_contiguous() or out.dtype != x.dtype or out.data_ptr() % 16:
        raise UsageError(f"swiglu_product: the result must be contiguous, aligned, of shape {(rows, width)}")
    tiles_m, tiles_n, steps = ceil_div(rows, ROWS), ceil_div(width, COLS), ceil_div(x.shape[1], DEPTH)
    hopper_swiglu_kernel[(min(tiles_m * tiles_n, multiprocessors(x.device)),)](
        _blocks(x, ROWS, DEPTH),
        _blocks(weight, COLS, DEPTH),
        _blocks(out, ROWS // 2, COLS),
        tiles_m,
        tiles_n,
        steps,
        width,
        GROUP=tiles.group,
        ROWS=ROWS,
        COLS=COLS,
        DEPTH=DEPTH,
        STAGES=tiles.stages,
        LEAD=min(tiles.lead, tiles.stages - 1, steps - 1),  # a slice that never comes must not be waited for
        PRODUCERS=tiles.producers,
        num_warps=4,
    )
    return out
