"""Decode attention of one layer on its own: the engine's kernel beside the paged one, same numbers in, same out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from xgr_engine.bench.baselines.architecture import decoder_only
from xgr_engine.bench.memory import free_memory
from xgr_engine.bench.timing import call_ms
from xgr_engine.bench.workloads import Workload
from xgr_engine.xschedule.engines import is_out_of_memory

_OWN = 2  # generated tokens of a beam at the last level of three
_BLOCK = 16
_COLD_BYTES = 256 << 20  # keys and values of the calls in a row, so that none finds the one before in the L2 cache
_MOST_COPIES = 8
_AGREE = {torch.bfloat16: 2e-2, torch.float16: 5e-3, torch.float32: 1e-4}
# FlashInfer's paged decode on an H200, ms a layer, 16/8 heads of 128, 2 own tokens: (context, users, W).
FLASHINFER_H200 = {
    (1000, 1, 256): 0.158,
    (1000, 8, 256): 1.19,
    (1000, 32, 512): 9.7,
    (5000, 8, 256): 4.84,
    (5000, 32, 512): 38.3,
}


@dataclass(frozen=True)
class _Problem:
    """One layer's inputs in both forms."""

    query: Tensor  # [U, R, Hq, D]
    prompt_k: Tensor
    prompt_v: Tensor  # [U * T, Hkv, D]
    prompt_start: Tensor
    own_k: Tensor
    own_v: Tensor  # [U, R * own, Hkv, D]
    ancestors: Tensor  # [U, R, own]
    pool_k: Tensor
    pool_v: Tensor
    context: Tensor  # [U * R]
    blocks: Tensor  # [U * R, B]


@torch.inference_mode()
def attention_times(workload: Workload) -> dict[str, Any]:
    """Milliseconds a layer of both kernels at the workload's shape, and how far their outputs are apart."""
    spec, device = workload.model.spec, workload.model.device
    shape = (workload.context, workload.users, workload.search.beam)
    record: dict[str, Any] = {"context": shape[0], "users": shape[1], "beam": shape[2], "own_tokens": _OWN}
    record |= {"heads": f"{spec.num_heads}/{spec.num_kv_heads} x {spec.head_dim}", "model": workload.model.name}
    try:
        record |= _measure(workload)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        record |= {"status": "out of memory"}
    free_memory(device)
    heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
    on_h200 = device.type == "cuda" and "H200" in torch.cuda.get_device_name(device)
    known = FLASHINFER_H200.get(shape) if on_h200 and heads == (16, 8, 128) else None
    if known is not None and record.get("paged_ms"):
        record |= {"flashinfer_paged_ms": known, "paged_against_flashinfer": record["paged_ms"] / known}
    return record


def _measure(workload: Workload) -> dict[str, Any]:
    device, scale = workload.model.device, decoder_only(workload.model).scale
    first = _make(workload, 0)
    size = sum(tensor.nbytes for tensor in (first.prompt_k, first.prompt_v))
    copies = 1 if device.type == "cpu" else max(1, min(_MOST_COPIES, -(-_COLD_BYTES // size)))
    problems = [first, *(_make(workload, seed) for seed in range(1, copies))]
    engine = workload.model.decoder.ops.beam_attention
    paged = _paged_kernel(workload)

    def ours(problem: _Problem) -> Callable[[], Tensor]:
        return lambda: engine(
            problem.query,
            problem.prompt_k,
            problem.prompt_v,
            problem.prompt_start,
            problem.own_k,
            problem.own_v,
            problem.ancestors,
            scale,
        )

    def pages(problem: _Problem) -> Callable[[], Tensor]:
        flat = problem.query.flatten(0, 1)
        return lambda: paged(flat, problem.pool_k, problem.pool_v, problem.context, problem.blocks, _BLOCK, scale)

    expected = ours(first)().flatten(0, 1).double()
    difference = float((pages(first)().double() - expected).norm() / expected.norm())
    record: dict[str, Any] = {"relative_difference": difference, "copies": copies}
    if not difference <= _AGREE[workload.model.decoder.dtype]:
        return {**record, "status": "results differ"}
    xgr_ms = call_ms([ours(problem) for problem in problems], device)
    paged_ms = call_ms([pages(problem) for problem in problems], device)
    kernels = workload.model.decoder.ops.name
    return {
        **record,
        "status": "ok",
        "kernels": kernels,
        "xgr_ms": xgr_ms,
        "paged_ms": paged_ms,
        "paged_over_xgr": paged_ms / xgr_ms,
    }


def _paged_kernel(workload: Workload) -> Callable[..., Tensor]:
    if workload.model.decoder.ops.name == "triton":
        from xgr_engine.bench.baselines.paged import fastest_paged_tiles
        from xgr_engine.bench.kernels import paged_triton

        return partial(paged_triton.paged_attention, tiles=fastest_paged_tiles(workload))
    from xgr_engine.bench.kernels import paged_reference

    return paged_reference.paged_attention


def _make(workload: Workload, seed: int) -> _Problem:
    """Random queries, keys and values of unit variance. A beam's last prompt block is its own copy, as after a fork."""
    spec, decoder = workload.model.spec, workload.model.decoder
    users, beams, length, kv = workload.users, workload.search.beam, workload.context, spec.num_kv_heads
    generator = torch.Generator(decoder.device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=decoder.dtype, device=decoder.device).normal_(generator=generator)

    prompts = [normal(users * length, kv, spec.head_dim) for _ in range(2)]
    own = [normal(users, beams * _OWN, kv, spec.head_dim) for _ in range(2)]
    rows = torch.arange(beams, device=decoder.device)
    ancestors = torch.stack([rows + step * beams for step in range(_OWN)], 1).to(torch.int32)
    whole, rest = divmod(length, _BLOCK)
    tail_rows = -(-(rest + _OWN) // _BLOCK) * _BLOCK
    pools = []
    for prompt, generated in zip(prompts, own, strict=True):
        last = prompt.view(users, 1, length, kv, -1)[:, :, whole * _BLOCK :].expand(-1, beams, -1, -1, -1)
        steps = generated.view(users, _OWN, beams, kv, -1).transpose(1, 2)
        padding = prompt.new_zeros(users, beams, tail_rows - rest - _OWN, kv, spec.head_dim)
        tails = torch.cat([last, steps, padding], 2)
        pools.append(torch.cat([prompt, tails.flatten(0, 2)]))
    user = torch.arange(users, device=decoder.device)[:, None, None]
    shared = user * length + torch.arange(whole, device=decoder.device) * _BLOCK
    first_tail = users * length + (user * beams + rows[:, None]) * tail_rows
    tail = first_tail + torch.arange(tail_rows // _BLOCK, device=decoder.device) * _BLOCK
    blocks = torch.cat([shared.expand(-1, beams, -1), tail], 2).flatten(0, 1).to(torch.int32)
    return _Problem(
        query=normal(users, beams, spec.num_heads, spec.head_dim),
        prompt_k=prompts[0],
        prompt_v=prompts[1],
        prompt_start=torch.arange(users + 1, device=decoder.device, dtype=torch.int32) * length,
        own_k=own[0],
        own_v=own[1],
        ancestors=ancestors.expand(users, -1, -1).contiguous(),
        pool_k=pools[0],
        pool_v=pools[1],
        context=torch.full((users * beams,), length + _OWN, dtype=torch.int32, device=decoder.device),
        blocks=blocks,
    )
