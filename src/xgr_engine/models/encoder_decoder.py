"""T5 and TIGER: an encoder reads the history once per user, and a decoder that attends to it writes the semantic ID.

The interface is that of :mod:`xgr_engine.models.decoder_only`, so the search knows no difference. The prefill runs the
encoder, stores every decoder layer's keys and values of the encoder's output as the prompt, and feeds the start token.
Beam rows then attend to that prompt, which all beams of a user share, and to their own tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from xgr_engine.kernels.linear import linear
from xgr_engine.models.model import allocate_cache
from xgr_engine.models.ops import Ops
from xgr_engine.models.packing import PackedPrompts
from xgr_engine.models.rows import Rows
from xgr_engine.models.spec import EncoderDecoderSpec
from xgr_engine.xattention.biased import (
    by_length,
    distance_table,
    encoder_attention,
    encoder_bias,
    encoder_kernels,
    own_attention,
)
from xgr_engine.xattention.cache import KVCache


@dataclass(frozen=True)
class FeedForward:
    """``down(relu(up x))``, or with a gate ``down(gelu(gate x) * up x)``, tanh approximation (arXiv 2002.05202)."""

    norm: Tensor
    gate: Tensor | None
    up: Tensor
    down: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """The block's output [N, H] for rows [N, H] that are normed already."""
        inner = linear(x, self.up)
        if self.gate is None:
            return linear(F.relu_(inner), self.down)
        return linear(F.gelu(linear(x, self.gate), approximate="tanh").mul_(inner), self.down)


@dataclass(frozen=True)
class SelfAttention:
    """q, k and v are stacked so that they are one matmul."""

    norm: Tensor
    qkv: Tensor
    out: Tensor


@dataclass(frozen=True)
class CrossAttention:
    """Queries come from the decoder; keys and values (stacked) from the encoder's output."""

    norm: Tensor
    q: Tensor
    kv: Tensor
    out: Tensor


@dataclass(frozen=True)
class EncoderLayer:
    """Tokens attend to each other, then the feed-forward block."""

    attention: SelfAttention
    feed_forward: FeedForward


@dataclass(frozen=True)
class DecoderLayer:
    """A row attends to its own tokens, then to the encoder's output, then the feed-forward block."""

    attention: SelfAttention
    cross: CrossAttention
    feed_forward: FeedForward


Layer = TypeVar("Layer", EncoderLayer, DecoderLayer)


@dataclass(frozen=True)
class Stack(Generic[Layer]):
    """Encoder or decoder.

    Attributes:
        bias: [buckets, heads] what each distance adds to the self-attention scores of all layers.
        layers: from the first to the last.
        norm: [H] of the output.
    """

    bias: Tensor
    layers: list[Layer]
    norm: Tensor


class EncoderDecoder:
    """An encoder-decoder over a :class:`KVCache`, whose prompt part holds the decoder's view of the encoder's output.

    Args:
        spec: sizes and switches.
        embed: [V, H], read by both stacks.
        encoder, decoder: the two stacks.
        ops: kernels for the norms and for the attention to the prompt.
    """

    causal = False  # what an encoder makes of a token depends on those after it

    def __init__(
        self,
        spec: EncoderDecoderSpec,
        embed: Tensor,
        encoder: Stack[EncoderLayer],
        decoder: Stack[DecoderLayer],
        ops: Ops,
    ) -> None:
        self.spec = spec
        self.embed = embed
        self.encoder = encoder
        self.decoder = decoder
        self.ops = ops
        self.device = embed.device
        self.dtype = embed.dtype
        far = spec.max_distance
        self._encoder_bias = distance_table(self.encoder.bias, both_ways=True, max_distance=far)
        self._own_bias = distance_table(self.decoder.bias, both_ways=False, max_distance=far).float()

    def new_cache(self, tokens: int, users: int, slots: int) -> KVCache:
        """A cache for this model, with one more slot per user: the last holds the start token."""
        return allocate_cache(self.spec, tokens, users, slots, self.embed)

    def prefill(self, pack: PackedPrompts, cache: KVCache) -> Tensor:
        """Encode every prompt of a batch once and feed the start token.

        Args:
            pack: made with ``share=False``.

        Returns:
            [U, H] the decoder's output for each user's start token, ready for the head.

        Raises:
            ValueError: the pack shares a beginning.
        """
        if pack.prefix:
            raise ValueError("prompts of an encoder cannot share a beginning: use PackedPrompts.of(..., share=False)")
        cache.begin(pack.lengths, 0)
        return self.fill(pack, cache)

    def fill(self, pack: PackedPrompts, cache: KVCache) -> Tensor:
        """:meth:`prefill` without ``cache.begin``."""
        with encoder_kernels():
            encoded = self._encode(pack)
        for index, layer in enumerate(self.decoder.layers):
            keys, values = linear(encoded, layer.cross.kv).view(len(encoded), 2, *self._heads).unbind(1)
            cache.prompt_k[index, pack.cache_rows] = keys
            cache.prompt_v[index, pack.cache_rows] = values
        users = len(pack.lengths)
        start = cache.slots - 1
        rows = Rows(
            tokens=torch.full((users,), self.spec.start_token, device=self.device),
            position=torch.zeros(users, dtype=torch.int64, device=self.device),
            slots=torch.arange(users, device=self.device) * cache.slots + start,
            ancestors=torch.full((users, 1, 1), start, dtype=torch.int32, device=self.device),
            cells=None,
        )
        return self._step(rows, cache)

    def decode(self, rows: Rows, cache: KVCache) -> Tensor:
        """Feed one generated token per row, put its key and value into the cache; the decoder's output [N, H]."""
        start = rows.ancestors.new_full((*rows.ancestors.shape[:2], 1), cache.slots - 1)
        ancestors = torch.cat([start, rows.ancestors], dim=2)
        return self._step(replace(rows, ancestors=ancestors), cache)

    @property
    def _heads(self) -> tuple[int, int]:
        return self.spec.num_heads, self.spec.head_dim

    # ---- encoder ----------------------------------------------------------------------------------------------------

    def _encode(self, pack: PackedPrompts) -> Tensor:
        """The encoder's output [N, H] for the packed tokens."""
        eps = self.spec.rms_eps
        groups = by_length(pack.sequences.query_start[:-1], pack.lengths, self.device)
        bias = encoder_bias(self._encoder_bias, max(pack.lengths))
        residual = F.embedding(pack.tokens, self.embed)
        delta: Tensor | None = None
        for layer in self.encoder.layers:
            x = self.ops.add_rms_norm(residual, delta, layer.attention.norm, eps)
            q, k, v = linear(x, layer.attention.qkv).view(len(x), 3, *self._heads).unbind(1)
            mixed = encoder_attention(q, k, v, groups, bias)
            x = self.ops.add_rms_norm(
                residual, linear(mixed.flatten(1), layer.attention.out), layer.feed_forward.norm, eps
            )
            delta = layer.feed_forward(x)
        return self.ops.add_rms_norm(residual, delta, self.encoder.norm, eps)

    # ---- decoder ----------------------------------------------------------------------------------------------------

    def _step(self, rows: Rows, cache: KVCache) -> Tensor:
        """One decoder step, [N, H]. The first column of the rows' ancestors is the start token's slot."""
        eps = self.spec.rms_eps
        users, width = rows.ancestors.shape[:2]
        only_start = rows.ancestors.shape[2] == 1
        no_ancestors = rows.ancestors.new_empty((users, width, 0))
        residual = F.embedding(rows.tokens, self.embed)
        delta: Tensor | None = None
        for index, layer in enumerate(self.decoder.layers):
            gen_k, gen_v = cache.generated(index, users)
            x = self.ops.add_rms_norm(residual, delta, layer.attention.norm, eps)
            q, k, v = linear(x, layer.attention.qkv).view(len(x), 3, *self._heads).unbind(1)
            gen_k.flatten(0, 1)[rows.slots] = k
            gen_v.flatten(0, 1)[rows.slots] = v
            if only_start:  # attention to a single token returns its value
                mixed = v
            else:
                own = own_attention(rows.to_grid(q), gen_k, gen_v, rows.ancestors, self._own_bias)
                mixed = rows.from_grid(own)
            delta = linear(mixed.flatten(1), layer.attention.out)
            x = self.ops.add_rms_norm(residual, delta, layer.cross.norm, eps)
            mixed = self.ops.beam_attention(
                rows.to_grid(linear(x, layer.cross.q).view(-1, *self._heads)),
                cache.prompt_k[index],
                cache.prompt_v[index],
                cache.prompt_start,
                gen_k,
                gen_v,
                no_ancestors,
                1.0,
            )
            delta = linear(rows.from_grid(mixed).flatten(1), layer.cross.out)
            delta = layer.feed_forward(self.ops.add_rms_norm(residual, delta, layer.feed_forward.norm, eps))
        hidden = self.ops.add_rms_norm(residual, delta, self.decoder.norm, eps)
        return hidden * self.spec.hidden_size**-0.5 if self.spec.scaled_output else hidden
