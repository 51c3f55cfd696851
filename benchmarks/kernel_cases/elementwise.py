"""The fused elementwise steps: each against its reference in float64, then its time and share of the copy rate."""

from __future__ import annotations

from collections.abc import Callable

import torch
from timing import graph_ms, relative_error
from torch import Tensor

from xgr_engine.kernels import reference
from xgr_engine.kernels import triton as fused

TOLERANCE = {torch.bfloat16: 4e-3, torch.float32: 2e-6}
Tensors = dict[str, Tensor]


def _normal(dtype: torch.dtype, *size: int) -> Tensor:
    return torch.randn(*size, device="cuda", dtype=dtype)


def _norm_inputs(rows: int, dtype: torch.dtype) -> Tensors:
    return {
        "residual": _normal(dtype, rows, 2048),
        "delta": _normal(dtype, rows, 2048),
        "weight": _normal(dtype, 2048),
    }


def _gate_inputs(rows: int, dtype: torch.dtype) -> Tensors:
    return {"gate_up": _normal(dtype, rows, 2 * 6144)}


def _rope_inputs(rows: int, dtype: torch.dtype) -> Tensors:
    heads, kv_heads, dim, context = 16, 8, 128, 5000
    angle = torch.rand(context, dim // 2, device="cuda") * 6.28
    slot = torch.randperm(rows, device="cuda", dtype=torch.int32)
    return {
        "qkv": _normal(dtype, rows, (heads + 2 * kv_heads) * dim),
        "q_norm": _normal(dtype, dim),
        "k_norm": _normal(dtype, dim),
        "cos": angle.cos(),
        "sin": angle.sin(),
        "position": torch.randint(0, context, (rows,), device="cuda"),
        "k_cache": torch.full((rows, kv_heads, dim), torch.nan, device="cuda", dtype=dtype),
        "v_cache": torch.full((rows, kv_heads, dim), torch.nan, device="cuda", dtype=dtype),
        "slot": slot,
    }


def _norm(module: object, x: Tensors) -> list[Tensor]:
    out = module.add_rms_norm(x["residual"], x["delta"], x["weight"], 1e-6)  # type: ignore[attr-defined]
    return [out, x["residual"]]


def _gate(module: object, x: Tensors) -> list[Tensor]:
    return [module.silu_mul(x["gate_up"])]  # type: ignore[attr-defined]


def _rope(module: object, x: Tensors) -> list[Tensor]:
    q = module.rope_and_store(**x, eps=1e-6)  # type: ignore[attr-defined]
    return [q, x["k_cache"], x["v_cache"]]


# name, inputs, call, bytes a row in bf16
CASES: list[tuple[str, Callable[[int, torch.dtype], Tensors], Callable[[object, Tensors], list[Tensor]], int]] = [
    ("add_rms_norm", _norm_inputs, _norm, 2 * 4 * 2048),
    ("silu_mul", _gate_inputs, _gate, 2 * 3 * 6144),
    ("rope_and_store", _rope_inputs, _rope, 2 * 2 * 32 * 128 + 2 * 4 * 64),
]


def run(limits: dict[str, float], quick: bool) -> tuple[list[dict[str, object]], int]:
    """Check and time the fused steps at a prefill's and a decode step's number of rows."""
    rows: list[dict[str, object]] = []
    wrong = 0
    for name, make, call, row_bytes in CASES:
        for dtype in (torch.float32, torch.bfloat16):
            inputs = make(777, dtype)
            wide = {k: v.double() if v.is_floating_point() else v.clone() for k, v in inputs.items()}
            pairs = zip(call(fused, inputs), call(reference, wide), strict=True)
            error = max((relative_error(a, b) for a, b in pairs), key=lambda e: float("inf") if e != e else e)
            rows.append({"kernel": name, "dtype": str(dtype), "error": error})
            if not error < TOLERANCE[dtype]:
                wrong += 1
                print(f"WRONG {name} {dtype}: {error:.2e}", flush=True)
        for count in (8000,) if quick else (8000, 2048, 384):
            sets = [make(count, torch.bfloat16) for _ in range(max(2, int(3e8 // (count * row_bytes))))]
            floor = count * row_bytes / limits["copy_tbs"] / 1e9
            ms = graph_ms([lambda x=x, c=call: c(fused, x) for x in sets])  # type: ignore[misc]
            rows.append({"kernel": name, "rows": count, "ms": ms, "floor_ms": floor})
            print(f"{name} {count} rows: {ms:.4f} ms, floor {floor:.4f}", flush=True)
    return rows, wrong
