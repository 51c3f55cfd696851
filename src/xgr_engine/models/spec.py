"""What a model is, as numbers: the part of ``xgr.json`` that the forward pass needs. No torch in here."""

from __future__ import annotations

from dataclasses import dataclass

FAMILIES = ("qwen2", "qwen3", "llama")


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
