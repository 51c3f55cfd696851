"""The order of things in the Hopper SwiGLU kernel: its source on a model of the machine, worst cases included."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hopper_machine import Descriptor, Machine, Stuck

import xgr_engine.kernels

SOURCE = Path(xgr_engine.kernels.__path__[0], "hopper", "swiglu_kernel.py").read_text("utf-8")
ROWS, COLS, DEPTH = 8, 4, 4
SHAPES = [  # rows, result's columns, inner dimension, programs, group, stages, lead
    (1, 4, 4, 1, 16, 4, 0),
    (17, 20, 4, 2, 2, 2, 0),
    (16, 8, 8, 3, 1, 2, 1),
    (33, 12, 12, 2, 3, 3, 2),
    (41, 16, 20, 3, 4, 3, 1),
    (24, 10, 30, 2, 16, 4, 3),
    (70, 13, 33, 4, 2, 4, 2),
]


def run(source: str, shape: tuple[int, ...], seed: int) -> None:
    rows, width, depth, programs, group, stages, lead = shape
    generator = torch.Generator().manual_seed(seed)
    x, weight = (torch.randn(n, depth, generator=generator).double() for n in (rows, 2 * width))
    out = torch.full((rows, width), torch.nan, dtype=torch.float64)
    tiles_m, tiles_n, steps = -(-rows // ROWS), -(-width // COLS), -(-depth // DEPTH)
    blocks = Descriptor(x, (ROWS, DEPTH)), Descriptor(weight, (COLS, DEPTH)), Descriptor(out, (ROWS // 2, COLS))
    Machine(seed).run(
        source,
        "hopper_swiglu_kernel",
        min(programs, tiles_m * tiles_n),
        (*blocks, tiles_m, tiles_n, steps, width),
        GROUP=group,
        ROWS=ROWS,
        COLS=COLS,
        DEPTH=DEPTH,
        STAGES=stages,
        LEAD=lead,
        PRODUCERS=1,
    )
    gate, up = (x @ weight.T).chunk(2, dim=1)
    torch.testing.assert_close(out, torch.nn.functional.silu(gate) * up, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_tile_is_right_whoever_is_slow(shape, seed):
    run(SOURCE, shape, seed)


FAULTS = {
    "a slot given back while a product reads it": ("acc = warpgroup_mma_wait(1, [acc])", "acc = acc"),
    "a slot that nobody gives back": ("        mbarrier.arrive(empty.index(INDEX * STAGES + before))\n\n", "\n"),
    "a slot given back by one consumer alone": ("mbarrier.wait(empty.index(STAGES + stage), phase)", "pass"),
    "a lead of a whole ring": ("ahead = stage + LEAD - 1", "ahead = stage + STAGES - 1"),
    "a phase that does not flip": ("phase ^ 1", "phase"),
    "no wait for the inputs": ("mbarrier.wait(full.index(stage), phase)", "pass"),
    "a producer that does not wait": ("mbarrier.wait(empty.index(stage), phase)", "pass"),
    "a result overwritten on its way out": ("tma.store_wait(0)  # the tile before", "pass  #"),
    "an end before the result is out": ("\n    tma.store_wait(0)", ""),
    "sums that go on into the next tile": ("use_acc=False, ", ""),
    "half of a tile's rows twice": ("m * ROWS + INDEX * M", "m * ROWS"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_do_not_go_unseen(fault, monkeypatch):
    monkeypatch.setattr("hopper_machine.PATIENCE_S", 0.3)
    right, wrong = FAULTS[fault]
    assert right in SOURCE
    with pytest.raises((AssertionError, Stuck)):
        for seed in range(5):
            run(SOURCE.replace(right, wrong), (41, 16, 20, 2, 4, 3, 1), seed)
