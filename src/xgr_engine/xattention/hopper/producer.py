"""The producer's warps, which bring queries, own tokens and prompt tiles to shared memory."""

# Gluon kernels are compiled from source; annotations in them would describe nothing.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,no-any-return,assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier, tma

from xgr_engine.xattention.hopper.work import advance, own_range, work_item

SLICE = gl.constexpr(64)  # rows per round of asynchronous copies; more would need more registers


@gluon.jit
def _copy_queries(
    q, smem, line, head, user, beams, stride_qu, stride_qr, stride_qh, G: gl.constexpr, D: gl.constexpr, M: gl.constexpr
):
    """Start the copy of M query rows from ``line`` on; rows past the last beam become zeros."""
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
    """Start the copy of ``keys`` < KEYS rows of values into a tile, with zeros after them."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    n = gl.arange(0, SLICE, layout=gl.SliceLayout(1, layout))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    for i in gl.static_range(KEYS // SLICE):
        at = (row + i * SLICE).to(gl.int64) * stride_token + column
        offset = gl.expand_dims(n * stride_token, 1) + gl.expand_dims(d, 0)
        inside = gl.expand_dims(n + i * SLICE < keys, 1) & gl.expand_dims(d >= 0, 0)
        async_copy.async_copy_global_to_shared(smem.slice(i * SLICE, SLICE), values + at + offset, mask=inside)


@gluon.jit
def produce(
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
        tile, head, split, user, start, keys = work_item(work, prompt_start, beams, KV_HEADS, G, SPLITS, ROWS, KEYS)
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
            _beam, table, limit = own_range(tile, user, beams, G, A, ROWS)
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
                stage, phase = advance(stage, phase, STAGES)
        if (OWN == 0) | (split != 0):
            async_copy.wait_group(0)
            fence_async_shared()
            mbarrier.arrive(q_full.index(q_stage))
        q_stage, q_phase = advance(q_stage, q_phase, 2)
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
            stage, phase = advance(stage, phase, STAGES)
