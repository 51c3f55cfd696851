"""Causal attention of ragged prompts for Hopper (compute capability 9.0), scheduled by hand in Gluon.

Programs walk over a list of work items that the host made (``xattention/ragged.py``), each 128 query tokens of one
head. As in the decode kernel (``kernel.py``), a producer brings tiles into shared memory with the tensor memory
accelerator and two consumer warpgroups own 64 query rows each; the consumers' steps are the same code. Keys are visited
downwards from the diagonal, so that the tiles that need a mask come first. The heads of a group are neighbours in the
list, so that the second finds the keys of the first in the L2 cache.

Keys and values after the last sequence are read as zeros (the tensor map ends there), so that they do not matter.
"""

# Gluon kernels are compiled from source; annotations in them would describe nothing.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,no-any-return,assignment"

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

from xgr_engine.xattention.hopper.consumer import masked_softmax, pass_turn, step
from xgr_engine.xattention.hopper.work import advance


@gluon.jit
def _item(work_list, work, works):
    """Item of the list: first query row, query rows, first key row, position of the first query, head."""
    at = work_list + gl.minimum(work, works - 1) * 5
    return gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3), gl.load(at + 4)


@gluon.jit
def _produce(
    q_tiles, k_tiles, v_tiles, work_list, works, q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full,
    v_empty, G: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    Q_STAGES: gl.constexpr,
):  # fmt: skip
    BYTES: gl.constexpr = k_tiles.block_type.nbytes
    Q_BYTES: gl.constexpr = q_tiles.block_type.nbytes
    stage = 0
    phase = 1  # the first time round, every buffer is free
    q_stage = 0
    q_phase = 1
    query_row, rows, key_row, position, head = _item(work_list, gl.program_id(0), works)
    for work in range(gl.program_id(0), works, gl.num_programs(0)):
        ahead = _item(work_list, work + gl.num_programs(0), works)
        mbarrier.wait(q_empty.index(q_stage), q_phase)
        mbarrier.expect(q_full.index(q_stage), 2 * Q_BYTES)
        for half in gl.static_range(2):
            tma.async_copy_global_to_shared(
                q_tiles, [query_row + half * (ROWS // 2), head * D], q_full.index(q_stage),
                q_smem.index(q_stage * 2 + half),
            )  # fmt: skip
        q_stage, q_phase = advance(q_stage, q_phase, Q_STAGES)
        column = head // G * D
        tiles = (position + rows + KEYS - 1) // KEYS
        for t in range(tiles):
            row = key_row + (tiles - 1 - t) * KEYS
            mbarrier.wait(k_empty.index(stage), phase)
            mbarrier.expect(k_full.index(stage), BYTES)
            tma.async_copy_global_to_shared(k_tiles, [row, column], k_full.index(stage), k_smem.index(stage))
            mbarrier.wait(v_empty.index(stage), phase)
            mbarrier.expect(v_full.index(stage), BYTES)
            tma.async_copy_global_to_shared(v_tiles, [row, column], v_full.index(stage), v_smem.index(stage))
            stage, phase = advance(stage, phase, STAGES)
        query_row, rows, key_row, position, head = ahead


@gluon.jit
def _consume(
    INDEX: gl.constexpr, out, work_list, works, scale, q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty,
    v_full, v_empty, HEADS: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr,
    STAGES: gl.constexpr, Q_STAGES: gl.constexpr,
):  # fmt: skip
    M: gl.constexpr = ROWS // 2
    dtype: gl.constexpr = k_smem.dtype
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])  # noqa: E741
    P: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    B: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    row_s: gl.constexpr = gl.SliceLayout(1, S)
    row_o: gl.constexpr = gl.SliceLayout(1, O)
    n = gl.expand_dims(gl.arange(0, KEYS, layout=gl.SliceLayout(0, S)), 0)
    line = gl.expand_dims(INDEX * M + gl.arange(0, M, layout=row_s), 1)
    stage = 0
    phase = 0
    q_stage = 0
    q_phase = 0
    p = gl.zeros([M, KEYS], gl.float32, S)
    if INDEX == 1:
        pass_turn(INDEX)  # consumer 0 goes first
    query_row, rows, _key_row, position, head = _item(work_list, gl.program_id(0), works)
    for work in range(gl.program_id(0), works, gl.num_programs(0)):
        following = _item(work_list, work + gl.num_programs(0), works)
        tiles = (position + rows + KEYS - 1) // KEYS
        masked = tiles - (position + 1) // KEYS  # tiles that hold keys after the first query
        my_q = q_smem.index(q_stage * 2 + INDEX)

        mbarrier.wait(q_full.index(q_stage), q_phase)
        mbarrier.wait(k_full.index(stage), phase)
        s = warpgroup_mma(my_q, k_smem.index(stage).permute((1, 0)), p, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, [s])
        mbarrier.arrive(k_empty.index(stage))
        m = gl.full([M], float("-inf"), gl.float32, row_s)
        mask = (tiles - 1) * KEYS + n <= position + line
        m, _alpha, p, total = masked_softmax(s, mask, m, gl.zeros([M], gl.float32, row_s), scale)
        acc = gl.zeros([M, D], gl.float32, O)
        ahead, ahead_phase = advance(stage, phase, STAGES)
        mbarrier.wait(k_full.index(ahead), ahead_phase, pred=tiles > 1)
        for t in range(1, masked):
            mask = (tiles - 1 - t) * KEYS + n <= position + line
            stage, phase, ahead, ahead_phase, p, acc, m, total = step(
                my_q, k_smem, v_smem, k_full, k_empty, v_full, v_empty, stage, phase, ahead, ahead_phase,
                t + 1 < tiles, p, acc, m, total, scale, mask, INDEX, True, STAGES, O, P,
            )  # fmt: skip
        for t in range(gl.maximum(masked, 1), tiles):
            stage, phase, ahead, ahead_phase, p, acc, m, total = step(
                my_q, k_smem, v_smem, k_full, k_empty, v_full, v_empty, stage, phase, ahead, ahead_phase,
                t + 1 < tiles, p, acc, m, total, scale, 0, INDEX, False, STAGES, O, P,
            )  # fmt: skip
        mbarrier.wait(v_full.index(stage), phase)
        weights = gl.convert_layout(p.to(dtype), P)
        acc = warpgroup_mma(weights, v_smem.index(stage), acc, is_async=True)
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(v_empty.index(stage))
        stage, phase = advance(stage, phase, STAGES)

        total = gl.convert_layout(total, row_o, assert_trivial=True)
        my_q.store((acc / gl.expand_dims(total, 1)).to(dtype))  # the queries are done with: their room is free
        r = INDEX * M + gl.arange(0, M, layout=gl.SliceLayout(1, B))
        d = gl.arange(0, D, layout=gl.SliceLayout(0, B))
        first = out + (query_row.to(gl.int64) * HEADS + head) * D
        where = first + (gl.expand_dims(r * (HEADS * D), 1) + gl.expand_dims(d, 0))
        gl.store(where, my_q.load(B), mask=gl.expand_dims(r < rows, 1))
        fence_async_shared()  # the next queries come by another way than these writes went
        mbarrier.arrive(q_empty.index(q_stage))
        q_stage, q_phase = advance(q_stage, q_phase, Q_STAGES)
        query_row, rows, _key_row, position, head = following


@gluon.jit(do_not_specialize=["works"])
def hopper_prefill_kernel(
    q_tiles, k_tiles, v_tiles, work_list, out, scale, works, HEADS: gl.constexpr, G: gl.constexpr, D: gl.constexpr,
    ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr,
):  # fmt: skip
    """Attention of ``works`` items of ``work_list`` (``ragged.list_work``) into ``out`` [N, HEADS, D]; ROWS is 128,
    ``scale`` in base 2. ``q_tiles`` are blocks of 64 rows, ``k_tiles`` and ``v_tiles`` blocks of KEYS."""
    q_smem = gl.allocate_shared_memory(q_tiles.dtype, [2 * Q_STAGES, ROWS // 2, D], q_tiles.layout)
    k_smem = gl.allocate_shared_memory(k_tiles.dtype, [STAGES, KEYS, D], k_tiles.layout)
    v_smem = gl.allocate_shared_memory(v_tiles.dtype, [STAGES, KEYS, D], v_tiles.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(Q_STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_empty.index(i), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (
                gl.constexpr(0), out, work_list, works, scale, q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty,
                v_full, v_empty, HEADS, D, ROWS, KEYS, STAGES, Q_STAGES,
            )),
            (_consume, (
                gl.constexpr(1), out, work_list, works, scale, q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty,
                v_full, v_empty, HEADS, D, ROWS, KEYS, STAGES, Q_STAGES,
            )),
            (_produce, (
                q_tiles, k_tiles, v_tiles, work_list, works, q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty,
                v_full, v_empty, G, D, ROWS, KEYS, STAGES, Q_STAGES,
            )),
        ],
        [4, 4],
        [224, 56],
    )  # fmt: skip
