"""Compile the baselines' kernels for compute capability 9.0 without a GPU; output as ``compile_for_hopper``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "kernels"))
from compile_for_hopper import build

BF16, I32, I64 = "*bf16", "*i32", "*i64"


def paged():
    from xgr_engine.bench.kernels import paged_triton as kernels

    pools = {"pool_k": BF16, "pool_v": BF16}
    variants = (
        (kernels.VARIANTS[0], 128, 2),
        (kernels.PagedTiles(64, 4, 3), 128, 4),
        (kernels.PagedTiles(splits=4), 64, 1),
    )
    for tiles, dim, group in variants:
        split = tiles.splits is not None
        constants = {"KV_HEADS": 8, "G": group, "D": dim, "BLOCK": 16, "SPLITS": tiles.splits or 1, "PARTIAL": split}
        constants.update(ROWS=16, KEYS=tiles.keys, BLOCK_D=dim)
        types = {"context": I32, "blocks": I32, "out": "*fp32" if split else BF16, **pools}
        build(kernels.paged_attention_kernel, constants, tiles.warps, tiles.stages, **types)
    copy = {"origins": I64, "goals": I64, "count": I64, **pools}
    build(kernels.copy_rows_kernel, {"LINE": 1024, "TILE": 1024}, **copy)


def staged():
    from xgr_engine.bench.kernels import staged_triton as kernels

    sizes = {"D": 128, "LINES": 8, "BLOCK_D": 128}
    types = {"values": BF16, "own_k": BF16, "own_v": BF16}
    build(kernels.unshared_kernel, {"HEADS": 16, "KV_HEADS": 8, "STEPS": 2, **sizes}, **types)
    floats = {"shared_state": "*fp32", "own_state": "*fp32"}
    build(kernels.merge_kernel, {"PARTS": 3, **sizes}, shared=BF16, own=BF16, out=BF16, **floats)
    build(kernels.reorder_kernel, {"ROWS": 16, "TILE": kernels._MOVED}, 8, own_k=BF16, own_v=BF16, parent=I64)


def masks():
    from xgr_engine.bench.kernels import masks_triton as kernels

    types = {"forbidden": "*i8", "alive": "*i1", "token": I32}
    build(kernels.set_children_kernel, {"VALUE": 1, "TILE": 128}, 1, **types)
    build(kernels.select_kernel, {"TILE": 1024}, 8, places=I64, best="*fp32")


if __name__ == "__main__":
    globals()[sys.argv[1]]()
