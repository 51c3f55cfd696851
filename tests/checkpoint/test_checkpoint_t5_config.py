"""config.json of a T5: what xgr takes from it, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from t5_support import CONFIG

from xgr_engine.checkpoint.hf_config import parse_hf_config
from xgr_engine.errors import CheckpointError
from xgr_engine.models.spec import EncoderDecoderSpec


def spec_of(**changes: Any) -> EncoderDecoderSpec:
    config = {key: value for key, value in {**CONFIG, **changes}.items() if value is not None}
    spec = parse_hf_config(config, Path("config.json")).spec
    assert isinstance(spec, EncoderDecoderSpec)
    return spec


def test_spec_says_what_the_config_says() -> None:
    assert spec_of(n_positions=512, decoder_start_token_id=3, feed_forward_proj="gated-gelu") == EncoderDecoderSpec(
        family="t5",
        vocab_size=32,
        hidden_size=16,
        num_layers=3,
        num_encoder_layers=2,
        num_heads=4,
        head_dim=6,
        intermediate_size=20,
        rms_eps=1e-6,
        num_buckets=8,
        max_distance=20,
        gated=True,
        start_token=3,
        max_context=512,
        tied=True,
        scaled_output=True,
    )


def test_what_a_config_leaves_out_is_transformers_default() -> None:
    left_out = ["num_decoder_layers", "relative_attention_num_buckets", "relative_attention_max_distance"]
    left_out += ["layer_norm_epsilon", "feed_forward_proj", "decoder_start_token_id", "pad_token_id"]
    spec = spec_of(**dict.fromkeys(left_out))
    assert (spec.num_layers, spec.num_buckets, spec.max_distance, spec.rms_eps) == (2, 32, 128, 1e-6)
    assert (spec.gated, spec.start_token, spec.max_context) == (False, 0, 2048)
    assert spec_of(decoder_start_token_id=None, pad_token_id=5).start_token == 5


@pytest.mark.parametrize(
    ("changes", "tied", "scaled"),
    [
        ({}, True, True),
        ({"tie_word_embeddings": True}, True, True),
        ({"tie_word_embeddings": False}, False, False),
        ({"tie_word_embeddings": True, "scale_decoder_outputs": False}, True, False),
        ({"tie_word_embeddings": True, "scale_decoder_outputs": True}, True, True),
        ({"scale_decoder_outputs": False}, True, False),
    ],
)
def test_tie_and_scale_of_both_transformers_generations(changes: dict[str, Any], tied: bool, scaled: bool) -> None:
    spec = spec_of(**changes)
    assert (spec.tied, spec.scaled_output) == (tied, scaled)


def test_class_name_of_letter() -> None:
    assert spec_of(architectures=["LETTER"]).family == "t5"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"feed_forward_proj": "gated-silu"}, "feed_forward_proj gated-silu is not supported"),
        ({"feed_forward_proj": "gelu"}, "feed_forward_proj gelu is not supported"),
        ({"d_kv": None}, "d_kv must be a positive integer"),
        ({"num_heads": 0}, "num_heads must be a positive integer"),
        ({"num_decoder_layers": -1}, "num_decoder_layers must be a positive integer"),
        ({"n_positions": "512"}, "n_positions must be a positive integer"),
        ({"layer_norm_epsilon": 0}, "layer_norm_epsilon must be a positive number"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false"),
        ({"scale_decoder_outputs": 1}, "scale_decoder_outputs must be true or false"),
        ({"decoder_start_token_id": 32}, "decoder_start_token_id must be a token of the model, 0 to 31, not 32"),
        ({"decoder_start_token_id": None, "pad_token_id": -1}, "pad_token_id must be a token of the model"),
        ({"relative_attention_num_buckets": 2}, "2 relative_attention_num_buckets"),
        ({"relative_attention_max_distance": 4}, "relative_attention_max_distance of 4 are impossible"),
        ({"architectures": ["T5EncoderModel"]}, "T5EncoderModel is not supported"),
        ({"architectures": ["UMT5ForConditionalGeneration"]}, "UMT5ForConditionalGeneration is not supported"),
        ({"architectures": None}, "model_type 't5'. is not supported"),
        ({"num_experts": 8}, "has experts"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised .awq"),
    ],
)
def test_what_xgr_does_not_compute(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        spec_of(**changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": 5}, "architectures must be a list of names, not 5"),
        ({"architectures": "T5ForConditionalGeneration"}, "architectures must be a list of names"),
        ({"architectures": [1, 2]}, "architectures must be a list of names"),
        ({"architectures": [["T5ForConditionalGeneration"]]}, "architectures must be a list of names"),
        ({"quantization_config": "awq"}, "quantised .[?]"),
        ({"quantization_config": [1]}, "quantised .[?]"),
        ({"feed_forward_proj": ["relu"]}, "feed_forward_proj .* is not supported"),
        ({"feed_forward_proj": {}}, "feed_forward_proj .* is not supported"),
        # transformers computes what dense_act_fn and is_gated_act say, not what follows from feed_forward_proj
        ({"dense_act_fn": "silu"}, "dense_act_fn silu contradicts feed_forward_proj relu, which means relu"),
        ({"feed_forward_proj": "gated-gelu", "dense_act_fn": "gelu"}, "dense_act_fn gelu .* which means gelu_new"),
        ({"feed_forward_proj": "gated-gelu", "is_gated_act": False}, "is_gated_act False .* which means True"),
        ({"feed_forward_proj": None, "is_gated_act": True}, "is_gated_act True contradicts feed_forward_proj"),
        ({"dense_act_fn": ["relu"]}, "dense_act_fn .* contradicts feed_forward_proj"),
    ],
)
def test_values_of_no_sensible_type_and_contradictions(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        spec_of(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"dense_act_fn": "relu", "is_gated_act": False},
        {"feed_forward_proj": "gated-gelu", "dense_act_fn": "gelu_new", "is_gated_act": True},
    ],
)
def test_activation_as_transformers_saves_it_beside_its_source(changes: dict[str, Any]) -> None:
    assert spec_of(**changes).gated is changes["is_gated_act"]


@pytest.mark.parametrize(("named", "end"), [(1, 1), ([1], 1), ([1, 3], None), (True, None), ("1", None), (None, None)])
def test_end_token_of_the_config(named: object, end: int | None) -> None:
    assert parse_hf_config({**CONFIG, "eos_token_id": named}, Path("config.json")).eos_token_id is end
