"""Random weights of a given size, made on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from xgr_engine.models.decoder_only import DecoderOnly, LayerWeights
from xgr_engine.models.loading import compute_dtype
from xgr_engine.models.ops import Ops, choose_ops
from xgr_engine.models.spec import ModelSpec

_DEVIATION = 0.02


def random_model(
    spec: ModelSpec, device: torch.device, seed: int, ops: Ops | None = None
) -> tuple[DecoderOnly, Tensor]:
    """A model with weights N(0, 0.02), norms of one, and its output projection [V, H].

    The same seed gives the same weights on the same kind of device.
    """
    dtype = compute_dtype(spec.dtype, device)
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device).normal_(0.0, _DEVIATION, generator=generator)

    def ones(size: int) -> Tensor:
        return torch.ones(size, dtype=dtype, device=device)

    hidden, inner = spec.hidden_size, spec.intermediate_size
    query, key = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    embed = normal(spec.vocab_size, hidden)
    layers = [
        LayerWeights(
            attn_norm=ones(hidden),
            qkv=normal(query + 2 * key, hidden),
            qkv_bias=None,
            q_norm=ones(spec.head_dim) if spec.qk_norm else None,
            k_norm=ones(spec.head_dim) if spec.qk_norm else None,
            out=normal(hidden, query),
            out_bias=None,
            mlp_norm=ones(hidden),
            gate_up=normal(2 * inner, hidden),
            gate_up_bias=None,
            down=normal(hidden, inner),
            down_bias=None,
        )
        for _ in range(spec.num_layers)
    ]
    head = embed if spec.tied else normal(spec.vocab_size, hidden)
    return DecoderOnly(spec, embed, ones(hidden), layers, ops or choose_ops(device)), head


def weight_bytes(model: DecoderOnly, head: Tensor) -> int:
    """Bytes of all weights; a tied head counts once."""
    tensors = [model.embed, model.norm]
    tensors += [tensor for layer in model.layers for tensor in vars(layer).values() if tensor is not None]
    if head.data_ptr() != model.embed.data_ptr():
        tensors.append(head)
    return sum(tensor.nbytes for tensor in tensors)
