"""Beam attention for Hopper (compute capability 9.0): what ``xattention/triton.py`` does, scheduled by hand in Gluon.

Three partitions of warps run side by side. A producer warp brings prompt tiles into shared memory with the tensor
memory accelerator; two consumer warpgroups own 64 query rows each and share every tile, which halves the traffic from
the L2 cache that a 64-row program would need (at 600 TFLOP/s it would ask for 9 TB/s). Inside a consumer the product
of the next tile's scores and the running weighted sum are in flight while the softmax of the current tile is computed;
the two consumers drift apart, so that one's softmax also overlaps the other's products (arXiv 2407.08608).

The ragged last tile of a prompt comes first: it is the only one that needs a mask, and the pipeline's prologue is
peeled anyway. Its values are copied with a mask, so that what lies behind a prompt's end never matters. Scores of a
row's own generated tokens are computed before the loop, while the first tile is in flight, and their values are added
after it.
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


@gluon.jit
def _work_item(
    work, prompt_start, beams, KV_HEADS: gl.constexpr, G: gl.constexpr, SPLITS: gl.constexpr, ROWS: gl.constexpr,
    KEYS: gl.constexpr,
):  # fmt: skip
    """Work number -> (tile of rows, head, split, user, first key, keys of the split), neighbours sharing their keys."""
    tiles = (beams * G + ROWS - 1) // ROWS
    tile = work % tiles
    rest = work // tiles
    head = rest % KV_HEADS
    rest = rest // KV_HEADS
    split = rest % SPLITS
    user = rest // SPLITS
    start = gl.load(prompt_start + user)
    length = gl.load(prompt_start + user + 1) - start
    share = ((length + SPLITS - 1) // SPLITS + KEYS - 1) // KEYS * KEYS
    low = gl.minimum(split * share, length)
    keys = gl.minimum(low + share, length) - low
    return tile, head, split, user, start + low, keys


@gluon.jit
def _advance(stage, phase, STAGES: gl.constexpr):
    """The next slot of a ring of buffers; the phase flips each time round."""
    stage += 1
    wrapped = stage == STAGES
    return gl.where(wrapped, 0, stage), gl.where(wrapped, phase ^ 1, phase)


@gluon.jit
def _copy_ragged(values, smem, row, keys, stride_token, column, KEYS: gl.constexpr, D: gl.constexpr):
    """Copy ``keys`` < KEYS rows of values into a tile and fill the rest with zeros."""
    SLICE: gl.constexpr = 16
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [1, 1], [1, 0])
    n = gl.arange(0, SLICE, layout=gl.SliceLayout(1, layout))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    for i in gl.static_range(KEYS // SLICE):
        at = (row + i * SLICE).to(gl.int64) * stride_token + column
        offset = gl.expand_dims(n * stride_token, 1) + gl.expand_dims(d, 0)
        inside = gl.expand_dims(n + i * SLICE < keys, 1) & gl.expand_dims(d >= 0, 0)
        async_copy.async_copy_global_to_shared(smem.slice(i * SLICE, SLICE), values + at + offset, mask=inside)
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()


@gluon.jit
def _produce(
    k_tiles, v_tiles, values, prompt_start, works, beams, stride_token, k_smem, v_smem, k_full, k_empty, v_full,
    v_empty, KV_HEADS: gl.constexpr, G: gl.constexpr, D: gl.constexpr, SPLITS: gl.constexpr, ROWS: gl.constexpr,
    KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    BYTES: gl.constexpr = k_tiles.block_type.nbytes
    stage = 0
    phase = 1  # the first time round, every buffer is free
    for work in range(gl.program_id(0), works, gl.num_programs(0)):
        _tile, head, _split, _user, first, keys = _work_item(work, prompt_start, beams, KV_HEADS, G, SPLITS, ROWS, KEYS)
        tiles = gl.maximum((keys + KEYS - 1) // KEYS, 1)
        column = head * D
        for j in range(tiles):
            # tile 0 is the ragged end, tiles 1.. are the whole ones from the start
            row = first + gl.where(j == 0, tiles - 1, j - 1) * KEYS
            mbarrier.wait(k_empty.index(stage), phase)
            mbarrier.expect(k_full.index(stage), BYTES)
            tma.async_copy_global_to_shared(k_tiles, [row, column], k_full.index(stage), k_smem.index(stage))
            mbarrier.wait(v_empty.index(stage), phase)
            rest = keys - (tiles - 1) * KEYS
            if (j == 0) & (rest < KEYS):
                _copy_ragged(values, v_smem.index(stage), row, rest, stride_token, column, KEYS, D)
                mbarrier.arrive(v_full.index(stage))
            else:
                mbarrier.expect(v_full.index(stage), BYTES)
                tma.async_copy_global_to_shared(v_tiles, [row, column], v_full.index(stage), v_smem.index(stage))
            stage, phase = _advance(stage, phase, STAGES)


@gluon.jit
def _softmax_step(s, m, total, scale):
    """Online softmax over a whole tile: new maximum, correction of the past, weights, new sum. All base 2."""
    m_new = gl.maximum(m, gl.max(s, 1) * scale)
    alpha = gl.exp2(m - m_new)
    p = gl.exp2(s * scale - gl.expand_dims(m_new, 1))
    return m_new, alpha, p, total * alpha + gl.sum(p, 1)


@gluon.jit
def _consume(
    index, q, gen_k, gen_v, ancestors, out, state, prompt_start, works, lines, beams, scale, stride_qu, stride_qr,
    stride_qh, stride_gu, stride_slot, stride_gh, q_smem, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
    KV_HEADS: gl.constexpr, G: gl.constexpr, D: gl.constexpr, A: gl.constexpr, SPLITS: gl.constexpr,
    PARTIAL: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    M: gl.constexpr = ROWS // 2
    dtype: gl.constexpr = k_smem.dtype
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])  # noqa: E741
    P: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    B: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    row_s: gl.constexpr = gl.SliceLayout(1, S)
    row_b: gl.constexpr = gl.SliceLayout(1, B)
    n = gl.arange(0, KEYS, layout=gl.SliceLayout(0, S))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, B))
    my_q = q_smem.index(index)
    stage = 0
    phase = 0
    p = gl.zeros([M, KEYS], gl.float32, S)
    for work in range(gl.program_id(0), works, gl.num_programs(0)):
        tile, head, split, user, _first, keys = _work_item(work, prompt_start, beams, KV_HEADS, G, SPLITS, ROWS, KEYS)
        user = user.to(gl.int64)
        r = tile * ROWS + index * M + gl.arange(0, M, layout=row_b)
        beam = r // G
        query_head = head * G + r % G
        active = beam < beams
        row = user * beams + beam
        at = user * stride_qu + gl.expand_dims(beam.to(gl.int64) * stride_qr + query_head * stride_qh, 1)
        b_q = gl.load(q + (at + gl.expand_dims(d, 0)), mask=gl.expand_dims(active, 1), other=0.0)
        my_q.store(b_q)
        fence_async_shared()

        # the row's own tokens: their scores start the softmax, their values follow at the end
        own = user * stride_gu + head * stride_gh
        mine = active & (split == 0)
        m = gl.full([M], float("-inf"), gl.float32, row_s)
        own_scores = ()
        for a in gl.static_range(A):
            slot = gl.load(ancestors + row * A + a, mask=mine, other=-1)
            offset = own + gl.expand_dims(slot.to(gl.int64) * stride_slot, 1) + gl.expand_dims(d, 0)
            b_k = gl.load(gen_k + offset, mask=gl.expand_dims(slot >= 0, 1), other=0.0)
            score = gl.sum(b_q.to(gl.float32) * b_k.to(gl.float32), 1) * scale
            score = gl.convert_layout(gl.where(slot >= 0, score, float("-inf")), row_s)
            own_scores = own_scores + (score,)  # noqa: RUF005 (the Gluon front end has no unpacking)
            m = gl.maximum(m, score)

        tiles = gl.maximum((keys + KEYS - 1) // KEYS, 1)
        mbarrier.wait(k_full.index(stage), phase)
        s = warpgroup_mma(my_q, k_smem.index(stage).permute((1, 0)), p, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, [s])
        mbarrier.arrive(k_empty.index(stage))
        s = gl.where(gl.expand_dims(n < keys - (tiles - 1) * KEYS, 0), s, float("-inf"))
        m = gl.maximum(m, gl.max(s, 1) * scale)
        m = gl.where(m == float("-inf"), 0.0, m)  # no key yet: any finite pivot will do
        p = gl.exp2(s * scale - gl.expand_dims(m, 1))
        total = gl.sum(p, 1)
        for a in gl.static_range(A):
            total += gl.exp2(own_scores[a] - m)
        weights = gl.convert_layout(p.to(dtype), P)
        acc = gl.zeros([M, D], gl.float32, O)
        ahead, ahead_phase = _advance(stage, phase, STAGES)
        mbarrier.wait(k_full.index(ahead), ahead_phase, pred=tiles > 1)
        for j in range(1, tiles):
            s_next = warpgroup_mma(my_q, k_smem.index(ahead).permute((1, 0)), p, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(stage), phase)
            acc_next = warpgroup_mma(weights, v_smem.index(stage), acc, is_async=True)
            s = warpgroup_mma_wait(1, [s_next])
            mbarrier.arrive(k_empty.index(ahead))
            m, alpha, p, total = _softmax_step(s, m, total, scale)
            # The wait for the next keys stands between the softmax and the wait for the products: its branch keeps
            # the assembler from moving the latter up, which would leave the tensor cores idle during the softmax.
            after, after_phase = _advance(ahead, ahead_phase, STAGES)
            mbarrier.wait(k_full.index(after), after_phase, pred=j + 1 < tiles)
            acc, p, weights = warpgroup_mma_wait(0, [acc_next, p, weights])
            mbarrier.arrive(v_empty.index(stage))
            acc = acc * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, O), assert_trivial=True), 1)
            weights = gl.convert_layout(p.to(dtype), P)
            stage, phase = ahead, ahead_phase
            ahead, ahead_phase = after, after_phase
        mbarrier.wait(v_full.index(stage), phase)
        acc = warpgroup_mma(weights, v_smem.index(stage), acc, is_async=True)
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(v_empty.index(stage))
        stage, phase = _advance(stage, phase, STAGES)

        result = gl.convert_layout(acc, B)
        for a in gl.static_range(A):
            slot = gl.load(ancestors + row * A + a, mask=mine, other=-1)
            offset = own + gl.expand_dims(slot.to(gl.int64) * stride_slot, 1) + gl.expand_dims(d, 0)
            b_v = gl.load(gen_v + offset, mask=gl.expand_dims(slot >= 0, 1), other=0.0)
            weight = gl.convert_layout(gl.exp2(own_scores[a] - m), row_b)
            result += gl.expand_dims(weight, 1) * b_v.to(gl.float32)
        target = row * (KV_HEADS * G) + query_head
        total_b = gl.convert_layout(total, row_b)
        if PARTIAL:
            target = split * lines.to(gl.int64) + target
            m = gl.where(total == 0.0, float("-inf"), m)  # an empty split must not raise the common maximum
            gl.store(state + target, gl.convert_layout(m, row_b), mask=active)
            gl.store(state + SPLITS * lines.to(gl.int64) + target, total_b, mask=active)
        else:
            result = result / gl.expand_dims(gl.where(total_b == 0.0, 1.0, total_b), 1)
        where = out + (gl.expand_dims(target * D, 1) + gl.expand_dims(d, 0))
        gl.store(where, result.to(out.dtype.element_ty), mask=gl.expand_dims(active, 1))


@gluon.jit
def hopper_attention_kernel(
    k_tiles, v_tiles, values, prompt_start, q, gen_k, gen_v, ancestors, out, state, scale, works, lines, beams,
    stride_token, stride_qu, stride_qr, stride_qh, stride_gu, stride_slot, stride_gh, KV_HEADS: gl.constexpr,
    G: gl.constexpr, D: gl.constexpr, A: gl.constexpr, SPLITS: gl.constexpr, PARTIAL: gl.constexpr,
    ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = k_tiles.dtype
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS // 2, D], dtype)
    q_smem = gl.allocate_shared_memory(dtype, [2, ROWS // 2, D], q_layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, KEYS, D], k_tiles.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, KEYS, D], v_tiles.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_empty.index(i), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    0,
                    q,
                    gen_k,
                    gen_v,
                    ancestors,
                    out,
                    state,
                    prompt_start,
                    works,
                    lines,
                    beams,
                    scale,
                    stride_qu,
                    stride_qr,
                    stride_qh,
                    stride_gu,
                    stride_slot,
                    stride_gh,
                    q_smem,
                    k_smem,
                    v_smem,
                    k_full,
                    k_empty,
                    v_full,
                    v_empty,
                    KV_HEADS,
                    G,
                    D,
                    A,
                    SPLITS,
                    PARTIAL,
                    ROWS,
                    KEYS,
                    STAGES,
                ),
            ),
            (
                _consume,
                (
                    1,
                    q,
                    gen_k,
                    gen_v,
                    ancestors,
                    out,
                    state,
                    prompt_start,
                    works,
                    lines,
                    beams,
                    scale,
                    stride_qu,
                    stride_qr,
                    stride_qh,
                    stride_gu,
                    stride_slot,
                    stride_gh,
                    q_smem,
                    k_smem,
                    v_smem,
                    k_full,
                    k_empty,
                    v_full,
                    v_empty,
                    KV_HEADS,
                    G,
                    D,
                    A,
                    SPLITS,
                    PARTIAL,
                    ROWS,
                    KEYS,
                    STAGES,
                ),
            ),
            (
                _produce,
                (
                    k_tiles,
                    v_tiles,
                    values,
                    prompt_start,
                    works,
                    beams,
                    stride_token,
                    k_smem,
                    v_smem,
                    k_full,
                    k_empty,
                    v_full,
                    v_empty,
                    KV_HEADS,
                    G,
                    D,
                    SPLITS,
                    ROWS,
                    KEYS,
                    STAGES,
                ),
            ),
        ],
        [4, 1],
        [232, 40],
    )
