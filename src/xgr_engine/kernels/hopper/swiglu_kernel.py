"""``silu(x @ gate.T) * (x @ up.T)`` for Hopper (compute capability 9.0), scheduled by hand in Gluon.

At most as many programs run as there are multiprocessors, and each walks over tiles of the result. In a program one
warp brings slices of x and of both weights to shared memory with the tensor memory accelerator, a ring of STAGES slices
ahead; two consumer warpgroups own half of a tile's rows each. The rows of gate and up that make a tile's columns lie
side by side in shared memory, so one instruction multiplies both (64 x 256 x 16: with narrower ones the tensor cores
would wait for shared memory), and both halves of a result meet in the registers of one thread.

Nothing of the next tile waits for the end of this one but the accumulators. So that their readers do not leave the
tensor cores idle, the second warpgroup begins a tile when the first is done with LEAD slices of it: while one computes
silu and stores, the other multiplies alone, at twice its usual rate. Each has its own barriers for slots it is done
with, which is how the second knows.
"""

# Gluon kernels are compiled from source; annotations in them would describe nothing.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,no-any-return"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def _advance(stage, phase, STAGES: gl.constexpr):
    """The next slot of the ring; the phase flips each time round."""
    stage += 1
    wrapped = stage == STAGES
    return gl.where(wrapped, 0, stage), gl.where(wrapped, phase ^ 1, phase)


@gluon.jit
def _tile(work, tiles_m, tiles_n, GROUP: gl.constexpr):
    """Work number -> tile (row, column): GROUP rows of tiles at a time, column by column, so that the programs of a
    moment read few rows of x and few of the weight. The last group may be lower."""
    group = work // (GROUP * tiles_n)
    first = group * GROUP
    height = gl.minimum(tiles_m - first, GROUP)
    inner = work - group * GROUP * tiles_n
    return first + inner % height, inner // height


@gluon.jit
def _silu(x):
    """``x / (1 + exp(-x))`` in two special-function instructions; the quotient's error is 1 in 2^23."""
    power = 1.0 + gl.exp2(x * -1.4426950408889634)
    inverse = gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [power], gl.float32, is_pure=True, pack=1)
    return x * inverse


@gluon.jit
def _produce(
    x_tiles, w_tiles, tiles_m, tiles_n, steps, width, x_smem, w_smem, full, empty, GROUP: gl.constexpr,
    ROWS: gl.constexpr, COLS: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    BYTES: gl.constexpr = x_tiles.block_type.nbytes + 2 * w_tiles.block_type.nbytes
    x_whole = x_smem._reinterpret(x_tiles.dtype, [STAGES, ROWS, DEPTH], x_tiles.layout)
    stage = 0
    phase = 1  # the first time round, every slot is free
    for work in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m, n = _tile(work, tiles_m, tiles_n, GROUP)
        for k in range(steps):
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.wait(empty.index(STAGES + stage), phase)
            mbarrier.expect(full.index(stage), BYTES)
            at = k * DEPTH
            tma.async_copy_global_to_shared(x_tiles, [m * ROWS, at], full.index(stage), x_whole.index(stage))
            tma.async_copy_global_to_shared(w_tiles, [n * COLS, at], full.index(stage), w_smem.index(stage * 2))
            tma.async_copy_global_to_shared(
                w_tiles, [width + n * COLS, at], full.index(stage), w_smem.index(stage * 2 + 1)
            )
            stage, phase = _advance(stage, phase, STAGES)


@gluon.jit
def _consume(
    INDEX: gl.constexpr, out_tiles, tiles_m, tiles_n, steps, x_smem, w_smem, out_smem, full, empty,
    GROUP: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr,
    LEAD: gl.constexpr,
):  # fmt: skip
    M: gl.constexpr = ROWS // 2
    dtype: gl.constexpr = x_smem.dtype
    BOTH: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * COLS, 16])
    ONE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16])
    w_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([2 * COLS, DEPTH], dtype)
    w_both = w_smem._reinterpret(dtype, [STAGES, 2 * COLS, DEPTH], w_layout)
    my_out = out_smem.index(INDEX)
    stage = 0
    phase = 0
    acc = gl.zeros([M, 2 * COLS], gl.float32, BOTH)
    for work in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m, n = _tile(work, tiles_m, tiles_n, GROUP)
        if INDEX == 1 and LEAD > 0:
            # Should the other be behind for once, this may let pass too early: the lead is for speed alone.
            ahead = stage + LEAD - 1
            wrapped = ahead >= STAGES
            ahead = gl.where(wrapped, ahead - STAGES, ahead)
            mbarrier.wait(empty.index(ahead), gl.where(wrapped, phase ^ 1, phase))
        mbarrier.wait(full.index(stage), phase)
        acc = warpgroup_mma(
            x_smem.index(stage * 2 + INDEX), w_both.index(stage).permute((1, 0)), acc, use_acc=False, is_async=True
        )
        acc = warpgroup_mma_wait(1, [acc])
        before = stage
        stage, phase = _advance(stage, phase, STAGES)
        for _k in range(1, steps):
            mbarrier.wait(full.index(stage), phase)
            acc = warpgroup_mma(
                x_smem.index(stage * 2 + INDEX), w_both.index(stage).permute((1, 0)), acc, is_async=True
            )
            acc = warpgroup_mma_wait(1, [acc])
            mbarrier.arrive(empty.index(INDEX * STAGES + before))
            before = stage
            stage, phase = _advance(stage, phase, STAGES)
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(empty.index(INDEX * STAGES + before))

        gate, up = acc.reshape([M, 2, COLS]).permute((0, 2, 1)).split()
        gate = gl.convert_layout(gate, ONE, assert_trivial=True)
        up = gl.convert_layout(up, ONE, assert_trivial=True)
        result = (_silu(gate) * up).to(dtype)
        tma.store_wait(0)  # the tile before has left shared memory
        my_out.store(result)
        fence_async_shared()
        tma.async_copy_shared_to_global(out_tiles, [m * ROWS + INDEX * M, n * COLS], my_out)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles_m", "tiles_n", "steps", "width"])
def hopper_swiglu_kernel(
    x_tiles, w_tiles, out_tiles, tiles_m, tiles_n, steps, width, GROUP: gl.constexpr, ROWS: gl.constexpr,
    COLS: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr, LEAD: gl.constexpr, PRODUCERS: gl.constexpr,
):  # fmt: skip
    """All tiles of the result. Descriptors of x [M, H], gate over up [2 I, H] and the result [M, I] in blocks of
    [ROWS, DEPTH], [COLS, DEPTH] and [ROWS / 2, COLS]; ``steps`` slices of DEPTH make H, ``width`` is I; LEAD < STAGES
    and LEAD < steps: the first consumer gives a slice back when it has started on the one behind; PRODUCERS warps."""
    dtype: gl.constexpr = x_tiles.dtype
    half_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS // 2, DEPTH], dtype)
    x_smem = gl.allocate_shared_memory(dtype, [STAGES * 2, ROWS // 2, DEPTH], half_layout)
    w_smem = gl.allocate_shared_memory(dtype, [STAGES * 2, COLS, DEPTH], w_tiles.layout)
    out_smem = gl.allocate_shared_memory(dtype, [2, ROWS // 2, COLS], out_tiles.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
        mbarrier.init(empty.index(STAGES + i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (
                gl.constexpr(0), out_tiles, tiles_m, tiles_n, steps, x_smem, w_smem, out_smem, full, empty, GROUP,
                ROWS, COLS, DEPTH, STAGES, LEAD,
            )),
            (_consume, (
                gl.constexpr(1), out_tiles, tiles_m, tiles_n, steps, x_smem, w_smem, out_smem, full, empty, GROUP,
                ROWS, COLS, DEPTH, STAGES, LEAD,
            )),
            (_produce, (
                x_tiles, w_tiles, tiles_m, tiles_n, steps, width, x_smem, w_smem, full, empty, GROUP, ROWS, COLS,
                DEPTH, STAGES,
            )),
        ],
        [4, PRODUCERS],
        [232, 40],
    )  # fmt: skip
