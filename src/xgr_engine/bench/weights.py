"""Random weights of a given size, made on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from xgr_engine.models.decoder_only import DecoderOnly, LayerWeights
from xgr_engine.models.encoder_decoder import (
    CrossAttention,
    DecoderLayer,
    EncoderDecoder,
    EncoderLayer,
    FeedForward,
    Layer,
    SelfAttention,
    Stack,
)
from xgr_engine.models.loading import AnyModel, compute_dtype
from xgr_engine.models.ops import Ops, choose_ops
from xgr_engine.models.spec import AnySpec, EncoderDecoderSpec, ModelSpec

_DEVIATION = 0.02


class _Draws:
    """Tensors N(0, 0.02), and of ones, in one dtype on one device; the same seed gives the same ones."""

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        self._dtype, self._device = dtype, device
        self._generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        empty = torch.empty(shape, dtype=self._dtype, device=self._device)
        return empty.normal_(0.0, _DEVIATION, generator=self._generator)

    def ones(self, size: int) -> Tensor:
        return torch.ones(size, dtype=self._dtype, device=self._device)


def random_model(spec: AnySpec, device: torch.device, seed: int, ops: Ops | None = None) -> tuple[AnyModel, Tensor]:
    """A model with weights N(0, 0.02), norms of one, and its output projection [V, H].

    The same seed gives the same weights on the same kind of device.
    """
    draw = _Draws(compute_dtype(spec.dtype, device), device, seed)
    embed = draw.normal(spec.vocab_size, spec.hidden_size)
    kernels = ops or choose_ops(device)
    model: AnyModel
    if isinstance(spec, EncoderDecoderSpec):
        model = _encoder_decoder(spec, embed, draw, kernels)
    else:
        model = _decoder_only(spec, embed, draw, kernels)
    head = embed if spec.tied else draw.normal(spec.vocab_size, spec.hidden_size)
    return model, head


def _decoder_only(spec: ModelSpec, embed: Tensor, draw: _Draws, ops: Ops) -> DecoderOnly:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    query, key = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    layers = [
        LayerWeights(
            attn_norm=draw.ones(hidden),
            qkv=draw.normal(query + 2 * key, hidden),
            qkv_bias=None,
            q_norm=draw.ones(spec.head_dim) if spec.qk_norm else None,
            k_norm=draw.ones(spec.head_dim) if spec.qk_norm else None,
            out=draw.normal(hidden, query),
            out_bias=None,
            mlp_norm=draw.ones(hidden),
            gate_up=draw.normal(2 * inner, hidden),
            gate_up_bias=None,
            down=draw.normal(hidden, inner),
            down_bias=None,
        )
        for _ in range(spec.num_layers)
    ]
    return DecoderOnly(spec, embed, draw.ones(hidden), layers, ops)


def _encoder_decoder(spec: EncoderDecoderSpec, embed: Tensor, draw: _Draws, ops: Ops) -> EncoderDecoder:
    hidden, inner, heads = spec.hidden_size, spec.intermediate_size, spec.num_heads * spec.head_dim

    def stack(layers: list[Layer]) -> Stack[Layer]:
        return Stack(draw.normal(spec.num_buckets, spec.num_heads), layers, draw.ones(hidden))

    def attention() -> SelfAttention:
        return SelfAttention(draw.ones(hidden), draw.normal(3 * heads, hidden), draw.normal(hidden, heads))

    def cross() -> CrossAttention:
        return CrossAttention(
            draw.ones(hidden), draw.normal(heads, hidden), draw.normal(2 * heads, hidden), draw.normal(hidden, heads)
        )

    def feed_forward() -> FeedForward:
        gate = draw.normal(inner, hidden) if spec.gated else None
        return FeedForward(draw.ones(hidden), gate, draw.normal(inner, hidden), draw.normal(hidden, inner))

    encoder = [EncoderLayer(attention(), feed_forward()) for _ in range(spec.num_encoder_layers)]
    decoder = [DecoderLayer(attention(), cross(), feed_forward()) for _ in range(spec.num_layers)]
    return EncoderDecoder(spec, embed, stack(encoder), stack(decoder), ops)
