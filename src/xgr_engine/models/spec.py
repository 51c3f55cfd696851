"""A model's sizes and switches: the part of ``xgr.json`` that the forward pass needs. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, get_type_hints

from xgr_engine.options import is_of

DECODER_ONLY_FAMILIES = ("qwen2", "qwen3", "llama")
ENCODER_DECODER_FAMILIES = ("t5",)
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
DTYPES = tuple(DTYPE_BYTES)


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding.

    ``kind`` is ``default`` or ``llama3``; the last four fields hold Llama 3's frequency scaling and are unused for
    ``default``.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position: int = 0


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer: pre-norm, RMSNorm, rotary, grouped-query attention, SwiGLU.

    Tensors of ``model.safetensors`` (all in ``dtype``; [out, in] as torch.nn.Linear has them):
    ``embed.weight`` [V, H]; ``head.weight`` [V, H], absent when ``tied``; ``norm.weight`` [H]; and for each layer i
    ``layers.{i}.attn_norm.weight``, ``layers.{i}.attn.{q,k,v,o}.weight`` (``.bias`` for q, k, v when ``qkv_bias``, for
    o when ``o_bias``), ``layers.{i}.attn.{q_norm,k_norm}.weight`` [head_dim] when ``qk_norm``,
    ``layers.{i}.mlp_norm.weight``, ``layers.{i}.mlp.{gate,up,down}.weight`` (``.bias`` when ``mlp_bias``).
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_eps: float
    rope: RopeSpec
    max_context: int
    tied: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    dtype: str = "bfloat16"

    @property
    def group(self) -> int:
        """Query heads per key-value head (G)."""
        return self.num_heads // self.num_kv_heads

    @property
    def extra_slots(self) -> int:
        """Slots per user besides those of the answer's tokens: none."""
        return 0

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of ``model.safetensors`` and its shape, in the order of the forward pass."""
        hidden, inner = self.hidden_size, self.intermediate_size
        query, key = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        linears = {
            "attn.q": (query, hidden, self.qkv_bias),
            "attn.k": (key, hidden, self.qkv_bias),
            "attn.v": (key, hidden, self.qkv_bias),
            "attn.o": (hidden, query, self.o_bias),
            "mlp.gate": (inner, hidden, self.mlp_bias),
            "mlp.up": (inner, hidden, self.mlp_bias),
            "mlp.down": (hidden, inner, self.mlp_bias),
        }
        norms = {"attn_norm": hidden, "mlp_norm": hidden}
        if self.qk_norm:
            norms |= {"attn.q_norm": self.head_dim, "attn.k_norm": self.head_dim}
        shapes: dict[str, tuple[int, ...]] = {"embed.weight": (self.vocab_size, hidden)}
        for layer in range(self.num_layers):
            at = f"layers.{layer}."
            shapes |= {f"{at}{name}.weight": (size,) for name, size in norms.items()}
            for name, (out, into, bias) in linears.items():
                shapes[f"{at}{name}.weight"] = (out, into)
                if bias:
                    shapes[f"{at}{name}.bias"] = (out,)
        shapes["norm.weight"] = (hidden,)
        if not self.tied:
            shapes["head.weight"] = (self.vocab_size, hidden)
        return shapes

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ModelSpec:
        """Inverse of :meth:`to_json`.

        Raises:
            ValueError: an unknown or missing key, a value of another type, or a family or dtype that this version does
                not know.
        """
        values = {**value, "rope": RopeSpec(**_checked(RopeSpec, value.get("rope"), "rope"))}
        spec = cls(**_checked(cls, values, "model"))
        _check_names(spec, DECODER_ONLY_FAMILIES, DTYPES)
        return spec


@dataclass(frozen=True)
class EncoderDecoderSpec:
    """A T5: an encoder that reads the history, and a decoder that attends to it and writes the semantic ID.

    RMSNorm before every block, no biases on matrix products, attention scores not scaled. Positions enter as a bias on
    the scores that depends on the distance alone (``num_buckets`` values up to ``max_distance``) and is shared by all
    layers of a stack.

    Tensors of ``model.safetensors`` ([out, in] as torch.nn.Linear has them): ``embed.weight`` [V, H]; ``head.weight``
    [V, H], absent when ``tied``; for both stacks ``{encoder,decoder}.bias.weight`` [buckets, heads] and
    ``{encoder,decoder}.norm.weight`` [H]; for each layer i of a stack ``.layers.{i}.attn_norm.weight``,
    ``.layers.{i}.attn.{q,k,v,o}.weight``, in the decoder ``.layers.{i}.cross_norm.weight`` and
    ``.layers.{i}.cross.{q,k,v,o}.weight``, then ``.layers.{i}.mlp_norm.weight``, ``.layers.{i}.mlp.{up,down}.weight``
    and, when ``gated``, ``.layers.{i}.mlp.gate.weight``.

    Attributes:
        num_layers: layers of the decoder, whose keys and values the cache holds.
        gated: ``gelu(gate x) * up x`` (tanh approximation) instead of ``relu(up x)``.
        start_token: what the decoder reads before the first code.
        max_context: most tokens of prompt and answer together. Relative positions have no end; this bounds memory.
        scaled_output: the decoder's output is multiplied by ``hidden_size ** -0.5`` before the head.
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_encoder_layers: int
    num_heads: int
    head_dim: int
    intermediate_size: int
    rms_eps: float
    num_buckets: int
    max_distance: int
    gated: bool
    start_token: int
    max_context: int
    tied: bool
    scaled_output: bool
    dtype: str = "float32"

    @property
    def num_kv_heads(self) -> int:
        """Every query head has keys of its own."""
        return self.num_heads

    @property
    def group(self) -> int:
        """Query heads per key-value head (G)."""
        return 1

    @property
    def extra_slots(self) -> int:
        """Slots per user besides those of the answer's tokens: one, for the start token."""
        return 1

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of ``model.safetensors`` and its shape, in the order of the forward pass."""
        hidden, heads = self.hidden_size, self.num_heads * self.head_dim
        attention = {"q": (heads, hidden), "k": (heads, hidden), "v": (heads, hidden), "o": (hidden, heads)}
        feed_forward = {"gate": (self.intermediate_size, hidden)} if self.gated else {}
        feed_forward |= {"up": (self.intermediate_size, hidden), "down": (hidden, self.intermediate_size)}
        shapes: dict[str, tuple[int, ...]] = {"embed.weight": (self.vocab_size, hidden)}
        for stack, layers in (("encoder", self.num_encoder_layers), ("decoder", self.num_layers)):
            blocks = {"attn": attention} | ({"cross": attention} if stack == "decoder" else {}) | {"mlp": feed_forward}
            shapes[f"{stack}.bias.weight"] = (self.num_buckets, self.num_heads)
            for layer in range(layers):
                for block, linears in blocks.items():
                    at = f"{stack}.layers.{layer}.{block}"
                    shapes[f"{at}_norm.weight"] = (hidden,)
                    shapes |= {f"{at}.{name}.weight": shape for name, shape in linears.items()}
            shapes[f"{stack}.norm.weight"] = (hidden,)
        if not self.tied:
            shapes["head.weight"] = (self.vocab_size, hidden)
        return shapes

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> EncoderDecoderSpec:
        """Inverse of :meth:`to_json`. Raises as :meth:`ModelSpec.from_json`."""
        spec = cls(**_checked(cls, value, "model"))
        _check_names(spec, ENCODER_DECODER_FAMILIES, tuple(name for name in DTYPES if name != "float16"))
        return spec


AnySpec = ModelSpec | EncoderDecoderSpec


def spec_from_json(value: Mapping[str, Any]) -> AnySpec:
    """The spec that ``to_json`` of either kind wrote.

    Raises:
        ValueError: as :meth:`ModelSpec.from_json`.
    """
    kind = EncoderDecoderSpec if value.get("family") in ENCODER_DECODER_FAMILIES else ModelSpec
    return kind.from_json(value)


def _check_names(spec: AnySpec, families: tuple[str, ...], dtypes: tuple[str, ...]) -> None:
    if spec.family not in families:
        known = ", ".join(DECODER_ONLY_FAMILIES + ENCODER_DECODER_FAMILIES)
        raise ValueError(f"model: family {spec.family!r} is not one of {known}")
    if spec.dtype not in dtypes:
        raise ValueError(f"model: dtype {spec.dtype!r} is not one of {', '.join(dtypes)}")


def _checked(kind: type[AnySpec] | type[RopeSpec], value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: must be an object")
    known = {field.name for field in fields(kind)}
    if wrong := sorted(known ^ set(value)):
        raise ValueError(f"{where}: unknown or missing {', '.join(wrong)}")
    if wrong := [name for name, declared in get_type_hints(kind).items() if not is_of(value[name], declared)]:
        raise ValueError(f"{where}: wrong type of {', '.join(wrong)}")
    return dict(value)
