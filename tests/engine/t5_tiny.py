"""Tiny random T5s as the engine and as the oracle see them, and the fixture's TIGER under the engine's names."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from oracle import beam_search
from safetensors.torch import load_file, save_file
from t5_oracle import AnswersTo, NaiveT5, random_t5_weights
from tiny import DEVICE, TINY, TOKENS, TinyCatalog, save_weights, token_table
from torch import Tensor

from xgr_engine.models.loading import load_model
from xgr_engine.models.ops import Ops
from xgr_engine.models.spec import EncoderDecoderSpec
from xgr_engine.options import SearchOptions
from xgr_engine.recommender import Recommender

# Few buckets and a short max_distance: an answer's tokens meet single distances and the shared last bucket alike.
TINY_T5 = EncoderDecoderSpec(
    family="t5",
    vocab_size=TINY.vocab_size,
    hidden_size=24,
    num_layers=3,
    num_encoder_layers=2,
    num_heads=3,
    head_dim=16,
    intermediate_size=20,
    rms_eps=1e-6,
    num_buckets=8,
    max_distance=20,
    gated=False,
    start_token=0,
    max_context=64,
    tied=True,
    scaled_output=True,
)
GATED_T5 = replace(TINY_T5, gated=True, tied=False, scaled_output=False, start_token=3, num_layers=2)


class TinyT5:
    """One random model, ready for the engine (on the GPU where there is one) and the oracle (on the CPU)."""

    def __init__(
        self,
        folder: Path,
        spec: EncoderDecoderSpec = TINY_T5,
        seed: int = 0,
        ops: Ops | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        weights = random_t5_weights(spec, seed)
        self.spec = spec
        self.naive = NaiveT5(spec, weights)
        path = save_weights(weights, folder / f"t5-{seed}.safetensors")
        self.model, self.head = load_model(spec, path, DEVICE, dtype, ops)

    def recommender(self, catalog: TinyCatalog, options: SearchOptions, **more: object) -> Recommender:
        return Recommender(self.model, self.head, catalog.trie, token_table(), options, **more)  # type: ignore[arg-type]

    def expected(self, prompt: list[int], catalog: TinyCatalog, **how: object):
        """:func:`oracle.beam_search` for a prompt."""
        answers: AnswersTo = self.naive.of(tuple(prompt))
        return beam_search(answers, tuple(prompt), catalog.catalog, TOKENS, **how)  # type: ignore[arg-type]


def engine_name(name: str) -> str | None:
    """A transformers T5's tensor name as the engine spells it; None: it repeats another."""
    if name == "shared.weight":
        return "embed.weight"
    if name.endswith("embed_tokens.weight"):
        return None
    stack, *rest = name.split(".")
    if "relative_attention_bias" in rest:
        return f"{stack}.bias.weight"
    if stack == "lm_head":
        return "head.weight"
    if rest[0] == "final_layer_norm":
        return f"{stack}.norm.weight"
    _, layer, _, place, block, *last = rest
    kind = ("attn", "mlp") if stack == "encoder" else ("attn", "cross", "mlp")
    at = f"{stack}.layers.{layer}.{kind[int(place)]}"
    if block == "layer_norm":
        return f"{at}_norm.weight"
    linear = {"wi": "up", "wi_0": "gate", "wi_1": "up", "wo": "down"}.get(last[0], last[0])
    return f"{at}.{linear}.weight"


def renamed(weights: dict[str, Tensor], tied: bool) -> dict[str, Tensor]:
    named = {engine_name(name): tensor.clone() for name, tensor in weights.items()}
    return {name: tensor for name, tensor in named.items() if name and not (tied and name == "head.weight")}


def load_tiger(folder: Path, to: Path, dtype: torch.dtype | None = None):
    """The fixture's TIGER: spec, model, head."""
    config = json.loads((folder / "config.json").read_text())
    spec = EncoderDecoderSpec(
        family="t5",
        vocab_size=config["vocab_size"],
        hidden_size=config["d_model"],
        num_layers=config["num_decoder_layers"],
        num_encoder_layers=config["num_layers"],
        num_heads=config["num_heads"],
        head_dim=config["d_kv"],
        intermediate_size=config["d_ff"],
        rms_eps=config["layer_norm_epsilon"],
        num_buckets=config["relative_attention_num_buckets"],
        max_distance=config["relative_attention_max_distance"],
        gated=False,
        start_token=config["decoder_start_token_id"],
        max_context=2048,
        tied=True,
        scaled_output=config["scale_decoder_outputs"],
    )
    weights = renamed(load_file(folder / "model.safetensors"), tied=True)
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == spec.tensor_shapes()
    path = to / "tiger.safetensors"
    save_file(weights, path)
    return spec, *load_model(spec, path, DEVICE, dtype)
