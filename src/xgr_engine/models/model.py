"""What the search asks of a model, whatever its architecture."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from xgr_engine.models.ops import Ops
from xgr_engine.models.packing import PackedPrompts
from xgr_engine.models.rows import Rows
from xgr_engine.models.spec import AnySpec
from xgr_engine.xattention.cache import KVCache


def allocate_cache(spec: AnySpec, tokens: int, users: int, slots: int, like: Tensor) -> KVCache:
    """A cache for a model of ``spec``, with the dtype and device of ``like``. Args as :meth:`Model.new_cache`."""
    return KVCache.allocate(
        tokens,
        users,
        slots + spec.extra_slots,
        layers=spec.num_layers,
        kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=like.dtype,
        device=like.device,
    )


class Model(Protocol):
    """A transformer over a :class:`KVCache`.

    Attributes:
        ops: the kernels that it runs on.
        device, dtype: of the weights, and of what is computed.
        causal: whether a token depends only on those before it. Only then may prompts share what they begin with, and
            be followed by padding.
        spec: sizes and switches.
    """

    ops: Ops
    device: torch.device
    dtype: torch.dtype

    @property
    def causal(self) -> bool: ...

    @property
    def spec(self) -> AnySpec: ...

    def new_cache(self, tokens: int, users: int, slots: int) -> KVCache:
        """Room for ``users`` prompts of ``tokens`` tokens together and at least ``slots`` generated tokens per user."""
        ...

    def prefill(self, pack: PackedPrompts, cache: KVCache) -> Tensor:
        """Compute every prompt once; returns the hidden states [U, H] from which the first level is scored."""
        ...

    def fill(self, pack: PackedPrompts, cache: KVCache) -> Tensor:
        """:meth:`prefill` without ``cache.begin``. Of a causal model, a CUDA graph can hold it."""
        ...

    def decode(self, rows: Rows, cache: KVCache) -> Tensor:
        """Feed one generated token per row, put its key and value into the cache, return its hidden state [N, H]."""
        ...
