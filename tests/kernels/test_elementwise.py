"""The fused elementwise steps against plain torch in float64."""

from __future__ import annotations

import pytest
import torch

from xgr_engine.errors import UsageError
from xgr_engine.kernels import reference, triton

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
# Triton's interpreter rounds to bfloat16 by cutting bits off; what counts is the GPU, where all three are run
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "hidden"), [(1, 64), (9, 768), (33, 2560), (3, 5120)])
def test_add_rms_norm(device, rows, hidden, dtype):
    residual, delta = (torch.randn(rows, hidden, device=device).to(dtype) for _ in range(2))
    weight = torch.randn(hidden, device=device).to(dtype)
    stored = (residual.float() + delta.float()).to(dtype)
    mine = residual.clone()
    out = triton.add_rms_norm(mine, delta, weight, 1e-6)
    assert torch.equal(mine, stored)
    expected = reference.add_rms_norm(stored.double(), None, weight.double(), 1e-6)
    assert error(out, expected) < TOLERANCE[dtype]
    assert error(triton.add_rms_norm(mine, None, weight, 1e-6), expected) < TOLERANCE[dtype]
    assert torch.equal(mine, stored)


def test_a_large_row_does_not_overflow(device):
    """Squares of float16 activations leave the range of float16."""
    x = torch.full((2, 512), 3000.0, dtype=torch.float16, device=device)
    out = triton.add_rms_norm(x, None, torch.ones(512, dtype=torch.float16, device=device), 1e-6)
    assert torch.allclose(out.float(), torch.ones(2, 512, device=device), atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 8), (17, 100), (5, 6144)])
def test_silu_mul(device, rows, width, dtype):
    gate_up = (3 * torch.randn(rows, 2 * width, device=device)).to(dtype)
    out = triton.silu_mul(gate_up)
    assert out.shape == (rows, width)
    assert error(out, reference.silu_mul(gate_up.double())) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(16, 8, 128), (12, 12, 64), (5, 1, 96), (6, 2, 16)])
def test_rope_and_store(device, heads, kv_heads, dim, norm, dtype):
    rows, slots = 13, 29
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * dim, device=device).to(dtype)
    weights = [torch.randn(dim, device=device).to(dtype) if norm else None for _ in range(2)]
    angle = 6 * torch.rand(50, dim // 2, device=device)
    position = torch.randint(0, 50, (rows,), device=device)
    slot = torch.randperm(slots, device=device)[:rows].to(torch.int32)
    slot[4] = -1
    k_cache, v_cache = (torch.full((slots, kv_heads, dim), torch.nan, device=device, dtype=dtype) for _ in range(2))
    q = triton.rope_and_store(qkv, *weights, 1e-6, angle.cos(), angle.sin(), position, k_cache, v_cache, slot)
    wide = [None if w is None else w.double() for w in weights]
    k_wide, v_wide = (torch.full((slots, kv_heads, dim), torch.nan, device=device).double() for _ in range(2))
    expected = reference.rope_and_store(
        qkv.double(), *wide, 1e-6, angle.cos(), angle.sin(), position, k_wide, v_wide, slot
    )
    assert error(q, expected) < TOLERANCE[dtype]
    written = torch.zeros(slots, dtype=torch.bool, device=device)
    written[slot[slot >= 0].long()] = True
    assert error(k_cache[written], k_wide[written]) < TOLERANCE[dtype]
    assert torch.equal(v_cache[written].double(), v_wide[written])
    assert k_cache[~written].isnan().all() and v_cache[~written].isnan().all()


def test_reference_rotates_as_the_models_do(device):
    """Position 0 leaves a head as it is; a quarter turn swaps the halves with a sign."""
    heads, dim = 2, 8
    qkv = torch.randn(2, 3 * heads * dim, device=device)
    cos = torch.tensor([[1.0] * 4, [0.0] * 4], device=device)
    sin = torch.tensor([[0.0] * 4, [1.0] * 4], device=device)
    cache = [torch.zeros(2, heads, dim, device=device) for _ in range(2)]
    position = torch.tensor([0, 1], device=device)
    q = reference.rope_and_store(qkv, None, None, 0.0, cos, sin, position, *cache, position)
    first = qkv[0, : heads * dim].view(heads, dim)
    assert torch.equal(q[0], first)
    second = qkv[1, : heads * dim].view(heads, dim)
    assert torch.equal(q[1], torch.cat([-second[:, 4:], second[:, :4]], -1))


def test_transposed_inputs_are_refused(device):
    with pytest.raises(UsageError, match="contiguous rows"):
        triton.silu_mul(torch.randn(8, 4, device=device).T)
