"""The bench's model as others read it: a transformers model over the same tensors, or a checkpoint directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xgr_engine.bench.baselines.base import NotAvailableError, decoder_only
from xgr_engine.bench.baselines.hf_t5 import t5_model
from xgr_engine.bench.workloads import BenchModel
from xgr_engine.models.encoder_decoder import EncoderDecoder
from xgr_engine.models.spec import ModelSpec

_NAMES = {"qwen2": "Qwen2", "qwen3": "Qwen3", "llama": "Llama"}
_SHARD_BYTES = 2 << 30  # of a checkpoint's file: the host holds one at a time


def transformers_model(model: BenchModel) -> Any:
    """The same weights as a transformers model; tensors are shared, stacked ones as views.

    Raises:
        NotAvailableError: the installed transformers has other weights.
    """
    import transformers

    start = None
    if isinstance(model.decoder, EncoderDecoder):
        wrapped, start = t5_model(model.decoder, model.head), model.decoder.spec.start_token
    else:
        wrapped = _decoder_only_model(model)
    missing = [name for name, tensor in wrapped.named_parameters() if tensor.is_meta]
    if missing:
        raise NotAvailableError(f"transformers {transformers.__version__} has other weights: {', '.join(missing[:5])}")
    # nothing preset for generate but what a decoder starts with
    wrapped.generation_config = transformers.GenerationConfig(decoder_start_token_id=start)  # type: ignore[no-untyped-call]
    return wrapped.eval()


def _decoder_only_model(model: BenchModel) -> Any:
    import transformers

    spec = decoder_only(model).spec
    name = _NAMES[spec.family]
    config = getattr(transformers, f"{name}Config")(**config_fields(spec, transformers.__version__))
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        wrapped = getattr(transformers, f"{name}ForCausalLM")(config)
    wrapped.load_state_dict(dict(named_tensors(model)), assign=True, strict=False)
    if spec.tied:
        wrapped.tie_weights()
    # its frequencies are no weights, so they are still on the meta device
    wrapped.model.rotary_emb = type(wrapped.model.rotary_emb)(config=config).to(model.device)
    return wrapped


def config_fields(spec: ModelSpec, installed: str) -> dict[str, Any]:
    """A model's configuration as that version of transformers names it."""
    rope: dict[str, Any] = {"rope_type": spec.rope.kind}
    if spec.rope.kind == "llama3":
        rope |= {
            "factor": spec.rope.factor,
            "low_freq_factor": spec.rope.low_freq_factor,
            "high_freq_factor": spec.rope.high_freq_factor,
            "original_max_position_embeddings": spec.rope.original_max_position,
        }
    if int(installed.split(".")[0]) >= 5:
        place: dict[str, Any] = {"rope_parameters": {**rope, "rope_theta": spec.rope.theta}}
    else:
        scaled = {} if spec.rope.kind == "default" else {"rope_scaling": rope}
        place = {"rope_theta": spec.rope.theta, **scaled}
    return {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.intermediate_size,
        "rms_norm_eps": spec.rms_eps,
        "max_position_embeddings": spec.max_context,
        "tie_word_embeddings": spec.tied,
        "attention_bias": spec.qkv_bias,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
        **place,
    }


def named_tensors(model: BenchModel) -> list[tuple[str, Tensor]]:
    """Weights under the names that transformers has for them; views of the engine's stacked tensors."""
    decoder = decoder_only(model)
    spec = decoder.spec
    query, key = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    named: list[tuple[str, Tensor]] = [
        ("model.embed_tokens.weight", decoder.embed),
        ("model.norm.weight", decoder.norm),
        ("lm_head.weight", model.head),
    ]

    def cut(stacked: Tensor) -> tuple[Tensor, ...]:
        return torch.split(stacked, [query, key, key])

    for index, layer in enumerate(decoder.layers):
        at = f"model.layers.{index}."
        named += zip((f"{at}self_attn.{n}_proj.weight" for n in "qkv"), cut(layer.qkv), strict=True)
        if layer.qkv_bias is not None:
            named += zip((f"{at}self_attn.{n}_proj.bias" for n in "qkv"), cut(layer.qkv_bias), strict=True)
        named += zip((f"{at}mlp.{n}_proj.weight" for n in ("gate", "up")), layer.gate_up.chunk(2), strict=True)
        optional = {
            "self_attn.q_norm.weight": layer.q_norm,
            "self_attn.k_norm.weight": layer.k_norm,
            "self_attn.o_proj.weight": layer.out,
            "self_attn.o_proj.bias": layer.out_bias,
            "input_layernorm.weight": layer.attn_norm,
            "post_attention_layernorm.weight": layer.mlp_norm,
            "mlp.down_proj.weight": layer.down,
            "mlp.down_proj.bias": layer.down_bias,
        }
        named += [(at + name, tensor) for name, tensor in optional.items() if tensor is not None]
    return [(name, tensor.detach()) for name, tensor in named]


def write_checkpoint(model: BenchModel, folder: Path) -> None:
    """Write the model as a Hugging Face checkpoint: ``config.json``, safetensors and a tokenizer.

    The tokenizer has a word for every id (``t17``; ``<s_a_17>`` for the SID tokens, which are special ones), because
    engines refuse a model without a tokenizer; nothing is ever tokenized with it.

    Args:
        folder: exists and is empty. It takes as many bytes as the weights.
    """
    spec = decoder_only(model).spec
    config = {
        # files of transformers 4 have the rotary base beside the rest, those of 5 in a part of their own
        **config_fields(spec, "4"),
        **config_fields(spec, "5"),
        "architectures": [f"{_NAMES[spec.family]}ForCausalLM"],
        "model_type": spec.family,
        "hidden_act": "silu",
        "torch_dtype": model.dtype,
        "dtype": model.dtype,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    _write_weights(model, folder)
    _write_tokenizer(model, folder)


def _write_weights(model: BenchModel, folder: Path) -> None:
    from safetensors.torch import save_file

    shards: list[list[tuple[str, Tensor]]] = [[]]
    size = 0
    for name, tensor in named_tensors(model):
        if name == "lm_head.weight" and model.spec.tied:
            continue
        if size and size + tensor.nbytes > _SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append((name, tensor))
        size += tensor.nbytes
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        # a copy of each: views of one stacked tensor may not share memory in a file
        tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in shard}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, file)
    index = {"metadata": {"total_size": sum(t.nbytes for shard in shards for _, t in shard)}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _write_tokenizer(model: BenchModel, folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    words = [f"t{token}" for token in range(model.spec.vocab_size)]
    special: dict[int, str] = {}
    for level, (ids, codes) in enumerate(zip(model.table.token_ids, model.table.codes, strict=True)):
        for token, code in zip(ids.tolist(), codes.tolist(), strict=True):
            special.setdefault(token, f"<s_{chr(ord('a') + level)}_{code}>")
    for token, word in special.items():
        words[token] = word
    tokenizer = Tokenizer(WordLevel({word: token for token, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in special.values()])
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": model.spec.max_context}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
