"""Compile kernels for compute capability 9.0 without a GPU: prints a line ``name spilled-bytes wgmma-instructions``."""

from __future__ import annotations

import sys

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

POINTERS = {
    **dict.fromkeys(("q", "prompt_k", "prompt_v", "gen_k", "gen_v", "values", "residual", "delta", "weight"), "*bf16"),
    **dict.fromkeys(("gate_up", "qkv", "q_norm", "k_norm", "q_out", "k_cache", "v_cache"), "*bf16"),
    **dict.fromkeys(("prompt_start", "ancestors", "slot", "begin", "shift", "column", "child_start", "dead"), "*i32"),
    **dict.fromkeys(("leaf_flags", "dead_leaves", "short_place", "short_count", "out_ancestors"), "*i32"),
    **dict.fromkeys(("state", "partial", "cos", "sin", "logits", "score", "scores", "maxima"), "*fp32"),
    **dict.fromkeys(("normaliser", "short_score", "out_score"), "*fp32"),
    **dict.fromkeys(("node", "position", "index", "read", "out_node", "out_column", "out_parent"), "*i64"),
    **dict.fromkeys(("scale", "eps"), "fp32"),
    "flags": "*i1",
}


def build(function, constants, warps=4, stages=3, source=ASTSource, **types):
    known = {name: types.get(name, POINTERS.get(name, "i32")) for name in function.arg_names}
    signature = {name: "constexpr" if name in constants else kind for name, kind in known.items()}
    places = {name: (i,) for i, name in enumerate(function.arg_names)}
    aligned = {
        places[name]: [["tt.divisibility", 16]]
        for name, kind in signature.items()
        if kind.startswith("*") or name.startswith("stride")
    }
    src = source(function, signature, {places[name]: value for name, value in constants.items()}, aligned)
    kernel = compile(src, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "num_stages": stages})
    wgmma = kernel.asm["ptx"].count("wgmma.mma_async")
    print(function.__name__, local_bytes(kernel.asm["cubin"]), wgmma)


def local_bytes(cubin: bytes) -> int:
    """Local memory a thread, from the per-kernel attributes of the machine code (EIATTR_FRAME_SIZE, 0x11)."""
    at = cubin.find(b"\x04\x11\x08\x00")
    return int.from_bytes(cubin[at + 8 : at + 12], "little") if at >= 0 else 0


def attention():
    from xgr_engine.xattention import triton

    shape = {"KV_HEADS": 8, "G": 2, "D": 128, "A": 2, "BLOCK_D": 128, "PRECISION": "ieee"}
    for rows, keys, warps, splits in ((128, 64, 8, 1), (64, 64, 4, 4)):
        constants = {**shape, "SPLITS": splits, "PARTIAL": splits > 1, "ROWS": rows, "KEYS": keys}
        build(triton._beam_attention_kernel, constants, warps, out="*fp32" if splits > 1 else "*bf16")


def hopper():
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from xgr_engine.xattention.hopper.kernel import hopper_attention_kernel

    for dim, keys, stages, splits, own, tiles in ((128, 64, 4, 1, 2, 2), (64, 64, 4, 3, 3, 3), (128, 128, 2, 2, 0, 0)):
        layout = gl.NVMMASharedLayout.get_default_for([keys, dim], gl.bfloat16)
        tile = f"tensordesc<bf16[{keys}, {dim}],{layout!r}>"
        constants = {"KV_HEADS": 8, "G": 2, "D": dim, "A": own, "SPLITS": splits, "PARTIAL": splits > 1}
        constants.update(ROWS=128, KEYS=keys, STAGES=stages, OWN=tiles)
        out = "*fp32" if splits > 1 else "*bf16"
        build(hopper_attention_kernel, constants, source=GluonASTSource, k_tiles=tile, v_tiles=tile, out=out)


def swiglu():
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from xgr_engine.kernels.hopper.swiglu_kernel import hopper_swiglu_kernel

    blocks = {"x_tiles": (128, 64), "w_tiles": (128, 64), "out_tiles": (64, 128)}
    layouts = {name: gl.NVMMASharedLayout.get_default_for(list(block), gl.bfloat16) for name, block in blocks.items()}
    types = {name: f"tensordesc<bf16[{r}, {c}],{layouts[name]!r}>" for name, (r, c) in blocks.items()}
    tile = {"GROUP": 16, "ROWS": 128, "COLS": 128, "DEPTH": 64}
    for stages, lead, producers in ((4, 2, 4), (3, 0, 1)):
        constants = {**tile, "STAGES": stages, "LEAD": lead, "PRODUCERS": producers}
        build(hopper_swiglu_kernel, constants, source=GluonASTSource, **types)


def prefill():
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from xgr_engine.xattention.hopper.prefill_kernel import hopper_prefill_kernel
    from xgr_engine.xattention.prefill import triton

    lists = {"work_list": "*i32", "out": "*bf16"}
    for dim, keys, stages, q_stages in ((128, 128, 2, 2), (64, 128, 4, 2), (128, 64, 4, 1)):
        layouts = {rows: gl.NVMMASharedLayout.get_default_for([rows, dim], gl.bfloat16) for rows in (64, keys)}
        tiles = {rows: f"tensordesc<bf16[{rows}, {dim}],{layout!r}>" for rows, layout in layouts.items()}
        constants = {"HEADS": 16, "G": 2, "D": dim, "ROWS": 128, "KEYS": keys, "STAGES": stages, "Q_STAGES": q_stages}
        types = {"q_tiles": tiles[64], "k_tiles": tiles[keys], "v_tiles": tiles[keys], **lists}
        build(hopper_prefill_kernel, constants, source=GluonASTSource, **types)
    heads = {"HEADS": 16, "G": 2, "D": 128, "BLOCK_D": 128, "PRECISION": "ieee"}
    build(triton._prefill_kernel, {**heads, "ROWS": 128, "KEYS": 64}, 8, 3, k="*bf16", v="*bf16", **lists)


def elementwise():
    from xgr_engine.kernels import triton

    build(triton._add_rms_norm_kernel, {"H": 2048, "BLOCK": 2048, "ADD": True}, out="*bf16")
    build(triton._silu_mul_kernel, {"I": 6144, "BLOCK": 2048}, 8, out="*bf16")
    heads = {"HEADS": 20, "KV_HEADS": 12, "D": 128, "NORM": True, "BLOCK_H": 32, "BLOCK_KV": 16, "BLOCK_E": 64}
    build(triton._rope_and_store_kernel, heads)


def logsumexp():
    from xgr_engine.kernels import triton

    tiles = {"hidden": "tensordesc<bf16[128, 64]>", "weight": "tensordesc<bf16[256, 64]>"}
    build(triton._tile_logsumexp_kernel, {"ROWS": 128, "COLS": 256, "DEPTH": 64}, 8, 4, **tiles)
    build(triton._merge_logsumexp_kernel, {"ROWS": 8, "TILES": 128}, out="*fp32")


def xbeam():
    from xgr_engine.xbeam.triton import kernels

    for log_rows in (0, 9):
        build(kernels.expand_kernel, {"LOG_R": log_rows})
        score = {"LOG_R": log_rows, "DENSE": True, "NORM_BY_INDEX": True, "ALL": False, "TILE": 1024, "GROUP": 32}
        build(kernels.score_kernel, {**score, "LEAF": False, "STEPS": 5})
        build(kernels.score_kernel, {**score, "LEAF": True, "STEPS": 0}, flags="*i32")
    row = {"DENSE": False, "INNER": True, "ALL": False, "STEPS": 3, "LEAF": True, "LEAF_STEPS": 3, "TILE": 128}
    build(kernels.row_normaliser_kernel, row, out="*fp32")
    build(kernels.shortlist_kernel, {"TILE": 1024, "GROUP": 32}, 8)
    for own in (0, 2):
        build(kernels.select_kernel, {"A": own, "OWN": own > 0, "LOG_R": 9, "TILE": 1024}, 8)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
