"""Weights of an xgr model directory -> a model on a device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from xgr_engine.errors import CheckpointError
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
from xgr_engine.models.ops import Ops, choose_ops
from xgr_engine.models.spec import AnySpec, EncoderDecoderSpec, ModelSpec

AnyModel = DecoderOnly | EncoderDecoder
# Reads the tensor of one name of the spec's ``tensor_shapes``, or those of several, stacked along their rows.
Read = Callable[..., Tensor]

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def compute_dtype(stored: str, device: torch.device) -> torch.dtype:
    """The dtype that a model computes in: float32 on a CPU, whatever is stored; the stored one elsewhere."""
    return torch.float32 if device.type == "cpu" else TORCH_DTYPES[stored]


def load_model(
    spec: AnySpec,
    weights: Path,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    ops: Ops | None = None,
) -> tuple[AnyModel, Tensor]:
    """Read ``model.safetensors`` (names as in :class:`ModelSpec` and :class:`EncoderDecoderSpec`).

    Args:
        dtype: to compute in; None: see :func:`compute_dtype`.
        ops: the kernels; None: see :func:`choose_ops`.

    Returns:
        The model, and the output projection [V, H] (the embedding itself when tied).

    Raises:
        CheckpointError: the file lacks a tensor or cannot be read.
    """
    device = torch.device(device)
    dtype = dtype or compute_dtype(spec.dtype, device)
    try:
        with safe_open(weights, framework="pt", device=str(device)) as file:

            def read(*names: str) -> Tensor:
                tensors = [file.get_tensor(name).to(dtype) for name in names]
                return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

            return build_model(spec, read, ops or choose_ops(device))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{weights}: cannot read the model's weights",
            why=str(error),
            hint="run `xgr convert` again; `xgr inspect` shows what the directory should hold",
        ) from error


def build_model(spec: AnySpec, read: Read, ops: Ops) -> tuple[AnyModel, Tensor]:
    """The model and its output projection. ``read`` is asked for every tensor once, always in the same order."""
    embed = read("embed.weight")
    model: AnyModel
    if isinstance(spec, EncoderDecoderSpec):
        model = _encoder_decoder(spec, embed, read, ops)
    else:
        model = _decoder_only(spec, embed, read, ops)
    return model, embed if spec.tied else read("head.weight")


def _decoder_only(spec: ModelSpec, embed: Tensor, read: Read, ops: Ops) -> DecoderOnly:
    layers = [_layer(spec, read, f"layers.{index}.") for index in range(spec.num_layers)]
    return DecoderOnly(spec, embed, read("norm.weight"), layers, ops)


def _layer(spec: ModelSpec, read: Read, at: str) -> LayerWeights:
    def stacked(names: tuple[str, ...], kind: str) -> Tensor:
        return read(*(f"{at}{name}.{kind}" for name in names))

    attention, feed_forward = ("attn.q", "attn.k", "attn.v"), ("mlp.gate", "mlp.up")
    return LayerWeights(
        attn_norm=read(f"{at}attn_norm.weight"),
        qkv=stacked(attention, "weight"),
        qkv_bias=stacked(attention, "bias") if spec.qkv_bias else None,
        q_norm=read(f"{at}attn.q_norm.weight") if spec.qk_norm else None,
        k_norm=read(f"{at}attn.k_norm.weight") if spec.qk_norm else None,
        out=read(f"{at}attn.o.weight"),
        out_bias=read(f"{at}attn.o.bias") if spec.o_bias else None,
        mlp_norm=read(f"{at}mlp_norm.weight"),
        gate_up=stacked(feed_forward, "weight"),
        gate_up_bias=stacked(feed_forward, "bias") if spec.mlp_bias else None,
        down=read(f"{at}mlp.down.weight"),
        down_bias=read(f"{at}mlp.down.bias") if spec.mlp_bias else None,
    )


def _encoder_decoder(spec: EncoderDecoderSpec, embed: Tensor, read: Read, ops: Ops) -> EncoderDecoder:
    def stacked(at: str, names: str) -> Tensor:
        return read(*(f"{at}.{name}.weight" for name in names))

    def attention(at: str) -> SelfAttention:
        return SelfAttention(read(f"{at}_norm.weight"), stacked(at, "qkv"), read(f"{at}.o.weight"))

    def cross(at: str) -> CrossAttention:
        return CrossAttention(
            read(f"{at}_norm.weight"), read(f"{at}.q.weight"), stacked(at, "kv"), read(f"{at}.o.weight")
        )

    def feed_forward(at: str) -> FeedForward:
        gate = read(f"{at}.gate.weight") if spec.gated else None
        return FeedForward(read(f"{at}_norm.weight"), gate, read(f"{at}.up.weight"), read(f"{at}.down.weight"))

    def stack(at: str, layers: list[Layer]) -> Stack[Layer]:
        return Stack(read(f"{at}.bias.weight"), layers, read(f"{at}.norm.weight"))

    into = [f"encoder.layers.{index}" for index in range(spec.num_encoder_layers)]
    out = [f"decoder.layers.{index}" for index in range(spec.num_layers)]
    encoder = [EncoderLayer(attention(f"{at}.attn"), feed_forward(f"{at}.mlp")) for at in into]
    decoder = [DecoderLayer(attention(f"{at}.attn"), cross(f"{at}.cross"), feed_forward(f"{at}.mlp")) for at in out]
    return EncoderDecoder(spec, embed, stack("encoder", encoder), stack("decoder", decoder), ops)
