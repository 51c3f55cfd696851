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
    """A cache of the sizes of ``spec``, in the dtype and on the device of ``like``; see :meth:`KVCache.allocate`."""
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
        causal: what is computed for a token depends on those before it alone. Only then may prompts share what they
            begin with, and be followed by padding.
    """

    ops: Ops
    device: torch.device
    dtype: torch.dtype

    @property
    def causal(self) -> bool: ...

    @property
    def spec(self) -> AnySpec: ...

    def new_cache(self, tokens: int, users: int, slots: int) -> KVCache:
        """Room for ``users`` prompts of ``tokens`` tokens together and at least ``slots`` generated tokens a user."""
        ...

    def prefill(self, pack: PackedPrompts, cache: KVCache) -> Tensor:
        """Compute every prompt once; returns the hidden states [U, H] that the first level is scored with."""
        ...

    def fill(self, pack: PackedPrompts, cache: KVCache) -> Tensor:
        """:meth:`prefill` into a cache that knows the prompts' lengths. A graph can hold that of a causal model."""
        ...

    def decode(self, rows: Rows, cache: KVCache) -> Tensor:
        """One generated token for each row: writes its key and value, returns its hidden state [N, H]."""
        ...
