"""Beam attention for Hopper (compute capability 9.0): what ``xattention/triton.py`` does, scheduled by hand in Gluon.

Three partitions of warps run side by side in a program, and there are at most as many programs as multiprocessors,
each walking over several work items (a tile of query rows of one user and head). The producer's warps bring prompt
tiles into shared memory with the tensor memory accelerator; two consumer warpgroups own 64 query rows each and share
every tile, which halves the traffic from the L2 cache that a 64-row program would need (at 600 TFLOP/s it would ask
for 9 TB/s). The producer runs ahead into the next work item while the consumers finish the current one.

The producer also gathers queries and own tokens (through the ancestor table) with asynchronous copies, so that a
consumer loads nothing from global memory before its first product or after its last. The own tokens of all rows of a
tile form tiles of keys that come first; a mask leaves each row only its own (at a prompt of 1000 tokens, one product in
eight is wasted on those of other rows). The ragged end of the prompt comes next, so that no later tile needs a mask.
Its values are copied under a mask, so that what lies past the prompt's end never matters.
"""

# Gluon kernels are compiled from source; annotations in them would describe nothing.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,no-any-return,assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from xgr_engine.xattention.hopper.consumer import consume
from xgr_engine.xattention.hopper.producer import produce


@gluon.jit(do_not_specialize=["works", "lines", "beams"])
def hopper_attention_kernel(
    k_tiles, v_tiles, values, prompt_start, q, gen_k, gen_v, ancestors, out, state, scale, works, lines, beams,
    stride_token, stride_qu, stride_qr, stride_qh, stride_gu, stride_slot, stride_gh, KV_HEADS: gl.constexpr,
    G: gl.constexpr, D: gl.constexpr, A: gl.constexpr, SPLITS: gl.constexpr, PARTIAL: gl.constexpr,
    ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, OWN: gl.constexpr,
):  # fmt: skip
    """Attention of ``works`` items. Tensors as in ``launch``; ROWS is 128, OWN the tiles of KEYS that hold the own
    tokens of ROWS rows, PARTIAL whether ``out`` gets values before the division and ``state`` maxima and sums."""
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
            (consume, (
                gl.constexpr(0), ancestors, out, state, prompt_start, works, lines, beams, scale, q_smem, k_smem,
                v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty, KV_HEADS, G, D, A, SPLITS, PARTIAL, ROWS,
                KEYS, STAGES, OWN,
            )),
            (consume, (
                gl.constexpr(1), ancestors, out, state, prompt_start, works, lines, beams, scale, q_smem, k_smem,
                v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty, KV_HEADS, G, D, A, SPLITS, PARTIAL, ROWS,
                KEYS, STAGES, OWN,
            )),
            (produce, (
                k_tiles, v_tiles, values, prompt_start, q, gen_k, gen_v, ancestors, works, beams, stride_token,
                stride_qu, stride_qr, stride_qh, stride_gu, stride_slot, stride_gh, q_smem, k_smem, v_smem, q_full,
                q_empty, k_full, k_empty, v_full, v_empty, KV_HEADS, G, D, A, SPLITS, ROWS, KEYS, STAGES, OWN,
            )),
        ],
        [4, 4],
        [224, 56],
    )  # fmt: skip
