"""Tiny random T5 checkpoints, written tensor by tensor: the names below are transformers', not looked up in xgr."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

OFFSETS = (2, 12, 22)
OFFSETS_TEXT = "2,12,22"
# heads x d_kv is not d_model, and the decoder is deeper than the encoder: what takes one for the other is found out.
CONFIG: dict[str, Any] = {
    "architectures": ["T5ForConditionalGeneration"],
    "model_type": "t5",
    "is_encoder_decoder": True,
    "vocab_size": 32,
    "d_model": 16,
    "d_kv": 6,
    "d_ff": 20,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "layer_norm_epsilon": 1e-6,
    "feed_forward_proj": "relu",
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
    "torch_dtype": "float32",
}


def t5_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """transformers' names and shapes, with one embedding and no head."""
    hidden, heads = config["d_model"], config["num_heads"] * config["d_kv"]
    inner, buckets = config["d_ff"], config["relative_attention_num_buckets"]
    gates = ("wi",) if config["feed_forward_proj"] == "relu" else ("wi_0", "wi_1")
    shapes: dict[str, tuple[int, ...]] = {"shared.weight": (config["vocab_size"], hidden)}
    for stack, layers in (("encoder", config["num_layers"]), ("decoder", config["num_decoder_layers"])):
        blocks = ["SelfAttention", "DenseReluDense"]
        if stack == "decoder":
            blocks.insert(1, "EncDecAttention")
        for layer in range(layers):
            for number, block in enumerate(blocks):
                at = f"{stack}.block.{layer}.layer.{number}"
                shapes[f"{at}.layer_norm.weight"] = (hidden,)
                if block == "DenseReluDense":
                    shapes |= {f"{at}.{block}.{gate}.weight": (inner, hidden) for gate in gates}
                    shapes[f"{at}.{block}.wo.weight"] = (hidden, inner)
                else:
                    shapes |= {f"{at}.{block}.{name}.weight": (heads, hidden) for name in "qkv"}
                    shapes[f"{at}.{block}.o.weight"] = (hidden, heads)
        bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        shapes |= {bias: (buckets, config["num_heads"]), f"{stack}.final_layer_norm.weight": (hidden,)}
    return shapes


def make_t5(
    folder: Path, *, dtype: torch.dtype = torch.float32, head: bool = False, seed: int = 0, **changes: Any
) -> Path:
    """A checkpoint without tokenizer; a change of None leaves the key out of config.json.

    Args:
        head: store an ``lm_head.weight`` of its own.
    """
    config = {**CONFIG, **changes}
    shapes = t5_shapes({**config, "num_decoder_layers": config["num_decoder_layers"] or config["num_layers"]})
    if head:
        shapes["lm_head.weight"] = shapes["shared.weight"]
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator) * 0.4
        tensors[name] = (values + 1 if "norm" in name else values).to(dtype)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
