"""Gate and up products with SwiGLU against float64: two steps anywhere, one kernel on a Hopper GPU."""

from __future__ import annotations

import pytest
import torch

from xgr_engine.errors import UsageError
from xgr_engine.kernels import reference, triton
from xgr_engine.kernels.hopper import SwigluTiles, covers, swiglu_product
from xgr_engine.kernels.launch import is_hopper

# Triton's interpreter rounds to bfloat16 by cutting bits off
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float16
SHAPES = [(1, 64, 128), (130, 200, 136), (300, 128, 192)]


def error(call, device: str, rows: int, hidden: int, width: int) -> float:
    torch.manual_seed(rows)
    x = torch.randn(rows, hidden).to(device, DTYPE)
    weight = (torch.randn(2 * width, hidden) / hidden**0.5).to(device, DTYPE)
    guarded = torch.full((rows + 2, width), torch.nan, dtype=DTYPE, device=device)
    call(x, weight, guarded[1:-1])
    assert guarded[[0, -1]].isnan().all()
    gate, up = (x.double() @ weight.double().T).chunk(2, dim=1)
    expected = torch.nn.functional.silu(gate) * up
    return float((guarded[1:-1].double() - expected).norm() / expected.norm())


@pytest.mark.skipif(
    not is_hopper(torch.device("cuda", 0)) if torch.cuda.is_available() else True, reason="no Hopper GPU"
)
@pytest.mark.parametrize("lead", [0, 2])
@pytest.mark.parametrize("shape", [*SHAPES, (2100, 1024, 3072)], ids=str)
def test_hopper(shape, lead):
    def call(x, weight, out):
        swiglu_product(x, weight, out, SwigluTiles(lead=lead))

    assert error(call, "cuda", *shape) < 2.5e-3


def test_inputs_that_the_kernel_does_not_cover_are_refused():
    x, weight = torch.zeros(3, 64, dtype=torch.bfloat16), torch.zeros(256, 64, dtype=torch.bfloat16)
    assert covers(x, weight)
    for bad_x, bad_weight in (
        (x.float(), weight.float()),
        (x.half(), weight),
        (x[:0], weight),
        (x[:, :60], weight[:, :60].contiguous()),
        (x, weight[:-2]),
        (x, weight.T.contiguous().T),
    ):
        assert not covers(bad_x, bad_weight)
        with pytest.raises(UsageError, match="linear and silu_mul"):
            swiglu_product(bad_x, bad_weight)
    with pytest.raises(UsageError, match="result"):
        swiglu_product(x, weight, torch.zeros(3, 64, dtype=torch.bfloat16))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_either_way_gives_the_reference(device, shape, bias):
    """The step as the model calls it: one kernel or two, with and without a bias, against its definition in float64."""
    rows, hidden, width = shape
    torch.manual_seed(rows)
    x = torch.randn(rows, hidden).to(device, DTYPE)
    weight = (torch.randn(2 * width, hidden) / hidden**0.5).to(device, DTYPE)
    offset = torch.randn(2 * width).to(device, DTYPE) if bias else None
    out = torch.full((rows, width), torch.nan, dtype=DTYPE, device=device)
    assert triton.swiglu(x, weight, offset, out=out) is out
    expected = reference.swiglu(x.double(), weight.double(), None if offset is None else offset.double())
    # two roundings to bfloat16 where there are two kernels
    assert float((out.double() - expected).norm() / expected.norm()) < 5e-3
