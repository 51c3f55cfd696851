"""A cache whose prompts and generated tokens lie in one pool, as page tables want them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from xgr_engine.xattention.cache import KVCache


@dataclass(frozen=True)
class PooledCache(KVCache):
    """One pool a layer. ``prompt_k`` and ``prompt_v`` are the whole of it, ``generated_k`` and ``generated_v`` its
    second part.

    Attributes:
        prompt_tokens: rows of the first part.
    """

    prompt_tokens: int

    @property
    def tokens(self) -> int:
        """Prompt tokens there is room for."""
        return self.prompt_tokens


def pool_fields(pool: KVCache, tokens: int, slots: int) -> dict[str, Any]:
    """The fields of a :class:`PooledCache` over ``pool``, which was allocated for prompts alone: ``tokens`` of its rows
    for prompts, then ``slots`` for each user."""
    second = {"generated_k": pool.prompt_k[:, tokens:], "generated_v": pool.prompt_v[:, tokens:]}
    return {**vars(pool), **second, "slots": slots, "prompt_tokens": tokens}
