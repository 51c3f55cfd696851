"""Decode attention of one layer on its own: the engine's kernel beside the paged one, same numbers in, same out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from xgr_engine.bench.baselines.base import decoder_only
from xgr_engine.bench.kernels.decode_layer import DecodeShape, Layer, cold_layers
from xgr_engine.bench.memory import free_memory
from xgr_engine.bench.timing import call_ms
from xgr_engine.bench.workloads import Workload
from xgr_engine.xschedule.engines import is_out_of_memory

_AGREE = {torch.bfloat16: 2e-2, torch.float16: 5e-3, torch.float32: 1e-4}
# FlashInfer's paged decode on an H200, ms a layer.
FLASHINFER_H200 = {
    DecodeShape(1000, 1, 256): 0.158,
    DecodeShape(1000, 8, 256): 1.19,
    DecodeShape(1000, 32, 512): 9.7,
    DecodeShape(5000, 8, 256): 4.84,
    DecodeShape(5000, 32, 512): 38.3,
}


@torch.inference_mode()
def attention_times(workload: Workload) -> dict[str, Any]:
    """Milliseconds a layer of both kernels at the workload's shape, and how far their outputs are apart.

    Raises:
        NotAvailableError: the model is an encoder-decoder, whose attention the paged kernel does not compute.
    """
    decoder_only(workload.model)
    device, shape = workload.model.device, DecodeShape.of(workload)
    record: dict[str, Any] = {"context": shape.context, "users": shape.users, "beam": shape.beams}
    record |= {"own_tokens": shape.own, "heads": f"{shape.heads}/{shape.kv_heads} x {shape.dim}"}
    record |= {"model": workload.model.name}
    try:
        record |= _measure(workload, shape)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        record |= {"status": "out of memory"}
    free_memory(device)
    on_h200 = device.type == "cuda" and "H200" in torch.cuda.get_device_name(device)
    known = FLASHINFER_H200.get(replace(shape, dtype=torch.bfloat16)) if on_h200 else None
    if known is not None and record.get("paged_ms"):
        record |= {"flashinfer_paged_ms": known, "paged_against_flashinfer": record["paged_ms"] / known}
    return record


def _measure(workload: Workload, shape: DecodeShape) -> dict[str, Any]:
    device, ops = workload.model.device, workload.model.decoder.ops
    layers = cold_layers(shape, device)
    ours = partial(Layer.engine, kernel=ops.beam_attention)
    paged = partial(Layer.paged, kernel=_paged_kernel(workload))
    expected = ours(layers[0]).double()
    difference = float((paged(layers[0]).double() - expected).norm() / expected.norm())
    record: dict[str, Any] = {"relative_difference": difference, "copies": len(layers)}
    if not difference <= _AGREE[shape.dtype]:
        return {**record, "status": "results differ"}
    xgr_ms = call_ms([partial(ours, layer) for layer in layers], device)
    paged_ms = call_ms([partial(paged, layer) for layer in layers], device)
    return {
        **record,
        "status": "ok",
        "kernels": ops.name,
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
