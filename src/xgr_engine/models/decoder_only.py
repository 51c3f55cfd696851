"""Qwen2, Qwen3 and Llama: one decoder-only forward pass in two shapes, a packed prefill and a decode of beam rows.

The prompt of a user is computed once, whatever the beam width; tokens that all prompts of a batch begin with are
computed once for the batch. Linear layers see only real rows: ragged prompts are packed, dead beams left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from xgr_engine.models.layers import RotaryTable, rms_norm, rotate, swiglu
from xgr_engine.models.spec import ModelSpec
from xgr_engine.xattention.cache import KVCache
from xgr_engine.xattention.reference import beam_attention, prompt_attention


@dataclass(frozen=True)
class LayerWeights:
    """One layer; q, k, v and gate, up are stacked so that each is one matmul."""

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


@dataclass(frozen=True)
class Rows:
    """Beam rows to be computed: which token each feeds in, and where its key and value go.

    Attributes:
        user, row: int64 [N] the beam's place in the dense [U, R] grid.
        tokens: int64 [N] token fed in.
        depth: int64 [N] tokens this beam generated before (so its position is the prompt's length + depth).
        slots: int64 [N] slot of the user's generated tokens that this row writes.
        ancestors: int32 [U, R, A] slots each grid row reads, its own included; -1 = none.
    """

    user: Tensor
    row: Tensor
    tokens: Tensor
    depth: Tensor
    slots: Tensor
    ancestors: Tensor


class DecoderOnly:
    """A decoder-only transformer over a :class:`KVCache`.

    Args:
        spec: sizes and switches.
        embed: [V, H]; norm: [H]; layers: one :class:`LayerWeights` each.
    """

    def __init__(self, spec: ModelSpec, embed: Tensor, norm: Tensor, layers: list[LayerWeights]) -> None:
        self.spec = spec
        self.embed = embed
        self.norm = norm
        self.layers = layers
        self.device = embed.device
        self.dtype = embed.dtype
        self.scale = float(spec.head_dim) ** -0.5
        self._rotary = RotaryTable(spec.rope, spec.head_dim, embed.device)

    def prefill(self, prompts: list[NDArray[np.int32]], slots: int) -> tuple[Tensor, KVCache]:
        """Compute every prompt once.

        Args:
            prompts: U arrays of token ids, each at least one long.
            slots: generated tokens the cache must have room for, a user.

        Returns:
            Final-normed hidden state of each prompt's last token [U, H], and the cache with all prompts in it.
        """
        lengths = [len(prompt) for prompt in prompts]
        cache = KVCache.allocate(
            lengths,
            slots,
            layers=self.spec.num_layers,
            kv_heads=self.spec.num_kv_heads,
            head_dim=self.spec.head_dim,
            dtype=self.dtype,
            device=self.device,
        )
        pack = _Pack.of(prompts, self.device)
        self._rotary.reserve(max(lengths) + slots + 1)
        cos, sin = self._rotary.lookup(pack.positions)
        x = F.embedding(pack.tokens, self.embed)
        for index, layer in enumerate(self.layers[:-1]):
            q, k, v = self._qkv(layer, x, cos, sin)
            keys, values = self._store_prompt(cache, index, pack, k, v)
            x = self._finish(layer, x, prompt_attention(q, keys, values, pack.query_start, pack.key_start, self.scale))
        return self._last_layer(cache, pack, x, cos, sin), cache

    def decode(self, rows: Rows, cache: KVCache) -> Tensor:
        """One generated token for each of ``rows``: writes its key and value, returns its hidden state.

        Returns:
            Final-normed hidden states [N, H] in the order of ``rows``.
        """
        cos, sin = self._rotary.lookup(cache.lengths[rows.user] + rows.depth)
        x = F.embedding(rows.tokens, self.embed)
        users, width = rows.ancestors.shape[:2]
        for index, layer in enumerate(self.layers):
            q, k, v = self._qkv(layer, x, cos, sin)
            cache.gen_k[index, rows.user, rows.slots] = k
            cache.gen_v[index, rows.user, rows.slots] = v
            grid = q.new_zeros(users, width, *q.shape[1:])
            grid[rows.user, rows.row] = q
            mixed = beam_attention(
                grid,
                cache.prompt_k[index],
                cache.prompt_v[index],
                cache.prompt_start,
                cache.gen_k[index],
                cache.gen_v[index],
                rows.ancestors,
                self.scale,
            )
            x = self._finish(layer, x, mixed[rows.user, rows.row])
        return rms_norm(x, self.norm, self.spec.rms_eps)

    def _qkv(self, layer: LayerWeights, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Normed, projected and rotated: q [N, Hq, D], k and v [N, Hkv, D]."""
        spec = self.spec
        heads = F.linear(rms_norm(x, layer.attn_norm, spec.rms_eps), layer.qkv, layer.qkv_bias)
        heads = heads.view(len(x), spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
        q, k, v = heads.split([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = rms_norm(q, layer.q_norm, spec.rms_eps), rms_norm(k, layer.k_norm, spec.rms_eps)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def _finish(self, layer: LayerWeights, x: Tensor, mixed: Tensor) -> Tensor:
        """Output projection, residual, and the feed-forward half. x [N, H], mixed [N, Hq, D]."""
        x = x + F.linear(mixed.flatten(1), layer.out, layer.out_bias)
        gate_up = F.linear(rms_norm(x, layer.mlp_norm, self.spec.rms_eps), layer.gate_up, layer.gate_up_bias)
        return x + F.linear(swiglu(gate_up), layer.down, layer.down_bias)

    def _store_prompt(self, cache: KVCache, index: int, pack: _Pack, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write a layer's keys and values to the cache; return what the layer's own attention reads."""
        if pack.prefix == 0:
            cache.prompt_k[index], cache.prompt_v[index] = k, v
            return cache.prompt_k[index], cache.prompt_v[index]
        for store, new in ((cache.prompt_k[index], k), (cache.prompt_v[index], v)):
            store[pack.own_rows] = new[pack.prefix :]
            store[pack.prefix_rows] = new[: pack.prefix]
        # the prefix attends to itself in front of the users' complete prompts
        return (
            torch.cat([k[: pack.prefix], cache.prompt_k[index]]),
            torch.cat([v[: pack.prefix], cache.prompt_v[index]]),
        )

    def _last_layer(self, cache: KVCache, pack: _Pack, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The last layer: keys and values of all tokens, the rest for each prompt's last token alone."""
        layer, index = self.layers[-1], len(self.layers) - 1
        q, k, v = self._qkv(layer, x, cos, sin)
        self._store_prompt(cache, index, pack, k, v)
        mixed = beam_attention(
            q[pack.last].unsqueeze(1),
            cache.prompt_k[index],
            cache.prompt_v[index],
            cache.prompt_start,
            cache.gen_k[index],
            cache.gen_v[index],
            torch.empty((len(pack.last), 1, 0), dtype=torch.int32, device=self.device),
            self.scale,
        )
        return rms_norm(self._finish(layer, x[pack.last], mixed.squeeze(1)), self.norm, self.spec.rms_eps)


@dataclass(frozen=True)
class _Pack:
    """Ragged prompts packed: first the tokens all of them begin with (computed once), then each user's own tokens.

    ``prefix_rows`` [U, prefix] and ``own_rows`` [N - prefix] are rows of the cache; sequence 0 is the prefix when there
    is one.
    """

    tokens: Tensor
    positions: Tensor
    prefix: int
    query_start: list[int]
    key_start: list[int]
    prefix_rows: Tensor
    own_rows: Tensor
    last: Tensor

    @classmethod
    def of(cls, prompts: list[NDArray[np.int32]], device: torch.device) -> _Pack:
        prefix = shared_prefix_length(prompts)
        own = np.array([len(prompt) - prefix for prompt in prompts])
        starts = np.concatenate([[0], np.cumsum([len(prompt) for prompt in prompts])])
        head = [prompts[0][:prefix]] if prefix else []
        query_start = np.concatenate([[0], np.cumsum([len(part) for part in head] + own.tolist())])
        key_start = np.concatenate([[0], prefix + starts]) if prefix else starts
        position = [np.arange(prefix)] if prefix else []
        position += [np.arange(prefix, len(prompt)) for prompt in prompts]
        own_rows = np.concatenate([np.arange(start + prefix, end) for start, end in pairwise(starts)])
        prefix_rows = starts[:-1, None] + np.arange(prefix)

        def put(values: NDArray[np.int64] | NDArray[np.int32]) -> Tensor:
            return torch.from_numpy(values.astype(np.int64, copy=False)).to(device)

        return cls(
            tokens=put(np.concatenate([*head, *(prompt[prefix:] for prompt in prompts)])),
            positions=put(np.concatenate(position)),
            prefix=prefix,
            query_start=query_start.tolist(),
            key_start=key_start.tolist(),
            prefix_rows=put(prefix_rows),
            own_rows=put(own_rows),
            last=put(prefix + np.cumsum(own) - 1),
        )


def shared_prefix_length(prompts: list[NDArray[np.int32]]) -> int:
    """Tokens that all prompts begin with, leaving each at least one of its own; 0 for a single prompt."""
    if len(prompts) < 2:
        return 0
    limit = min(len(prompt) for prompt in prompts) - 1
    same = np.ones(limit, bool)
    for prompt in prompts[1:]:
        same &= prompt[:limit] == prompts[0][:limit]
    return int(limit if same.all() else same.argmin())
