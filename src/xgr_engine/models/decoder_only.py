"""Qwen2, Qwen3 and Llama: one decoder-only forward pass in two shapes, a packed prefill and a decode of beam rows.

A user's prompt is computed once, whatever the beam width; tokens that all prompts of a batch begin with are computed
once per batch. Ragged prompts are packed, so no padding is computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from xgr_engine.kernels.linear import linear
from xgr_engine.models.model import allocate_cache
from xgr_engine.models.ops import Ops
from xgr_engine.models.packing import PackedPrompts
from xgr_engine.models.rotary import RotaryTable
from xgr_engine.models.rows import Rows
from xgr_engine.models.spec import ModelSpec
from xgr_engine.xattention.cache import KVCache

# Rows that go through the row-wise steps together. On a GPU this only bounds memory: blocks that fit its cache (2048
# rows) cost more in launches than they save, 39.5 ms against 37.3 for 8 x 1000 tokens of Qwen3-1.7B on an H200.
GPU_ROWS, CPU_ROWS = 16384, 256


@dataclass(frozen=True)
class LayerWeights:
    """One layer, [out, in] as torch.nn.Linear has them; q, k, v are stacked to one matmul, and so are gate and up."""

    attn_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


class DecoderOnly:
    """A decoder-only transformer over a :class:`KVCache`.

    Args:
        spec: sizes and switches.
        embed: [V, H]; norm: [H]; layers: one :class:`LayerWeights` each.
        ops: the kernels to run on.
    """

    causal = True  # see :class:`xgr_engine.models.model.Model`

    def __init__(self, spec: ModelSpec, embed: Tensor, norm: Tensor, layers: list[LayerWeights], ops: Ops) -> None:
        self.spec = spec
        self.embed = embed
        self.norm = norm
        self.layers = layers
        self.ops = ops
        self.device = embed.device
        self.dtype = embed.dtype
        self.scale = float(spec.head_dim) ** -0.5
        self._row_block = GPU_ROWS if embed.is_cuda else CPU_ROWS
        self._rotary = RotaryTable(spec.rope, spec.head_dim, spec.max_context, embed.device)

    def new_cache(self, tokens: int, users: int, slots: int) -> KVCache:
        """A cache for this model; see :meth:`KVCache.allocate`."""
        return allocate_cache(self.spec, tokens, users, slots, self.embed)

    def prefill(self, pack: PackedPrompts, cache: KVCache) -> Tensor:
        """Compute every prompt of a batch once, and put its keys and values into the cache.

        Returns:
            [U, H] the hidden state of each prompt's last token, after the final norm.
        """
        cache.begin(pack.lengths, pack.prefix)
        with self.ops.prefill_scope():
            return self.fill(pack, cache)

    def fill(self, pack: PackedPrompts, cache: KVCache) -> Tensor:
        """:meth:`prefill` without ``cache.begin``. It never waits for the device, so a CUDA graph can hold it."""
        residual = F.embedding(pack.tokens, self.embed)
        delta: Tensor | None = None
        for index, layer in enumerate(self.layers):
            keys, values = cache.prompt_k[index], cache.prompt_v[index]
            q = self._attention_input(layer, residual, delta, pack.positions, keys, values, pack.cache_rows)
            if pack.prefix:
                for stored in (keys, values):
                    stored[pack.prefix_rows] = stored[: pack.prefix].clone()
            if index + 1 == len(self.layers):  # apart from keys and values, only each prompt's last token matters now
                residual = residual[pack.last]
                mixed = self._last_token_attention(q[pack.last], cache, index)
            else:
                mixed = self.ops.prompt_attention(q, keys, values, pack.sequences, self.scale)
            delta = self._feed_forward(layer, residual, mixed)
        return self.ops.add_rms_norm(residual, delta, self.norm, self.spec.rms_eps)

    def decode(self, rows: Rows, cache: KVCache) -> Tensor:
        """Feed one generated token per row, and put its key and value into the cache.

        Returns:
            [N, H] the hidden states after the final norm, in the order of ``rows``.
        """
        residual = F.embedding(rows.tokens, self.embed)
        users = len(rows.ancestors)
        delta: Tensor | None = None
        for index, layer in enumerate(self.layers):
            gen_k, gen_v = cache.generated(index, users)
            own_k, own_v = gen_k.flatten(0, 1), gen_v.flatten(0, 1)
            q = self._attention_input(layer, residual, delta, rows.position, own_k, own_v, rows.slots)
            mixed = self.ops.beam_attention(
                rows.to_grid(q),
                cache.prompt_k[index],
                cache.prompt_v[index],
                cache.prompt_start,
                gen_k,
                gen_v,
                rows.ancestors,
                self.scale,
            )
            delta = self._feed_forward(layer, residual, rows.from_grid(mixed))
        return self.ops.add_rms_norm(residual, delta, self.norm, self.spec.rms_eps)

    def _attention_input(
        self,
        layer: LayerWeights,
        residual: Tensor,
        delta: Tensor | None,
        position: Tensor,
        keys: Tensor,
        values: Tensor,
        slots: Tensor,
    ) -> Tensor:
        """Add ``delta``, norm, project and rotate; keys and values go to ``slots``. Returns the queries [N, Hq, D].

        Args:
            residual: [N, H], updated.
            delta: [N, H] the output of the layer before, yet to be added; None before the first layer.
            position, slots: int64 [N].
            keys, values: [rows of the cache, Hkv, D] of this layer.
        """
        ops, spec = self.ops, self.spec
        q = residual.new_empty(len(residual), spec.num_heads, spec.head_dim)
        for rows in self._blocks(len(residual)):
            block = None if delta is None else delta[rows]
            x = ops.add_rms_norm(residual[rows], block, layer.attn_norm, spec.rms_eps)
            ops.rope_and_store(
                linear(x, layer.qkv, layer.qkv_bias),
                layer.q_norm,
                layer.k_norm,
                spec.rms_eps,
                self._rotary.cos,
                self._rotary.sin,
                position[rows],
                keys,
                values,
                slots[rows],
                out=q[rows],
            )
        return q

    def _feed_forward(self, layer: LayerWeights, residual: Tensor, mixed: Tensor) -> Tensor:
        """Output projection and feed-forward half. The result [N, H] is yet to be added to the residual stream."""
        ops, width = self.ops, self.spec.intermediate_size
        delta = torch.empty_like(residual)
        for rows in self._blocks(len(residual)):
            attention = linear(mixed[rows].flatten(1), layer.out, layer.out_bias)
            x = ops.add_rms_norm(residual[rows], attention, layer.mlp_norm, self.spec.rms_eps)
            inner = x.new_empty(len(x), width)
            ops.swiglu(x, layer.gate_up, layer.gate_up_bias, out=inner)
            linear(inner, layer.down, layer.down_bias, out=delta[rows])
        return delta

    def _blocks(self, rows: int) -> list[slice]:
        """Slices of at most ``_row_block`` rows."""
        size = self._row_block
        return [slice(at, min(at + size, rows)) for at in range(0, rows, size)]

    def _last_token_attention(self, q: Tensor, cache: KVCache, index: int) -> Tensor:
        """Attention of each prompt's last token, q [U, Hq, D]: that of a beam without generated tokens."""
        return self.ops.beam_attention(
            q.unsqueeze(1),
            cache.prompt_k[index],
            cache.prompt_v[index],
            cache.prompt_start,
            *cache.generated(index, len(q)),
            torch.empty((len(q), 1, 0), dtype=torch.int32, device=self.device),
            self.scale,
        ).squeeze(1)
