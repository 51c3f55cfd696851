"""Beam attention for Hopper with the rows' own tokens as one more tile of keys.

Against ``kernel``: the producer's warps gather queries and own tokens (through the ancestor table) into shared memory
with asynchronous copies, so a consumer has no loads from global memory left before its first product, and none after
its last one. All own tokens of a tile's rows form a tile of keys of their own, which comes first; a mask leaves each
row its own ones (the products wasted on the others are one tile in eight at a prompt of 1000 tokens). The producer
runs ahead into the next work item while the consumers finish the current one.

With ``PINGPONG`` the two consumer warpgroups take turns at the tensor cores (arXiv 2407.08608, section 3.1), so that
one's softmax runs under the other's products instead of both falling into step. With ``QUERY_REGISTERS`` the queries
are read from shared memory once a work item, not once a tile: a third less traffic for the scores' product.
"""

# Gluon kernels are compiled from source; annotations in them would describe nothing.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,no-any-return,assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from xgr_engine.xattention.hopper.kernel import _advance, _softmax_step, _work_item

SLICE = gl.constexpr(64)  # rows of one round of asynchronous copies: more would need more registers


@gluon.jit
def _take_turn(INDEX: gl.constexpr):
    """Wait until the other consumer has issued its products. 256 = both warpgroups; Triton's own barriers are low."""
    if INDEX == 0:
        gl.inline_asm_elementwise("bar.sync 14, 256; mov.b32 $0, 0;", "=r", [], gl.int32, is_pure=False, pack=1)
    else:
        gl.inline_asm_elementwise("bar.sync 15, 256; mov.b32 $0, 0;", "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _pass_turn(INDEX: gl.constexpr):
    """Let the other consumer issue its products."""
    if INDEX == 0:
        gl.inline_asm_elementwise("bar.arrive 15, 256; mov.b32 $0, 0;", "=r", [], gl.int32, is_pure=False, pack=1)
    else:
        gl.inline_asm_elementwise("bar.arrive 14, 256; mov.b32 $0, 0;", "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _copy_queries(
    q, smem, line, head, user, beams, stride_qu, stride_qr, stride_qh, G: gl.constexpr, D: gl.constexpr, M: gl.constexpr
):
    """Start the copy of M query rows from ``line`` on; rows behind the last beam become zeros."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    n = gl.arange(0, SLICE, layout=gl.SliceLayout(1, layout))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    for i in gl.static_range(M // SLICE):
        r = line + i * SLICE + n
        at = (r // G).to(gl.int64) * stride_qr + (head * G + r % G) * stride_qh
        inside = gl.expand_dims(r // G < beams, 1) & gl.expand_dims(d >= 0, 0)
        source = q + user * stride_qu + (gl.expand_dims(at, 1) + gl.expand_dims(d, 0))
        async_copy.async_copy_global_to_shared(smem.slice(i * SLICE, SLICE), source, mask=inside)


@gluon.jit
def _copy_own(gen, smem, ancestors, own, table, first, limit, stride_slot, D: gl.constexpr, KEYS: gl.constexpr):
    """Start the gather of own tokens ``first`` .. ``first + KEYS`` of a tile's table, zeros where there is none."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    n = gl.arange(0, SLICE, layout=gl.SliceLayout(1, layout))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    for i in gl.static_range(KEYS // SLICE):
        o = first + i * SLICE + n
        slot = gl.load(ancestors + table + o, mask=o < limit, other=-1)
        inside = gl.expand_dims(slot >= 0, 1) & gl.expand_dims(d >= 0, 0)
        source = gen + own + (gl.expand_dims(slot.to(gl.int64) * stride_slot, 1) + gl.expand_dims(d, 0))
        async_copy.async_copy_global_to_shared(smem.slice(i * SLICE, SLICE), source, mask=inside)


@gluon.jit
def _copy_ragged(values, smem, row, keys, stride_token, column, KEYS: gl.constexpr, D: gl.constexpr):
    """Start the copy of ``keys`` < KEYS rows of values into a tile, zeros behind them."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    n = gl.arange(0, SLICE, layout=gl.SliceLayout(1, layout))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    for i in gl.static_range(KEYS // SLICE):
        at = (row + i * SLICE).to(gl.int64) * stride_token + column
        offset = gl.expand_dims(n * stride_token, 1) + gl.expand_dims(d, 0)
        inside = gl.expand_dims(n + i * SLICE < keys, 1) & gl.expand_dims(d >= 0, 0)
        async_copy.async_copy_global_to_shared(smem.slice(i * SLICE, SLICE), values + at + offset, mask=inside)


@gluon.jit
def _own_range(tile, user, beams, G: gl.constexpr, A: gl.constexpr, ROWS: gl.constexpr):
    """First beam of a tile, its place in the ancestor table and how many entries belong to the tile's beams."""
    beam = tile * ROWS // G
    last = gl.minimum((tile * ROWS + ROWS - 1) // G + 1, beams)
    return beam, (user.to(gl.int64) * beams + beam) * A, (last - beam) * A


@gluon.jit
def _produce(
    k_tiles, v_tiles, values, prompt_start, q, gen_k, gen_v, ancestors, works, beams, stride_token, stride_qu,
    stride_qr, stride_qh, stride_gu, stride_slot, stride_gh, q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty,
    v_full, v_empty, KV_HEADS: gl.constexpr, G: gl.constexpr, D: gl.constexpr, A: gl.constexpr, SPLITS: gl.constexpr,
    ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, OWN: gl.constexpr,
):  # fmt: skip
    BYTES: gl.constexpr = k_tiles.block_type.nbytes
    M: gl.constexpr = ROWS // 2
    stage = 0
    phase = 1  # the first time round, every buffer is free
    q_stage = 0
    q_phase = 1
    for work in range(gl.program_id(0), works, gl.num_programs(0)):
        tile, head, split, user, start, keys = _work_item(work, prompt_start, beams, KV_HEADS, G, SPLITS, ROWS, KEYS)
        wide_user = user.to(gl.int64)
        mbarrier.wait(q_empty.index(q_stage), q_phase)
        for half in gl.static_range(2):
            _copy_queries(
                q, q_smem.index(q_stage * 2 + half), tile * ROWS + half * M, head, wide_user, beams, stride_qu,
                stride_qr, stride_qh, G, D, M,
            )  # fmt: skip
        async_copy.commit_group()
        if OWN > 0:
            own = wide_user * stride_gu + head * stride_gh
            _beam, table, limit = _own_range(tile, user, beams, G, A, ROWS)
            for t in range(gl.where(split == 0, OWN, 0)):
                mbarrier.wait(k_empty.index(stage), phase)
                _copy_own(gen_k, k_smem.index(stage), ancestors, own, table, t * KEYS, limit, stride_slot, D, KEYS)
                async_copy.commit_group()
                mbarrier.wait(v_empty.index(stage), phase)
                _copy_own(gen_v, v_smem.index(stage), ancestors, own, table, t * KEYS, limit, stride_slot, D, KEYS)
                async_copy.commit_group()
                async_copy.wait_group(1)
                fence_async_shared()
                if t == 0:
                    mbarrier.arrive(q_full.index(q_stage))
                mbarrier.arrive(k_full.index(stage))
                async_copy.wait_group(0)
                fence_async_shared()
                mbarrier.arrive(v_full.index(stage))
                stage, phase = _advance(stage, phase, STAGES)
        if (OWN == 0) | (split != 0):
            async_copy.wait_group(0)
            fence_async_shared()
            mbarrier.arrive(q_full.index(q_stage))
        q_stage, q_phase = _advance(q_stage, q_phase, 2)
        tiles = gl.maximum((keys + KEYS - 1) // KEYS, 1)
        column = head * D
        for j in range(tiles):
            # tile 0 is the ragged end, tiles 1.. are the whole ones from the start
            row = start + gl.where(j == 0, tiles - 1, j - 1) * KEYS
            mbarrier.wait(k_empty.index(stage), phase)
            mbarrier.expect(k_full.index(stage), BYTES)
            tma.async_copy_global_to_shared(k_tiles, [row, column], k_full.index(stage), k_smem.index(stage))
            mbarrier.wait(v_empty.index(stage), phase)
            rest = keys - (tiles - 1) * KEYS
            if (j == 0) & (rest < KEYS):
                _copy_ragged(values, v_smem.index(stage), row, rest, stride_token, column, KEYS, D)
                async_copy.commit_group()
                async_copy.wait_group(0)
                fence_async_shared()
                mbarrier.arrive(v_full.index(stage))
            else:
                mbarrier.expect(v_full.index(stage), BYTES)
                tma.async_copy_global_to_shared(v_tiles, [row, column], v_full.index(stage), v_smem.index(stage))
            stage, phase = _advance(stage, phase, STAGES)


@gluon.jit
def _masked_softmax(s, mask, m, total, scale):
    """As :func:`_softmax_step` with absent keys; a row without any key so far keeps m = -inf."""
    s = gl.where(mask, s, float("-inf"))
    m_new = gl.maximum(m, gl.max(s, 1) * scale)
    pivot = gl.where(m_new == float("-inf"), 0.0, m_new)  # -inf minus -inf is NaN
    alpha = gl.exp2(m - pivot)
    p = gl.exp2(s * scale - gl.expand_dims(pivot, 1))
    return m_new, alpha, p, total * alpha + gl.sum(p, 1)


@gluon.jit
def _mask(
    t, own, keys, n, line, tile, user, beams, ancestors, G: gl.constexpr, A: gl.constexpr, ROWS: gl.constexpr,
    KEYS: gl.constexpr,
):  # fmt: skip
    """[M, KEYS]: which keys of tile t a row sees. Tiles below ``own`` hold own tokens, tile ``own`` the ragged end."""
    inside = n < gl.where(t < own, 0, keys)
    mask = gl.expand_dims(inside, 0) & gl.expand_dims(line >= 0, 1)
    if A > 0:
        beam, table, limit = _own_range(tile, user, beams, G, A, ROWS)
        o = t * KEYS + n
        slot = gl.load(ancestors + table + o, mask=(o < limit) & (t < own), other=-1)
        column = gl.where(slot >= 0, o // A, -1)
        mask = mask | (gl.expand_dims(line // G - beam, 1) == gl.expand_dims(column, 0))
    return mask


@gluon.jit
def _step(
    b_q, k_smem, v_smem, k_full, k_empty, v_full, v_empty, stage, phase, ahead, ahead_phase, more, p, acc, m,
    total, scale, mask, INDEX: gl.constexpr, MASKED: gl.constexpr, PINGPONG: gl.constexpr, STAGES: gl.constexpr,
    QUERY_REGISTERS: gl.constexpr, O: gl.constexpr, P: gl.constexpr,  # noqa: E741
):  # fmt: skip
    """Scores of the tile ``ahead`` and values of the tile ``stage``.

    Both are in flight together, the latter under the softmax. No register of theirs may be written once the first is
    issued, or the assembler serialises them: conversion and correction come before.
    """
    weights = gl.convert_layout(p.to(k_smem.dtype), P)
    if PINGPONG:
        _take_turn(INDEX)
    s_next = warpgroup_mma(b_q, k_smem.index(ahead).permute((1, 0)), p, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(stage), phase)
    acc_next = warpgroup_mma(weights, v_smem.index(stage), acc, is_async=True)
    if PINGPONG:
        _pass_turn(INDEX)
    s = warpgroup_mma_wait(1, [s_next])
    mbarrier.arrive(k_empty.index(ahead))
    if MASKED:
        m, alpha, p, total = _masked_softmax(s, mask, m, total, scale)
    else:
        m, alpha, p, total = _softmax_step(s, m, total, scale)
    # The wait for the next keys stands between the softmax and the wait for the products: its branch keeps the
    # assembler from moving the latter up, which would leave the tensor cores idle during the softmax.
    after, after_phase = _advance(ahead, ahead_phase, STAGES)
    mbarrier.wait(k_full.index(after), after_phase, pred=more)
    if QUERY_REGISTERS:
        acc, p, weights, b_q = warpgroup_mma_wait(0, [acc_next, p, weights, b_q])
    else:
        acc, p, weights = warpgroup_mma_wait(0, [acc_next, p, weights])
    mbarrier.arrive(v_empty.index(stage))
    acc = acc * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, O), assert_trivial=True), 1)
    return ahead, ahead_phase, after, after_phase, p, acc, m, total


@gluon.jit
def _consume(
    INDEX: gl.constexpr, ancestors, out, state, prompt_start, works, lines, beams, scale, q_smem, k_smem, v_smem,
    q_full, q_empty, k_full, k_empty, v_full, v_empty, KV_HEADS: gl.constexpr, G: gl.constexpr, D: gl.constexpr,
    A: gl.constexpr, SPLITS: gl.constexpr, PARTIAL: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr,
    STAGES: gl.constexpr, OWN: gl.constexpr, PINGPONG: gl.constexpr, QUERY_REGISTERS: gl.constexpr,
):  # fmt: skip
    M: gl.constexpr = ROWS // 2
    dtype: gl.constexpr = k_smem.dtype
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])  # noqa: E741
    P: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    B: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    row_s: gl.constexpr = gl.SliceLayout(1, S)
    row_o: gl.constexpr = gl.SliceLayout(1, O)
    n = gl.arange(0, KEYS, layout=gl.SliceLayout(0, S))
    stage = 0
    phase = 0
    q_stage = 0
    q_phase = 0
    p = gl.zeros([M, KEYS], gl.float32, S)
    if PINGPONG and INDEX == 1:
        _pass_turn(INDEX)  # consumer 0 goes first
    for work in range(gl.program_id(0), works, gl.num_programs(0)):
        tile, head, split, user, _start, keys = _work_item(work, prompt_start, beams, KV_HEADS, G, SPLITS, ROWS, KEYS)
        tiles = gl.maximum((keys + KEYS - 1) // KEYS, 1)
        rest = keys - (tiles - 1) * KEYS
        own = gl.where(split == 0, OWN, 0)
        line = tile * ROWS + INDEX * M + gl.arange(0, M, layout=row_s)
        my_q = q_smem.index(q_stage * 2 + INDEX)

        mask = _mask(0, own, rest, n, line, tile, user, beams, ancestors, G, A, ROWS, KEYS)
        mbarrier.wait(q_full.index(q_stage), q_phase)
        b_q = my_q.load(gl.DotOperandLayout(0, S, 2)) if QUERY_REGISTERS else my_q
        mbarrier.wait(k_full.index(stage), phase)
        s = warpgroup_mma(b_q, k_smem.index(stage).permute((1, 0)), p, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, [s])
        mbarrier.arrive(k_empty.index(stage))
        m = gl.full([M], float("-inf"), gl.float32, row_s)
        m, _alpha, p, total = _masked_softmax(s, mask, m, gl.zeros([M], gl.float32, row_s), scale)
        acc = gl.zeros([M, D], gl.float32, O)
        ahead, ahead_phase = _advance(stage, phase, STAGES)
        count = own + tiles
        mbarrier.wait(k_full.index(ahead), ahead_phase, pred=count > 1)
        if OWN > 0:
            for t in range(1, own + 1):
                mask = _mask(t, own, rest, n, line, tile, user, beams, ancestors, G, A, ROWS, KEYS)
                stage, phase, ahead, ahead_phase, p, acc, m, total = _step(
                    b_q, k_smem, v_smem, k_full, k_empty, v_full, v_empty, stage, phase, ahead, ahead_phase,
                    t + 1 < count, p, acc, m, total, scale, mask, INDEX, True, PINGPONG, STAGES,
                    QUERY_REGISTERS, O, P,
                )  # fmt: skip
        for j in range(1, tiles):
            stage, phase, ahead, ahead_phase, p, acc, m, total = _step(
                b_q, k_smem, v_smem, k_full, k_empty, v_full, v_empty, stage, phase, ahead, ahead_phase,
                j + 1 < tiles, p, acc, m, total, scale, 0, INDEX, False, PINGPONG, STAGES,
                    QUERY_REGISTERS, O, P,
            )  # fmt: skip
        mbarrier.wait(v_full.index(stage), phase)
        weights = gl.convert_layout(p.to(dtype), P)
        acc = warpgroup_mma(weights, v_smem.index(stage), acc, is_async=True)
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(v_empty.index(stage))
        stage, phase = _advance(stage, phase, STAGES)

        wide_user = user.to(gl.int64)
        if PARTIAL:
            beam = line // G
            target = split * lines.to(gl.int64) + (wide_user * beams + beam) * (KV_HEADS * G) + head * G + line % G
            gl.store(state + target, m, mask=beam < beams)
            gl.store(state + SPLITS * lines.to(gl.int64) + target, total, mask=beam < beams)
            at = gl.expand_dims(gl.convert_layout(target * D, row_o, assert_trivial=True), 1)
            at = at + gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, O)), 0)
            inside = gl.expand_dims(gl.convert_layout(beam < beams, row_o, assert_trivial=True), 1)
            gl.store(out + at, acc.to(out.dtype.element_ty), mask=inside)
        else:
            total = gl.convert_layout(gl.where(total == 0.0, 1.0, total), row_o, assert_trivial=True)
            my_q.store((acc / gl.expand_dims(total, 1)).to(dtype))  # the queries are done with: their room is free
            r = tile * ROWS + INDEX * M + gl.arange(0, M, layout=gl.SliceLayout(1, B))
            target = (wide_user * beams + r // G) * (KV_HEADS * G) + head * G + r % G
            d = gl.arange(0, D, layout=gl.SliceLayout(0, B))
            where = out + (gl.expand_dims(target * D, 1) + gl.expand_dims(d, 0))
            gl.store(where, my_q.load(B), mask=gl.expand_dims(r // G < beams, 1))
        mbarrier.arrive(q_empty.index(q_stage))
        q_stage, q_phase = _advance(q_stage, q_phase, 2)


@gluon.jit(do_not_specialize=["works", "lines", "beams"])
def folded_attention_kernel(
    k_tiles, v_tiles, values, prompt_start, q, gen_k, gen_v, ancestors, out, state, scale, works, lines, beams,
    stride_token, stride_qu, stride_qr, stride_qh, stride_gu, stride_slot, stride_gh, KV_HEADS: gl.constexpr,
    G: gl.constexpr, D: gl.constexpr, A: gl.constexpr, SPLITS: gl.constexpr, PARTIAL: gl.constexpr,
    ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, OWN: gl.constexpr, PINGPONG: gl.constexpr,
    QUERY_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Arguments as ``kernel.hopper_attention_kernel``; OWN = tiles of KEYS that hold the own tokens of ROWS rows."""
    dtype: gl.constexpr = k_tiles.dtype
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS // 2, D], dtype)
    q_smem = gl.allocate_shared_memory(dtype, [4, ROWS // 2, D], q_layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, KEYS, D], k_tiles.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, KEYS, D], v_tiles.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
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
                gl.constexpr(0), ancestors, out, state, prompt_start, works, lines, beams, scale, q_smem, k_smem,
                v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty, KV_HEADS, G, D, A, SPLITS, PARTIAL, ROWS,
                KEYS, STAGES, OWN, PINGPONG, QUERY_REGISTERS,
            )),
            (_consume, (
                gl.constexpr(1), ancestors, out, state, prompt_start, works, lines, beams, scale, q_smem, k_smem,
                v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty, KV_HEADS, G, D, A, SPLITS, PARTIAL, ROWS,
                KEYS, STAGES, OWN, PINGPONG, QUERY_REGISTERS,
            )),
            (_produce, (
                k_tiles, v_tiles, values, prompt_start, q, gen_k, gen_v, ancestors, works, beams, stride_token,
                stride_qu, stride_qr, stride_qh, stride_gu, stride_slot, stride_gh, q_smem, k_smem, v_smem, q_full,
                q_empty, k_full, k_empty, v_full, v_empty, KV_HEADS, G, D, A, SPLITS, ROWS, KEYS, STAGES, OWN,
            )),
        ],
        [4, 4],
        [224, 56],
    )  # fmt: skip
