"""The gate and up products with SwiGLU in plain Triton: what the compiler schedules without help."""

# Triton kernels are compiled from source; annotations in them would describe nothing.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,no-any-return"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from xgr_engine.kernels.launch import ceil_div, multiprocessors

ROWS, COLS, DEPTH = 128, 128, 64


@triton.jit
def plain_swiglu_kernel(
    x,  # descriptor of [M, H], blocks [ROWS, DEPTH]
    weight,  # descriptor of [2, I, H], blocks [2, COLS, DEPTH]: the same rows of gate and up side by side
    out,  # descriptor of [M, I], blocks [ROWS, COLS]
    rows,
    width,
    depth,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    tiles_m = tl.cdiv(rows, ROWS)
    tiles_n = tl.cdiv(width, COLS)
    # Not flattened: with the two loops made one, the assembler finds the accumulators written between products and
    # serialises these.
    for work in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        group = work // (GROUP * tiles_n)
        height = tl.minimum(tiles_m - group * GROUP, GROUP)
        inner = work - group * GROUP * tiles_n
        row = (group * GROUP + inner % height) * ROWS
        column = inner // height * COLS
        acc = tl.zeros([ROWS, 2 * COLS], tl.float32)
        for k in range(0, depth, DEPTH):
            both = weight.load([0, column, k]).reshape(2 * COLS, DEPTH)
            acc = tl.dot(x.load([row, k]), both.T, acc)
        gate, up = acc.reshape(ROWS, 2, COLS).permute(0, 2, 1).split()
        out.store([row, column], (gate * tl.sigmoid(gate) * up).to(out.dtype))


def plain_swiglu_product(
    x: Tensor, weight: Tensor, out: Tensor | None = None, *, group: int = 16, stages: int = 4, warps: int = 8
) -> Tensor:
    """As :func:`xgr_engine.kernels.hopper.swiglu_product`, for the same inputs."""
    rows, (width, depth) = len(x), (len(weight) // 2, x.shape[1])
    if out is None:
        out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    stride = weight.stride(0)
    works = ceil_div(rows, ROWS) * ceil_div(width, COLS)
    plain_swiglu_kernel[(min(works, multiprocessors(x.device)),)](
        TensorDescriptor.from_tensor(x, [ROWS, DEPTH]),
        TensorDescriptor(weight, [2, width, depth], [width * stride, stride, 1], [2, COLS, DEPTH]),
        TensorDescriptor.from_tensor(out, [ROWS, COLS]),
        rows,
        width,
        depth,
        GROUP=group,
        ROWS=ROWS,
        COLS=COLS,
        DEPTH=DEPTH,
        num_warps=warps,
        num_stages=stages,
    )
    return out
