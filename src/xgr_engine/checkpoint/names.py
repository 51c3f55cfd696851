"""Two-way maps between the tensor names of a foreign checkpoint and those of an xgr model directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class NameMap:
    """Foreign names <-> xgr names, declared once; ``{i}`` stands for a layer's number on both sides.

    Attributes:
        pairs: foreign name -> xgr name.
        ignored: foreign names that are known and hold nothing of their own (tables that are computed).
    """

    pairs: Mapping[str, str]
    ignored: Sequence[str] = ()

    @cached_property
    def _back(self) -> dict[str, str]:
        return {ours: foreign for foreign, ours in self.pairs.items()}

    def to_xgr(self, foreign: str) -> str | None:
        """Our name of a foreign tensor; None if the map does not know it."""
        return _look_up(self.pairs, foreign)

    def to_foreign(self, ours: str) -> str | None:
        """The foreign name of one of our tensors; None if the map does not know it."""
        return _look_up(self._back, ours)

    def ignores(self, foreign: str) -> bool:
        return _generic(foreign)[0] in self.ignored


def _look_up(names: Mapping[str, str], name: str) -> str | None:
    generic, number = _generic(name)
    found = names.get(generic)
    return None if found is None else found.replace("{i}", number)


def _generic(name: str) -> tuple[str, str]:
    """``layers.12.norm`` -> (``layers.{i}.norm``, ``12``). Only the first number is the layer's."""
    words = name.split(".")
    for at, word in enumerate(words):
        if word.isdecimal() and str(int(word)) == word:
            return ".".join([*words[:at], "{i}", *words[at + 1 :]]), word
    return name, ""


# Qwen2, Qwen3 and Llama of transformers use the same names; which of them a model has is a matter of its config.
HF_DECODER = NameMap(
    pairs={
        "model.embed_tokens.weight": "embed.weight",
        "model.norm.weight": "norm.weight",
        "lm_head.weight": "head.weight",
        "model.layers.{i}.input_layernorm.weight": "layers.{i}.attn_norm.weight",
        "model.layers.{i}.post_attention_layernorm.weight": "layers.{i}.mlp_norm.weight",
        "model.layers.{i}.self_attn.q_norm.weight": "layers.{i}.attn.q_norm.weight",
        "model.layers.{i}.self_attn.k_norm.weight": "layers.{i}.attn.k_norm.weight",
        **{
            f"model.layers.{{i}}.{block}.{name}_proj.{kind}": f"layers.{{i}}.{ours}.{name}.{kind}"
            for block, ours, names in (("self_attn", "attn", "qkvo"), ("mlp", "mlp", ("gate", "up", "down")))
            for name in names
            for kind in ("weight", "bias")
        },
    },
    ignored=(
        "model.rotary_emb.inv_freq",
        "model.layers.{i}.self_attn.rotary_emb.inv_freq",
        "model.layers.{i}.self_attn.rotary_emb.cos_cached",
        "model.layers.{i}.self_attn.rotary_emb.sin_cached",
    ),
)
