"""The layers that the micro-benchmark times: three forms of the same attention over the same keys."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "benchmarks"))
from decode_attention import compare
from kernel_cases.attention import check, poisoned

from xgr_engine.bench.kernels import paged_reference, paged_triton
from xgr_engine.bench.kernels.decode_layer import DecodeShape, Layer
from xgr_engine.xattention import reference, triton

FORMS = {
    "paged": lambda layer: layer.paged(paged_triton.paged_attention),
    "paged in torch": lambda layer: layer.paged(paged_reference.paged_attention),
    "engine": lambda layer: layer.engine(triton.beam_attention),
    "engine in torch": lambda layer: layer.engine(reference.beam_attention),
    "staged": Layer.staged,
}


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(("context", "users", "beams", "own"), [(50, 2, 5, 2), (31, 1, 33, 1), (16, 3, 4, 3)])
def test_all_forms_compute_the_same(device, context, users, beams, own):
    shape = DecodeShape(context, users, beams, own, heads=4, kv_heads=2, dim=64, dtype=torch.float32)
    layer = Layer.random(shape, torch.device(device))
    for form in FORMS.values():
        assert layer.error(form(layer), most_beams=beams) < 2e-6


@pytest.mark.parametrize("form", FORMS)
def test_errors_are_seen(device, form):
    shape = DecodeShape(50, 2, 5, heads=4, kv_heads=2, dim=64, dtype=torch.float32)
    layer = Layer.random(shape, torch.device(device))
    layer.pool[0][:] += 0.01 * torch.randn_like(layer.pool[0])
    out = FORMS[form](layer)
    fresh = Layer.random(shape, torch.device(device))
    assert fresh.error(out) > 1e-4


@pytest.mark.parametrize(
    ("context", "users", "beams", "own"), [(70, 2, 33, 1), (130, 3, 9, 3), (0, 2, 9, 2), (17, 2, 9, 0)]
)
def test_tables_are_followed_over_poisoned_inputs(device, context, users, beams, own):
    shape = DecodeShape(context, users, beams, own, heads=4, kv_heads=2, dim=64, dtype=torch.float32)
    assert check(shape, None, torch.device(device)) < 2e-6


def test_what_no_table_names_shows(device):
    shape = DecodeShape(80, 2, 5, heads=4, kv_heads=2, dim=64, dtype=torch.float32)
    layer = poisoned(Layer.random(shape, torch.device(device)))
    other_slots = torch.where(layer.ancestors < 0, layer.ancestors, layer.ancestors % 5)
    for wrong in (replace(layer, start=layer.start + 1), replace(layer, ancestors=other_slots)):
        assert layer.error(FORMS["engine in torch"](layer), most_beams=5) < 2e-6
        assert not layer.error(FORMS["engine in torch"](wrong), most_beams=5) < 1e-3


@pytest.mark.cuda
def test_a_row_of_the_table():
    row = compare(DecodeShape(500, 2, 64), torch.device("cuda"))
    assert row["paged_ms"] > 0 and max(row[f"{name}_error"] for name in ("paged", "xgr", "paper")) < 1e-2
