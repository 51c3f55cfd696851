"""The two consumer warpgroups: scores, softmax and weighted values of 64 query rows each.

The product of the next tile's scores and the running weighted sum are in flight while the softmax of the current tile
is computed. The two consumers take turns at issuing products (arXiv 2407.08608, section 3.1), so that one's softmax
runs under the other's products instead of both falling into step.
"""

# Gluon kernels are compiled from source; annotations in them would describe nothing.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,no-any-return,assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from xgr_engine.xattention.hopper.work import advance, own_range, work_item


@gluon.jit
def take_turn(INDEX: gl.constexpr):
    """Wait until the other consumer has issued its products. 256 threads are both warpgroups; Triton itself uses the
    barriers with low numbers."""
    if INDEX == 0:
        gl.inline_asm_elementwise("bar.sync 14, 256; mov.b32 $0, 0;", "=r", [], gl.int32, is_pure=False, pack=1)
    else:
        gl.inline_asm_elementwise("bar.sync 15, 256; mov.b32 $0, 0;", "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def pass_turn(INDEX: gl.constexpr):
    """Let the other consumer issue its products."""
    if INDEX == 0:
        gl.inline_asm_elementwise("bar.arrive 15, 256; mov.b32 $0, 0;", "=r", [], gl.int32, is_pure=False, pack=1)
    else:
        gl.inline_asm_elementwise("bar.arrive 14, 256; mov.b32 $0, 0;", "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _softmax_step(s, m, total, scale):
    """Online softmax over a whole tile, in base 2: new maximum, factor for earlier sums, weights, new sum."""
    m_new = gl.maximum(m, gl.max(s, 1) * scale)
    alpha = gl.exp2(m - m_new)
    p = gl.exp2(s * scale - gl.expand_dims(m_new, 1))
    return m_new, alpha, p, total * alpha + gl.sum(p, 1)


@gluon.jit
def masked_softmax(s, mask, m, total, scale):
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
    """[M, KEYS] which keys of tile t a row sees. Tiles below ``own`` hold own tokens, tile ``own`` the prompt's end."""
    inside = n < gl.where(t < own, 0, keys)
    mask = gl.expand_dims(inside, 0) & gl.expand_dims(line >= 0, 1)
    if A > 0:
        beam, table, limit = own_range(tile, user, beams, G, A, ROWS)
        o = t * KEYS + n
        slot = gl.load(ancestors + table + o, mask=(o < limit) & (t < own), other=-1)
        column = gl.where(slot >= 0, o // A, -1)
        mask = mask | (gl.expand_dims(line // G - beam, 1) == gl.expand_dims(column, 0))
    return mask


@gluon.jit
def step(
    my_q, k_smem, v_smem, k_full, k_empty, v_full, v_empty, stage, phase, ahead, ahead_phase, more, p, acc, m, total,
    scale, mask, INDEX: gl.constexpr, MASKED: gl.constexpr, STAGES: gl.constexpr, O: gl.constexpr,  # noqa: E741
    P: gl.constexpr,
):  # fmt: skip
    """Scores of the tile ``ahead`` and values of the tile ``stage``.

    Both products are in flight together, and the softmax runs meanwhile. None of their registers may be written once
    the first is issued, or the assembler serialises them, so conversion and correction come before.
    """
    weights = gl.convert_layout(p.to(k_smem.dtype), P)
    take_turn(INDEX)
    s_next = warpgroup_mma(my_q, k_smem.index(ahead).permute((1, 0)), p, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(stage), phase)
    acc_next = warpgroup_mma(weights, v_smem.index(stage), acc, is_async=True)
    pass_turn(INDEX)
    s = warpgroup_mma_wait(1, [s_next])
    mbarrier.arrive(k_empty.index(ahead))
    if MASKED:
        m, alpha, p, total = masked_softmax(s, mask, m, total, scale)
    else:
        m, alpha, p, total = _softmax_step(s, m, total, scale)
    # The wait for the next keys stands between the softmax and the wait for the products: its branch keeps the
    # assembler from moving the latter up, which would leave the tensor cores idle during the softmax.
    after, after_phase = advance(ahead, ahead_phase, STAGES)
    # In a ring of two, own keys are announced only after the room for their values was given back: wait for them last.
    LATE: gl.constexpr = MASKED and STAGES == 2
    if not LATE:
        mbarrier.wait(k_full.index(after), after_phase, pred=more)
    acc, p, weights = warpgroup_mma_wait(0, [acc_next, p, weights])
    mbarrier.arrive(v_empty.index(stage))
    if LATE:
        mbarrier.wait(k_full.index(after), after_phase, pred=more)
    acc = acc * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, O), assert_trivial=True), 1)
    return ahead, ahead_phase, after, after_phase, p, acc, m, total


@gluon.jit
def consume(
    INDEX: gl.constexpr, ancestors, out, state, prompt_start, works, lines, beams, scale, q_smem, k_smem, v_smem,
    q_full, q_empty, k_full, k_empty, v_full, v_empty, KV_HEADS: gl.constexpr, G: gl.constexpr, D: gl.constexpr,
    A: gl.constexpr, SPLITS: gl.constexpr, PARTIAL: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr,
    STAGES: gl.constexpr, OWN: gl.constexpr,
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
    if INDEX == 1:
        pass_turn(INDEX)  # consumer 0 goes first
    for work in range(gl.program_id(0), works, gl.num_programs(0)):
        tile, head, split, user, _start, keys = work_item(work, prompt_start, beams, KV_HEADS, G, SPLITS, ROWS, KEYS)
        tiles = gl.maximum((keys + KEYS - 1) // KEYS, 1)
        rest = keys - (tiles - 1) * KEYS
        own = gl.where(split == 0, OWN, 0)
        line = tile * ROWS + INDEX * M + gl.arange(0, M, layout=row_s)
        my_q = q_smem.index(q_stage * 2 + INDEX)

        mask = _mask(0, own, rest, n, line, tile, user, beams, ancestors, G, A, ROWS, KEYS)
        mbarrier.wait(q_full.index(q_stage), q_phase)
        mbarrier.wait(k_full.index(stage), phase)
        s = warpgroup_mma(my_q, k_smem.index(stage).permute((1, 0)), p, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, [s])
        mbarrier.arrive(k_empty.index(stage))
        m = gl.full([M], float("-inf"), gl.float32, row_s)
        m, _alpha, p, total = masked_softmax(s, mask, m, gl.zeros([M], gl.float32, row_s), scale)
        acc = gl.zeros([M, D], gl.float32, O)
        ahead, ahead_phase = advance(stage, phase, STAGES)
        count = own + tiles
        mbarrier.wait(k_full.index(ahead), ahead_phase, pred=count > 1)
        if OWN > 0:
            for t in range(1, own + 1):
                mask = _mask(t, own, rest, n, line, tile, user, beams, ancestors, G, A, ROWS, KEYS)
                stage, phase, ahead, ahead_phase, p, acc, m, total = step(
                    my_q, k_smem, v_smem, k_full, k_empty, v_full, v_empty, stage, phase, ahead, ahead_phase,
                    t + 1 < count, p, acc, m, total, scale, mask, INDEX, True, STAGES, O, P,
                )  # fmt: skip
        for j in range(1, tiles):
            stage, phase, ahead, ahead_phase, p, acc, m, total = step(
                my_q, k_smem, v_smem, k_full, k_empty, v_full, v_empty, stage, phase, ahead, ahead_phase,
                j + 1 < tiles, p, acc, m, total, scale, 0, INDEX, False, STAGES, O, P,
            )  # fmt: skip
        mbarrier.wait(v_full.index(stage), phase)
        weights = gl.convert_layout(p.to(dtype), P)
        acc = warpgroup_mma(weights, v_smem.index(stage), acc, is_async=True)
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(v_empty.index(stage))
        stage, phase = advance(stage, phase, STAGES)

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
        q_stage, q_phase = advance(q_stage, q_phase, 2)
