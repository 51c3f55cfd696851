"""``config.json`` of a T5 of transformers 4 or 5, which is what most TIGER code trains -> EncoderDecoderSpec."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xgr_engine.checkpoint.config_fields import positive_integer, positive_number
from xgr_engine.errors import CheckpointError
from xgr_engine.models.spec import EncoderDecoderSpec

# Defaults of transformers' T5Config, for keys that a file may leave out.
_DEFAULTS = {
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "layer_norm_epsilon": 1e-6,
    "feed_forward_proj": "relu",
    "pad_token_id": 0,
}
_GATED = {"relu": False, "gated-gelu": True}  # feed_forward_proj -> whether there is a gate
_ACTIVATION = {"relu": "relu", "gated-gelu": "gelu_new"}  # feed_forward_proj -> dense_act_fn
# T5's positions are relative and have no end. What a batch may take needs one.
_UNBOUNDED_CONTEXT = 2048


def parse_t5_spec(config: Mapping[str, Any], path: Path) -> EncoderDecoderSpec:
    """Sizes and switches of a T5.

    Args:
        path: of the file, for messages.

    Raises:
        CheckpointError: a feature that xgr does not compute, or a missing or impossible value.
    """
    values = {**_DEFAULTS, **{key: value for key, value in config.items() if value is not None}}

    def size(key: str) -> int:
        return positive_integer(values, key, path)

    # transformers 5 ties always and says apart from that whether the output is scaled; 4 had one flag for both.
    tied = _flag(values, "tie_word_embeddings", True, path)
    buckets, max_distance = size("relative_attention_num_buckets"), size("relative_attention_max_distance")
    _check_buckets(buckets, max_distance, path)
    vocab_size = size("vocab_size")
    layers = size("num_layers")
    return EncoderDecoderSpec(
        family="t5",
        vocab_size=vocab_size,
        hidden_size=size("d_model"),
        num_layers=size("num_decoder_layers") if "num_decoder_layers" in values else layers,
        num_encoder_layers=layers,
        num_heads=size("num_heads"),
        head_dim=size("d_kv"),
        intermediate_size=size("d_ff"),
        rms_eps=positive_number(values, "layer_norm_epsilon", path),
        num_buckets=buckets,
        max_distance=max_distance,
        gated=_gated(values, path),
        start_token=_start_token(values, vocab_size, path),
        max_context=size("n_positions") if "n_positions" in values else _UNBOUNDED_CONTEXT,
        tied=tied,
        scaled_output=_flag(values, "scale_decoder_outputs", tied, path),
    )


def _gated(values: Mapping[str, Any], path: Path) -> bool:
    feed_forward = values["feed_forward_proj"]
    if not isinstance(feed_forward, str) or feed_forward not in _GATED:
        raise CheckpointError(
            f"{path}: feed_forward_proj {feed_forward} is not supported",
            why=f"xgr computes {' and '.join(_GATED)}, T5's own and that of version 1.1",
        )
    # transformers also saves these two, and obeys them where they contradict feed_forward_proj.
    for key, implied in (("dense_act_fn", _ACTIVATION[feed_forward]), ("is_gated_act", _GATED[feed_forward])):
        if (said := values.get(key, implied)) != implied:
            raise CheckpointError(
                f"{path}: {key} {said} contradicts feed_forward_proj {feed_forward}, which means {implied}",
                why="transformers would compute the one, other readers of the file the other",
                hint=f"remove {key}, or correct feed_forward_proj, so that they say what the model was trained with",
            )
    return _GATED[feed_forward]


def _flag(values: Mapping[str, Any], key: str, default: bool, path: Path) -> bool:
    value = values.get(key, default)
    if not isinstance(value, bool):
        raise CheckpointError(f"{path}: {key} must be true or false, not {value!r}")
    return value


def _start_token(values: Mapping[str, Any], vocab_size: int, path: Path) -> int:
    """What the decoder reads first: ``decoder_start_token_id``, else the padding token."""
    key = "decoder_start_token_id" if "decoder_start_token_id" in values else "pad_token_id"
    token = values[key]
    if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
        raise CheckpointError(
            f"{path}: {key} must be a token of the model, 0 to {vocab_size - 1}, not {token!r}",
            why="the decoder reads it before the first code",
        )
    return token


def _check_buckets(buckets: int, max_distance: int, path: Path) -> None:
    """The encoder halves the buckets (one half a direction) and both stacks halve them again (near and far)."""
    if buckets < 4 or max_distance <= buckets // 2:
        raise CheckpointError(
            f"{path}: {buckets} relative_attention_num_buckets up to a relative_attention_max_distance of "
            f"{max_distance} are impossible",
            why="there must be at least 4 buckets, and the distance must be greater than half their number",
        )
