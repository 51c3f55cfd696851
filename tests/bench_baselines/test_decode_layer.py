"""The layers that the micro-benchmark times: three forms of the same attention over the same keys."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "benchmarks"))
from decode_attention import compare

from xgr_engine.bench.kernels.decode_layer import DecodeShape, Layer


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(("context", "users", "beams", "own"), [(50, 2, 5, 2), (31, 1, 33, 1), (16, 3, 4, 3)])
def test_all_forms_compute_the_same(device, context, users, beams, own):
    shape = DecodeShape(context, users, beams, own, heads=4, kv_heads=2, dim=64, dtype=torch.float32)
    layer = Layer.random(shape, torch.device(device))
    for out in (layer.paged(), layer.engine(), layer.staged()):
        assert layer.error(out) < 2e-6


@pytest.mark.parametrize("form", ["paged", "engine", "staged"])
def test_errors_are_seen(device, form):
    shape = DecodeShape(50, 2, 5, heads=4, kv_heads=2, dim=64, dtype=torch.float32)
    layer = Layer.random(shape, torch.device(device))
    layer.pool[0][:] += 0.01 * torch.randn_like(layer.pool[0])
    out = getattr(layer, form)()
    fresh = Layer.random(shape, torch.device(device))
    assert fresh.error(out) > 1e-4


@pytest.mark.cuda
def test_a_row_of_the_table():
    row = compare(DecodeShape(500, 2, 64), torch.device("cuda"))
    assert row["paged_ms"] > 0 and max(row[f"{name}_error"] for name in ("paged", "xgr", "paper")) < 1e-2
