"""Two-way maps between the tensor names of a foreign checkpoint and those of an xgr model directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from xgr_engine.models.spec import AnySpec, EncoderDecoderSpec


@dataclass(frozen=True)
class NameMap:
    """Foreign names <-> xgr names, declared once; ``{i}`` stands for a layer's number on both sides.

    Attributes:
        pairs: foreign name -> xgr name. A name that spells out a number takes precedence over one with ``{i}``.
        ignored: foreign names that are known and hold no weights (tables that are computed).
        copies: other foreign names of a tensor -> its name in ``pairs``. A file may hold any one of them, or several
            with equal contents.
    """

    pairs: Mapping[str, str]
    ignored: Sequence[str] = ()
    copies: Mapping[str, str] = field(default_factory=dict)

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
        return foreign in self.ignored or _generic(foreign)[0] in self.ignored


def _look_up(names: Mapping[str, str], name: str) -> str | None:
    if name in names and "{i}" not in name:
        return names[name]
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

# T5 of transformers, where each block of a layer has a number of its own. Both stacks read one embedding; the bias by
# distance belongs to a whole stack and stands in its first layer.
_T5_BLOCKS = {
    "encoder": (("0", "SelfAttention", "attn"), ("1", "DenseReluDense", "mlp")),
    "decoder": (("0", "SelfAttention", "attn"), ("1", "EncDecAttention", "cross"), ("2", "DenseReluDense", "mlp")),
}
_T5_ATTENTION = {"q": "q", "k": "k", "v": "v", "o": "o"}
# The up projection is called wi without a gate; with one, the two are wi_0 and wi_1.
_T5_PLAIN = {"wi": "up", "wo": "down"}
_T5_GATED = {"wi_0": "gate", "wi_1": "up", "wo": "down"}


def _t5(feed_forward: Mapping[str, str]) -> NameMap:
    pairs = {"shared.weight": "embed.weight", "lm_head.weight": "head.weight"}
    for stack, blocks in _T5_BLOCKS.items():
        bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        pairs |= {bias: f"{stack}.bias.weight", f"{stack}.final_layer_norm.weight": f"{stack}.norm.weight"}
        for number, block, ours in blocks:
            theirs, own = f"{stack}.block.{{i}}.layer.{number}", f"{stack}.layers.{{i}}.{ours}"
            pairs[f"{theirs}.layer_norm.weight"] = f"{own}_norm.weight"
            linears = feed_forward if ours == "mlp" else _T5_ATTENTION
            pairs |= {f"{theirs}.{block}.{name}.weight": f"{own}.{to}.weight" for name, to in linears.items()}
    return NameMap(
        pairs,
        # Old files hold it, and no version of transformers has ever used it.
        ignored=("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),
        copies={f"{stack}.embed_tokens.weight": "shared.weight" for stack in _T5_BLOCKS},
    )


HF_T5 = _t5(_T5_PLAIN)
HF_T5_GATED = _t5(_T5_GATED)


def names_of(spec: AnySpec) -> NameMap:
    """How transformers names the tensors of a model."""
    if isinstance(spec, EncoderDecoderSpec):
        return HF_T5_GATED if spec.gated else HF_T5
    return HF_DECODER
