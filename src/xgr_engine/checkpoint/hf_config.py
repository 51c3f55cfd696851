"""``config.json`` of a Hugging Face checkpoint (transformers 4 or 5) -> a spec, or an error that says why not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xgr_engine.checkpoint.config_fields import positive_integer, positive_number
from xgr_engine.checkpoint.hf_t5_config import parse_t5_spec
from xgr_engine.errors import CheckpointError
from xgr_engine.models.spec import ENCODER_DECODER_FAMILIES, AnySpec, ModelSpec, RopeSpec

# architectures[0] -> family
ARCHITECTURES = {
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "LlamaForCausalLM": "llama",
    "T5ForConditionalGeneration": "t5",
    "LETTER": "t5",  # LETTER-TIGER's class: a T5 with a temperature in the training loss
}
_SUPPORTED = "Qwen2, Qwen2.5, Qwen3 and Llama decoders and T5 encoder-decoders of transformers"
# Defaults of the transformers config classes, for keys that a file may leave out.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen2": {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 32768},
    "qwen3": {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 32768, "head_dim": 128},
    "llama": {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 2048},
}


@dataclass(frozen=True)
class HfConfig:
    """What a config says.

    Attributes:
        spec: sizes and switches. ``tied`` is the config's flag; only the tensors tell whether a head is stored.
        dtype: the dtype that it names, None if it names none.
        eos_token_id: the end token that it names; None if it names none or several.
    """

    spec: AnySpec
    dtype: str | None
    eos_token_id: int | None


def parse_hf_config(config: Mapping[str, Any], path: Path) -> HfConfig:
    """Read the config of a decoder or an encoder-decoder.

    Args:
        path: of the file, for messages.

    Raises:
        CheckpointError: an architecture, or a feature of it, that xgr does not compute; a missing or impossible size.
    """
    family = _family(config, path)
    _refuse_quantised_and_experts(config, path)
    if family in ENCODER_DECODER_FAMILIES:
        spec: AnySpec = parse_t5_spec(config, path)
    else:
        spec = _decoder_spec(config, family, path)
    dtype = config.get("dtype", config.get("torch_dtype"))
    return HfConfig(spec, str(dtype).removeprefix("torch.") if dtype else None, _end_token(config))


def _end_token(config: Mapping[str, Any]) -> int | None:
    named = config.get("eos_token_id")
    ids = named if isinstance(named, list) else [named]
    whole = len(ids) == 1 and isinstance(ids[0], int) and not isinstance(ids[0], bool)
    return ids[0] if whole else None


def _decoder_spec(config: Mapping[str, Any], family: str, path: Path) -> ModelSpec:
    _refuse_features(config, family, path)
    values = {**_DEFAULTS[family], **{key: value for key, value in config.items() if value is not None}}

    def size(key: str) -> int:
        return positive_integer(values, key, path)

    hidden, heads = size("hidden_size"), size("num_attention_heads")
    kv_heads = size("num_key_value_heads") if "num_key_value_heads" in values else heads
    if "head_dim" not in values and hidden % heads:
        raise CheckpointError(f"{path}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    head_dim = size("head_dim") if "head_dim" in values else hidden // heads
    if heads % kv_heads or head_dim % 2:
        raise CheckpointError(
            f"{path}: {heads} query heads for {kv_heads} key-value heads of size {head_dim} are impossible",
            why="there must be a whole number of query heads for each key-value head, and an even head size",
        )
    attention_bias = bool(values.get("attention_bias", False))
    return ModelSpec(
        family=family,
        vocab_size=size("vocab_size"),
        hidden_size=hidden,
        num_layers=size("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=size("intermediate_size"),
        rms_eps=positive_number(values, "rms_norm_eps", path),
        rope=_rope(values, path),
        max_context=size("max_position_embeddings"),
        tied=bool(values.get("tie_word_embeddings", False)),
        # Qwen2 has biases on q, k and v whatever its config says, and none on o.
        qkv_bias=family == "qwen2" or attention_bias,
        o_bias=family != "qwen2" and attention_bias,
        mlp_bias=family == "llama" and bool(values.get("mlp_bias", False)),
        qk_norm=family == "qwen3",
    )


def _family(config: Mapping[str, Any], path: Path) -> str:
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise CheckpointError(f"{path}: architectures must be a list of names, not {architectures!r}")
    name = architectures[0] if architectures else f"(none; model_type {config.get('model_type')!r})"
    if len(architectures) == 1 and name in ARCHITECTURES:
        return ARCHITECTURES[name]
    if "Moe" in name or any(config.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts")):
        raise CheckpointError(f"{path}: {name} is a mixture of experts", why=f"xgr computes dense models: {_SUPPORTED}")
    raise CheckpointError(
        f"{path}: the architecture {name} is not supported",
        why=f"xgr computes {_SUPPORTED}",
        hint="convert a checkpoint of one of these",
    )


def _refuse_quantised_and_experts(config: Mapping[str, Any], path: Path) -> None:
    if quantised := config.get("quantization_config"):
        method = quantised.get("quant_method", "?") if isinstance(quantised, Mapping) else "?"
        raise CheckpointError(
            f"{path}: the checkpoint is quantised ({method})",
            why="xgr reads float32, bfloat16 and float16 weights",
            hint="convert the unquantised checkpoint, or dequantise it first",
        )
    if any(config.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts")):
        raise CheckpointError(f"{path}: the model has experts", why=f"xgr computes dense models: {_SUPPORTED}")


def _refuse_features(config: Mapping[str, Any], family: str, path: Path) -> None:
    layer_types = config.get("layer_types")
    if layer_types is not None and not isinstance(layer_types, list):
        raise CheckpointError(f"{path}: layer_types must be a list of names, not {layer_types!r}")
    if _slides(config):
        raise CheckpointError(
            f"{path}: layers of this model attend to a sliding window of {config.get('sliding_window')} tokens",
            why="xgr shares the whole prompt between beams and computes full attention only",
        )
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise CheckpointError(f"{path}: hidden_act {activation} is not supported", why="xgr computes silu (SwiGLU)")
    if family == "qwen2" and config.get("attention_bias") is False:
        raise CheckpointError(f"{path}: attention_bias is false", why="Qwen2 has biases on q, k and v by definition")


def _slides(config: Mapping[str, Any]) -> bool:
    """Whether any layer really uses a window; Qwen configs carry the number even where it is off."""
    if "sliding_attention" in (config.get("layer_types") or []):
        return True
    if config.get("layer_types"):
        return False
    return bool(
        config.get("use_sliding_window")
        and config.get("sliding_window", 4096)
        and config.get("max_window_layers", 28) < config.get("num_hidden_layers", 0)
    )


def _rope_kind(scaling: Mapping[str, Any]) -> Any:
    return scaling.get("rope_type", scaling.get("type", "default"))


def _rope(values: Mapping[str, Any], path: Path) -> RopeSpec:
    """transformers 5 has ``rope_parameters``; 4 has ``rope_theta`` and ``rope_scaling`` (``type`` when old)."""
    old, new = values.get("rope_scaling") or {}, values.get("rope_parameters") or {}
    for name, entry in (("rope_scaling", old), ("rope_parameters", new)):
        if not isinstance(entry, Mapping):
            raise CheckpointError(f"{path}: {name} must be an object, not {entry!r}")
    kind = _rope_kind(new or old)
    if old and new and _rope_kind(old) != kind:
        # transformers 5 would obey rope_scaling, other readers of the file rope_parameters.
        raise CheckpointError(
            f"{path}: rope_scaling says {_rope_kind(old)!r}, rope_parameters says {kind!r}",
            hint="leave the one that the model was trained with",
        )
    scaling = {**old, **new}
    theta = positive_number({"rope_theta": values["rope_theta"], **scaling}, "rope_theta", path)
    if scaling.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0)) != 1.0:
        raise CheckpointError(f"{path}: rotary embedding over a part of the head is not supported")
    if kind == "default":
        return RopeSpec(theta)
    if kind != "llama3":
        raise CheckpointError(
            f"{path}: rotary scaling {kind!r} is not supported",
            why="xgr computes the plain rotary embedding and Llama 3's scaling",
            hint="remove the scaling if the model was trained without it (it serves contexts longer than trained)",
        )
    try:
        return RopeSpec(
            theta,
            kind="llama3",
            factor=positive_number(scaling, "factor", path),
            low_freq_factor=positive_number(scaling, "low_freq_factor", path),
            high_freq_factor=positive_number(scaling, "high_freq_factor", path),
            original_max_position=int(positive_number(scaling, "original_max_position_embeddings", path)),
        )
    except KeyError as error:
        raise CheckpointError(f"{path}: llama3 rotary scaling lacks {error}") from error
