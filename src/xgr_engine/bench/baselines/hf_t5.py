"""An encoder-decoder of the bench as transformers has it: a T5ForConditionalGeneration over the same tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from xgr_engine.models.encoder_decoder import EncoderDecoder, FeedForward, SelfAttention
from xgr_engine.models.spec import EncoderDecoderSpec


def t5_model(model: EncoderDecoder, head: Tensor) -> Any:
    """The same weights as a transformers model; tensors are shared, q, k and v being views."""
    import transformers

    kind = transformers.T5ForConditionalGeneration
    config = transformers.T5Config(**t5_config_fields(model.spec))
    # before version 5 its attention to positions was written out, for any hardware
    config._attn_implementation = "sdpa" if kind._supports_sdpa else "eager"
    with torch.device("meta"):
        wrapped = kind(config)
    wrapped.load_state_dict(dict(t5_tensors(model, head)), assign=True, strict=False)
    # generate makes its cache as deep as this says, which is the encoder's depth where nobody corrects it
    wrapped.config.num_layers = model.spec.num_layers
    return wrapped


def t5_config_fields(spec: EncoderDecoderSpec) -> dict[str, Any]:
    """Its configuration. All versions scale the output by the flag that says whether embedding and head are tied."""
    return {
        "vocab_size": spec.vocab_size,
        "d_model": spec.hidden_size,
        "d_kv": spec.head_dim,
        "d_ff": spec.intermediate_size,
        "num_layers": spec.num_encoder_layers,
        "num_decoder_layers": spec.num_layers,
        "num_heads": spec.num_heads,
        "relative_attention_num_buckets": spec.num_buckets,
        "relative_attention_max_distance": spec.max_distance,
        "layer_norm_epsilon": spec.rms_eps,
        "feed_forward_proj": "gated-gelu" if spec.gated else "relu",
        "tie_word_embeddings": spec.scaled_output,
        "decoder_start_token_id": spec.start_token,
        "pad_token_id": 0,
        "eos_token_id": None,
    }


def t5_tensors(model: EncoderDecoder, head: Tensor) -> list[tuple[str, Tensor]]:
    """Weights under the names that transformers has for them; views of the engine's stacked tensors."""
    named = [(f"{name}.weight", model.embed) for name in ("shared", "encoder.embed_tokens", "decoder.embed_tokens")]
    named.append(("lm_head.weight", head))
    for name, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
        named.append((f"{name}.block.0.layer.0.SelfAttention.relative_attention_bias.weight", stack.bias))
        named.append((f"{name}.final_layer_norm.weight", stack.norm))
    for index, encoder_layer in enumerate(model.encoder.layers):
        at = f"encoder.block.{index}.layer"
        named += _self_attention(f"{at}.0", encoder_layer.attention)
        named += _feed_forward(f"{at}.1", encoder_layer.feed_forward)
    for index, layer in enumerate(model.decoder.layers):
        at = f"decoder.block.{index}.layer"
        named += _self_attention(f"{at}.0", layer.attention)
        keys, values = layer.cross.kv.chunk(2)
        linears = {"q": layer.cross.q, "k": keys, "v": values, "o": layer.cross.out}
        named += _block(f"{at}.1", "EncDecAttention", layer.cross.norm, linears)
        named += _feed_forward(f"{at}.2", layer.feed_forward)
    return [(name, tensor.detach()) for name, tensor in named]


def _self_attention(at: str, attention: SelfAttention) -> list[tuple[str, Tensor]]:
    linears = dict(zip("qkv", attention.qkv.chunk(3), strict=True)) | {"o": attention.out}
    return _block(at, "SelfAttention", attention.norm, linears)


def _feed_forward(at: str, feed_forward: FeedForward) -> list[tuple[str, Tensor]]:
    linears = {"wi": feed_forward.up} if feed_forward.gate is None else {"wi_0": feed_forward.gate}
    if feed_forward.gate is not None:
        linears["wi_1"] = feed_forward.up
    return _block(at, "DenseReluDense", feed_forward.norm, linears | {"wo": feed_forward.down})


def _block(at: str, name: str, norm: Tensor, linears: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
    named = [(f"{at}.{name}.{linear}.weight", tensor) for linear, tensor in linears.items()]
    return [(f"{at}.layer_norm.weight", norm), *named]
